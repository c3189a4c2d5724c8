"""Changes of a call whose effect on the result is known, and the matching cuts of results; laws are made of them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem, Descale, Operands, Sequence
from fa3verify.operations import Outputs
from fa3verify.properties.law import Setup, Untaken


def _cut(descale: Descale | None, seq: Sequence, heads: slice, rows: slice) -> Descale | None:
    """Return the descale of some heads and rows of a sequence, None of None.

    If the rows start inside a block, the result has one value per row.
    """
    if descale is None:
        return None
    values = descale.values[seq.index : seq.index + 1, heads]
    size = descale.block_rows
    if size and rows.start % size:
        return Descale(np.ascontiguousarray(values[..., np.arange(rows.start, rows.stop) // size]), 1)
    if size:
        first = rows.start // size
        values = values[..., first : max(first + 1, -(-rows.stop // size))]
    return Descale(np.ascontiguousarray(values), size)


def heads_of(problem: AttentionProblem, kv_heads: slice | None) -> slice:
    """Return the query heads that share some kv heads, or all of them."""
    kv_heads = kv_heads or slice(0, problem.nheads_kv)
    return slice(kv_heads.start * problem.group, kv_heads.stop * problem.group)


def part(
    setup: Setup, seq: Sequence, *, kv_heads: slice | None = None, rows: slice | None = None, keys: slice | None = None
) -> Setup:
    """Return the call for one sequence alone, optionally for some kv heads, query rows and keys of it.

    It keeps ``causal`` and ``window`` of the problem, aligned to the lengths of the part: bottom-right unless the
    problem is ``top_left``. Callers that cut rows or keys must see to the mask (:func:`masked_part` does). Keys must
    start at a whole block of descales (:func:`key_unit`), as kernels read one descale of K and of V for a whole key
    tile. Sinks are dropped, and a cache is not cut: callers have neither.
    """
    problem = setup.problem
    operands = setup.operands
    rows = rows or slice(0, seq.seqlen_q)
    keys = keys or slice(0, seq.seqlen_k)
    heads = heads_of(problem, kv_heads)
    kv_heads = kv_heads or slice(0, problem.nheads_kv)
    single = replace(
        problem,
        batch=1,
        nheads=heads.stop - heads.start,
        nheads_kv=kv_heads.stop - kv_heads.start,
        seqlen_q=rows.stop - rows.start,
        seqlen_k=keys.stop - keys.start,
        seqlens_q=None,
        seqlens_k=None,
    )
    cut = Operands(
        np.ascontiguousarray(problem.rows_q(operands.q, seq)[None, rows, heads]),
        np.ascontiguousarray(problem.rows_k(operands.k, seq)[None, keys, kv_heads]),
        np.ascontiguousarray(problem.rows_k(operands.v, seq)[None, keys, kv_heads]),
        _cut(operands.q_descale, seq, heads, rows),
        _cut(operands.k_descale, seq, kv_heads, keys),
        _cut(operands.v_descale, seq, kv_heads, keys),
    )
    return setup._replace(problem=single, operands=cut)


def masked_part(setup: Setup, seq: Sequence, *, rows: slice, keys: slice) -> Setup:
    """Return the call for some rows and keys of a sequence, under a mask by which each row sees the keys it saw before.

    Either all rows see all keys of the part, or the part must end with the last key that its last row sees. Masks are
    aligned bottom-right, so that a window moves with the cut. Untaken where no mask of the part does that.
    """
    problem = setup.problem
    cut = part(setup, seq, rows=rows, keys=keys)
    first, stop = (x[rows] for x in visible(problem, seq))
    if (first <= keys.start).all() and (stop >= keys.stop).all():
        return cut._replace(problem=replace(cut.problem, causal=False, window=(-1, -1)))
    # keys to the right of the last row's diagonal
    beyond = keys.stop - rows.stop - problem.offset(seq.seqlen_q, seq.seqlen_k)
    if problem.causal and beyond:  # aligned top-left, with rows below the last key's diagonal
        raise Untaken("no causal mask has the diagonal of these rows")
    left, right = problem.window
    window = (left + beyond if left >= 0 else left, right - beyond if right >= 0 else right)
    return cut._replace(problem=replace(cut.problem, window=window, top_left=False))


def key_unit(setup: Setup) -> int:
    """Keys of a whole number of descale blocks, at whose multiples a part of the keys may start."""
    descales = (setup.operands.k_descale, setup.operands.v_descale)
    return math.lcm(*(descale.block_rows for descale in descales if descale is not None and descale.block_rows))


def part_of_result(
    setup: Setup, result: Outputs, seq: Sequence, kv_heads: slice | None = None, rows: slice | None = None
) -> Outputs:
    """Cut from the outputs of a whole call those that the call of :func:`part` computes, in that call's layout."""
    problem = setup.problem
    heads = heads_of(problem, kv_heads)
    rows = rows or slice(0, seq.seqlen_q)
    cut = {}
    for name, x in result.items():  # in the layout of lse or in that of out
        is_like_lse = x.ndim == len(problem.lse_shape)
        cut[name] = problem.rows_lse(x, seq)[heads, rows] if is_like_lse else problem.rows_q(x, seq)[rows, heads]
    return {name: x[None] for name, x in cut.items()}


def repeated_heads(setup: Setup) -> Setup:
    """Return the multi-head call that repeats every kv head for each query head of its group."""
    problem = setup.problem
    operands = setup.operands
    group = problem.group

    def repeat(descale: Descale | None) -> Descale | None:
        return descale and Descale(np.repeat(descale.values, group, axis=1), descale.block_rows)

    wide = replace(
        operands,
        k=np.repeat(operands.k, group, axis=-2),
        v=np.repeat(operands.v, group, axis=-2),
        k_descale=repeat(operands.k_descale),
        v_descale=repeat(operands.v_descale),
    )
    unpacked = replace(setup.config, pack_gqa=False)  # a group of one head has nothing to pack
    return setup._replace(problem=replace(problem, nheads_kv=problem.nheads), operands=wide, config=unpacked)


def reordered(setup: Setup, batch: np.ndarray, kv_heads: np.ndarray, of_group: np.ndarray) -> Setup:
    """Return a batched call with sequences, kv heads, and the query heads of every group in another order."""
    operands = setup.operands
    heads = query_heads(setup.problem, kv_heads, of_group)

    def order(x: np.ndarray, of: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x[batch][:, :, of])

    def order_descale(descale: Descale | None, of: np.ndarray) -> Descale | None:
        return descale and Descale(np.ascontiguousarray(descale.values[batch][:, of]), descale.block_rows)

    return setup.fed(
        q=order(operands.q, heads),
        k=order(operands.k, kv_heads),
        v=order(operands.v, kv_heads),
        q_descale=order_descale(operands.q_descale, heads),
        k_descale=order_descale(operands.k_descale, kv_heads),
        v_descale=order_descale(operands.v_descale, kv_heads),
    )


def query_heads(problem: AttentionProblem, kv_heads: np.ndarray, of_group: np.ndarray) -> np.ndarray:
    """Query heads of kv heads, in order, and in the same order within every group."""
    return (kv_heads[:, None] * problem.group + of_group).ravel()


def scaled_by_power_of_two(x: np.ndarray, exponent: int) -> np.ndarray:
    """Multiply stored values by 2 ** exponent; exact where :func:`kept` made room."""
    return np.ldexp(x.astype(np.float64), exponent).astype(x.dtype)


def kept(x: np.ndarray, room: int, format_name: str) -> np.ndarray:
    """Replace by 0 every value that a factor of 2 ** +-room would take out of the normal range of its format.

    In bf16 only values in [2^-40, 2^40] stay, so that no product or sum in binary32 is subnormal or overflows.
    """
    fmt = FORMATS[format_name]
    low = max(fmt.min_normal, 2.0**-40) * 2.0**room
    high = min(fmt.max_finite, 2.0**40) / 2.0**room
    size = np.abs(x.astype(np.float64))
    return np.where((size >= low) & (size <= high), x, np.zeros(1, x.dtype))


def rescaled(descale: Descale, exponent: int) -> Descale:
    """Multiply descales by 2 ** exponent."""
    return Descale(descale.values * np.float32(2.0**exponent), descale.block_rows)


def visible(problem: AttentionProblem, seq: Sequence) -> tuple[np.ndarray, np.ndarray]:
    """Return the range of keys that each query row of a sequence sees: the first, and the one behind the last."""
    return problem.visible_keys(np.arange(seq.seqlen_q), seq.seqlen_q, seq.seqlen_k)


def filled(problem: AttentionProblem) -> list[Sequence]:
    """Return the sequences that have queries."""
    return [seq for seq in problem.sequences() if seq.seqlen_q]
