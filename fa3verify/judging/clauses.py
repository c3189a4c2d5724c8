"""The clauses by which kernels are judged: every property, bound and policy has a number and a version to cite.

``data/clauses.toml`` is the table of clauses. The words of a demand stand in the code that checks it, and
``docs/conformance.md`` is made of both. A number is never used for another clause, and a version is raised when the
clause demands something else. In the wheel :mod:`fa3verify.campaign.findings` uses :func:`clause_of` to name the clause
that a finding breaks. The whole table, :func:`clauses`, is for a checkout: ``fa3_reports.conformance`` makes the pages
of it, and ``tests/quality/test_clauses.py`` compares its digests with the demands.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

NO_RESULT = "no result"  # ``of`` of the clause that a kernel breaks by raising, hanging or returning something else
_TABLE = Path(__file__).parents[1] / "data" / "clauses.toml"


@dataclass(frozen=True, slots=True)
class Clause:
    """One demand on kernels: a row of the table.

    Parameters
    ----------
    number : str
        A letter for its kind, and a number: ``P07``.
    of : str
        The check that it is about, as findings name that: ``law key_order``. Where each operation has a clause of its
        own, its name stands in front: ``quantize: L1 error / bound``.
    version : int
        Raised when the demand changes.
    digest : str
        The first digits of the SHA-256 of the demand.
    source : str
        Where the demand comes from.
    shown : str
        A kernel that does not meet it and that a test runs, or the test that contains such a kernel.
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
    """Return every clause by its ``of``, in the order of the table."""
    table = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
    return {row["of"]: Clause(number, **row) for number, row in table.items()}


def clause_of(what: str, operation: str) -> str | None:
    """Return the name of the clause that a finding breaks; None where no clause is about it.

    ``what`` is the text of the finding's ``what``, or :data:`NO_RESULT`; ``operation`` is the kernel's.

    >>> clause_of("law error_within_bound", "forward")
    'FA3V-P01, version 1'
    """
    known = clauses()
    clause = known.get(f"{operation}: {what}") or known.get(what)
    return clause and clause.name
