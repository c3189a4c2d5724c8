"""The page of claims: what papers state, beside what was measured, each figure read from its file.

``claims.toml`` holds a table ``claim`` per row: ``text``, ``source``, ``said``, ``verdict`` and ``measured``, a text
with names of ``figures`` in braces. A figure is read from a CSV, JSON, TOML or Markdown file, or made of others.
``holds`` gives the interval of each figure that the verdict rests on: data that leave it make the page refuse, so that
no verdict outlives its evidence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fa3_reports.device.keys import why_stale
from fa3_reports.device.source import Row, Source
from fa3verify.files import json_text, markdown_table, write_text
from fa3verify.timed.cells import CELL_FIELDS
from fa3verify.timed.ratios import geometric_mean
from fa3verify.timed.tables import RECORDED

VERDICTS = ("confirmed", "refuted", "not reproduced", "not tested")
PAGE = "claims.md"
FACTS = "claims.json"
SCHEMA = "fa3verify.claims/1"
STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "max": max,
    "min": min,
    "sum": math.fsum,
    "count": len,
    "geometric mean": geometric_mean,
}
NAMES = ("name", "kernel", "family")  # what an entry of a list in JSON is called by


@dataclass(frozen=True, slots=True)
class Claim:
    """One row: what is said and where, what was measured, the verdict, and the files that it rests on."""

    topic: str
    text: str
    source: str
    said: str
    verdict: str
    measured: str
    figures: dict[str, float]
    data: tuple[str, ...]
    stale: tuple[str, ...]


def write(file: Path, out: Path | None = None) -> Path:
    """Write ``claims.md`` and ``claims.json`` beside ``claims.toml`` unless told otherwise; return the page.

    Raises
    ------
    ValueError
        For a figure that its file does not have, an unknown verdict, and a figure outside what its verdict rests on.
    """
    out = Path(out or file.parent)
    for name, text in render(file).items():
        write_text(out / name, text)
    return out / PAGE


def render(file: Path) -> dict[str, str]:
    """Return the page and the figures as text, by file name."""
    source = Source(file.parent)
    table = source.toml(file.name)
    claims = [_claim(source, table["sources"], row) for row in table["claim"]]
    facts = {
        "schema": SCHEMA,
        "claims": [{name: getattr(c, name) for name in Claim.__slots__} for c in claims],
        "sources": dict(sorted(source.used.items())),
    }
    return {PAGE: _page(table, claims, source), FACTS: json_text(facts)}


def _claim(source: Source, papers: Mapping[str, str], row: Mapping[str, Any]) -> Claim:
    where = f"claim {row['text']!r}"
    named: dict[str, dict[str, Any]] = row.get("figures", {})
    data = tuple(dict.fromkeys(f["file"] for f in named.values() if "file" in f))
    verdict = row["verdict"]
    measured = row["measured"]
    figures = {}
    if verdict not in VERDICTS:
        raise ValueError(f"{where}: verdict must be one of {', '.join(VERDICTS)}, got {verdict!r}")
    if row["source"].partition(",")[0] not in papers:
        raise ValueError(f"{where}: source must begin with one of {', '.join(papers)}, got {row['source']!r}")
    if verdict != "not tested":
        for name, figure in named.items():
            try:
                figures[name] = value_of(source, figure, figures)
            except (KeyError, LookupError, ValueError) as error:
                raise ValueError(f"{where}, figure {name}: {error}") from None
        _check(where, row.get("holds", {}), figures)
        measured = measured.format(**figures)
    stale = tuple(path for path in data if why_stale(source, path))
    return Claim(row["topic"], row["text"], row["source"], row["said"], verdict, measured, figures, data, stale)


def _check(where: str, holds: Mapping[str, Sequence[float]], figures: Mapping[str, float]) -> None:
    if not holds:
        raise ValueError(f"{where}: say in 'holds' which figures the verdict rests on")
    for name, (low, high) in holds.items():
        if not low <= figures[name] <= high:
            raise ValueError(
                f"{where}: its verdict rests on {name} in [{low:g}, {high:g}], it is {figures[name]:g} now"
            )


def value_of(source: Source, figure: Mapping[str, Any], known: Mapping[str, float]) -> float:
    """Read one figure.

    Parameters
    ----------
    source : Source
        The folder that files are named from.
    figure : mapping
        ``sum`` of names of ``known`` ones; ``product`` of numbers and names, ``over`` a name; or a ``file``, for CSV a
        ``column`` (or ``ratio`` of two kernels' speeds cell by cell) of the rows ``where`` columns have a value, and a
        ``statistic`` where there are several; for JSON and TOML ``keys``, ``*`` for every entry, and such a
        ``statistic``; for Markdown a ``pattern`` with one group, or ``row`` and ``column`` of a table. ``scale``
        multiplies.
    known : mapping
        Figures that were read before.
    """
    if "sum" in figure:
        return math.fsum(known[name] for name in figure["sum"])
    if "file" not in figure:
        factors = [known[f] if isinstance(f, str) else float(f) for f in figure["product"]]
        return math.prod(factors) / (known[figure["over"]] if "over" in figure else 1)
    path = figure["file"]
    readers = {".csv": _of_csv, ".jsonl": _of_csv, ".md": _of_markdown, ".json": _of_keys, ".toml": _of_keys}
    return readers[Path(path).suffix](source, path, figure) * figure.get("scale", 1)


def _of_csv(source: Source, path: str, figure: Mapping[str, Any]) -> float:
    rows = [row for row in source.rows(path) if _matches(row, figure.get("where", {}))]
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


def _page(table: Mapping[str, Any], claims: Sequence[Claim], source: Source) -> str:
    counts = {verdict: sum(c.verdict == verdict for c in claims) for verdict in VERDICTS}
    lines = [f"# {table['title']}", "", *(f"{line}\n" for line in table["text"])]
    lines += [f"{len(claims)} claims: {', '.join(f'{n} {verdict}' for verdict, n in counts.items())}.", ""]
    for topic in dict.fromkeys(claim.topic for claim in claims):
        rows = [_cells(claim, source) for claim in claims if claim.topic == topic]
        lines += [f"## {topic}", "", *markdown_table(("claim", "said", "measured", "verdict", "source", "data"), rows)]
    lines += ["## Sources", "", *(f"- **{name}**: {told}" for name, told in table["sources"].items()), ""]
    lines += [
        "Made by `python -m fa3_reports claims reports/claims.toml`; all figures with more digits: "
        "[claims.json](claims.json)."
    ]
    return "\n".join(lines) + "\n"


def _cells(claim: Claim, source: Source) -> list[str]:
    data = ", ".join(
        f"[{_short(path)}]({source.link(path)}){' (stale)' if path in claim.stale else ''}" for path in claim.data
    )
    verdict = claim.verdict if claim.verdict == "not tested" else f"**{claim.verdict}**"
    cells = (claim.text, claim.said, claim.measured, verdict, claim.source, data or "–")
    return [cell.replace("|", r"\|") for cell in cells]


def _short(path: str) -> str:
    return "/".join(path.split("/")[-2:])
