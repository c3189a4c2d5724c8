"""Rows of what bench measured, from its table or from its records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fa3_reports.bench.results import read
from fa3_reports.bench.tables import csv_text
from fa3_reports.stored import csv_rows, read_csv

# Names of peers in older tables, and their names in fa3verify.known.peers.
RECORDED = {
    "fa3": "flash3",
    "fa3.dew": "flash3.dew",
    "fa4": "flash4",
    "torch.cudnn": "cudnn",
    "torch.flash2": "flash2",
    "torch.flex": "flex",
}


def read_rows(path: Path, columns: Sequence[str] = ()) -> list[dict[str, str]]:
    """Return the rows of ``bench.csv``, or the same rows made from the records of ``bench.jsonl``.

    Raises
    ------
    ValueError
        For a file that is neither, or lacks one of the columns.
    """
    if path.suffix != ".jsonl":
        return read_csv(path, columns)
    return csv_rows(csv_text(read(path).cells.values()), path.name, columns)
