"""Records of a few units of every study as they were found, and what the report draws and writes of them.

    python -m tests.bless studies

writes both files again after a change that is meant.
"""

from __future__ import annotations

import json
import lzma
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fa3_reports.studies import (
    STUDIES,
    accumulator_loss,
    budget,
    errors,
    growth,
    outliers,
    paper,
    rotation,
    usage,
)
from fa3verify.report import svg
from fa3verify.report.tables import PageTable

STORED = Path(__file__).with_suffix(".json.xz")
DRAWN = Path(__file__).with_suffix(".txt")
TINY = (  # cheap units of each study, by its own function and arguments
    (paper.STUDY, [u for u in paper.units("quick", 0) if "flash_fp16" in u["variants"]][:1]),
    (outliers.STUDY, outliers.units("quick", 0)[:2]),
    (errors.STUDY, errors.units("quick", 0)[::5]),
    (growth.STUDY, growth.units("quick", 0)[:2]),
    (usage.STUDY, usage.units("quick", 0)[:5]),
    (budget.STUDY, budget.units("quick", 0)[:2]),
    (rotation.STUDY, rotation.units("quick", 0)[:2]),
    (accumulator_loss.STUDY, [u for u in accumulator_loss.units("quick", 0) if u["seqlen_k"] == 2048][:4]),
)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def stored() -> dict[str, list[Any]]:
    """Return the stored results by study."""
    return json.loads(lzma.decompress(STORED.read_bytes()))


def told() -> str:
    """Return, line by line, the dataset that each study makes of the stored results, its picture and its tables."""
    data = {study.name: study.assemble(stored()[study.name]) for study in STUDIES}
    lines = []
    with svg.styled():
        for study in STUDIES:
            found = data[study.name]
            lines += [f"==== {study.name}: {study.title}", f"attributes {dict(found.attrs)}"]
            lines += [f"{name} {x.dims} {dict(x.attrs)} {figures(x.values)}" for name, x in found.variables.items()]
            figure = study.draw(found)
            lines.append(f"size {figures(figure.get_size_inches())}")
            lines += [
                f"legend {[(text.get_text(), text.get_fontsize()) for text in each.get_texts()]}"
                for each in figure.legends
            ]
            for axes in figure.axes:
                lines += ["-- axes", *drawn(axes)]
    tables = {study.name: study.table(data[study.name]) for study in STUDIES if study.table}
    lines += ["==== tables", *(f"{name} {_printed(table)}" for name, table in tables.items())]
    return "\n".join([*lines, ""])


def _printed(table: PageTable) -> tuple[object, ...]:
    """Return what a reader sees of a table: its words, the head of every column and its side, and the cells."""
    heads = [(column.head, "left" if column.is_text else "right") for column in table.columns]
    return table.title, table.note, heads, [[table.cell(row, c) for c in table.columns] for row in table.rows]


def alike(line: str, other: str) -> bool:
    """Whether two lines have the same words, and numbers that differ at most in the last of the digits written."""
    pairs = zip(NUMBER.findall(line), NUMBER.findall(other), strict=False)
    return NUMBER.split(line) == NUMBER.split(other) and all(
        math.isclose(float(a), float(b), rel_tol=2e-5, abs_tol=1e-12) for a, b in pairs
    )


def drawn(axes: Any) -> Iterator[str]:
    """Yield what stands in one system of axes: words, scales, marks and the places of everything."""
    yield f"title {axes.get_title('left')!r}"
    yield f"words {axes.get_xlabel()!r} {axes.get_ylabel()!r} {[t.get_text() for t in axes.texts]}"
    yield f"scales {axes.get_xscale()} {figures(axes.get_xlim())} {axes.get_yscale()} {figures(axes.get_ylim())}"
    across = seen(axes.get_xticks(), axes.get_xlim())
    yield f"ticks {figures(across)} {figures(seen(axes.get_yticks(), axes.get_ylim()))}"
    legend = axes.get_legend()
    yield f"legend {[text.get_text() for text in legend.get_texts()] if legend else ''}"
    for line in axes.lines:
        style = (line.get_color(), line.get_marker(), line.get_linestyle(), line.get_linewidth(), line.get_markersize())
        yield f"line {style} {figures(line.get_xdata())} {figures(line.get_ydata())}"
    for each in axes.collections:
        paths = [figures(path.vertices) for path in each.get_paths()]
        yield f"collection {figures(each.get_offsets())} {paths[:4]}"
    for patch in axes.patches:
        yield f"patch {figures(patch.get_path().vertices)}"
    for text in axes.texts:
        yield f"text {text.get_text()!r} {figures(text.get_position())}"


def seen(ticks: Any, ends: tuple[float, float]) -> list[float]:
    """Return the ticks between two ends: some versions of matplotlib return more."""
    return [tick for tick in ticks if min(ends) <= tick <= max(ends)]


def figures(values: Any) -> str:
    """Return values as text, numbers with six digits."""
    flat = np.ravel(np.asarray(values)).tolist()
    return " ".join(f"{x:.6g}" if isinstance(x, int | float | np.number) else str(x) for x in flat)


def renew() -> None:
    """Write both files again."""
    found = {study.name: [study.measure(**unit) for unit in units] for study, units in TINY}
    STORED.write_bytes(lzma.compress(json.dumps(found).encode(), preset=9))
    DRAWN.write_text(told(), encoding="utf-8")
