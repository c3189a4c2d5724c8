"""Figures that sentences quote: read from data by name, and refused where the sentence no longer holds.

``holds`` of a sentence gives the interval of each figure that its words rest on: data that leave it make the page
refuse, so that no sentence outlives its evidence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fa3_reports.bench.cells import CELL_FIELDS
from fa3_reports.bench.ratios import geometric_mean
from fa3_reports.bench_rows import RECORDED
from fa3_reports.device.source import Row, Source
from fa3verify.files import csv_cell
from fa3verify.report.tables import PageTable

STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "max": max,
    "min": min,
    "sum": math.fsum,
    "count": len,
    "geometric mean": geometric_mean,
}
NAMES = ("name", "kernel", "family")  # what an entry of a list in JSON is called by
Tables = Mapping[str, PageTable]


def figures_of(source: Source, where: str, row: Mapping[str, Any], tables: Tables | None = None) -> dict[str, float]:
    """Read the figures of a sentence, by name.

    Parameters
    ----------
    source : Source
        The folder that files are named from.
    where : str
        What an error calls the sentence.
    row : mapping
        With ``figures``, each as :func:`value_of` takes it, and ``holds``.
    tables : mapping of str to PageTable, optional
        Tables of the page itself, by name.

    Raises
    ------
    ValueError
        For a figure that is not there, a sentence that rests on none, and a figure outside its interval.
    """
    figures: dict[str, float] = {}
    for name, figure in row.get("figures", {}).items():
        try:
            figures[name] = value_of(source, figure, figures, tables)
        except (KeyError, LookupError, ValueError) as error:
            raise ValueError(f"{where}, figure {name}: {error}") from None
    if not row.get("holds"):
        raise ValueError(f"{where}: say in 'holds' which figures the verdict rests on")
    for name, (low, high) in row["holds"].items():
        if not low <= figures[name] <= high:
            raise ValueError(
                f"{where}: its verdict rests on {name} in [{low:g}, {high:g}], it is {figures[name]:g} now"
            )
    return figures


def value_of(
    source: Source, figure: Mapping[str, Any], known: Mapping[str, float], tables: Tables | None = None
) -> float:
    """Read one figure.

    Parameters
    ----------
    source : Source
        The folder that files are named from.
    figure : mapping
        ``sum`` of names of ``known`` ones; ``product`` of numbers and names, ``over`` a name; or a ``file``, for CSV a
        ``column`` (or ``ratio`` of two kernels' speeds cell by cell) of the rows ``where`` columns have a value, and a
        ``statistic`` where there are several; for JSON and TOML ``keys``, ``*`` for every entry, and such a
        ``statistic``; for Markdown a ``pattern`` with one group, or ``row`` and ``column`` of a table; or a ``table``
        of the page itself, as a CSV file. ``scale`` multiplies.
    known : mapping
        Figures that were read before.
    tables : mapping of str to PageTable, optional
        Tables of the page itself, by name.
    """
    if "sum" in figure:
        return math.fsum(known[name] for name in figure["sum"])
    if "table" in figure:
        table = (tables or {})[figure["table"]]
        rows = [{c.key: str(csv_cell(row.get(c.key))) for c in table.columns} for row in table.rows]
        return _of_rows(rows, figure["table"], figure) * figure.get("scale", 1)
    if "file" not in figure:
        factors = [known[f] if isinstance(f, str) else float(f) for f in figure["product"]]
        return math.prod(factors) / (known[figure["over"]] if "over" in figure else 1)
    path = figure["file"]
    readers = {".csv": _of_csv, ".jsonl": _of_csv, ".md": _of_markdown, ".json": _of_keys, ".toml": _of_keys}
    return readers[Path(path).suffix](source, path, figure) * figure.get("scale", 1)


def _of_csv(source: Source, path: str, figure: Mapping[str, Any]) -> float:
    return _of_rows(source.rows(path), path, figure)


def _of_rows(every: Iterable[Row], path: str, figure: Mapping[str, Any]) -> float:
    rows = [row for row in every if _matches(row, figure.get("where", {}))]
    values = (
        list(_speeds(rows, *figure["ratio"]))
        if "ratio" in figure
        else [float(row[figure["column"]]) for row in rows if row[figure["column"]] != ""]
    )
    if not values:
        raise LookupError(f"{path} has no such row")
    if "statistic" not in figure and len(values) > 1:
        raise LookupError(f"{path} has {len(values)} such rows, and no statistic is named")
    return float(STATISTICS[figure.get("statistic", "max")](values))


def _matches(row: Row, where: Mapping[str, Any]) -> bool:
    """Whether columns have these values; of a list one, of a table {at_least = x} that or more."""

    def is_met(text: str, wanted: Any) -> bool:
        if isinstance(wanted, dict):
            return float(text) >= wanted["at_least"]
        return text in [RECORDED.get(str(w), str(w)) for w in (wanted if isinstance(wanted, list) else [wanted])]

    return all(is_met(row[column], wanted) for column, wanted in where.items())


def _speeds(rows: Iterable[Row], kernel: str, peer: str) -> Iterable[float]:
    """Speed of a kernel over another's in every cell that has both."""
    found: dict[tuple[str, ...], dict[str, float]] = {}
    for row in rows:
        if row["status"] == "ok":
            found.setdefault(tuple(row[name] for name in CELL_FIELDS), {})[row["kernel"]] = float(row["burst_tflops"])
    return (cell[kernel] / cell[peer] for cell in found.values() if kernel in cell and peer in cell)


def _of_markdown(source: Source, path: str, figure: Mapping[str, Any]) -> float:
    if "pattern" in figure:
        found = re.findall(figure["pattern"], source.text(path))
        if len(found) != 1:
            raise LookupError(f"{path} has {len(found)} places like {figure['pattern']!r}")
        return float(found[0])
    cells = [
        dict(zip(table.columns, row, strict=False))[figure["column"]]
        for table in source.markdown(path)
        for row in table.rows
        if row[0] == figure["row"] and figure["column"] in table.columns
    ]
    if len(cells) != 1:
        raise LookupError(f"{path} has {len(cells)} rows {figure['row']!r} with a column {figure['column']!r}")
    return float(cells[0].rstrip("% "))


def _of_keys(source: Source, path: str, figure: Mapping[str, Any]) -> float:
    found: Any = source.json(path) if path.endswith(".json") else source.toml(path)
    values = [float(x) for x in _values(found, figure["keys"])]
    if "statistic" not in figure and len(values) > 1:
        raise LookupError(f"{path} has {len(values)} such values, and no statistic is named")
    return float(STATISTICS[figure.get("statistic", "max")](values))


def _values(found: Any, keys: Sequence[Any]) -> list[Any]:
    """What keys lead to, one after the other: ``*`` to every entry, another text to an entry of a list by its name."""
    if not keys:
        return [found]
    key, *rest = keys
    if key == "*":
        return [x for entry in (found.values() if isinstance(found, dict) else found) for x in _values(entry, rest)]
    if isinstance(found, list) and isinstance(key, str):
        return _values(next(entry for entry in found if key in map(entry.get, NAMES)), rest)
    return _values(found[key], rest)
