"""The files that a page is made of, with their digests, and which file says what measured a table."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from fa3_reports import stored
from fa3_reports.bench_rows import RECORDED, read_rows
from fa3verify import files

Row = dict[str, str]


class MarkdownTable(NamedTuple):
    """A table of a Markdown page, under which heading it stands, and its cells as they are written there."""

    heading: str
    columns: list[str]
    rows: list[list[str]]


class Source:
    """The folder of a device. Paths are relative to it; what was read is in :attr:`used`, as SHA-256 by path."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self.used: dict[str, str] = {}

    def has(self, path: str) -> bool:
        return files.stored(self.root / path).is_file()

    def find(self, pattern: str) -> list[str]:
        """Return the files that match, sorted; packed ones by the names that they have unpacked."""
        plain = [path for path in self.root.glob(pattern) if path.is_file()]
        packed = [path.with_suffix("") for path in self.root.glob(pattern + files.PACKED)]
        return sorted({path.relative_to(self.root).as_posix() for path in (*plain, *packed)})

    def bench_tables(self) -> list[str]:
        """Return the tables of speed: records of bench, or rows that were made from several."""
        return sorted([*self.find("speed/*/bench.jsonl"), *self.find("speed/*/bench.csv")])

    def link(self, path: str) -> str:
        """Return where a file lies, for a page: of a packed one its name says so."""
        return files.stored(self.root / path).relative_to(self.root).as_posix()

    def read(self, path: str) -> bytes:
        """Read a file, unpacked.

        Raises
        ------
        ValueError
            If it is absent or damaged.
        """
        try:
            content = files.read_bytes(self.root / path)
        except OSError as error:
            raise ValueError(f"{path} of {self.root} cannot be read: {error}") from None
        self.used[path] = hashlib.sha256(content).hexdigest()
        return content

    def text(self, path: str) -> str:
        """Read a text file, UTF-8."""
        return self.read(path).decode()

    def recording(self, path: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Read what a library returned: the facts of the run, and its launches."""
        first, *launches = self.text(path).splitlines()
        return json.loads(first)["facts"], [json.loads(line) for line in launches]

    def rows(self, path: str) -> list[Row]:
        """Read a CSV table, or records of bench as one; kernels have the names that they have now."""
        content = self.text(path)
        found = read_rows(self.root / path) if path.endswith(".jsonl") else stored.csv_rows(content, path)
        for row in found:
            for column in {"kernel"} & row.keys():
                row[column] = RECORDED.get(row[column], row[column])
        return found

    def json(self, path: str) -> Any:
        return json.loads(self.text(path))

    def toml(self, path: str) -> dict[str, Any]:
        return tomllib.loads(self.text(path))

    def markdown(self, path: str) -> list[MarkdownTable]:
        """Read all tables of a Markdown page."""
        return markdown_tables(self.text(path))

    def provenance_of(self, path: str) -> str | None:
        """Return the file that says what measured a table: its folder's, of several that whose name is most alike."""
        folder = str(Path(path).parent)
        name = Path(path).name.partition(".")[0]
        beside = [*self.find(f"{folder}/*_provenance.json"), *self.find(f"{folder}/*_run.json")]
        if len(beside) == 1:
            return beside[0]
        alike = [(_common(Path(other).stem, name), other) for other in beside]
        longest, found = max(alike, default=(0, None))
        return found if longest else None


def _common(a: str, b: str) -> int:
    """Words that two file names begin with alike."""
    pairs = zip(a.split("_"), b.split("_"), strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


def markdown_tables(text: str) -> list[MarkdownTable]:
    """Read the tables of a Markdown text.

    >>> markdown_tables("# A\\n| b | c |\\n|---|--:|\\n| 1 | 2 |\\n")
    [MarkdownTable(heading='A', columns=['b', 'c'], rows=[['1', '2']])]
    """
    found: list[MarkdownTable] = []
    heading = ""
    previous = ""
    for line in text.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ").strip()
        if re.fullmatch(r"\|(\s*:?-+:?\s*\|)+\s*", line):
            found.append(MarkdownTable(heading, _cells(previous), []))
        elif line.startswith("|") and found and previous.startswith("|"):
            found[-1].rows.append(_cells(line))
        previous = line
    return found


def _cells(line: str) -> list[str]:
    return [cell.strip().strip("*") for cell in line.strip().removesuffix("|").removeprefix("|").split("|")]
