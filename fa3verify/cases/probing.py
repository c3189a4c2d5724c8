"""What a kernel does with small problems of plain inputs: whether it refuses them, and with which words."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from fa3_kernels.plan.config import MAX_HEAD_DIM
from fa3_reference.problem import AttentionProblem, Dtype
from fa3verify.cases.case import Case
from fa3verify.cases.dimensions import HEAD_DIMS, head_dims
from fa3verify.files import Json
from fa3verify.kernels import calls
from fa3verify.kernels.arrays import ArrayFunction
from fa3verify.kernels.record import REFUSED, Kernel
from fa3verify.kernels.widths import widths

PROBING_S = 60.0  # for calls of a function that declares no head dims, which take less than a second


def every_head_dim(dtype: Dtype) -> range:
    """Return each head_dim that a kernel of a dtype may take."""
    step = 16 if dtype == "e4m3" else 8
    return range(step, MAX_HEAD_DIM + 1, step)


def probe(kernel: Kernel) -> None:
    """Call a user's function of arrays once at each head_dim, and note in ``REFUSED`` those that it refuses.

    It does nothing for kernels that declare their head dims, for other kinds of kernels, and the second time. A
    function has no other way to say what it takes. An error that is no refusal is not noted: judged calls will find it.
    A slow one is called for :data:`PROBING_S`, first at :data:`HEAD_DIMS`; those that it then was not called at are
    left out as well.
    """
    is_function = isinstance(kernel.code, ArrayFunction)
    if kernel.head_dims is not None or kernel.name in REFUSED or not is_function:
        return
    until = time.monotonic() + PROBING_S
    REFUSED[kernel.name] = frozenset(
        head_dim
        for head_dim in sorted(every_head_dim(kernel.dtype), key=lambda head_dim: head_dim not in HEAD_DIMS)
        if time.monotonic() > until or _refuses(kernel, head_dim)
    )


def _refuses(kernel: Kernel, head_dim: int) -> bool:
    """Tell whether a kernel refuses all small problems of a head_dim: a few rows, one, whole tiles."""
    return all(refuses(kernel, problem) for problem in _small(kernel, head_dim))


def _small(kernel: Kernel, head_dim: int) -> Iterator[AttentionProblem]:
    fields: Json = {"dtype": kernel.dtype, "causal": "causal" in kernel.features} | widths(kernel, head_dim)
    return (kernel.fitted(AttentionProblem(1, 1, 1, n, m, **fields)) for n, m in ((8, 8), (1, 8), (128, 128)))


def refuses(kernel: Kernel, problem: AttentionProblem) -> bool:
    """Tell whether a kernel refuses a problem of plain inputs, by running it."""
    error = raised(kernel, problem)
    return error is not None and (isinstance(error, calls.Refused) or not isinstance(error, calls.KernelError))


def small_call(kernel: Kernel, head_dim: int) -> ValueError | calls.KernelError | None:
    """Run small problems of a head_dim until one returns, and return what the kernel raised of the first, or None."""
    errors = (raised(kernel, problem) for problem in _small(kernel, head_dim))
    first = next(errors)
    return None if first is None or None in errors else first


def raised(kernel: Kernel, problem: AttentionProblem) -> ValueError | calls.KernelError | None:
    """Run a problem of plain inputs, and return what the kernel raised, or how it refused; None if it returned."""
    operands = Case.plain(kernel, problem).operands()
    try:
        calls.run(kernel, problem, operands, kernel.config_for(problem))
    except (calls.KernelError, ValueError) as error:
        return error
    return None


def tried_here(kernel: Kernel) -> Kernel:
    """Return a kernel that says why it cannot run here, where a small call of it does not return."""
    error = None if kernel.unavailable else small_call(kernel, (head_dims(kernel) or HEAD_DIMS)[0])
    return replace(kernel, unavailable=f"a call of a few queries and keys: {error}") if error else kernel
