"""Tables and packed files as the reports keep them, beside :mod:`fa3verify.files`."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from fa3verify.files import csv_cell, csv_text, read_bytes, read_text, stored, write_bytes
from fa3verify.report.tables import PageTable


def csv_rows(text: str, name: str, columns: Sequence[str] = ()) -> list[dict[str, str]]:
    """Return the rows of a table by the names in its head.

    Parameters
    ----------
    text : str
    name : str
        What the table is called in a refusal.
    columns : sequence of str
        Names that the head must have.

    Raises
    ------
    ValueError
        For what is no csv, lacks a column, or has a row of another length; the message names table and line.

    Examples
    --------
    >>> csv_rows("a,b\\n1,2\\n", "t")
    [{'a': '1', 'b': '2'}]
    """
    try:
        head, *rows = [row for row in csv.reader(io.StringIO(text, newline=""), strict=True) if row] or [[]]
    except csv.Error as error:
        raise ValueError(f"{name} is no CSV file: {error}") from None
    if missing := [column for column in columns if column not in head]:
        raise ValueError(f"{name}, line 1: column {missing[0]} is missing; it has {', '.join(columns)}")
    for line, row in enumerate(rows, 2):
        if len(row) != len(head):
            raise ValueError(f"{name}, line {line}: must have {len(head)} fields")
    return [dict(zip(head, row, strict=True)) for row in rows]


def read_csv(path: Path, columns: Sequence[str] = ()) -> list[dict[str, str]]:
    """Return the rows of a table, plain or packed; raises as :func:`csv_rows` and :func:`read_bytes` do."""
    try:
        return csv_rows(read_text(path), path.name, columns)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} is no CSV file: {error}") from None


def unpack(path: Path) -> None:
    """Put the plain file in the place of a packed one, so that it can be added to."""
    held = stored(path)
    if held != path:
        write_bytes(path, read_bytes(path))
        held.unlink()


def table_csv(table: PageTable) -> str:
    """Return all values of a page's table as csv, six significant digits, under their keys."""
    keys = [column.key for column in table.columns]
    return csv_text(keys, ([csv_cell(row.get(key)) for key in keys] for row in table.rows))
