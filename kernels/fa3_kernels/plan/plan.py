"""A launch as values: a checked request becomes a plan, and a plan the calls of kernels that the GPU gets.

A plan holds for all requests that differ in nothing it depends on: in a decoding loop one plan serves all numbers of
keys that fill as many key tiles. The calls of one launch have its own sizes. Tensors are named in them; who runs a call
puts the addresses in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from fa3_kernels.plan.choose import shape_of
from fa3_kernels.plan.config import WARPGROUP_ROWS, Config
from fa3_kernels.plan.packed_order import MAX_SORTED, PackedOrder
from fa3_kernels.plan.request import ONE_BLOCK, Request
from fa3_kernels.plan.stamps import COLUMNS
from fa3_kernels.plan.tile_order import L2_BYTES, Shape, count_items, static_schedule
from fa3_kernels.plan.variant import Variant, variant_of
from fa3_kernels.plan.views import View
from fa3_reference.problem import AttentionProblem

LOG2_E = 1.4426950408889634
MIN_NORMAL = 2.0**-126
COMBINE_ROWS = 4
_ORDER_OPTIONS = {"num_warps": 4}
LOCKSTEP_TILE = 128  # rows and keys of the kernel of the ablation
TORCH_NAMES = {"fp16": "float16", "bf16": "bfloat16", "e4m3": "float8_e4m3fn"}


class Pointer(NamedTuple):
    """The address of a tensor that a kernel gets; ``name`` says which, ``dtype`` is of its elements."""

    name: str
    dtype: str


class Call(NamedTuple):
    """One kernel launch: the kernel's name, its arguments in order, the grid, and launch options.

    Arguments are numbers, the kernel's compile-time record, :class:`Pointer` and :class:`View`.
    """

    kernel: str
    arguments: tuple[Any, ...]
    grid: tuple[int, ...]
    options: dict[str, Any]


class Sizes(NamedTuple):
    """What differs between launches of one plan: query rows of a sequence, or of all packed ones, and keys likewise.

    ``longest`` are the longest queries and keys of packed sequences.
    """

    rows_q: int
    rows_k: int
    longest: tuple[int, int] = (0, 0)


def softmax_factors(softmax_scale: float, softcap: float) -> tuple[float, float]:
    """Return the fp32 factors (scale_log2, cap_scale) as the kernel gets them.

    Without a cap scale_log2 is softmax_scale * log2(e), at least the smallest normal number; with one cap_scale takes
    raw scores to the argument of the cap's ex2 and scale_log2 takes tanh to log2 units.
    """
    scale = np.float32(max(np.float32(softmax_scale * LOG2_E), np.float32(MIN_NORMAL)))
    if softcap == 0:
        return float(scale), 0.0
    return float(np.float32(max(softcap * LOG2_E, MIN_NORMAL))), float(scale * np.float32(2 / softcap))


def fp8_factors(softmax_scale: float, softcap: float) -> tuple[float, tuple[float, float]]:
    """Return scale_log2, which e4m3 multiplies with the descales before it clamps, and (2 / cap, cap * log2(e))."""
    cap = (float(np.float32(2 / softcap)), softmax_factors(softmax_scale, softcap)[0]) if softcap else (0.0, 0.0)
    return float(np.float32(softmax_scale * LOG2_E)), cap


def shared_keys(request: Request, seqlen_k: int, tile_n: int) -> int:
    """Return the number of keys whose plan serves ``seqlen_k``: in a decoding loop the most that fill its key tiles.

    Where every sequence is one row tile and no left limit cuts key tiles off, nothing but the last key tile tells such
    numbers apart.
    """
    problem = request.problem
    is_one_tile = problem.seqlen_q * problem.group <= WARPGROUP_ROWS
    has_keys = seqlen_k >= problem.seqlen_q and seqlen_k % tile_n
    if not (is_one_tile and has_keys) or problem.window != (-1, -1) or any(request.descale_blocks):
        return seqlen_k
    return -(-seqlen_k // tile_n) * tile_n - 1


class Fixed(NamedTuple):
    """What all forward calls of a plan have in common: arguments before and behind the sizes; how tiles may be ordered.

    ``orders`` of packed sequences take one tile or two as a unit of work; ``order_numbers`` are what their kernel gets
    of each.
    """

    kernel: str
    before: tuple[Any, ...]
    behind: tuple[Any, ...]
    options: dict[str, Any]
    orders: tuple[PackedOrder, PackedOrder]
    order_pointers: tuple[Pointer, ...]
    order_numbers: tuple[tuple[int, ...], tuple[int, ...]]


def _views(config: Config, variant: Variant, problem: AttentionProblem) -> tuple[View, ...]:
    """How the forward kernel's TMA sees q, k, v and out."""
    dtype, is_packed = TORCH_NAMES[config.dtype], problem.is_varlen
    rows = {"group": problem.group, "pack": variant.pack, "is_packed": is_packed}
    # e4m3 stages O in halves at head_dim 256: as much as the buffer of Q holds.
    out_channels = min(config.head_dim, 128) if config.dtype == "e4m3" else config.head_dim
    return (
        View("q", dtype, 64, config.head_dim, **rows),
        View("k", dtype, config.tile_n, config.head_dim, is_packed=is_packed),
        View("v", dtype, config.tile_n, config.head_dim, is_packed=is_packed),
        View("out", TORCH_NAMES[config.out_dtype], 64, out_channels, **rows),
    )


def _fixed(request: Request, config: Config, variant: Variant, shape: Shape) -> Fixed:
    problem = request.problem
    is_split = config.num_splits > 1
    workspace = (
        Pointer("partial_lse" if is_split else "lse", "float32"),
        Pointer("partial" if is_split else "lse", "float32"),
        Pointer("sequences", "int32"),
        Pointer("stamps" if variant.stamps else "sequences", "int32"),
        Pointer("schedule", "int64"),
    )
    before: tuple[Any, ...] = (*_views(config, variant, problem), *workspace)
    options = {"num_warps": 4, "maxnreg": variant.entry_regs, "enable_fp_fusion": False}
    if config.dtype == "e4m3":
        kernel = "forward_fp8"
        scale, cap = fp8_factors(problem.softmax_scale, problem.softcap)
        for name, layout in zip("qkv", request.descales, strict=True):
            before += (Pointer(f"{name}_descale", "float32"), *(layout.strides if layout else (0, 0, 0)))
        before += (request.descale_blocks[0] or ONE_BLOCK, *cap)
        behind: tuple[Any, ...] = (scale, variant)
    else:
        kernel, behind = "forward_fp16", (*softmax_factors(problem.softmax_scale, problem.softcap), variant)
    one = PackedOrder(
        1, variant.tile_positions, config.tile_n, shape.tile_heads, 1 if shape.pack_gqa else shape.group, shape.left,
        shape.right, config.num_splits, config.head_dim,
    )  # fmt: skip
    pointers = (
        Pointer("cu_seqlens_q", "int32"), Pointer("cu_seqlens_k", "int32"), Pointer("sequences", "int32"),
        Pointer("schedule", "int64"), Pointer("out", TORCH_NAMES[config.out_dtype]), Pointer("lse", "float32"),
    )  # fmt: skip
    two = one._replace(tiles_per_unit=2)
    numbers = tuple(
        (
            problem.nheads, x.tile_heads, x.heads_per_kv, x.tiles_per_unit, x.positions, x.tile_n, x.left, x.right,
            x.num_splits, 4 * x.head_dim, problem.head_dim_v, L2_BYTES,
        )
        for x in (one, two)
    )  # fmt: skip
    return Fixed(kernel, before, behind, options, (one, two), pointers, (numbers[0], numbers[1]))


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about a launch but addresses and :class:`Sizes`.

    Parameters
    ----------
    request : Request
    config : Config
        Configuration of the kernel, with which the twin gives the same bits.
    variant : Variant
        What is compiled.
    shape : Shape
        What the tile schedule depends on.
    tables : dict of str to array
        Tensors that the host makes: ``schedule`` int64 (ctas, entries) and ``sequences`` int32 (batch, 4), each row
        q_start, seqlen_q, k_start, seqlen_k. Empty for packed sequences, whose tables the GPU makes.
    is_complete : bool
        Whether every row and every split has a tile; packed sequences are completed on the GPU, but for splits.
    num_sms : int
    fixed : Fixed
        What all its calls have in common.
    """

    request: Request
    config: Config
    variant: Variant
    shape: Shape
    tables: dict[str, np.ndarray]
    is_complete: bool
    num_sms: int
    fixed: Fixed

    @property
    def problem(self) -> AttentionProblem:
        return self.request.problem

    @property
    def is_packed(self) -> bool:
        return self.problem.is_varlen

    @property
    def num_splits(self) -> int:
        return self.config.num_splits

    def num_rows(self, sizes: Sizes) -> int:
        """Rows of all sequences and query heads."""
        return self.problem.nheads * sizes.rows_q * (1 if self.is_packed else self.problem.batch)

    def order(self, sizes: Sizes) -> tuple[PackedOrder, tuple[int, int]]:
        """How packed sequences are cut into tiles, and the CTAs and entries of their schedule."""
        batch, (longest_q, _) = self.problem.batch, sizes.longest
        one, two = self.fixed.orders
        units = one.units_at_most(batch, sizes.rows_q, longest_q)
        if one.pays_in_pairs(units, self.num_sms):
            return two, two.table_shape(two.units_at_most(batch, sizes.rows_q, longest_q), self.num_sms)
        return one, one.table_shape(units, self.num_sms)

    def calls(self, sizes: Sizes) -> tuple[Call, ...]:
        """Return the kernels that a launch starts, in order; none where no tile sees a key."""
        return self.launch(sizes)[0]

    def launch(self, sizes: Sizes) -> tuple[tuple[Call, ...], tuple[int, int]]:
        """Return the calls, and CTAs and entries of the tile schedule."""
        if not self.request.choices.warp_specialize:
            return (self._lockstep(sizes),), (0, 0)
        found = []
        if self.is_packed:
            order, table = self.order(sizes)
            if sizes.rows_k:
                found = [self._packed_order(sizes, order, table), self._forward(sizes, table)]
        else:
            table = self.tables["schedule"].shape
            if table[0]:
                found = [self._forward(sizes, table)]
        if self.num_splits > 1:
            found.append(self._combine(sizes))
        return tuple(found), table

    def _forward(self, sizes: Sizes, table: tuple[int, ...]) -> Call:
        shape, problem, fixed = self.shape, self.problem, self.fixed
        numbers = (
            table[1], problem.nheads, problem.group, sizes.rows_q,
            problem.seqlen_k if self.is_packed else sizes.rows_k, shape.left, shape.right, self.num_splits,
            self.num_rows(sizes),
        )  # fmt: skip
        return Call(fixed.kernel, (*fixed.before, *numbers, *fixed.behind), (table[0],), fixed.options)

    def _packed_order(self, sizes: Sizes, order: PackedOrder, table: tuple[int, int]) -> Call:
        """The kernel that makes the tile schedule of packed sequences."""
        problem = self.problem
        entries = min(256, 1 << (table[1] - 2).bit_length()) if table[1] > 2 else 2
        arguments = (
            *self.fixed.order_pointers, problem.batch, sizes.rows_q, sizes.rows_k, *sizes.longest, table[1],
            *self.fixed.order_numbers[order.tiles_per_unit - 1], problem.batch <= MAX_SORTED, entries, 32,
            1 << (problem.head_dim_v - 1).bit_length(),
        )  # fmt: skip
        return Call("packed_order", arguments, (table[0],), _ORDER_OPTIONS)

    def _combine(self, sizes: Sizes) -> Call:
        """The kernel that merges the partial results of the splits."""
        rows, problem = self.num_rows(sizes), self.problem
        arguments = (
            Pointer("partial", "float32"), Pointer("partial_lse", "float32"),
            Pointer("out", TORCH_NAMES[self.config.out_dtype]), Pointer("lse", "float32"), rows, sizes.rows_q,
            problem.nheads, self.num_splits, problem.head_dim_v, COMBINE_ROWS, self.config.head_dim,
        )  # fmt: skip
        return Call("combine", arguments, (-(-rows // COMBINE_ROWS),), {"num_warps": 4, "enable_fp_fusion": False})

    def _lockstep(self, sizes: Sizes) -> Call:
        """The kernel without warp specialisation: one CTA per row tile."""
        problem, tile = self.problem, LOCKSTEP_TILE
        dtype = TORCH_NAMES[problem.dtype]
        views = tuple(View(name, dtype, tile, 128) for name in ("q", "k", "v", "out"))
        scale, _ = softmax_factors(problem.softmax_scale, 0.0)
        arguments = (
            *views, Pointer("lse", "float32"), problem.nheads, problem.group, sizes.rows_q, sizes.rows_k, scale,
            problem.causal, sizes.rows_k % tile != 0, self.config.intra_wg_overlap,
        )  # fmt: skip
        grid = (-(-sizes.rows_q // tile), problem.batch * problem.nheads)
        return Call("forward_lockstep", arguments, grid, {"num_warps": 8, "maxnreg": 255, "enable_fp_fusion": False})


@lru_cache(maxsize=256)
def plan_of(request: Request, num_sms: int) -> Plan:
    """Plan a launch for a GPU with ``num_sms`` multiprocessors.

    Raises
    ------
    ValueError
        For a problem or a choice that no kernel is compiled for.
    """
    problem, choices = request.problem, request.choices
    config = choices.config(problem, num_sms)
    shape = shape_of(problem, pack_gqa=config.pack_gqa, num_splits=config.num_splits)
    variant = variant_of(config, problem, shape, block_descales=request.block_descales)
    if choices.stamps:
        if config.num_splits > 1:
            raise ValueError(f"stamps are taken where keys are not split, got num_splits {config.num_splits}")
        variant = replace(variant, stamps=choices.stamps)
    tables: dict[str, np.ndarray] = {}
    is_complete = True
    if not problem.is_varlen and choices.warp_specialize:
        table = static_schedule(shape, num_sms, tile_m=config.tile_m, tile_n=config.tile_n, head_dim=config.head_dim)
        lengths = [(s.q_start, s.seqlen_q, s.k_start, s.seqlen_k) for s in problem.sequences()]
        tables = {"schedule": table, "sequences": np.array(lengths, np.int32)}
        is_complete = int((table >= 0).sum()) == count_items(shape, config.tile_m)
    elif config.num_splits > 1:
        is_complete = False
    return Plan(request, config, variant, shape, tables, is_complete, num_sms, _fixed(request, config, variant, shape))


def stamps_shape(plan: Plan, ctas: int) -> tuple[int, int, int, int]:
    """Shape of the timeline that an instrumented kernel keeps, int32."""
    return ctas, plan.variant.consumers + 1, plan.variant.stamps, COLUMNS


def sizes_of(problem: AttentionProblem) -> Sizes:
    """Sizes of a launch of a problem whose lengths are known."""
    if problem.seqlens_q is None or problem.seqlens_k is None:
        return Sizes(problem.seqlen_q, problem.seqlen_k)
    return Sizes(sum(problem.seqlens_q), sum(problem.seqlens_k), (problem.seqlen_q, problem.seqlen_k))
