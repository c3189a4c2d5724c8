"""The pages of a device, as HTML and Markdown, with their tables as CSV and their figures as SVG.

The first page has what a newcomer wants to see, the second every table. ``page.toml`` in the folder is the part written
by hand: name of the machine file, title, notes, and conclusions, whose figures are read from the data that lie there as
everything else is.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fa3_reports.device import accuracy, cycles, evidence, front, speed
from fa3_reports.device.blocks import Drawing, Figure, Section, html_text
from fa3_reports.device.keys import changed_launches, why_stale
from fa3_reports.device.quoted import figures_of
from fa3_reports.device.source import Source
from fa3_reports.stored import table_csv
from fa3_simulator.machine import load
from fa3verify import __version__
from fa3verify.files import json_text, write_text
from fa3verify.report.build import both_pages, environment, stylesheet
from fa3verify.report.tables import PageColumn, PageTable, count

SCHEMA = "fa3verify.device/3"
TEMPLATES = Path(__file__).with_name("templates")
HAND_WRITTEN = "page.toml"
PAGE = "report.html"
MARKDOWN = "README.md"
DETAILS = "details.html"
DETAILS_MARKDOWN = "DETAILS.md"
FACTS = "report.json"
TABLES = "tables"
FIGURES = "figures"
MOST_ROWS = 20  # of a table that is not folded
DRAWN_WITH = ("matplotlib", "numpy")
FACT_COLUMNS = (
    PageColumn("data", "data"),
    PageColumn("date", "date"),
    PageColumn("GPU", "gpu"),
    PageColumn("driver", "driver"),
    PageColumn("torch", "torch"),
    PageColumn("triton", "triton"),
    PageColumn("launches", "launches"),
    PageColumn("state", "state"),
)


METHOD = (
    "**Bits.** A GPU kernel is launched on inputs drawn from seeds, and every output is compared with a CPU twin "
    "that does the same operations in the same order, each modelled bit for bit. Controls have a fault planted in "
    "the twin and must differ.",
    "**Speed.** Bursts of a few launches with pauses between, all kernels of a cell in turns, the median of the "
    "rounds; the SM clock is counted on the chip (cycles over time), not read from the driver. Forward 4 seqlen² "
    "head_dim FLOP for each head and sequence, half with a causal mask, 2.5 times that backward. Sustained: "
    "launches without a pause, for 40 ms or more.",
    "**Limit.** The slower of two units at full rate and at the counted clock: tensor cores (4096 FLOP a cycle and "
    "SM in 16 bits, twice that in FP8) and special-function units (one ex2 for every score). A kernel that computes "
    "exponentials otherwise is not bound by the second.",
    "**Simulation.** Tile and schedule of each launch are simulated instruction by instruction with constants from "
    "microbenchmarks of this machine, at the clock that was counted; no constant is fitted to an attention kernel.",
)


def write(folder: Path, out: Path | None = None) -> Path:
    """Write the pages of a device's folder, into it unless told otherwise.

    Parameters
    ----------
    folder : Path
        With ``page.toml`` and data as ``reports/h200`` has them.
    out : Path, optional
        Links of the pages are those of ``folder`` wherever they are written.

    Returns
    -------
    Path
        The first page, as HTML.

    Raises
    ------
    ValueError
        If there is no ``page.toml``, or a table lacks what its page needs.
    """
    out = Path(out or folder)
    for name, text in render(Path(folder)).items():
        write_text(out / name, text)
    return out / PAGE


def render(folder: Path) -> dict[str, str]:
    """Return every file of both pages as text, by its path."""
    source = Source(folder)
    hand = source.toml(HAND_WRITTEN)
    machine = load(hand["machine"])
    every = front.passes(source)
    shown = [
        front.at_a_glance(source, every),
        front.charts(source, every),
        front.decoding(source),
        front.errors(source, every),
        front.overlap(source),
        front.host(source),
    ]
    details = [
        evidence.bits(source),
        speed.section(source, machine),
        speed.sustained(source, machine),
        speed.others(source),
        accuracy.section(source),
        evidence.mutants(source),
        evidence.sanitizer(source),
        cycles.section(source),
        evidence.microbenchmarks(source),
        _provenance(source),
    ]
    reasons = _stale(source, (*shown, *details))
    shown, details = ([_marked(each, reasons) for each in of if each.blocks] for of in (shown, details))
    tables = {table.name: table for section in (*details, *shown) for table in section.tables}
    told, more = ([c for c in conclusions(source, hand[of], tables) if not c.stale] for of in ("conclusions", "more"))
    stale = [block for section in (*shown, *details) for block in section.blocks if block.stale]
    shown, details = ([_current(each) for each in of] for of in (shown, details))
    tables = {table.name: table for section in (*details, *shown) for table in section.tables}
    context = {
        "hand": hand,
        "folder": f"reports/{folder.resolve().name}",
        "link": source.link,
        "conclusions": told,
        "measured": measured(tables["provenance"]),
        "more": more,
        "left_out": len(stale),
        "reasons": _by_reason({path: reasons[path] for block in stale for path in block.data if path in reasons}),
        "method": METHOD,
        "cite": cite(hand),
        "script": (TEMPLATES / "sort.js").read_text("utf-8"),
    }
    css = stylesheet() + (TEMPLATES / "device.css").read_text("utf-8")
    _teach_templates()
    files = {FACTS: json_text(_facts(source, hand, [*told, *more], stale))}
    for sections, page, markdown in ((shown, PAGE, MARKDOWN), (details, DETAILS, DETAILS_MARKDOWN)):
        own = context | {"sections": [each for each in sections if each.blocks], "is_front": page == PAGE}
        made = both_pages("device", own, css=css, folder=TEMPLATES)
        files |= {page: made["device.html"], markdown: made["device.md"]}
    files |= {f"{TABLES}/{table.name}.csv": table_csv(table) for table in tables.values()}
    figures = [figure for section in (*shown, *details) for figure in section.figures]
    drawings = {d.name: d for figure in figures for d in figure.drawings}
    return files | {f"{FIGURES}/{name}.svg": standalone(d, css) for name, d in drawings.items()}


class Conclusion(NamedTuple):
    """A sentence with its figures, the files that they are of, and whether one of them is stale."""

    text: str
    data: Sequence[str]
    stale: bool


def conclusions(source: Source, told: Sequence[Mapping[str, Any]], tables: Mapping[str, PageTable]) -> list[Conclusion]:
    """Return the sentences of a page, each figure read from the data.

    Raises
    ------
    ValueError
        For a figure that is not there, or that has left the interval that its sentence rests on.
    """
    found = []
    for row in told:
        figures = figures_of(source, f"conclusion {row['text']!r}", row, tables)
        of = [tables[f["table"]] for f in row["figures"].values() if "table" in f]
        files = [f["file"] for f in row["figures"].values() if "file" in f]
        stale = any(table.stale for table in of) or any(why_stale(source, path) for path in files)
        data = dict.fromkeys([*(f"{TABLES}/{table.name}.csv" for table in of), *files])
        found.append(Conclusion(row["text"].format(**figures), tuple(data), stale))
    return found


def measured(provenance: PageTable) -> str:
    """Return when and with which software the data of a page were measured."""

    def of(name: str) -> list[str]:
        return sorted({str(row[name]) for row in provenance.rows if row[name] and not row["data"].startswith("..")})

    dates = of("date")
    software = [f"{name} {', '.join(of(name))}" for name in ("driver", "torch", "triton") if of(name)]
    when = " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]]))
    return f"Measured {when} with {'; '.join(software)}. Pages by fa3verify {__version__}."


def _stale(source: Source, sections: Sequence[Section]) -> dict[str, str]:
    """Return why each file that blocks are made of is stale, by path; those of today's code are left out."""
    paths = sorted({path for section in sections for block in section.blocks for path in block.data})
    return {path: reason for path in paths if (reason := why_stale(source, path))}


def _marked(section: Section, reasons: Mapping[str, str]) -> Section:
    """Return a section whose blocks say whether they, or one of their files, are stale, its long tables folded."""
    blocks = [
        replace(
            block,
            stale=any(path in reasons for path in block.data) if block.stale is None else block.stale,
            fold=block.fold or (isinstance(block, PageTable) and len(block.rows) > MOST_ROWS),
        )
        for block in section.blocks
    ]
    return replace(section, blocks=blocks)


def _current(section: Section) -> Section:
    """Return a section without what is stale, which no page shows."""
    return replace(section, blocks=[block for block in section.blocks if not block.stale])


def _by_reason(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for path, reason in reasons.items():
        found[reason].append(path)
    return dict(found)


def cite(hand: Mapping[str, Any]) -> str:
    """Return how the page is cited."""
    return (
        f"fa3verify {__version__}: {hand['title']}, {hand['date']}. Algorithm: Shah, Bikshandi, Zhang, Thakkar, "
        "Ramani, Dao: FlashAttention-3, Fast and Accurate Attention with Asynchrony and Low-precision, 2024, "
        "arXiv:2407.08608."
    )


def _teach_templates() -> None:
    """Give the templates of a device what those of runs do not need."""
    for autoescape in (False, True):
        made = environment(autoescape=autoescape, folder=TEMPLATES)
        made.tests["table_block"] = lambda block: isinstance(block, PageTable)
        made.filters["rich"] = lambda text: html_text(text.replace(f"({DETAILS_MARKDOWN})", f"({DETAILS})"))


def _facts(
    source: Source, hand: Mapping[str, Any], told: Sequence[Conclusion], stale: Sequence[PageTable | Figure]
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "title": hand["title"],
        "conclusions": [each.text for each in told],
        "left_out": {block.title: list(block.data) for block in stale},
        "drawn_with": {name: importlib.metadata.version(name) for name in DRAWN_WITH},
        "sources": dict(sorted(source.used.items())),
    }


def _provenance(source: Source) -> Section:
    """Which machine and software measured each file that was read."""
    rows = []
    for path in source.find("**/*_provenance.json") + source.find("**/*_run.json"):
        facts = source.json(path)
        for run in facts.get("runs", [facts]):
            rows.append(
                {"data": path, "date": str(run.get("run") or run.get("date_utc", ""))[:10], "gpu": run.get("gpu")}
                | {name: run.get(name) for name in ("driver", "torch", "triton")}
                | {"launches": str(facts.get("launches_sha256", ""))[:12] or None}
                | {"state": _state(facts)}
            )
    unique = list({tuple(row.values()): row for row in rows}.values())
    text = [
        "stale: a kernel that was measured has other machine code now; the figures are of the code before. Every "
        "launch has a key of its own, of its machine code, arguments and tile schedule, so that a launch that changed "
        "makes those rows stale that have its features. A file without a hash counts as stale. Tables and figures with "
        "stale rows are left out of both pages. "
        f"The digest of every file that this page was made of stands in [{FACTS}]({FACTS})."
    ]
    table = PageTable(
        "provenance", "Provenance", FACT_COLUMNS, unique, tuple(sorted({row["data"] for row in unique})), fold=True
    )
    return Section("provenance", "Provenance", text, [table])


def _state(facts: Mapping[str, Any]) -> str:
    """Return what the hash in a file of provenance says of it."""
    if "launches_sha256" in facts:
        changed = changed_launches(facts)
        return f"{count(len(changed))} launches new or changed" if changed else "current"
    return "a hash a row" if "rows" in facts else "no hash"


def standalone(drawing: Drawing, css: str) -> str:
    """Return a drawing as a file of its own, with the page's colours in light and dark."""
    rules = re.findall(
        r"^(?::root \{.*?^\}|@media \(prefers-color-scheme: dark\) \{.*?^\})", css, re.DOTALL | re.MULTILINE
    )
    style = "\n".join(rules) + "\nsvg { background: var(--paper); font-family: system-ui, sans-serif; }"
    head, _, body = drawing.svg.partition(">")
    width, height = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', head)[0]
    size = f' xmlns="http://www.w3.org/2000/svg" width="{width}pt" height="{height}pt"'
    return f"{head}{size}><style>{style}</style>{body}\n"
