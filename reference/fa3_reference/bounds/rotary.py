"""The error bound of a call that rotates Q and the keys that it appends, in binary32, and rounds them before it
attends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fa3_reference.bounds.forward import ErrorBound, forward_bound
from fa3_reference.bounds.model import KernelModel
from fa3_reference.bounds.quantisation import quantization_bound
from fa3_reference.bounds.steps import OUTWARD, gamma, rounded, rounded_error
from fa3_reference.cache import rotated
from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem, Operands

# A kernel may round a number near the middle of two to the other one than the bound of its arithmetic is taken at. One
# unit of 16 bits in some operands moves that bound by far less than this share of it.
_NEIGHBOURS = 2.0**-4


def call_bound(problem: AttentionProblem, operands: Operands, model: KernelModel) -> ErrorBound:
    """Bound the error of a call as it is made: :func:`forward_bound`, and what rounding rotated operands adds to it.

    Parameters
    ----------
    problem : AttentionProblem
        What is computed.
    operands : Operands
        What the kernel was given.
    model : KernelModel
        Formats, tiling and order of operations of the kernel.

    Returns
    -------
    ErrorBound
        Against the truth that rotates and does not round. A rotated number is off by its two products, their sum in
        binary32 and one rounding to the operands' format, in any order; O then moves as
        :func:`~fa3_reference.bounds.quantisation.quantization_bound` says.

    Raises
    ------
    ValueError
        As :func:`forward_bound` does.
    """
    if not problem.is_rotated:
        return forward_bound(problem, operands, model)
    plain = replace(problem, cache=None)
    fmt = FORMATS[problem.dtype]
    q, k, v, *sinks = operands.dequantized(problem)
    exact = rotated(problem, q, k)
    sizes = rotated(problem, np.abs(q), np.abs(k), of_sizes=True)
    moved = []
    for before, x, size in zip((q, k), exact, sizes, strict=True):
        error = rounded_error(x, gamma(3) * size * OUTWARD, fmt)
        moved.append(np.where((x == before) & (size == np.abs(before)), 0.0, error))
    stored = [rounded(x, fmt).astype(fmt.dtype) for x in exact]
    with np.errstate(all="ignore"):
        own = forward_bound(plain, replace(operands, q=stored[0], k=stored[1]), model)
        q, k, v = (np.nan_to_num(x, posinf=0.0, neginf=0.0) for x in (*exact, v))
        dq, dk = (np.nan_to_num(x, posinf=np.inf) for x in moved)
        of_rounding = quantization_bound(plain, q, k, v, dq, dk, np.zeros_like(v), sinks[0] if sinks else None)
    return ErrorBound(
        *(a * (1 + _NEIGHBOURS) + np.nan_to_num(b, nan=np.inf) for a, b in zip(own, of_rounding, strict=True))
    )
