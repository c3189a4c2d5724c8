"""What a page is put together from: sections of tables, figures and paragraphs, and how each is printed."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fa3_reports.device.source import MarkdownTable
from fa3verify.report.tables import DASH, Form, PageColumn, PageTable, count, written


def fixed(digits: int) -> Form:
    """Print with so many digits behind the point, a dash for what is not there.

    >>> fixed(3)(1.0256), fixed(0)(None), fixed(0)("")
    ('1.026', '–', '–')
    """
    return lambda value: DASH if value in (None, "") else f"{float(value):.{digits}f}"


def whole(value: Any) -> str:
    """Print a count, a dash for what is not there."""
    return DASH if value in (None, "") else count(value)


def as_printed(name: str, title: str, table: MarkdownTable, path: str, note: str = "") -> PageTable:
    """Return a table of a Markdown page, its cells as they are there; columns of numbers go to the right."""
    keys = [f"c{i}" for i in range(len(table.columns))]
    rows = [dict(zip(keys, (re.sub(r"\\([_*|])", r"\1", c) for c in cells), strict=True)) for cells in table.rows]

    def is_number(key: str) -> bool:
        return all(re.match(r"^[+\-−–]?[\d.]*", row[key]).group() or row[key] == "" for row in rows)  # type: ignore[union-attr]

    forms = {key: written if is_number(key) else str for key in keys}
    columns = [PageColumn(head, key, forms[key]) for head, key in zip(table.columns, keys, strict=True)]
    return PageTable(name, title, columns, rows, (path,), note)


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure as SVG; ``alt`` says what it shows to who cannot see it."""

    name: str
    svg: str
    alt: str


@dataclass(frozen=True, slots=True)
class Figure:
    """Drawings under one title, ``abreast`` so many, from the files ``data``; ``reading`` tells what to see.

    Of the files ``others`` only rows of other projects' kernels are drawn, which no change of ours makes stale.
    ``stale`` is None where its files say it. ``fold`` hides it until it is asked for.
    """

    name: str
    title: str
    drawings: Sequence[Drawing]
    data: tuple[str, ...]
    reading: str
    stale: bool | None = None
    others: tuple[str, ...] = ()
    abreast: int = 3
    fold: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with paragraphs, figures and tables; empty ones are left out of a page."""

    anchor: str
    title: str
    text: Sequence[str] = ()
    blocks: Sequence[PageTable | Figure] = field(default=())

    @property
    def tables(self) -> list[PageTable]:
        return [block for block in self.blocks if isinstance(block, PageTable)]

    @property
    def figures(self) -> list[Figure]:
        return [block for block in self.blocks if isinstance(block, Figure)]


def html_text(text: str) -> str:
    """Turn links, code and bold of a Markdown paragraph into HTML; everything else is escaped.

    >>> html_text("**a** < [b](c.md) `d`")
    '<strong>a</strong> &lt; <a href="c.md">b</a> <code>d</code>'
    """
    text = html.escape(text, quote=True)
    text = re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", r'<a href="\2">\1</a>', text)
    text = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
