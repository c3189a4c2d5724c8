"""Build the report of a run: its dataset ``run.nc``, and the pages that are made from that alone.

``fa3verify verify`` calls :func:`write_report` and ``fa3verify report`` :func:`rebuild`. The dataset is
:mod:`fa3verify.report.dataset`; tables, pictures and first screen are made in the modules beside this one, and put into
the templates here. :func:`both_pages` serves the pages of atlases, histories and comparisons too.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup, escape

from fa3verify.campaign.findings import SEVERITIES, symptoms
from fa3verify.campaign.run import Run
from fa3verify.files import Json, json_text, write_text
from fa3verify.inputs.recipe import DISTRIBUTIONS
from fa3verify.judging import bits_lost
from fa3verify.judging.metrics import all_measures
from fa3verify.records import plain
from fa3verify.report import (
    dataset,
    figures_coverage,
    first_screen,
    pictures,
    tables,
    words,
)
from fa3verify.text import plural

if TYPE_CHECKING:
    import xarray as xr

TEMPLATES = Path(__file__).with_name("templates")
DATA = "run.nc"
SUMMARY = "summary.json"
PAGE = "report.html"
MARKDOWN = "report.md"


def write_report(out: Path, run: Run) -> Path:
    """Write ``run.nc``, ``summary.json``, ``report.html`` and ``report.md`` into a folder.

    Parameters
    ----------
    out : Path
        Created if absent.
    run : Run

    Returns
    -------
    Path
        The page. Each file appears whole or not at all, the dataset first and the summary last.

    Raises
    ------
    OSError
        From the file system.
    """
    out = Path(out)
    tree = dataset.to_tree(run)
    dataset.save(tree, out / DATA)
    return _write_pages(out, tree)


def rebuild(run: Path, out: Path) -> Path:
    """Write the pages and the summary again from a stored dataset, byte for byte the same.

    Raises
    ------
    ValueError
        If the file is not a run of this program, or damaged.
    """
    return _write_pages(Path(out), dataset.load(Path(run)))


def _write_pages(out: Path, tree: xr.DataTree) -> Path:
    """Write all files but the dataset, the summary last, and return the path of the page."""
    pages = render(dataset.from_tree(tree), str(tree.attrs["content_sha256"]))
    write_text(out / MARKDOWN, pages[MARKDOWN])
    write_text(out / PAGE, pages[PAGE])
    write_text(out / SUMMARY, json_text(dataset.summary_of(tree)))
    return out / PAGE


def render(run: Run, content_sha256: str) -> dict[str, str]:
    """Return the text of ``report.html`` and ``report.md`` by file name; the hash is that of the dataset."""
    drawn = {case.case.recipe.distribution for case in run.cases}
    context = {
        "summary": run,
        "provenance": dict(sorted(plain(run.provenance).items())),
        "sentence": words.sentence(run),
        "headline": first_screen.headline(run),
        "not_said": first_screen.not_said(run),
        "ranked": words.ranked(run.kernels),
        "definition": bits_lost.DEFINITION,
        "heat": first_screen.heat_map(run),
        "pictures": [each for kernel in run.kernels if (each := pictures.of_kernel(kernel.name, kernel.sketch))],
        "sha256": content_sha256,
        "symptoms": symptoms(run.failures),
        "severities": SEVERITIES,
        "tried": tables.what_was_tried(run),
        "coverage": tables.coverage(run),
        "headlines": [tables.headline(kernel) for kernel in run.kernels],
        "gate_open": tables.gate(run.gate, passed=False),
        "gate_passed": tables.gate(run.gate, passed=True),
        "laws": tables.laws(run),
        "measures": all_measures(kernel.operation for kernel in run.kernels),
        "distributions": [d for d in DISTRIBUTIONS.values() if d.name in drawn] or list(DISTRIBUTIONS.values()),
        "layers": _LAYERS,
    }
    return both_pages(
        "report",
        context,
        css=stylesheet("heat.css", "run.css"),
        pairs=figures_coverage.pairs(kernel.coverage for kernel in run.kernels),
    )


def both_pages(
    name: str, context: Json, *, css: str = "", folder: Path = TEMPLATES, **of_html: object
) -> dict[str, str]:
    """Return a page as HTML and as Markdown by file name, from the templates ``NAME.html.j2`` and ``NAME.md.j2``.

    ``context`` is what both templates print, ``of_html`` what the HTML prints besides. The templates are in ``folder``,
    and may use those of this package. Empty lines at the ends and repeated ones are removed from the Markdown.
    """
    html = environment(autoescape=True, folder=folder).get_template(f"{name}.html.j2")
    markdown = environment(autoescape=False, folder=folder).get_template(f"{name}.md.j2").render(context)
    return {
        f"{name}.html": html.render(context, css=css or stylesheet(), **of_html),
        f"{name}.md": re.sub(r"\n{3,}", "\n\n", markdown).strip() + "\n",
    }


def write_both(out: Path, name: str, context: Json, **of_html: Any) -> Path:
    """Write both pages of :func:`both_pages` into a folder; return the path of the HTML."""
    for file, text in both_pages(name, context, **of_html).items():
        write_text(out / file, text)
    return out / f"{name}.html"


def stylesheet(*more: str) -> str:
    """Return the style sheet of all pages, followed by other files of the templates' folder."""
    return "".join((TEMPLATES / name).read_text("utf-8") for name in ("report.css", *more))


_LAYERS = {
    "L0": "bits, against the twin",
    "L1": "bound on rounding errors",
    "L2": "baseline of stored figures",
    "laws": "properties",
}


@cache
def environment(*, autoescape: bool, folder: Path = TEMPLATES) -> jinja2.Environment:
    """Return the environment of a folder's templates, whose filters write numbers and texts as reports do.

    There is one for each argument, so that templates are compiled once.
    """
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, TEMPLATES]),
        autoescape=autoescape,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    made.filters |= {
        "number": tables.number,
        "ratio": tables.ratio,
        "below_one": tables.below_one,
        "moment": tables.moment,
        "breakable": _breakable,
        "count": tables.count,
        "percent": tables.percent,
        "minutes": _minutes,
        "word": _word,
        "bits": bits_lost.bits_text,
        "plural": plural,
        "worst_sides": tables.worst_sides,
        "md": markdown_text,
        "code": markdown_code,
    }
    return made


def _breakable(text: Any) -> Markup:
    """Return a name as HTML that a narrow column may break after an underscore, a colon or a point."""
    return Markup(re.sub(r"([_:.])(?=.)", r"\1<wbr>", str(escape(text))))


def _minutes(seconds: Any) -> str:
    seconds = float(seconds)
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _word(status: Any) -> str:
    """Return the CSS class of a status: pass, fail, na (not applicable), or open for all others."""
    text = str(status).replace("_", " ").strip().lower()
    return text if text in ("pass", "fail") else "na" if text == "not applicable" else "open"


def markdown_code(value: Any) -> str:
    """Write a text as a Markdown code span that may stand in a table cell."""
    return "`" + str(value).replace("`", "'").replace("|", r"\|").replace("\n", " ") + "`"


def markdown_text(value: Any) -> str:
    r"""Escape a text for a Markdown table cell.

    >>> markdown_text("a|b <script>")
    'a\\|b &lt;script&gt;'
    """
    text = str(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\n", " ")
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", text)
