"""Make the pages of an atlas, HTML and Markdown, from stored files: atlases, and lists of known findings.

Equal files give equal pages, byte for byte. ``python -m fa3_reports atlas`` calls :func:`write_pages`. The tables,
cards and chart are made in the modules beside this one; the report of a single run is
:mod:`fa3verify.report.build`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

from fa3_reference.problem import Dtype
from fa3_reference.rules import require
from fa3_reports.atlas import chart
from fa3_reports.atlas.chart import Known
from fa3_reports.atlas.tables import Judged, contracts, details, errors, matrices, verdicts
from fa3verify import operations, records
from fa3verify.campaign import atlas
from fa3verify.campaign.run import KernelRun, Run
from fa3verify.files import parsed, read_text, stored, write_text
from fa3verify.judging import bits_lost
from fa3verify.report.build import both_pages, stylesheet
from fa3verify.version import __version__

TEMPLATES = Path(__file__).with_name("templates")
PAGE = "atlas.html"
KNOWN_SCHEMA = "fa3verify.known/1"

GLOSSARY = (
    (
        "Largest known error",
        "The largest that the stated number of problems found: a lower bound of the true one. Its input is a replay "
        "file, and fa3verify replay FILE --family NAME gives the figure again, on any machine that has the kernel.",
    ),
    (
        "Error / bound",
        "Every output has its own a-priori bound on rounding errors, derived from the order of operations that the "
        "kernel states and from the operands that it saw, with nothing fitted; a kernel that states none gets that of "
        "any order. It is the certified upper end: above 1, the kernel or its statement is wrong. Half an ulp of the "
        "output is in it, so that sound kernels come close to 1.",
    ),
    (
        "Status",
        "Of a largest error. Proved: on these inputs the stated order of operations leaves each output a single value, "
        "under the model of the tensor core, and each had it, so that nothing else can come out. Searched: other "
        "values are possible, and the largest error is the largest found. Not run: nothing is known here, for the "
        "reason given. A bound is a theorem about an order of operations; that a kernel follows the order is what bits "
        "against its twin and the search test.",
    ),
    (
        "Two references",
        "Seen: float64 attention of the operands that the kernel saw, rounded or dequantised, which is the kernel's "
        "own error. Unrounded: of the inputs before that, which adds what the format costs.",
    ),
    (
        "Accumulator loss",
        "Relative RMSE over long rows of keys, head_dim 64, V of mean 1, against the operands seen: a sum that "
        "loses low bits loses output as keys grow.",
    ),
    (
        "Declares",
        "What a kernel does by design other than the default (out 0 and lse -inf of rows without a key, NaN and "
        "infinities as arithmetic has them, a causal mask aligned bottom-right, any length): it is judged so, or not "
        "judged there.",
    ),
    (
        "Verdict",
        "That of fa3verify verify: bits against the twin where there is one, bound, properties, and enough of what the "
        "kernel claims tried. In the tables shaded cells are more than twice the least of their row, and red ones are "
        "not finite. Why says it of a fail in few words, one for each symptom; the findings say all.",
    ),
)


@dataclass(slots=True)
class Data:
    """What a page is made from; paths are relative to the page's folder.

    ``sources`` are the files with their hashes, ``atlases`` pairs of a folder and an atlas, and ``known`` are findings
    that have a page.
    """

    sources: list[dict[str, str]] = field(default_factory=list)
    atlases: list[tuple[str, Run]] = field(default_factory=list)
    known: list[Known] = field(default_factory=list)


def write_pages(out: Path, files: Sequence[Path]) -> Path:
    """Write ``atlas.html`` and ``atlas.md`` into a folder.

    Parameters
    ----------
    out : Path
    files : sequence of Path
        At least one atlas; lists of known findings beside it.

    Raises
    ------
    ValueError
        For a file that is none of these, or damaged.
    """
    pages = render(read(out, files))
    for name, text in pages.items():
        write_text(out / name, text)
    return out / PAGE


def read(out: Path, files: Sequence[Path]) -> Data:
    """Read the files of a page in folder ``out``.

    ValueError, with the path, for a file that is damaged or of no known kind, and if there is no atlas among them.
    """
    data = Data()
    for path in files:
        try:
            text = read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        where = _relative(path, out)
        what = _take(data, where, text, str(path))
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        data.sources.append({"file": where, "link": _relative(stored(path), out), "what": what, "sha256": digest})
    require(data.atlases, "a page needs at least one atlas")
    return data


def _relative(path: Path, out: Path) -> str:
    """Return a path relative to a folder, with slashes, as links have it."""
    return Path(os.path.relpath(path, out)).as_posix()


def _take(data: Data, where: str, text: str, name: str) -> str:
    """Add one file to the data, and return in words what it is.

    ``where`` is its path relative to the page, ``name`` its path in messages of a ValueError.
    """
    folder = Path(where).parent
    if f'"{KNOWN_SCHEMA}"' in text:
        body = parsed(text, KNOWN_SCHEMA, f"{name} is no list of known findings")
        listed = records.read(list[Known], body.get("known"), name)
        data.known += [replace(each, page=(folder / each.page).as_posix()) for each in listed]
        return "findings with a page"
    made = atlas.parse(text, name)
    data.atlases.append((folder.as_posix(), made))
    facts = made.provenance
    git = f" ({facts.git})" if facts.git else ""
    packages = ", ".join(f"{package} {version}" for package, version in facts.packages.items())
    return f"{made.profile}, seed {made.seed}, {made.started[:10]}, fa3verify {made.version}{git}; {packages}"


def judged(data: Data) -> tuple[list[Judged], list[KernelRun]]:
    """Return the kernels that were judged, and the entries of those that were not run in any of the atlases."""
    ran = _newest((folder, made, e) for folder, made in data.atlases for e in made.kernels if e.verdict != "not run")
    names = [entry.name for _, _, entry in ran]
    rows = []
    for folder, made, entry in ran:
        device = entry.introduction.identity.device or made.provenance.platform
        label = entry.name if names.count(entry.name) == 1 else f"{entry.name} ({device})"
        rows.append(Judged(label, entry, made, folder, device))
    absent = {e.name: e for _, made in data.atlases for e in made.kernels if e.name not in names}
    return rows, list(absent.values())


def _newest(ran: Iterable[tuple[str, Run, KernelRun]]) -> list[tuple[str, Run, KernelRun]]:
    """Return for each kernel and device the entry that was judged last, in the order of first entries.

    A row is the folder of an atlas, the atlas and the entry.
    """
    newest: dict[tuple[str, str], tuple[str, Run, KernelRun]] = {}
    for row in ran:
        _, made, entry = row
        device = entry.introduction.identity.device or made.provenance.platform
        # All CPUs are one device; a kernel that names no device has that of its platform.
        place = entry.name, "CPU" if device.startswith(("CPU", "linux")) else device
        if place not in newest or newest[place][1].started <= made.started:
            newest[place] = row
    return list(newest.values())


def render(data: Data) -> dict[str, str]:
    """Return the text of both pages by file name; kernels stand in groups of one operation and dtype."""
    rows, absent = judged(data)
    beside = chart.pairs(rows)
    apart = {id(pair.twin) for pair in beside}
    groups = _grouped(rows)
    shown = {title: [row for row in mine if id(row) not in apart] for title, mine in groups.items()}
    cards = chart.cards(rows, data.known)
    context = {
        "written": chart.written,
        "chart": chart.chart(shown, beside),
        "definition": bits_lost.DEFINITION,
        "contracts": contracts(rows),
        "cards": cards,
        "pairs": beside,
        "sources": data.sources,
        "groups": [
            {"title": title, "id": title.lower().replace(", ", "-")}
            | {"tables": [verdicts(mine, title), errors(mine, title)], "matrices": matrices(shown[title], title)}
            for title, mine in groups.items()
        ],
        "kernels": [
            details(row) | {"cards": [card for card in cards if any(each.row is row for each in card.found)]}
            for row in rows
        ],
        "absent": absent,
        "rows": rows,
        "older": sorted({row.version for row in rows if row.is_older}),
        "version": __version__,
        "glossary": GLOSSARY,
        "reproduce": " ".join(source["file"] for source in data.sources),
    }
    css = stylesheet("heat.css") + (TEMPLATES / "atlas.css").read_text("utf-8")
    return both_pages("atlas", context, css=css, folder=TEMPLATES)


def _grouped(rows: Sequence[Judged]) -> dict[str, list[Judged]]:
    """Return the kernels by the title of their group, which is operation and dtype; empty groups are left out."""
    return {
        f"{operation.capitalize()}, {dtype}": mine
        for operation in operations.OPERATIONS
        for dtype in get_args(Dtype)
        if (mine := [row for row in rows if (row.entry.operation, row.entry.dtype) == (operation, dtype)])
    }
