"""Calls of a kernel whose outputs name addresses: which small ones properties ask, and what is due of each."""

from __future__ import annotations

import numpy as np

from fa3_reference.problem import AttentionProblem
from fa3verify.cases.case import Case
from fa3verify.inputs.recipe import Recipe
from fa3verify.kernels.record import Kernel
from fa3verify.properties.address_gradients import addressed_gradients
from fa3verify.properties.addresses import Addressed, addressed
from fa3verify.properties.ladder import LADDERS, ladders, problem_of
from fa3verify.properties.law import Setup

_NEAR = 2.0**-5  # of the largest output, by which two runs of one call may differ where no address is known
_SMALL = (  # ladders whose calls of a small size differ in what a kernel is handed, with that size
    ("queries", 5),
    ("keys", 37),
    ("packed keys", 19),
    ("keys in pages", 37),
    ("keys in rows", 37),
    ("appended keys", 3),
    ("rotary positions", 21),
)


def is_addressable(problem: AttentionProblem) -> bool:
    """Tell whether outputs for a problem can name addresses: not under a softcap, with a term, or with stored FP8."""
    is_plain = not (problem.softcap or problem.term or problem.qv or problem.top_left)
    return is_plain and not (problem.cache and problem.cache.fp8)


def is_asked(kernel: Kernel) -> bool:
    """Tell whether a kernel takes calls whose outputs name addresses."""
    return bool(ladders(kernel)) and kernel.operation in ("forward", "backward")


def calls(kernel: Kernel) -> tuple[AttentionProblem, ...]:
    """Return small problems of each kind that a kernel is handed: batched, packed, in pages and rows, with new keys."""
    known = ladders(kernel)
    problems = (problem_of(kernel, LADDERS[name], n) for name, n in _SMALL if name in known)
    return tuple(dict.fromkeys(problem for problem in problems if problem is not None))


def call_of(kernel: Kernel, problem: AttentionProblem, *, seed: int = 0, alike: str = "") -> tuple[Setup, Addressed]:
    """Return a call whose outputs name addresses, and what is due.

    Where scores are changed, by a softcap or a function of the kernel, no address is known: what is due is then what
    the same call returns first.
    """
    if kernel.operation == "backward":
        found = addressed_gradients(problem, seed=seed, alike=alike)
    else:
        found = addressed(problem, seed=seed, alike=alike, is_coarse=bool(kernel.quantises.said))
    setup = Setup(kernel, problem, found.operands, kernel.configured(problem))
    if kernel.mods is None and is_addressable(problem):
        return setup, found
    due = {name: x.astype(np.float32) for name, x in setup.run().items()}
    allowed = {name: np.full(x.shape, _NEAR * np.abs(x).max(initial=0, where=np.isfinite(x))) for name, x in due.items()}
    return setup, Addressed(problem, found.operands, due, allowed)


def case_of(kernel: Kernel, problem: AttentionProblem) -> Case:
    """Return the case by which a trial names a problem; the operands are not those of its recipe."""
    return Case(kernel.name, problem, Recipe("normal"), None, (), kernel.operation)
