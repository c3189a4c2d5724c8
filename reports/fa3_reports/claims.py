"""The page of claims: what papers state, beside what was measured, each figure read from its file.

``claims.toml`` holds a table ``claim`` per row: ``text``, ``source``, ``said``, ``verdict`` and ``measured``, a text
with names of ``figures`` in braces. A figure is read from a CSV, JSON, TOML or Markdown file, or made of others.
``holds`` gives the interval of each figure that the verdict rests on: data that leave it make the page refuse, so that
no verdict outlives its evidence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fa3_reports.device.keys import why_stale
from fa3_reports.device.quoted import figures_of
from fa3_reports.device.source import Source
from fa3verify.files import json_text, markdown_table, write_text

VERDICTS = ("confirmed", "refuted", "not reproduced", "not tested")
PAGE = "claims.md"
FACTS = "claims.json"
SCHEMA = "fa3verify.claims/1"


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
    figures: dict[str, float] = {}
    if verdict not in VERDICTS:
        raise ValueError(f"{where}: verdict must be one of {', '.join(VERDICTS)}, got {verdict!r}")
    if row["source"].partition(",")[0] not in papers:
        raise ValueError(f"{where}: source must begin with one of {', '.join(papers)}, got {row['source']!r}")
    if verdict != "not tested":
        figures = figures_of(source, where, row)
        measured = measured.format(**figures)
    stale = tuple(path for path in data if why_stale(source, path))
    return Claim(row["topic"], row["text"], row["source"], row["said"], verdict, measured, figures, data, stale)


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
