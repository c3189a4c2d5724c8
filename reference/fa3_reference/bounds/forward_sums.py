"""Sums over a key block, P V and the row sum: how far adding them takes a kernel from the truth.

These are steps 5 and 6 of the bound of a forward, in reference/README.md. :mod:`fa3_reference.bounds.forward` calls
them block by block; the weights that are added come from :mod:`fa3_reference.bounds.forward_weights`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fa3_reference.bounds.device import FP32_MIN_NORMAL, U_FP32
from fa3_reference.bounds.forward_weights import LIFTED, BlockWeights
from fa3_reference.bounds.head import Head, finite
from fa3_reference.bounds.model import KernelModel
from fa3_reference.bounds.state import State
from fa3_reference.bounds.steps import OUTWARD, gamma, last_bit


def accumulate(
    state: State, head: Head, keys: slice, w: BlockWeights, rescaled: np.ndarray, model: KernelModel
) -> None:
    """Add P V of one block, and its errors, to the state (step 5).

    ``rescaled`` (rows, 1) is the relative error of rescaling C before this block, 0 where C is not rescaled.
    """
    v = head.v_rows(keys)
    factor = head.v_factor[keys][:, None]
    fmt = model.core.operand
    p = w.p
    n = w.p.shape[0]
    d = head.v.shape[1]
    dv = head.moved[2][keys] if head.moved else np.zeros(v.shape)
    v_abs = np.abs(v) + dv
    seen = w.visible.any(axis=1, keepdims=True)
    # the range of V behind a row, of which O is a mean; inf and -inf stay where a row has seen no key
    state.v_min = np.where(seen, np.minimum(state.v_min, _seen(w.visible, v - dv, np.inf).min(0)), state.v_min)
    state.v_max = np.where(seen, np.maximum(state.v_max, _seen(w.visible, v + dv, -np.inf).max(0)), state.v_max)
    sums = np.concatenate([p, p * w.either]) @ np.concatenate([v, v * v], axis=1)
    absolute = np.concatenate([p, p * w.either, w.rounding]) @ v_abs
    # sums of |v| weighed by p, by p times its relative error, and by the rounding of P
    pa = absolute[:n]
    ba = absolute[n : 2 * n]
    da = absolute[2 * n :]
    moved = (p * (1 + w.either)) @ dv  # by the codes of V
    carried = np.abs(state.o) + state.boa + state.o_error  # |C| at most, after rescaling
    added = (pa + ba + da) * OUTWARD  # sum of |P^ v|
    largest = p * (1 + w.either) + w.rounding
    # Products are aligned by their operands' exponents, and a subnormal operand's is that of the least normal number.
    clamped_p = np.where(largest > 0, np.maximum(largest, fmt.min_normal / w.unit), 0.0)
    clamped_v = np.where(v != 0, np.maximum(v_abs, fmt.min_normal * factor), 0.0)
    largest_product = np.minimum(clamped_p @ clamped_v, clamped_p.max(1)[:, None] * clamped_v.max(0)) * OUTWARD
    aligned = np.maximum(largest_product, added)
    # A whole tile is multiplied, though its last keys may be padding; where the tile is not known, the keys alone.
    steps = _steps(max(model.tile_n, len(v)), model)
    exact = _exact(state, head.v[keys], w, (carried, added, largest_product), rescaled > 0, steps, model)
    # |O| at most, unless more is lost
    reached = np.abs(state.o + sums[:n, :d]) + state.boa + state.o_error + ba + da + moved
    sizes = carried, added, aligned, reached
    lost = _cut(sizes, (w.visible.sum(1)[:, None], steps), rescaled > 0, exact, model)
    lost = lost + carried * rescaled * OUTWARD
    if model.factors:
        lost = lost + (model.factors * added + FP32_MIN_NORMAL * p.sum(1, keepdims=True)) * OUTWARD
    # Outside a tensor core each product may vanish below the normal range, and each sum.
    vanished = 3 + (2 * w.visible.sum(1)[:, None] if model.accumulator != "wgmma" else 0)
    lost += (vanished * model.tiny + steps * model.core.tiny) * factor.max() / w.unit
    state.keys += len(v)
    # From here on: whether a sum may overflow in the kernel. Lazy rescaling lets P grow to 2^8.
    is_running = model.order.weights != "normalised"
    lift = 2.0**8 if is_running and model.order.rescale == "lazy" else 1.0
    every = state.keys * 2 * lift * np.maximum(np.abs(state.v_min), np.abs(state.v_max))
    if model.is_blocked or not is_running:
        reached = np.fmin((carried + added + lost) * lift, every * LIFTED) * w.unit
    else:  # a sum may be largest while the maximum is still small
        reached = every * np.minimum(np.exp2(2 * state.tau), LIFTED)[:, None]
    state.outside |= ~(reached < 2.0**126 * factor.min())
    state.o_error = (state.o_error + da + moved + lost) * OUTWARD
    state.share += _share(len(v), model)
    state.o = state.o + sums[:n, :d]
    state.o2 = state.o2 + sums[:n, d:]
    state.oa = state.oa + pa
    state.bo = state.bo + sums[n:, :d]
    state.bo2 = state.bo2 + sums[n:, d:]
    state.boa = state.boa + ba


def _steps(keys: int, model: KernelModel) -> int:
    """Return how many steps the tensor core takes for so many products; with "either" each step may be half empty."""
    return -(-keys // (model.core.k_step // (2 if model.accumulator == "either" else 1)))


class _Exact(NamedTuple):
    """Says where nothing is lost, bool (rows, channels) each.

    ``products``: products and C lie on the grid of every step. ``sums``: the results of steps need no cut.
    ``promotion``: binary32 sums of promoted parts need no rounding.
    """

    products: np.ndarray
    sums: np.ndarray
    promotion: np.ndarray


def _exact(
    state: State,
    v: np.ndarray,
    w: BlockWeights,
    sizes: tuple[np.ndarray, ...],
    rescaled: np.ndarray,
    steps: int,
    model: KernelModel,
) -> _Exact:
    """Return where P V of a block is exact, because all addends are multiples of one power of two.

    The state keeps that power of two for O. ``v`` are the block's rows of V as they are stored, ``rescaled`` says in
    which rows C was rescaled, and ``sizes`` are upper bounds of C, of the sum of |P^ v| and of the largest product.
    """
    if not model.is_stated:
        return _Exact(*[np.zeros(state.o.shape, bool)] * 3)
    core = model.core
    promoted = bool(model.promotion_interval)
    scale = w.unit / state.v_factor * np.exp2(state.tau)[:, None]  # takes sizes to units of the kernel
    carried, added, largest = (x * scale for x in sizes)
    least = (np.abs(state.o) - state.boa - state.o_error) * scale * np.exp2(-2 * state.tau)[:, None]
    ulp = np.where(least > 0, np.ldexp(1.0, np.maximum(np.frexp(least)[1] - 24, -149)), 2.0**-149)
    state.o_grid = np.where(rescaled, 0.0 if promoted else ulp, state.o_grid)  # an fma does not round C alone
    products = w.p_grid[:, None] * last_bit(finite(v)).min(0)
    state.o_grid = np.minimum(state.o_grid, products)
    chain, before = (products, 0.0) if promoted else (state.o_grid, carried)
    total = before + added
    on_grid = chain >= core.align * np.maximum(largest, total if steps > 1 else before)
    return _Exact(on_grid, total < 2 * chain / core.out, carried + added < state.o_grid / U_FP32)


def _share(keys: int, model: KernelModel) -> float:
    """Return what rounding P and cutting P V lose of one block at most, relative to the row sum times the largest |v|.

    The epilogue uses it where next to nothing is known of the weights (step 9).
    """
    tiny = keys * model.p_format.min_subnormal / 2.0**model.p_offset_log2
    tree = 0.0 if model.accumulator == "wgmma" else gamma(keys + 2, model.addition) + model.factors
    if model.accumulator not in ("wgmma", "either"):
        return tiny + tree
    steps = _steps(keys, model)
    return tiny + tree + 2 * ((keys + steps) * model.core.align + steps * model.core.out + 4 * U_FP32)


def _seen(visible: np.ndarray, v: np.ndarray, otherwise: float) -> np.ndarray:
    """Return V with ``otherwise`` in the keys that no row of the block sees.

    The range of V over the block's keys is wider than each row's own, which is safe.
    """
    return np.where(np.logical_or.reduce(visible, axis=0)[:, None], v, otherwise)


def _cut(
    sizes: tuple[np.ndarray, ...],
    counts: tuple[np.ndarray, int],
    rescaled: np.ndarray,
    exact: _Exact,
    model: KernelModel,
) -> np.ndarray:
    """Return what an accumulator loses of a block's products and of C, (rows, channels).

    ``sizes`` are upper bounds of C, of the sum of |P^ v|, of the largest number that sets a grid, and of |O| after the
    block. ``counts`` are the visible keys (rows, 1) and the wgmma steps. ``rescaled`` tells in which rows C moved.
    """
    (carried, added, aligned, reached), (keys, steps) = sizes, counts
    core = model.core
    if model.accumulator != "wgmma":
        unit = gamma(1, model.addition)
        tree = gamma(int(keys.max()) + 1, unit) * (added + np.where(added > 0, carried, 0.0))
        return np.maximum(tree, _grouped(sizes, counts, model)) if model.accumulator == "either" else tree
    chunks = model.tile_n // model.promotion_interval if model.promotion_interval else 0
    top = carried + added
    # inside a promoted chain |C| is at most the products so far
    chain_top = added if chunks else top
    products = np.minimum(keys * core.align * np.maximum(chain_top, aligned), added) + steps * core.align * aligned
    if not chunks and core.out_bits < 23:
        products = products + np.where(rescaled, core.out * carried, 0.0)
    sums = np.minimum(steps * core.out * chain_top, 8 * added)
    lost = np.where(exact.products, 0.0, products) + np.where(exact.sums, 0.0, sums)
    if chunks:
        rounded_sum = reached if chunks == 1 else top
        inexact = (added > 0) & ~exact.promotion
        lost = lost + np.where(inexact, chunks * U_FP32 * (rounded_sum + lost), 0.0)
    return lost


def _grouped(sizes: tuple[np.ndarray, ...], counts: tuple[np.ndarray, int], model: KernelModel) -> np.ndarray:
    """Return what the tensor core loses where it is not known which keys form a group and how many groups are chained.

    Products and C are cut in each group, then their sum, which may move to binary32. Arguments as of :func:`_cut`.
    """
    (carried, added, aligned, _), (keys, steps), core = sizes, counts, model.core
    top = np.maximum(carried + added, aligned)
    products = np.minimum(keys * core.align * top, added) + steps * core.align * top
    sums = steps * core.out * top + np.where(added > 0, gamma(steps, model.addition) * (carried + added), 0.0)
    # Cut toward zero, a sum stays between those of all positive and of all negative products.
    return np.minimum(products, carried + added) + np.minimum(sums, carried + added)


def add_to_row_sum(state: State, w: BlockWeights, model: KernelModel) -> None:
    """Add the block's weights, and the errors of adding them, to the row sum of the state (step 6)."""
    added = w.p.sum(1)
    up = (w.p * w.either).sum(1)
    state.l = state.l + added
    state.l_up = state.l_up + up
    state.l_down = state.l_down + (w.p * w.down).sum(1)
    state.weights, state.l_grid = state.weights + w.counts, np.minimum(state.l_grid, w.grid)
    depth = model.row_sum_depth if model.is_blocked else w.p.shape[1]
    total = np.where(added > 0, state.l + state.l_up + state.l_error, 0.0)
    chain = total if model.order.row_sum == "any" else added + up
    lost = gamma(depth) * chain + U_FP32 * total * (1 + gamma(depth))
    state.l_error = (state.l_error + lost) * OUTWARD
