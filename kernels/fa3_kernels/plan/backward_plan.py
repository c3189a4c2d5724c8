"""A launch of the backward as values: what is compiled, the schedule of key tiles, and the calls of its kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from fa3_kernels.plan.backward import BackwardConfig, backward_config
from fa3_kernels.plan.barriers import slot_threads
from fa3_kernels.plan.config import WARPGROUP_ROWS
from fa3_kernels.plan.key_tiles import Walk, key_tile_schedule, walk_of
from fa3_kernels.plan.plan import TORCH_NAMES, Call, LaunchNumber, Pointer, softmax_factors
from fa3_kernels.plan.tiles import mask_of
from fa3_kernels.plan.views import Block, View, boxes
from fa3_reference.problem import AttentionProblem


@dataclass(frozen=True, slots=True)
class BackwardVariant:
    """Compile-time switches of the backward kernel. Tile shapes are those of the descriptors' blocks.

    Parameters
    ----------
    splits_channels : bool
        Whether the two warpgroups share the dQ of a tile by channels, or by rows.
    is_wide : bool
        Whether the two warpgroups share a tile's 64 keys, as at head_dim 192 and 256, or have 64 keys each.
    qk_boxes, v_boxes : int
        Boxes of the channels of Q and K, and of V and dO, see :func:`fa3_kernels.plan.views.boxes`.
    is_deterministic : bool
        Whether the parts of dQ are added in a fixed order.
    goes_round : bool
        Whether tiles start at the rows beside their own keys, see :mod:`fa3_kernels.plan.key_tiles`.
    folds : bool
        Whether tiles with many rows turn back, see there.
    has_key_tail, is_left_limited, is_right_limited, is_varlen, softcap : bool
        As in :class:`fa3_kernels.plan.variant.Variant`.
    """

    splits_channels: bool
    is_wide: bool = False
    qk_boxes: int = 1
    v_boxes: int = 1
    is_deterministic: bool = False
    goes_round: bool = False
    folds: bool = False
    has_key_tail: bool = True
    is_left_limited: bool = False
    is_right_limited: bool = False
    is_varlen: bool = False
    softcap: bool = False
    stages: int = 2
    consumer_regs: int = 240
    producer_regs: int = 24

    # Derived; fields, so that they are part of the record that Triton's cache is keyed by.
    is_masked: bool = field(init=False)
    dout_stages: int = field(init=False)
    dq_boxes: int = field(init=False)  # that both warpgroups stage
    ds_tiles: int = field(init=False)
    dq_parts: int = field(init=False)  # in which a warpgroup hands on its share of dQ
    slot_threads: int = field(init=False)

    def __post_init__(self) -> None:
        derived = {
            "is_masked": self.has_key_tail or self.is_left_limited or self.is_right_limited,
            # A second dO at head_dim 192 gains 5 % where CTAs wait for their turn, and costs 2 % elsewhere.
            "dout_stages": 1 if self.is_wide and not (self.is_deterministic and self.qk_boxes > 1) else self.stages,
            "ds_tiles": 1 if self.is_wide else 2,
            "dq_boxes": max(2, self.qk_boxes),
            "dq_parts": 2 if self.is_wide and self.qk_boxes == 1 else 1,
            "slot_threads": slot_threads(2),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True)
class BackwardPlan:
    """Everything about a launch but addresses.

    Parameters
    ----------
    problem : AttentionProblem
        Of packed sequences with the longest lengths there may be for every sequence.
    config : BackwardConfig
    schedule : int64 (ctas, entries)
    kernels : tuple of Call
        In order; what differs between launches of packed sequences is named in them.
    """

    problem: AttentionProblem
    config: BackwardConfig
    schedule: np.ndarray
    kernels: tuple[Call, ...]

    @property
    def tables(self) -> dict[str, np.ndarray]:
        return {"schedule": self.schedule}

    def numbers(self, rows_q: int) -> dict[str, int]:
        """Return what :class:`fa3_kernels.plan.plan.LaunchNumber` names in the calls, of so many packed query rows.

        ``num_blocks`` are the row blocks of one head of all sequences, as sums of dQ are kept.
        """
        tile_m = self.config.tile_m
        problem = self.problem
        of_a_sequence = -(-problem.seqlen_q // tile_m)
        num_blocks = rows_q // tile_m + problem.batch if problem.is_varlen else problem.batch * of_a_sequence
        return {"rows_q": rows_q, "num_blocks": num_blocks}

    def sums_shape(self, num_blocks: int) -> tuple[int, int]:
        """Return the shape of the fp32 sums of dQ: rows of all heads in whole blocks, channels."""
        return self.problem.nheads * num_blocks * self.config.tile_m, self.config.head_dim

    def calls(self, rows_q: int) -> tuple[Call, ...]:
        """Return the calls of a launch with its own numbers in them."""
        numbers = self.numbers(rows_q)
        return tuple(call.of(numbers) for call in self.kernels)


DQ_SUMS = Pointer("dq_sums", "float32")
STARTS_Q = Pointer("starts_q", "int32")
NUM_BLOCKS = LaunchNumber("num_blocks")


@lru_cache(maxsize=256)
def backward_plan(problem: AttentionProblem, num_sms: int, *, is_deterministic: bool = False) -> BackwardPlan:
    """Plan the backward of a problem for a GPU with ``num_sms`` multiprocessors.

    Parameters
    ----------
    problem : AttentionProblem
        Of 16-bit operands.
    num_sms : int
    is_deterministic : bool

    Raises
    ------
    ValueError
        For a problem that no kernel is compiled for.
    """
    config = backward_config(problem, family="gluon")
    walk = walk_of(problem, config.tile_m, config.tile_n, num_sms, problem.seqlen_q, problem.seqlen_k)
    schedule = key_tile_schedule(
        problem, num_sms, tile_m=config.tile_m, tile_n=config.tile_n, walk=walk, is_deterministic=is_deterministic
    )
    variant = _variant(problem, config, walk, is_deterministic=is_deterministic)
    start = _start(problem, config)
    finish = _finish(problem, config)
    main = _main(problem, config, variant, walk, schedule)
    kernels = (start, main, finish) if len(schedule) else (start, finish)
    return BackwardPlan(problem, config, schedule, kernels)


def _variant(
    problem: AttentionProblem, config: BackwardConfig, walk: Walk, *, is_deterministic: bool
) -> BackwardVariant:
    """Return what is compiled into the main kernel."""
    mask = mask_of(problem, problem.seqlen_q, problem.seqlen_k)
    return BackwardVariant(
        splits_channels=config.tile_m == WARPGROUP_ROWS,
        is_wide=config.tile_n == WARPGROUP_ROWS,
        qk_boxes=boxes(config.head_dim),
        v_boxes=boxes(config.head_dim_v(problem)),
        is_deterministic=is_deterministic,
        goes_round=walk.gang > 0,
        folds=walk.fold > 0,
        has_key_tail=problem.is_varlen or problem.seqlen_k % config.tile_n != 0,
        is_left_limited=mask.left >= 0,
        is_right_limited=mask.right >= 0,
        is_varlen=problem.is_varlen,
        softcap=problem.softcap > 0,
    )


def _call(kernel: str, arguments: tuple[Any, ...], grid: tuple[int, ...], **options: int) -> Call:
    """Return a call of four warps, in whose code ptxas fuses nothing."""
    return Call(kernel, arguments, grid, {"num_warps": 4, "enable_fp_fusion": False, **options})


def _row_grid(problem: AttentionProblem, config: BackwardConfig) -> tuple[int, int, int]:
    """Return the grid of the kernels that have a program for each block of rows."""
    return problem.nheads, -(-problem.seqlen_q // config.tile_m), problem.batch


def _start(problem: AttentionProblem, config: BackwardConfig) -> Call:
    """Return the call that computes D and the lse in log2 units and zeroes the sums of dQ."""
    dtype = TORCH_NAMES[problem.dtype]
    arguments = (
        Pointer("out", dtype),
        Pointer("dout", dtype),
        Pointer("lse", "float32"),
        Pointer("stats", "float32"),
        DQ_SUMS,
        Pointer("turns", "int32"),
        STARTS_Q,
        problem.seqlen_q,
        problem.nheads,
        problem.head_dim_v,
        NUM_BLOCKS,
        LaunchNumber("rows_q"),
        config.tile_m,
        config.head_dim,
        problem.is_varlen,
    )
    return _call("backward_start", arguments, _row_grid(problem, config))


def _main(
    problem: AttentionProblem, config: BackwardConfig, variant: BackwardVariant, walk: Walk, schedule: np.ndarray
) -> Call:
    """Return the call of the main kernel, a CTA for each row of the schedule."""
    mask = mask_of(problem, problem.seqlen_q, problem.seqlen_k)
    arguments = (
        *_views(problem, config, variant),
        STARTS_Q,
        Pointer("starts_k", "int32"),
        Pointer("turns", "int32"),
        Pointer("schedule", "int64"),
        schedule.shape[1],
        problem.nheads,
        problem.group,
        problem.seqlen_q,
        problem.seqlen_k,
        mask.left,
        mask.right,
        walk.gang,
        walk.fold,
        walk.turn,
        NUM_BLOCKS,
        *softmax_factors(problem.softmax_scale, problem.softcap),
        float(np.float32(problem.softmax_scale)),
        variant,
    )
    return _call("backward", arguments, (len(schedule),), maxnreg=168)


def _views(problem: AttentionProblem, config: BackwardConfig, variant: BackwardVariant) -> tuple[View | Block, ...]:
    """Return how TMA sees the arrays that the main kernel reads and writes."""
    dtype = TORCH_NAMES[problem.dtype]
    tile_m = config.tile_m
    of_qk = config.head_dim // variant.qk_boxes
    of_v = config.head_dim_v(problem) // variant.v_boxes
    row_view = {"is_packed": problem.is_varlen}
    share = config.head_dim // (variant.dq_boxes * variant.dq_parts)
    dq_block = (tile_m, share) if variant.splits_channels else (tile_m // 2, config.head_dim)
    return (
        View("q", dtype, tile_m, of_qk, **row_view),
        View("k", dtype, config.tile_n, of_qk, **row_view),
        View("v", dtype, config.tile_n, of_v, **row_view),
        View("dout", dtype, tile_m, of_v, **row_view),
        Block("dq_sums", "float32", dq_block),
        Block("stats", "float32", (2 * tile_m,)),
        View("dk", dtype, WARPGROUP_ROWS, of_qk, **row_view),
        View("dv", dtype, WARPGROUP_ROWS, of_v, **row_view),
    )


def _finish(problem: AttentionProblem, config: BackwardConfig) -> Call:
    """Return the call that makes dQ of its sums."""
    arguments = (
        DQ_SUMS,
        Pointer("dq", TORCH_NAMES[problem.dtype]),
        STARTS_Q,
        problem.seqlen_q,
        problem.nheads,
        problem.head_dim,
        NUM_BLOCKS,
        float(np.float32(problem.softmax_scale)),
        config.tile_m,
        config.head_dim,
        problem.is_varlen,
    )
    return _call("backward_finish", arguments, _row_grid(problem, config))
