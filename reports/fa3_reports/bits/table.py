"""A table that is made case by case: which cases, what their rows say, and the file that keeps them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fa3_reports.stored import read_csv
from fa3verify.files import csv_text, stored, write_text

Key = tuple[str, ...]


class Wrong(Exception):
    """A kernel hangs, raises or gives a result of another kind: no table can say that."""


def one_by_one(cases: Sequence[Any], workers: int) -> list[list[Any]]:
    """Every case is a piece of work of its own."""
    return [[case] for case in cases]


@dataclass(frozen=True, slots=True)
class CaseTable:
    """One CSV file.

    Parameters
    ----------
    file : str
    columns : tuple of str
    cases : callable
        ``cases() -> sequence``, in the order of the file.
    key : callable
        ``key(case) -> sequence``: what a case's rows begin with; no two cases share it.
    rows : callable
        ``rows(case) -> list of rows``, run on the GPU in a process of its own: a function of a module.
    split : callable
        ``split(cases, workers) -> pieces of work``, each a list of cases.
    rule : {"equal", "differ", "none"}
        Of the columns named ``*_differing``: all 0, or (a planted fault) ``values_differing`` not 0.
    is_alone : bool
        Whether nothing else may use the GPU meanwhile.
    """

    file: str
    columns: tuple[str, ...]
    cases: Callable[[], Sequence[Any]]
    key: Callable[[Any], Sequence[Any]]
    rows: Callable[[Any], list[list[Any]]]
    split: Callable[[Sequence[Any], int], list[list[Any]]] = one_by_one
    rule: Literal["equal", "differ", "none"] = "equal"
    is_alone: bool = False

    def key_of(self, case: Any) -> Key:
        """The key as the file has it."""
        return tuple(map(str, self.key(case)))

    def chosen(self, dtypes: Sequence[str]) -> list[Any]:
        """Cases of some dtypes; all of them where the table does not tell dtypes apart."""
        if "dtype" not in self.columns:
            return list(self.cases())
        at = self.columns.index("dtype")
        return [case for case in self.cases() if self.key(case)[at] in dtypes]

    def is_broken(self, row: Sequence[str]) -> bool:
        """Whether a row breaks the rule of the table."""
        found = {name: x for name, x in zip(self.columns, row) if name.endswith("_differing")}
        if self.rule == "differ":
            return int(found["values_differing"]) == 0
        return self.rule == "equal" and any(map(int, found.values()))


def by_case(table: CaseTable, rows: Iterable[list[str]]) -> dict[Key, list[list[str]]]:
    """Rows by the key that they begin with."""
    length = len(table.key(table.cases()[0]))
    found: dict[Key, list[list[str]]] = {}
    for row in rows:
        found.setdefault(tuple(row[:length]), []).append(row)
    return found


def read(path: Path, table: CaseTable) -> dict[Key, list[list[str]]]:
    """Rows by case; none without a file. ValueError for columns of another table."""
    if not stored(path).exists():
        return {}
    rows = read_csv(path, table.columns)
    if rows and tuple(rows[0]) != table.columns:
        raise ValueError(f"columns of {path} must be {', '.join(table.columns)}, got {', '.join(rows[0])}")
    return by_case(table, [list(row.values()) for row in rows])


def write(path: Path, table: CaseTable, found: dict[Key, list[list[str]]]) -> None:
    """Write the rows in the order of the cases; rows of other cases are left out."""
    rows = (row for case in table.cases() for row in found.get(table.key_of(case), []))
    write_text(path, csv_text(table.columns, rows))
