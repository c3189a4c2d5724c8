"""Head dims of plain problems: how wide heads of Q, K and V are together, and which widths a kernel takes."""

from __future__ import annotations

from fa3_reference.problem import MAX_HEAD_DIM_V, AttentionProblem
from fa3verify.files import Json
from fa3verify.kernels.record import Kernel

BESIDE_V = 64  # channels of Q and K that are not V's, where K holds V


def is_absorbed(kernel: Kernel, head_dim: int) -> bool:
    """Tell whether a head_dim is that of absorbed heads alone, as no V is so wide."""
    return "qv" in kernel.features and head_dim > MAX_HEAD_DIM_V


def widths(kernel: Kernel, head_dim: int) -> Json:
    """Return the fields of a plain problem that say how wide its heads are; absorbed ones have a V that is narrower."""
    absorbed: Json = {"qv": True, "head_dim_v": head_dim - BESIDE_V} if is_absorbed(kernel, head_dim) else {}
    return {"head_dim": head_dim} | absorbed


def head_dim_refusal(kernel: Kernel, head_dim: int) -> str | None:
    """Return why a kernel takes no plain problem of a head_dim, with or without a causal mask; None if it takes one.

    Raises
    ------
    ValueError
        If there is no problem of such a head_dim.
    """
    plain: Json = {"dtype": kernel.dtype} | widths(kernel, head_dim)
    problems = [kernel.fitted(AttentionProblem(1, 1, 1, 128, 128, causal=causal, **plain)) for causal in (False, True)]
    refusals = [kernel.refusal(problem) for problem in problems]
    return None if None in refusals else refusals[0]
