"""What a page is put together from: sections of tables, figures and paragraphs, and how each is printed."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fa3_reports.device.source import MarkdownTable
from fa3verify.files import csv_text
from fa3verify.report.notation import DASH, count
from fa3verify.report.tables import table as printable

Form = Callable[[Any], str]


class Column(NamedTuple):
    """Heading, key in the rows, and how a value is printed; texts are set to the left."""

    head: str
    key: str
    form: Form = str

    @property
    def is_text(self) -> bool:
        return self.form is str


def fixed(digits: int) -> Form:
    """Print with so many digits behind the point, a dash for what is not there.

    >>> fixed(3)(1.0256), fixed(0)(None), fixed(0)("")
    ('1.026', '–', '–')
    """
    return lambda value: DASH if value in (None, "") else f"{float(value):.{digits}f}"


def whole(value: Any) -> str:
    """Print a count, a dash for what is not there."""
    return DASH if value in (None, "") else count(value)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of values by column key, from the files ``data``; ``fold`` hides it until it is asked for."""

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]
    data: tuple[str, ...]
    note: str = ""
    fold: bool = False
    stale: bool = False

    def printed(self) -> dict[str, Any]:
        """Return what the templates print."""
        rows = [{c.key: _text(c, row.get(c.key)) for c in self.columns} for row in self.rows]
        texts = tuple(c.key for c in self.columns if c.is_text)
        return printable(self.name, self.title, [(c.head, c.key) for c in self.columns], rows, texts, self.note)

    def csv(self) -> str:
        """Return all values, six significant digits, under their keys."""
        keys = [c.key for c in self.columns]
        return csv_text(keys, ([_plain(row.get(key)) for key in keys] for row in self.rows))


def _text(column: Column, value: Any) -> str:
    return DASH if value is None and column.is_text else column.form(value)


def _plain(value: Any) -> Any:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else value


def as_printed(name: str, title: str, table: MarkdownTable, path: str, note: str = "") -> Table:
    """Return a table of a Markdown page, its cells as they are there; columns of numbers go to the right."""
    keys = [f"c{i}" for i in range(len(table.columns))]
    rows = [dict(zip(keys, (re.sub(r"\\([_*|])", r"\1", c) for c in cells), strict=True)) for cells in table.rows]

    def is_number(key: str) -> bool:
        return all(re.match(r"^[+\-−–]?[\d.]*", row[key]).group() or row[key] == "" for row in rows)  # type: ignore[union-attr]

    forms = {key: (lambda x: x) if is_number(key) else str for key in keys}
    columns = [Column(head, key, forms[key]) for head, key in zip(table.columns, keys, strict=True)]
    return Table(name, title, columns, rows, (path,), note)


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure as SVG; ``alt`` says what it shows to who cannot see it."""

    name: str
    svg: str
    alt: str


@dataclass(frozen=True, slots=True)
class Figure:
    """Drawings side by side under one title, from the files ``data``; ``reading`` tells what to see."""

    name: str
    title: str
    drawings: Sequence[Drawing]
    data: tuple[str, ...]
    reading: str
    stale: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with paragraphs, figures and tables; empty ones are left out of a page."""

    anchor: str
    title: str
    text: Sequence[str] = ()
    blocks: Sequence[Table | Figure] = field(default=())

    @property
    def tables(self) -> list[Table]:
        return [block for block in self.blocks if isinstance(block, Table)]

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
