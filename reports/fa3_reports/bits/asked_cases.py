"""Cases of a campaign of bits over problems that somebody else wrote down, a line each (:mod:`fa3verify.cases.lines`).

Each problem meets every family of values. Parts of the keys, packed heads and what else a caller chooses are drawn, all
by one seed, so that nobody who wrote the kernels has seen the cases before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fa3_kernels.plan.backward import backward_plan
from fa3_kernels.plan.choose import H200_SMS, without_lengths
from fa3_kernels.plan.request import Choices, request_for
from fa3_reference.problem import AttentionProblem
from fa3_reports.bits.forward_cases import E4M3_FAMILIES, FAMILIES, Case
from fa3verify.cases.lines import lines_in, read_line
from fa3verify.files import csv_text
from fa3verify.operations import FORWARD

LIST = "asked_cases.csv"
COLUMNS = ("part", "line", "family", "seed", "choices", "scopes")
SPLITS = (1, 1, 2, 3, 7)
SCOPES = ("head", "none", "tensor")
STEP = 1_000_000  # between the seeds of two campaigns


def cases_of(lines: Sequence[str], seed: int) -> dict[str, list[Case]]:
    """Return the cases of problems by the part of the campaign that runs them: forward, paged or backward.

    The feature of a case is its line. ValueError for a line that is not understood, and for a problem that our kernels
    refuse.
    """
    found: dict[str, list[Case]] = {"forward": [], "paged": [], "backward": []}
    for line in dict.fromkeys(lines):
        problem, operation = read_line(line, seed)
        part = "backward" if operation != FORWARD else "paged" if problem.cache else "forward"
        try:
            if operation == FORWARD:
                request_for(problem, Choices())
            else:
                backward_plan(without_lengths(problem), H200_SMS)
        except ValueError as error:
            raise ValueError(f"our kernels refuse {line!r}: {error}") from None
        found[part] += _of_problem(line, problem, part, seed, STEP * seed + sum(map(len, found.values())))
    return {part: cases for part, cases in found.items() if cases}


def _of_problem(line: str, problem: AttentionProblem, part: str, seed: int, first: int) -> Iterator[Case]:
    is_fp8 = problem.dtype == "e4m3"
    for i, family in enumerate(E4M3_FAMILIES if is_fp8 else FAMILIES):
        rng = np.random.default_rng([seed, first + i])
        scope = str(rng.choice(SCOPES)) if is_fp8 else "none"
        choices: dict[str, Any] = {}
        if part != "backward":
            choices = {"num_splits": int(rng.choice(SPLITS)), "pack_gqa": bool(rng.integers(2))}
        if is_fp8:
            choices |= {"promotion_interval": int(rng.choice((128, 128, 0))), "out_dtype": "bf16"}
        yield Case(line, problem, family, first + i, choices, (scope, scope, scope))


def write_list(cases: dict[str, list[Case]], out: Path) -> Path:
    """Write the list of cases, and return its file."""
    path = out / LIST
    rows = [
        (part, x.feature, x.family, x.seed, " ".join(f"{name}={y}" for name, y in x.choices.items()), x.scopes[0])
        for part, own in cases.items()
        for x in own
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(csv_text(COLUMNS, rows), encoding="utf-8")
    return path


def read_cases(path: Path, seed: int) -> dict[str, list[Case]]:
    """Return the cases of a file of problems, as :func:`cases_of`; ValueError for a file without any."""
    if cases := cases_of(lines_in(path), seed):
        return cases
    raise ValueError(f"{path} has no problem")
