"""Calls of a kernel whose outputs name addresses: which small ones properties ask, and what is due of each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from fa3_reference.problem import AttentionProblem
from fa3_reference.scales import QuantScheme
from fa3verify.cases.case import Case
from fa3verify.files import Json
from fa3verify.inputs.recipe import Recipe
from fa3verify.kernels.record import Kernel
from fa3verify.operations import WrongOutput
from fa3verify.operations.backward import LSE_GRADIENT
from fa3verify.properties.address_gradients import addressed_gradients
from fa3verify.properties.addresses import Addressed, addressed
from fa3verify.properties.ladder import batched, cached, ladders, packed, place, rotated
from fa3verify.properties.law import KernelError, Setup

_NEAR = 2.0**-5  # of the largest output, by which two runs of one call may differ where no address is known


class Stopwatch:
    """Seconds of work since it was made: of this process, or where that waits for others a quarter of those that have
    passed, so that a busy machine asks a kernel as much as an idle one.
    """

    def __init__(self) -> None:
        self._began = time.process_time(), time.monotonic()

    @property
    def seconds(self) -> float:
        return max(time.process_time() - self._began[0], (time.monotonic() - self._began[1]) / 4)


def is_addressable(kernel: Kernel, problem: AttentionProblem) -> bool:
    """Tell whether outputs for a problem can name addresses: not under a softcap, with a term, or with keys in FP8 that
    share descales otherwise than by head.

    Gradients cannot where a row may see no key, as some kernels weigh all keys alike there.
    """
    is_plain = not (problem.softcap or problem.term or problem.qv or problem.top_left or kernel.mods)
    is_seeing = all(seq.seqlen_k >= max(1, seq.seqlen_q * problem.causal) for seq in problem.sequences())
    is_stored = problem.cache is None or problem.cache.fp8 in ("", "head")
    return is_plain and is_stored and (kernel.operation == "forward" or is_seeing)


def is_asked(kernel: Kernel) -> bool:
    """Tell whether a kernel takes calls whose outputs name addresses."""
    return bool(ladders(kernel)) and kernel.operation in ("forward", "backward")


def calls(kernel: Kernel) -> tuple[AttentionProblem, ...]:
    """Return small problems of each kind that a kernel is handed: batched and packed, of as many queries as keys and of
    fewer, of one key, over pages and rows, with new keys and rotary positions.
    """
    is_causal = "causal" in kernel.features
    of_cache: tuple[tuple[str, Json], ...] = (
        ("paged", {}),
        ("seqused_k", {"page_size": 0}),
        ("append", {"new": (3, 2)}),
        ("fp8_cache", {"fp8": "head"}),
        ("leftpad", {"leftpad": (3, 40), "page_size": place(kernel, 1)}),
        ("batch_idx", {"indexed": True, "page_size": place(kernel, 0)}),
    )
    makers: tuple[tuple[str, Callable[[], AttentionProblem]], ...] = (
        ("", lambda: batched(kernel, causal=is_causal)),
        ("", lambda: batched(kernel, queries=7, keys=7, group=1)),
        ("", lambda: batched(kernel, queries=1, keys=1, group=1)),
        ("varlen", lambda: packed(kernel, (3, 1, 5), (9, 4, 19), causal=is_causal)),
        ("varlen", lambda: packed(kernel, (4, 6), (4, 6), group=2)),
        *((name, partial(cached, kernel, (2, 2), (37, 20), **of)) for name, of in of_cache),
        ("rotary", lambda: rotated(kernel, (37, 20))),
    )
    problems = []
    for name, make in makers:
        with contextlib.suppress(ValueError):
            if not name or name in kernel.features:
                problems.append(kernel.fitted(make()))
    return tuple(dict.fromkeys(problem for problem in problems if kernel.supports(problem)))


def call_of(kernel: Kernel, problem: AttentionProblem, *, seed: int = 0, alike: str = "") -> tuple[Setup, Addressed]:
    """Return a call whose outputs name addresses, and what is due.

    Where scores are changed, by a softcap or a function of the kernel, no address is known: what is due is then what
    the same call returns first.
    """
    if kernel.operation == "backward":
        found = addressed_gradients(problem, seed=seed, alike=alike, of_lse=LSE_GRADIENT in kernel.features)
    else:
        found = addressed(problem, seed=seed, alike=alike, is_coarse=bool(kernel.quantises.said))
    setup = Setup(kernel, problem, found.operands, kernel.configured(problem))
    if is_addressable(kernel, problem):
        return setup, found
    due = {name: x.astype(np.float32) for name, x in setup.run().items()}
    largest = {name: np.abs(x).max(initial=0, where=np.isfinite(x)) for name, x in due.items()}
    allowed = {name: np.full(x.shape, _NEAR * largest[name]) for name, x in due.items()}
    return setup, Addressed(problem, found.operands, due, allowed)


def is_refusal(error: KernelError) -> bool:
    """Tell whether a call failed because the kernel refuses it, as libraries do by a RuntimeError, or lacks memory.

    An error of the GPU is none, and neither is an output that is not as declared.
    """
    cause = error.__cause__
    return isinstance(cause, Exception) and not isinstance(cause, WrongOutput) and "CUDA error" not in str(cause)


def case_of(kernel: Kernel, problem: AttentionProblem) -> Case:
    """Return the case by which a trial names a problem; the operands are not those of its recipe."""
    scheme = QuantScheme("head") if kernel.dtype == "e4m3" else None
    return Case(kernel.name, problem, Recipe("normal"), scheme, operation=kernel.operation)
