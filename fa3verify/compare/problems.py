"""Fields of the problems that :mod:`fa3verify.compare.axes` compares: sizes of an axis, or those of a user."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from fa3_reference.problem import AttentionProblem
from fa3verify.kernels.record import Kernel

Fields = dict[str, Any]
PAIR: Fields = {  # the problem on which two kernels are compared, unless somebody chooses its sizes
    "batch": 1,
    "nheads": 2,
    "nheads_kv": 1,
    "seqlen_q": 4,
    "seqlen_k": 300,
    "head_dim": 128,
    "causal": False,
}
SIZES = tuple(PAIR)  # the fields that a user may choose
LONG = 2000  # keys, enough for FlashAttention-3 to split them by itself


def base(kernel: Kernel) -> Fields:
    """Fields of the problems of all axes: two kv heads, grouped where the kernel takes that."""
    group = 2 if "gqa" in kernel.features else 1
    dims = kernel.head_dims or (128,)
    return {"nheads": 2 * group, "nheads_kv": 2, "head_dim": dims[0], "dtype": kernel.dtype}


def causal(tokens: int, sizes: Fields) -> Fields:
    """Return a prefill of one sequence, with the user's ``sizes`` of heads."""
    heads = {"nheads": 2, "nheads_kv": 1} | sizes
    return heads | {"batch": 1, "seqlen_q": tokens, "seqlen_k": tokens, "causal": True}


def dense(keys: int, *, rows: int = 8, batch: int = 1) -> Fields:
    """Return a few rows that see all keys."""
    return {"batch": batch, "seqlen_q": rows, "seqlen_k": keys}


def always(fields: Fields) -> Callable[[Any, Fields], Fields]:
    """Return the function of an axis whose problem is the same at each of its values."""
    return lambda _, sizes: fields | sizes


def beside(neighbours: int | str, sizes: Fields) -> Fields:
    """Return a packed sequence and its neighbours, given as LENGTH for one or as COUNTxLENGTH: keys of each.

    Unless ``sizes`` has its lengths, the compared sequence has 40 queries and LONG keys. Neighbours have as many
    queries, but no more than they have keys. "0x5" is the sequence alone. ValueError for anything else, None too.

    >>> beside("2x9", {"seqlen_q": 1, "seqlen_k": 40})["seqlens_k"]
    (40, 9, 9)
    """
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)", str(neighbours))
    if not match:
        raise ValueError(f"neighbours must be LENGTH or COUNTxLENGTH, such as 3000 or 8x3000, got {neighbours!r}")
    count = int(match[1] or 1)
    length = int(match[2])
    rows = sizes.get("seqlen_q", 40)
    seqlens_q = (rows, *(min(rows, length),) * count)
    seqlens_k = (sizes.get("seqlen_k", LONG), *(length,) * count)
    lengths = {"seqlen_q": max(seqlens_q), "seqlen_k": max(seqlens_k), "seqlens_q": seqlens_q, "seqlens_k": seqlens_k}
    return {"batch": count + 1} | lengths


def disagreement(problem: AttentionProblem, sizes: Fields) -> str:
    """Return in words which chosen size a problem does not have; empty where it has all.

    Of packed sequences the lengths of the first, the compared one, count.
    """
    first = next(iter(problem.sequences()))
    own = {"seqlen_q": first.seqlen_q, "seqlen_k": first.seqlen_k}
    for name, chosen in sizes.items():
        value = own.get(name, getattr(problem, name))
        if value != chosen:
            return f"{name} {value}, which cannot be chosen, got {chosen}"
    return ""
