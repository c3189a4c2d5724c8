"""A launch as values: a checked request becomes a plan, and a plan the calls of kernels that the GPU gets.

:mod:`fa3_kernels.gluon.launch` plans its launches here and runs them; the audit compiles the same calls without a GPU.
Requests are made in :mod:`fa3_kernels.plan.request`, the backward is planned in :mod:`fa3_kernels.plan.backward`.

One plan holds for all requests that differ in nothing that it depends on: in a decoding loop one plan serves all
numbers of keys that fill as many key tiles. What differs between launches, sizes and tensors, stands in its calls by
name; who runs a call puts in numbers and addresses.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from fa3_kernels.plan.call import Call, LaunchNumber, Pointer, View, box_channels
from fa3_kernels.plan.choose import over_cache
from fa3_kernels.plan.config import WARPGROUP_ROWS, Config, require
from fa3_kernels.plan.packed_order import CHUNK, MAX_SORTED, PackedOrder, order_of
from fa3_kernels.plan.request import ONE_BLOCK, Request
from fa3_kernels.plan.stamps import COLUMNS
from fa3_kernels.plan.tile_order import L2_BYTES, Shape, count_items, shape_of, static_schedule
from fa3_kernels.plan.tiles import power_of_two
from fa3_kernels.plan.variant import Variant, staged_channels, variant_of
from fa3_reference.problem import AttentionProblem

LOG2_E = 1.4426950408889634
MIN_NORMAL = 2.0**-126
COMBINE_ROWS = 4
COMBINED_AT_ONCE = (8, 16)  # parts that are copied together; 16 at a time make two parts half a microsecond slower
SCHEDULE_KINDS = 1024  # int32 by which the sizes of schedules for unlike launches differ at most
LOCKSTEP_TILE = 128  # rows and keys of the kernel of the ablation
TORCH_NAMES = {"fp16": "float16", "bf16": "bfloat16", "e4m3": "float8_e4m3fn"}


def softmax_factors(softmax_scale: float, softcap: float) -> tuple[float, float]:
    """Return the fp32 factors (scale_log2, cap_scale) as the kernel gets them.

    Without a cap scale_log2 is softmax_scale * log2(e), at least the smallest normal number, and cap_scale is 0. With a
    cap cap_scale takes raw scores to the argument of the cap's ex2, and scale_log2 takes tanh to log2 units.
    """
    scale = np.float32(max(np.float32(softmax_scale * LOG2_E), np.float32(MIN_NORMAL)))
    if softcap == 0:
        return float(scale), 0.0
    return float(np.float32(max(softcap * LOG2_E, MIN_NORMAL))), float(scale * np.float32(2 / softcap))


def fp8_factors(softmax_scale: float, softcap: float) -> tuple[float, tuple[float, float]]:
    """Return the factors of the e4m3 kernel: scale_log2, and (2 / cap, cap * log2(e)), or zeros without a cap.

    The kernel multiplies scale_log2 with the descales before it clamps the product.
    """
    cap = (float(np.float32(2 / softcap)), softmax_factors(softmax_scale, softcap)[0]) if softcap else (0.0, 0.0)
    return float(np.float32(softmax_scale * LOG2_E)), cap


def shares_plans(request: Request) -> bool:
    """Tell whether all numbers of keys that fill equally many key tiles share a plan, as in a decoding loop.

    That holds where every sequence is one row tile and no window cuts off key tiles: then such numbers differ only in
    their last key tile.
    """
    problem = request.problem
    is_one_tile = problem.seqlen_q * problem.group <= WARPGROUP_ROWS
    return is_one_tile and not problem.is_windowed and not any(request.descale_blocks)


def shared_keys(request: Request, seqlen_k: int, tile_n: int) -> int:
    """Return the number of keys whose plan serves ``seqlen_k``, which is itself if plans are not shared.

    Otherwise it is the largest number that fills as many key tiles without filling the last one.
    """
    has_keys = seqlen_k >= request.problem.seqlen_q and seqlen_k % tile_n
    return -(-seqlen_k // tile_n) * tile_n - 1 if has_keys and shares_plans(request) else seqlen_k


def _views(config: Config, variant: Variant, problem: AttentionProblem) -> tuple[View, ...]:
    """Return how the forward kernel's TMA sees q, k, v and out."""
    dtype = TORCH_NAMES[config.dtype]
    is_packed = problem.is_varlen
    rows = {"group": problem.group, "pack": variant.pack, "is_packed": is_packed}
    keys = config.tile_n // max(1, variant.page_boxes)
    of_qk, of_v = (box_channels(n, config.bits) for n in (config.head_dim, config.head_dim_v))
    of_out = min(of_v, staged_channels(config))
    return (
        View("q", dtype, 64, of_qk, **rows),
        View("k", dtype, keys, of_qk // variant.qk_panels, is_packed=is_packed),
        View("v", dtype, keys, of_v // variant.v_panels, is_packed=is_packed),
        View("out", TORCH_NAMES[config.out_dtype], 64, of_out, **rows),
    )


def _forward(request: Request, config: Config, variant: Variant, shape: Shape) -> Call:
    """Return the call of the forward kernel."""
    problem = request.problem
    dtype = TORCH_NAMES[config.dtype]
    is_split = config.num_splits > 1
    stored = Pointer("out", TORCH_NAMES[config.out_dtype]) if variant.stored_channels else Pointer("lse", "float32")
    arguments: tuple[Any, ...] = (
        *_views(config, variant, problem),
        Pointer("partial_lse" if is_split else "lse", "float32"),
        Pointer("partial", "float32") if is_split else stored,
        Pointer("sequences", "int32"),
        Pointer("stamps" if variant.stamps else "sequences", "int32"),
        Pointer("schedule", "int64"),
    )
    factors: tuple[float, ...] = softmax_factors(problem.softmax_scale, problem.softcap)
    if config.dtype == "e4m3":
        scale, cap = fp8_factors(problem.softmax_scale, problem.softcap)
        for name, layout in zip("qkv", request.descales, strict=True):
            arguments += (Pointer(f"{name}_descale", "float32"), *(layout.strides if layout else (0, 0, 0)))
        arguments += (request.descale_blocks[0] or ONE_BLOCK, *cap)
        factors = (scale,)
    keys = problem.seqlen_k if problem.is_varlen else LaunchNumber("rows_k")
    numbers = (
        LaunchNumber("width"),
        problem.nheads,
        problem.group,
        LaunchNumber("rows_q"),
        keys,
        shape.left,
        shape.right,
        config.num_splits,
        LaunchNumber("num_rows"),
    )
    kernel = "forward_fp8" if config.dtype == "e4m3" else "forward_fp16"
    options = {"num_warps": 4, "maxnreg": variant.entry_regs, "enable_fp_fusion": False}
    arguments += (*numbers, *factors, variant)
    pages = request.pages
    of_pages: tuple[Any, ...] = (None,) * 5
    if pages:
        of_pages = (Pointer("page_table", "int32"), LaunchNumber("table_row"), *pages[:2], variant.page_boxes)
        options["launch_pdl"] = True
    gathered = (
        (Pointer("k_cache", dtype), *pages.of_k, Pointer("v_cache", dtype), *pages.of_v)
        if pages and variant.gathered_v
        else (None,) * 6
    )
    arguments += (*of_pages, Pointer("sinks", "float32") if request.has_sinks else None, *gathered, shape.chunk or None)
    while arguments[-1] is None:  # as the kernels have it by default
        arguments = arguments[:-1]
    return Call(kernel, arguments, (LaunchNumber("ctas"),), options)


def _packed_order(problem: AttentionProblem, config: Config, order: PackedOrder, *, is_paged: bool) -> Call:
    """Return the call that makes the tile schedule of packed sequences, or of queries over a cache."""
    arguments = (
        Pointer("cu_seqlens_q", "int32"),
        Pointer("cu_seqlens_k", "int32"),
        Pointer("sequences", "int32"),
        Pointer("schedule", "int64"),
        Pointer("out", TORCH_NAMES[config.out_dtype]),
        Pointer("lse", "float32"),
        problem.batch,
        LaunchNumber("rows_q"),
        LaunchNumber("rows_k"),
        LaunchNumber("longest_q"),
        LaunchNumber("longest_k"),
        LaunchNumber("width"),
        problem.nheads,
        order.tile_heads,
        order.heads_per_kv,
        LaunchNumber("tiles_per_unit"),
        order.positions,
        order.tile_n,
        order.left,
        order.right,
        order.num_splits,
        4 * order.head_dim,
        problem.head_dim_v,
        L2_BYTES,
        problem.batch <= MAX_SORTED,
        LaunchNumber("entries"),
        CHUNK,
        power_of_two(problem.head_dim_v),
    )
    if order.keeps_empty or order.chunk:
        arguments += (Pointer("first_keys", "int32") if is_paged else None, order.keeps_empty, is_paged)
    arguments += (order.chunk,) if order.chunk else ()
    return Call("packed_order", arguments, (LaunchNumber("ctas"),), {"num_warps": 4})


def combined_at_once(num_splits: int) -> int:
    """Return how many parts the merging kernel copies together."""
    return COMBINED_AT_ONCE[num_splits > COMBINED_AT_ONCE[0]]


def _combine(problem: AttentionProblem, config: Config, *, is_paged: bool) -> Call:
    """Return the call that merges the partial results of the splits."""
    options = {"num_warps": 4, "enable_fp_fusion": False}
    arguments = (
        Pointer("partial", "float32"),
        Pointer("partial_lse", "float32"),
        Pointer("out", TORCH_NAMES[config.out_dtype]),
        Pointer("lse", "float32"),
        LaunchNumber("num_rows"),
        LaunchNumber("rows_q"),
        problem.nheads,
        config.num_splits,
        problem.head_dim_v,
        COMBINE_ROWS,
        power_of_two(config.head_dim_v),  # channels of a row of partial results
        combined_at_once(config.num_splits),
    )
    if is_paged:
        arguments += (True,)
        options["launch_pdl"] = True
    return Call("combine", arguments, (LaunchNumber("row_groups"),), options)


def _lockstep(problem: AttentionProblem, config: Config) -> Call:
    """Return the call of the kernel without warp specialisation, which has one CTA per row tile."""
    tile = LOCKSTEP_TILE
    dtype = TORCH_NAMES[problem.dtype]
    views = tuple(View(name, dtype, tile, 128) for name in ("q", "k", "v", "out"))
    scale, _ = softmax_factors(problem.softmax_scale, 0.0)
    arguments = (
        *views,
        Pointer("lse", "float32"),
        problem.nheads,
        problem.group,
        problem.seqlen_q,
        LaunchNumber("rows_k"),
        scale,
        problem.causal,
        problem.seqlen_k % tile != 0,
        config.intra_wg_overlap,
    )
    grid = (-(-problem.seqlen_q // tile), problem.batch * problem.nheads)
    return Call("forward_lockstep", arguments, grid, {"num_warps": 8, "maxnreg": 255, "enable_fp_fusion": False})


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about a launch but its addresses and its numbers of rows, which :meth:`launch` takes.

    Parameters
    ----------
    request : Request
    problem : AttentionProblem
        The request's.
    config : Config
        Configuration of the kernel, with which the twin gives the same bits.
    variant : Variant
        What is compiled.
    tables : dict of str to array
        Tensors that the host makes: ``schedule`` int64 (ctas, entries) and ``sequences`` int32 (batch, 4), each row
        q_start, seqlen_q, k_start, seqlen_k. Empty for packed sequences, whose tables the GPU makes.
    is_complete : bool
        Whether every row and every split has a tile, so that the kernels write all outputs. The rows of packed
        sequences without a tile are written on the GPU; only their splits may be left out.
    num_sms : int
    kernels : tuple of Call
        What a launch starts, in order. Empty where no tile sees a key.
    numbers : dict of str to int
        The values of :class:`LaunchNumber` that all launches of the plan share; empty for packed sequences.
    in_ones : PackedOrder, optional
        How packed sequences are cut into units of work of one tile. None for others.
    """

    request: Request
    problem: AttentionProblem
    config: Config
    variant: Variant
    tables: dict[str, np.ndarray]
    is_complete: bool
    num_sms: int
    kernels: tuple[Call, ...]
    numbers: dict[str, int]
    in_ones: PackedOrder | None

    def launch(self, rows_q: int, rows_k: int, longest: tuple[int, int]) -> tuple[tuple[Call, ...], dict[str, int]]:
        """Return the calls of a launch, in order, and the numbers in them that are its own.

        Parameters
        ----------
        rows_q, rows_k : int
            Query rows of a sequence, or of all packed ones, and keys likewise. Over a cache ``rows_k`` is how many
            pages a sequence may have.
        longest : (int, int)
            Longest queries and keys of packed sequences; not read for others.

        Among the numbers of a launch over a cache is ``schedule_size``: how many int32 a schedule has that is made in
        front of it. It differs where the launches do, so that none is read by a launch that it is not for.
        """
        if not self.in_ones:
            return self.kernels, {"rows_k": rows_k}
        longest_q, longest_k = longest
        order, (ctas, width) = self.order(rows_q, longest_q)
        num_rows = self.problem.nheads * rows_q
        numbers = {
            "rows_q": rows_q,
            "rows_k": rows_k,
            "longest_q": longest_q,
            "longest_k": longest_k,
            "num_rows": num_rows,
            "row_groups": -(-num_rows // COMBINE_ROWS),
            "ctas": ctas,
            "width": width,
            "tiles_per_unit": order.tiles_per_unit,
            "entries": min(256, 1 << (width - 2).bit_length()) if width > 2 else 2,
            "table_row": rows_k,  # entries of a row of a page table, where no others lie between
        }
        if self.request.pages:
            of_launch = zlib.crc32(repr((order, longest_k)).encode()) % SCHEDULE_KINDS
            numbers["schedule_size"] = 4 * self.problem.batch + 2 * ctas * width + of_launch
        return self.kernels if rows_k else self.kernels[2:], numbers  # without a key only parts are merged

    def order(self, rows_q: int, longest_q: int) -> tuple[PackedOrder, tuple[int, int]]:
        """Return how packed sequences are cut into tiles, and the CTAs and entries of their schedule."""
        assert self.in_ones is not None
        return self.in_ones.of_launch(self.problem.batch, rows_q, longest_q, self.num_sms)

    def calls(self, rows_q: int, rows_k: int, longest: tuple[int, int] = (0, 0)) -> tuple[Call, ...]:
        """Return the calls of a launch with its own numbers in them, see :meth:`launch`."""
        kernels, numbers = self.launch(rows_q, rows_k, longest)
        return tuple(call.of(self.numbers | numbers) for call in kernels)


@lru_cache(maxsize=256)
def plan_of(request: Request, num_sms: int) -> Plan:
    """Plan a launch for a GPU with ``num_sms`` multiprocessors.

    Raises
    ------
    ValueError
        For a problem or a choice that no kernel is compiled for.
    """
    problem = request.problem
    choices = request.choices
    config = choices.config(problem, num_sms)
    if request.pages and not choices.tile:
        config = over_cache(problem, config)
    shape = shape_of(problem, pack_gqa=config.pack_gqa, num_splits=config.num_splits)
    variant = variant_of(
        config,
        problem,
        shape,
        block_descales=request.block_descales,
        pages=request.pages,
        has_sinks=request.has_sinks,
    )
    if choices.stamps:
        splits = config.num_splits
        require(splits == 1, f"stamps are taken where keys are not split, got num_splits {splits}")
        variant = replace(variant, stamps=choices.stamps)
    if not choices.warp_specialize:
        return Plan(request, problem, config, variant, {}, True, num_sms, (_lockstep(problem, config),), {}, None)
    kernels = (_forward(request, config, variant, shape),)
    tables: dict[str, np.ndarray] = {}
    numbers: dict[str, int] = {}
    is_complete = config.num_splits == 1 or variant.keeps_empty
    one = None
    if problem.is_varlen:
        one = order_of(shape, config, keeps_empty=variant.keeps_empty)
        kernels = (_packed_order(problem, config, one, is_paged=request.pages is not None), *kernels)
    else:
        table = static_schedule(shape, num_sms, tile_m=config.tile_m, tile_n=config.tile_n, head_dim=config.head_dim)
        lengths = [(s.q_start, s.seqlen_q, s.k_start, s.seqlen_k) for s in problem.sequences()]
        tables = {"schedule": table, "sequences": np.array(lengths, np.int32)}
        num_rows = problem.nheads * problem.batch * problem.seqlen_q
        numbers = {"rows_q": problem.seqlen_q, "num_rows": num_rows, "row_groups": -(-num_rows // COMBINE_ROWS)}
        numbers["ctas"], numbers["width"] = table.shape
        is_complete = int((table >= 0).sum()) == count_items(shape, config.tile_m)
        kernels = kernels if len(table) else ()
    if config.num_splits > 1:
        kernels += (_combine(problem, config, is_paged=request.pages is not None),)
    return Plan(request, problem, config, variant, tables, is_complete, num_sms, kernels, numbers, one)


def stamps_shape(plan: Plan, ctas: int) -> tuple[int, int, int, int]:
    """Return the shape of the timeline that an instrumented kernel keeps, int32."""
    return ctas, plan.variant.consumers + 1, plan.variant.stamps, COLUMNS
