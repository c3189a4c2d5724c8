"""Host side of the Gluon forward: checks, plan, launch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from fa3_kernels.gluon.combine import combine
from fa3_kernels.gluon.descriptors import DTYPES, key_view, query_view
from fa3_kernels.gluon.forward_fp8 import forward_fp8
from fa3_kernels.gluon.forward_fp16 import forward_fp16
from fa3_kernels.gluon.forward_lockstep import forward_lockstep
from fa3_kernels.gluon.launch_descale import DescaleBlocks, Descales, descales_of, differ_by_tile
from fa3_kernels.plan.choose import check_lockstep, config_of, shape_of
from fa3_kernels.plan.config import Config, kernel_head_dim
from fa3_kernels.plan.stamps import COLUMNS
from fa3_kernels.plan.tile_order import Shape, count_items, static_schedule
from fa3_kernels.plan.variant import Variant, variant_of
from fa3_reference.problem import AttentionProblem

LOG2_E = 1.4426950408889634
MIN_NORMAL = 2.0**-126
COMBINE_ROWS = 4
_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3"}
_OUT_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def softmax_factors(softmax_scale: float, softcap: float) -> tuple[float, float]:
    """Return the fp32 factors (scale_log2, cap_scale) as the kernel gets them.

    Without a cap scale_log2 is softmax_scale * log2(e), at least the smallest normal number; with one cap_scale takes
    raw scores to the argument of the cap's ex2 and scale_log2 takes tanh to log2 units.
    """
    scale = np.float32(max(np.float32(softmax_scale * LOG2_E), np.float32(MIN_NORMAL)))
    if softcap == 0:
        return float(scale), 0.0
    return float(np.float32(max(softcap * LOG2_E, MIN_NORMAL))), float(scale * np.float32(2 / softcap))


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about a launch that depends on shapes alone."""

    config: Config
    variant: Variant
    shape: Shape
    schedule: torch.Tensor  # int64 (ctas, tiles + 1)
    sequences: torch.Tensor  # int32 (batch, 4): q_start, seqlen_q, k_start, seqlen_k
    is_complete: bool  # every row and every split has a tile
    factors: tuple[float, float]


@lru_cache(maxsize=64)
def _plan(
    problem: AttentionProblem,
    num_splits: int,
    pack_gqa: bool | None,
    pingpong: bool,
    intra_wg_overlap: bool,
    device: torch.device,
    block_descales: bool = False,
    **changes,
) -> Plan:
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    config = config_of(
        problem,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        pingpong=pingpong,
        intra_wg_overlap=intra_wg_overlap,
        num_sms=num_sms,
        **changes,
    )
    shape = shape_of(problem, pack_gqa=config.pack_gqa, num_splits=config.num_splits)
    table = static_schedule(shape, num_sms, tile_m=config.tile_m, tile_n=config.tile_n, head_dim=config.head_dim)
    lengths = [(s.q_start, s.seqlen_q, s.k_start, s.seqlen_k) for s in problem.sequences()]
    return Plan(
        config,
        variant_of(config, problem, shape, block_descales=block_descales),
        shape,
        torch.from_numpy(table).to(device),
        torch.tensor(lengths, dtype=torch.int32).to(device),
        int((table >= 0).sum()) == count_items(shape, config.tile_m),
        softmax_factors(problem.softmax_scale, problem.softcap),
    )


def _lengths(cu_seqlens: torch.Tensor, name: str, total: int) -> tuple[int, ...]:
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype != torch.int32 or cu_seqlens.numel() < 2:
        raise ValueError(f"{name} must be int32 (batch + 1,), got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}")
    starts = cu_seqlens.tolist()
    lengths = tuple(b - a for a, b in pairwise(starts))
    if starts[0] != 0 or starts[-1] != total or min(lengths) < 0:
        raise ValueError(f"{name} must rise from 0 to the number of rows, {total}, got {starts}")
    return lengths


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_varlen: bool) -> None:
    tensors = (q, k, v)
    rank = 3 if is_varlen else 4
    if any(x.ndim != rank for x in tensors):
        axes = "(total, nheads, head_dim) with cu_seqlens" if is_varlen else "(batch, seqlen, nheads, head_dim)"
        raise ValueError(f"q, k and v must be {axes}, got {', '.join(str(tuple(x.shape)) for x in tensors)}")
    is_one_dtype = q.dtype in DTYPES and k.dtype == v.dtype == q.dtype
    filled = [x for x in tensors if x.numel()]  # the strides of an empty tensor mean nothing
    is_aligned = all(x.data_ptr() % 16 == 0 and not any(n * x.itemsize % 16 for n in x.stride()[:-1]) for x in filled)
    rules = (
        (all(x.is_cuda and x.device == q.device for x in tensors), "q, k and v must be on one GPU"),
        (is_one_dtype, f"q, k and v must all be fp16, all bf16 or all e4m3, got {q.dtype}, {k.dtype} and {v.dtype}"),
        (
            k.shape[:-1] == v.shape[:-1],
            f"k and v must have one shape but for head_dim, got {tuple(k.shape)} and {tuple(v.shape)}",
        ),
        (
            k.shape[-1] == q.shape[-1] and (is_varlen or k.shape[0] == q.shape[0]),
            f"k must fit q {tuple(q.shape)}, got {tuple(k.shape)}",
        ),
        (all(x.stride(-1) == 1 for x in filled), "the last dimension of q, k and v must be contiguous"),
        (is_aligned, "addresses and outer strides must be multiples of 16 bytes (TMA)"),
    )
    for ok, rule in rules:
        if not ok:
            raise ValueError(rule)


def _check_size(problem: AttentionProblem, num_splits: int) -> None:
    """Raise ValueError for outputs that 32-bit offsets do not reach."""
    head_dim = kernel_head_dim(max(problem.head_dim, problem.head_dim_v))
    if math.prod(problem.lse_shape) * max(num_splits, head_dim) >= 1 << 31:
        raise ValueError(f"at most 2^31 output elements and partial rows, got {problem.out_shape}")


def _problem(q, k, v, cu_seqlens_q, cu_seqlens_k, **semantics) -> AttentionProblem:
    """The launch as a problem, which checks sizes and semantics."""
    is_varlen = cu_seqlens_q is not None
    if is_varlen != (cu_seqlens_k is not None):
        raise ValueError("cu_seqlens_q and cu_seqlens_k must be given together")
    _check(q, k, v, is_varlen)
    semantics |= {"head_dim_v": v.shape[-1], "dtype": _NAMES[q.dtype]}
    nheads, head_dim = q.shape[-2:]
    if is_varlen:
        return AttentionProblem.varlen(
            _lengths(cu_seqlens_q, "cu_seqlens_q", q.shape[0]),
            _lengths(cu_seqlens_k, "cu_seqlens_k", k.shape[0]),
            nheads=nheads,
            nheads_kv=k.shape[-2],
            head_dim=head_dim,
            **semantics,
        )
    return AttentionProblem(q.shape[0], nheads, k.shape[2], q.shape[1], k.shape[1], head_dim, **semantics)


def _changes(problem: AttentionProblem, promotion_interval: int | None, out_dtype: torch.dtype | None) -> dict:
    """What the caller changes in the default configuration; only e4m3 has a choice."""
    given = {"promotion_interval": promotion_interval, "out_dtype": out_dtype}
    given = {name: value for name, value in given.items() if value is not None}
    if given and problem.dtype != "e4m3":
        raise ValueError(f"{' and '.join(given)} is for e4m3 operands, got dtype {problem.dtype}")
    if out_dtype is not None:
        names = {dtype: name for name, dtype in _OUT_DTYPES.items()}
        if out_dtype not in names:
            raise ValueError(f"out_dtype must be torch.float16 or torch.bfloat16, got {out_dtype}")
        given["out_dtype"] = names[out_dtype]
    return given


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    softmax_scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    pingpong: bool = True,
    intra_wg_overlap: bool = True,
    warp_specialize: bool = True,
    tile: tuple[int, int] | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    descale_blocks: DescaleBlocks = (0, 0, 0),
    promotion_interval: int | None = None,
    out_dtype: torch.dtype | None = None,
    stamps: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the forward kernel.

    Parameters
    ----------
    q : float16, bfloat16 or float8_e4m3fn (batch, seqlen_q, nheads, head_dim), on a Hopper GPU
        head_dim a multiple of 16 bytes, at most 256; TMA pads it with zeros to 64, 128 or 256. Last dimension
        contiguous, other strides multiples of 16 bytes. With cu_seqlens (total_q, nheads, head_dim).
    k : same dtype (batch, seqlen_k, nheads_kv, head_dim) or (total_k, nheads_kv, head_dim)
        Likewise; seqlen_k may be 0.
    v : like k, with its own head_dim
    causal : bool
        Bottom-right aligned.
    window : (int, int)
        Keys visible to the left and right of the bottom-right aligned diagonal, both inclusive; -1 is unlimited.
    softcap : float
        c > 0 replaces scores x by c * tanh(x / c).
    softmax_scale : float, optional
        1 / sqrt(head_dim) by default.
    cu_seqlens_q, cu_seqlens_k : int32 (batch + 1,), optional
        Starts of packed sequences, from 0 to the number of rows; sequences may be empty. The schedule is made on the
        host: tensors on the GPU are copied there once per call, which waits for the GPU.
    num_splits : int
        Parts into which the key blocks of every tile are cut, merged by a second kernel in ascending order; 0 chooses
        from the shape. Bits depend on it.
    pack_gqa : bool, optional
        Fold the query heads of a kv head into the rows of a tile; by default where that makes fewer tiles.
    pingpong, intra_wg_overlap : bool
        Schedule only: no bit depends on them.
    warp_specialize : bool
        False runs the kernel of the ablation, for few problems: :func:`fa3_kernels.plan.choose.check_lockstep`.
    tile : (int, int), optional
        Query rows and keys of a tile, for experiments: :func:`fa3_kernels.plan.choose.check_tile`. By default what ships.
    q_descale, k_descale, v_descale : float32 (batch, heads) or (batch, heads, blocks), optional
        e4m3 only: multiply the stored operand to give its value; finite and > 0, which is not checked (it would wait for
        the GPU). Heads are those of the operand, or kv heads for q too.
    descale_blocks : (int, int, int)
        Rows per block of q, k and v, counted from the start of each sequence; 0 is one block. Blocks of k and v are
        whole key tiles (of 128 unless ``tile`` says otherwise).
    promotion_interval : int, optional
        e4m3 only: keys the tensor core sums before O takes the sum in fp32; 128, or the keys of a smaller tile, by
        default, 0 chains through the 13-bit accumulator.
    out_dtype : bfloat16 or float16, optional
        e4m3 only: bfloat16 by default.
    stamps : int32 (ctas, consumer warpgroups + 1, steps, 8), zeros, optional
        Filled by an instrumented kernel, see :mod:`fa3_kernels.plan.stamps`; ``ctas`` at least that of the launch.

    Returns
    -------
    out : like q (e4m3: out_dtype), with the head_dim of v; contiguous
    lse : float32 (batch, nheads, seqlen_q), or (nheads, total_q)
        Bits of :func:`fa3_kernels.twin.forward.forward` for the configuration that
        :func:`fa3_kernels.plan.choose.config_of` returns; it states what NaN, Inf and rows without a key become.

    Raises
    ------
    ValueError
        For shapes, dtypes, strides or options the kernel does not take.
    """
    semantics = {"causal": causal, "window": tuple(window), "softcap": softcap, "softmax_scale": softmax_scale or 0.0}
    problem = _problem(q, k, v, cu_seqlens_q, cu_seqlens_k, **semantics)
    changes = _changes(problem, promotion_interval, out_dtype)
    if tile:
        changes["tile"] = tuple(tile)
    if not warp_specialize:
        check_lockstep(problem, num_splits, pack_gqa, changes.get("tile"))
        if stamps is not None:
            raise ValueError("stamps are taken by warp-specialised kernels alone")
        if q_descale is not None or k_descale is not None or v_descale is not None:
            raise ValueError(f"descales are for e4m3 operands, got dtype {problem.dtype}")
        _check_size(problem, 1)
        return launch_lockstep(problem, q, k, v, intra_wg_overlap=intra_wg_overlap)
    values = (q_descale, k_descale, v_descale)
    blocks: Any = tuple(descale_blocks)
    by_tile = differ_by_tile(values, blocks)
    plan = _plan(problem, num_splits, pack_gqa, pingpong, intra_wg_overlap, q.device, by_tile, **changes)
    descales = descales_of(problem, values, blocks, plan.config.tile_n, q.device)
    _check_size(problem, plan.config.num_splits)
    out = torch.empty(problem.out_shape, dtype=_OUT_DTYPES[plan.config.out_dtype], device=q.device)
    lse = torch.empty(problem.lse_shape, dtype=torch.float32, device=q.device)
    with torch.cuda.device(q.device):
        if plan.config.num_splits > 1:
            if stamps is not None:
                raise ValueError(f"stamps are taken where keys are not split, got num_splits {plan.config.num_splits}")
            _launch_splits(plan, problem, q, k, v, out, lse, descales)
        else:
            if not plan.is_complete:
                out.zero_()
                lse.fill_(-math.inf)
            _launch(
                plan if stamps is None else _instrumented(plan, stamps),
                problem,
                q,
                k,
                v,
                out,
                lse,
                lse,
                descales,
                stamps,
            )
    return out, lse


def _instrumented(plan: Plan, stamps: torch.Tensor) -> Plan:
    """The plan of a kernel that keeps a timeline in ``stamps``."""
    ctas, actors = plan.schedule.shape[0], plan.variant.consumers + 1
    fits = stamps.ndim == 4 and stamps.shape[0] >= ctas and stamps.shape[1] == actors and stamps.shape[3] == COLUMNS
    if not fits or stamps.dtype != torch.int32 or not stamps.is_contiguous():
        raise ValueError(
            f"stamps must be contiguous int32 ({ctas} or more, {actors}, steps, {COLUMNS}), "
            f"got {stamps.dtype} {tuple(stamps.shape)}"
        )
    return replace(plan, variant=replace(plan.variant, stamps=stamps.shape[2]))


def launch_lockstep(
    problem: AttentionProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, intra_wg_overlap: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Start the kernel without warp specialisation: one CTA per row tile."""
    tile_m, tile_n, head_dim = 128, 128, 128
    out = torch.empty(problem.out_shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(problem.lse_shape, dtype=torch.float32, device=q.device)
    q_view, out_view = (key_view(x, tile_m, head_dim, is_varlen=False) for x in (q, out))
    k_view, v_view = (key_view(x, tile_n, head_dim, is_varlen=False) for x in (k, v))
    scale, _ = softmax_factors(problem.softmax_scale, 0.0)
    with torch.cuda.device(q.device):
        forward_lockstep[(-(-problem.seqlen_q // tile_m), problem.batch * problem.nheads)](
            q_view, k_view, v_view, out_view, lse, problem.nheads, problem.group, problem.seqlen_q, problem.seqlen_k,
            scale, problem.causal, problem.seqlen_k % tile_n != 0, intra_wg_overlap,
            num_warps=8, maxnreg=255, enable_fp_fusion=False,
        )  # fmt: skip
    return out, lse


def _launch(plan: Plan, problem: AttentionProblem, q, k, v, out, lse, partial, descales: Descales, stamps=None) -> None:
    """Start the main kernel; ``lse`` and ``partial`` are workspaces when the launch is split."""
    if not plan.schedule.shape[0]:
        return
    config, shape, variant = plan.config, plan.shape, plan.variant
    rows = {"group": problem.group, "pack": variant.pack, "is_varlen": variant.is_varlen}
    keys = {"block_rows": config.tile_n, "head_dim": config.head_dim, "is_varlen": variant.is_varlen}
    is_fp8 = problem.dtype == "e4m3"
    out_channels = min(config.head_dim, 128) if is_fp8 else config.head_dim  # e4m3: what the Q buffer of 256 holds
    views = (
        query_view(q, config.head_dim, **rows), key_view(k, **keys), key_view(v, **keys),
        query_view(out, out_channels, **rows),
    )  # fmt: skip
    workspace = (lse, partial, plan.sequences, plan.sequences if stamps is None else stamps, plan.schedule)
    sizes = (
        plan.schedule.shape[1], problem.nheads, problem.group, problem.out_shape[-3], problem.seqlen_k, shape.left,
        shape.right, config.num_splits, math.prod(problem.lse_shape),
    )  # fmt: skip
    options = {"num_warps": 4, "maxnreg": variant.entry_regs, "enable_fp_fusion": False}
    if is_fp8:
        scale = float(np.float32(problem.softmax_scale * LOG2_E))  # the kernel multiplies by the descales, then clamps
        cap = (float(np.float32(2 / problem.softcap)), plan.factors[0]) if problem.softcap else (0.0, 0.0)
        forward_fp8[(plan.schedule.shape[0],)](
            *views, *workspace, *descales.arguments, *cap, *sizes, scale, variant, **options
        )
    else:
        forward_fp16[(plan.schedule.shape[0],)](*views, *workspace, *sizes, *plan.factors, variant, **options)


def _launch_splits(plan: Plan, problem: AttentionProblem, q, k, v, out, lse, descales: Descales) -> None:
    """Partials to a workspace, then the combine. Splits without a key block keep the workspace's (0, -inf)."""
    num_rows, splits = math.prod(problem.lse_shape), plan.config.num_splits
    partial = torch.empty((splits, num_rows, plan.config.head_dim), dtype=torch.float32, device=q.device)
    partial_lse = torch.empty((splits, num_rows), dtype=torch.float32, device=q.device)
    if not plan.is_complete:
        partial.zero_()
        partial_lse.fill_(-math.inf)
    _launch(plan, problem, q, k, v, out, partial_lse, partial, descales)
    combine[(-(-num_rows // COMBINE_ROWS),)](
        partial, partial_lse, out, lse, num_rows, problem.out_shape[-3], problem.nheads, splits, problem.head_dim_v,
        COMBINE_ROWS, plan.config.head_dim, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


__all__ = ["Plan", "config_of", "forward", "softmax_factors"]
