"""The error bound of a call that changes its operands before it attends to them.

Such a call rotates Q and the keys that it appends, in binary32, and rounds them; or it dequantises K and V from e4m3 to
16 bits. All other calls have the bound of :mod:`fa3_reference.bounds.forward` itself.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fa3_reference.attention import attention
from fa3_reference.bounds.forward import ErrorBound, forward_bound
from fa3_reference.bounds.model import KernelModel
from fa3_reference.bounds.quantisation import quantization_bound
from fa3_reference.bounds.steps import OUTWARD, gamma, rounded, rounded_error
from fa3_reference.cache import rotated
from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem, Operands

# forward_bound is evaluated at operands rounded to nearest. A kernel may round an operand to the other neighbour, or
# not at all, and so have slightly other operands. Their bound differs from that one by far less than this share, but
# for the roundings of P and of O, which depend on the number that is rounded: these are charged below for any number.
_NEIGHBOURS = 2.0**-4


@np.errstate(all="ignore")
def call_bound(problem: AttentionProblem, operands: Operands, model: KernelModel) -> ErrorBound:
    """Bound the error of a call as it is made: :func:`forward_bound`, plus what rounding changed operands adds.

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
        Bounds of the distance from the truth, which rotates and dequantises without rounding. A changed operand is off
        by the roundings of two products and their sum in binary32, and by one rounding to the operands' format or none.
        O then moves by at most :func:`~fa3_reference.bounds.quantisation.quantization_bound`. inf where nothing is
        promised.

    Raises
    ------
    ValueError
        As :func:`forward_bound` does.
    """
    if not problem.changes_operands:
        return forward_bound(problem, operands, model)
    plain = replace(problem, cache=None)
    fmt = FORMATS[problem.dtype]
    given = operands.dequantized(problem)
    q, k, v, *sinks = given
    exact = (*rotated(problem, q, k), v)
    sizes = (*rotated(problem, np.abs(q), np.abs(k), of_sizes=True), np.abs(v))
    is_fp8 = not problem.is_rotated  # a call changes operands by one of the two: it rotates, or has K and V in e4m3
    moved = []
    for before, x, size, is_converted in zip(given, exact, sizes, (False, is_fp8, is_fp8), strict=False):
        # two products and a sum
        error = rounded_error(x, gamma(3) * size * OUTWARD, fmt)
        # not rotated: the result is the operand, and so is the only product
        is_kept = (x == before) & (size == np.abs(before)) & np.logical_not(is_converted)
        moved.append(np.where(is_kept, 0.0, error))
    q, k, v = (rounded(x, fmt).astype(fmt.dtype) for x in exact)
    own = forward_bound(plain, Operands(q, k, v, sinks=operands.sinks), replace(model, out_dtype="fp32"))
    q, k, v = (np.nan_to_num(x, posinf=0.0, neginf=0.0) for x in exact)
    dq, dk, dv = (np.nan_to_num(x, posinf=np.inf) for x in moved)
    of_rounding = quantization_bound(plain, q, k, v, dq, dk, dv, *sinks)
    exact_out = attention(plain, *exact, *sinks).out
    mean = attention(plain, q, k, np.abs(v), *sinks).out
    is_moved = any(x.any() for x in moved)  # then P, too, may be rounded to another neighbour
    out = own.out * (1 + _NEIGHBOURS) + of_rounding.out + is_moved * model.p_format.unit_roundoff * mean
    if model.out_dtype != "fp32":
        out = np.where(out > 0, rounded_error(exact_out, out, FORMATS[model.out_dtype]), 0.0)
    lse = own.lse * (1 + _NEIGHBOURS) + of_rounding.lse
    return ErrorBound(*(np.nan_to_num(x, nan=np.inf, posinf=np.inf) for x in (out, lse)))
