"""The clauses by which kernels are judged: a number and a version of every property, bound and policy.

``data/clauses.toml`` is the table. What a clause demands is said where it is checked, and ``docs/conformance.md`` is
made of both. A number is never given again, and a version is raised when what the clause demands is another.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

NO_RESULT = "no result"  # what the clause of calls is of
_TABLE = Path(__file__).parents[1] / "data" / "clauses.toml"


@dataclass(frozen=True, slots=True)
class Clause:
    """One thing that is demanded of kernels.

    Parameters
    ----------
    number : str
        A letter for its kind, and a number: ``P07``.
    of : str
        What it is about, as findings name it, behind an operation where each has its own: ``law key_order``.
    version : int
        Of what it demands.
    digest : str
        The first digits of the SHA-256 of that.
    source : str
        Where the demand comes from.
    shown : str
        A kernel that does not meet it, which a test runs, or the test that has one.
    why : str
        Why it is demanded; empty where the code that checks it gives the reason.
    """

    number: str
    of: str
    version: int
    digest: str
    source: str
    shown: str
    why: str = ""

    @property
    def name(self) -> str:
        """Return what others cite: ``FA3V-P07, version 1``."""
        return f"FA3V-{self.number}, version {self.version}"


@cache
def clauses() -> dict[str, Clause]:
    """Return every clause by what it is of, in the order of the table."""
    table = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
    return {row["of"]: Clause(number, **row) for number, row in table.items()}


def clause_of(what: str, operation: str) -> str | None:
    """Return the name of the clause that a finding breaks; None for a finding of no clause.

    >>> clause_of("law error_within_bound", "forward")
    'FA3V-P01, version 1'
    """
    known = clauses()
    found = known.get(f"{operation}: {what}") or known.get(what)
    return found and found.name
