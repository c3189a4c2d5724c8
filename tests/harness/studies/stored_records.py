"""Records of a few units of every study as they were found, thinned, and what the report draws and writes of them.

    python -m tests.harness.studies.stored_records

writes both files again after a change that is meant.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fa3verify.report import study_tables, svg
from fa3verify.report.panels import PANELS
from fa3verify.studies import (
    STUDIES,
    accumulator_loss,
    budget,
    errors,
    growth,
    outliers,
    paper,
    ratio_map,
    rotation,
    usage,
)

STORED = Path(__file__).with_suffix(".json.xz")
DRAWN = Path(__file__).with_suffix(".txt")
TINY = (  # cheap units of each study, by its own function and arguments
    (paper.STUDY, [u for u in paper.units("quick", 0) if "flash_fp16" in u.kwargs["variants"]][:1]),
    (outliers.STUDY, outliers.units("quick", 0)[:2]),
    (errors.STUDY, errors.units("quick", 0)[::5]),
    (ratio_map.STUDY, ratio_map.units("quick", 0)[-2:]),
    (growth.STUDY, growth.units("quick", 0)[:2]),
    (usage.STUDY, usage.units("quick", 0)[:5]),
    (budget.STUDY, budget.units("quick", 0)[:2]),
    (rotation.STUDY, rotation.units("quick", 0)[:2]),
    (accumulator_loss.STUDY, [u for u in accumulator_loss.units("quick", 0) if u.kwargs["seqlen_k"] == 2048][:4]),
)
MAPPED = 16  # every 16th row and column of a map is stored


def thinned(results: list[Any]) -> list[Any]:
    """Return results with less of each map."""
    return json.loads(json.dumps([[_thin(record) for record in records] for records in results]))


def _thin(record: dict[str, Any]) -> dict[str, Any]:
    ratio = record.get("ratio")
    return record if ratio is None else record | {"ratio": [row[::MAPPED] for row in ratio[::MAPPED]]}


def stored() -> dict[str, list[Any]]:
    """Return the stored results by study."""
    return json.loads(lzma.decompress(STORED.read_bytes()))


def told() -> str:
    """Return, line by line, the dataset that each study makes of the stored results, its picture and its tables."""
    data = {study.name: study.assemble(stored()[study.name]) for study in STUDIES}
    lines = []
    with svg.styled():
        for panel in PANELS:
            found = data[panel.study]
            lines += [f"==== {panel.study}: {panel.title}", f"attributes {dict(found.attrs)}"]
            lines += [f"{name} {x.dims} {dict(x.attrs)} {figures(x.values)}" for name, x in found.variables.items()]
            figure = panel.draw(found)
            lines += [f"legend {[text.get_text() for text in each.get_texts()]}" for each in figure.legends]
            for axes in figure.axes:
                lines += ["-- axes", *drawn(axes)]
    return "\n".join([*lines, "==== tables", *(f"{k} {v}" for k, v in study_tables.of_studies(data).items()), ""])


def rounded(attributes: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
    """Return attributes with numbers to nine digits: the last ones depend on the version of numpy."""
    return {name: float(f"{x:.9g}") if isinstance(x, float) else x for name, x in attributes.items()}


def drawn(axes: Any) -> Iterator[str]:
    """Yield what stands in one system of axes: words, scales, marks and the places of everything."""
    yield f"words {axes.get_title()!r} {axes.get_xlabel()!r} {axes.get_ylabel()!r} {[t.get_text() for t in axes.texts]}"
    yield f"scales {axes.get_xscale()} {figures(axes.get_xlim())} {axes.get_yscale()} {figures(axes.get_ylim())}"
    yield f"ticks {figures(axes.get_xticks())} {figures(axes.get_yticks())}"
    legend = axes.get_legend()
    yield f"legend {[text.get_text() for text in legend.get_texts()] if legend else ''}"
    for line in axes.lines:
        style = (line.get_color(), line.get_marker(), line.get_linestyle(), line.get_linewidth(), line.get_markersize())
        yield f"line {style} {figures(line.get_xdata())} {figures(line.get_ydata())}"
    for each in axes.collections:
        paths = [figures(path.vertices) for path in each.get_paths()]
        yield f"collection {figures(each.get_offsets())} {paths[:4]}"
    for image in axes.images:
        yield f"image {figures(image.get_array())} {figures(image.get_extent())} {figures(image.get_clim())}"
    for patch in axes.patches:
        yield f"patch {figures(patch.get_path().vertices)}"
    for text in axes.texts:
        yield f"text {text.get_text()!r} {figures(text.get_position())}"


def figures(values: Any) -> str:
    """Return values as text with five digits; of many their number and a digest."""
    flat = np.ravel(np.asarray(values))
    texts = [f"{x:.5g}" if isinstance(x, int | float | np.number) else str(x) for x in flat.tolist()]
    text = " ".join(texts)
    return text if len(texts) <= 12 else f"{len(texts)} values {hashlib.sha256(text.encode()).hexdigest()[:12]}"


if __name__ == "__main__":
    found = {study.name: thinned([unit() for unit in units]) for study, units in TINY}
    STORED.write_bytes(lzma.compress(json.dumps(found).encode(), preset=9))
    DRAWN.write_text(told(), encoding="utf-8")
