"""Tables and packed files as the reports keep them, beside :mod:`fa3verify.files`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fa3verify.files import csv_cell, csv_rows, csv_text, read_bytes, read_text, stored, write_bytes
from fa3verify.report.tables import PageTable


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
