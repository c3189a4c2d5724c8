"""The backward: its configuration for any family, and the plan of a launch of our own.

The configuration is read by the twin, the error bound and the simulator. The plan has what is compiled, the schedule of
key tiles and the calls of the kernels; :mod:`fa3_kernels.gluon.launch_backward` runs it. The forward has
:mod:`fa3_kernels.plan.config` and :mod:`fa3_kernels.plan.plan`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from fa3_kernels.plan.barriers import slot_threads
from fa3_kernels.plan.call import Block, Call, LaunchNumber, Pointer, View, boxes
from fa3_kernels.plan.choose import H200_SMS
from fa3_kernels.plan.config import WARPGROUP_ROWS, require
from fa3_kernels.plan.families import traits_of
from fa3_kernels.plan.families.record import Backward
from fa3_kernels.plan.key_tiles import Walk, key_tile_schedule, walk_of
from fa3_kernels.plan.plan import TORCH_NAMES, softmax_factors
from fa3_kernels.plan.tiles import mask_of, power_of_two
from fa3_reference.bounds.device import TANH_REL
from fa3_reference.bounds.model import BackwardModel
from fa3_reference.problem import AttentionProblem, Dtype


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """One backward kernel of a family.

    Parameters
    ----------
    dtype : {"fp16", "bf16"}
        Of operands and gradients.
    head_dim : int
        Compiled size, to which channels are padded with zeros.
    tile_m, tile_n : int
        Query rows and keys of a tile, multiples of 16. ``tile_n`` changes bits of dQ; ``tile_m`` only where NaN or Inf
        meets hidden rows, or where row blocks are visited in descending order.
    family : str
        A key of :data:`fa3_kernels.plan.families.FAMILIES` that has a backward.
    num_ctas : int
        Multiprocessors of the GPU. Bits of our kernel depend on them where a head has more key tiles.

    Raises
    ------
    ValueError
        Whenever a field breaks its rule.
    """

    dtype: Dtype
    head_dim: int
    tile_m: int
    tile_n: int
    family: str
    num_ctas: int = H200_SMS

    def __post_init__(self) -> None:
        """Check the fields."""
        require(self.dtype in ("fp16", "bf16"), f"dtype must be fp16 or bf16, got {self.dtype!r}")
        sizes = self.backward.tiles
        rule = f"head_dim must be one of {', '.join(map(str, sizes))}, got {self.head_dim}"
        require(self.head_dim in sizes, rule)
        for name, size in (("tile_m", self.tile_m), ("tile_n", self.tile_n)):
            is_size = size % 16 == 0 and 16 <= size <= 256
            require(is_size, f"{name} must be a multiple of 16 in [16, 256], got {size}")

    @property
    def backward(self) -> Backward:
        """Return what is known of the family's backward."""
        return backward_of(self.family)

    @property
    def dots_channels(self) -> int:
        """Return the channels over which D is added; ours pads them to a power of two, as its first kernel does."""
        is_power = traits_of(self.family).builds_powers_of_two
        return power_of_two(self.head_dim) if is_power else self.head_dim

    def head_dim_v(self, problem: AttentionProblem) -> int:
        """Return the compiled size of V, dO and dV, at most head_dim; no bit depends on it."""
        return next(d for d in sorted(self.backward.tiles) if d >= problem.head_dim_v)

    @property
    def model(self) -> BackwardModel:
        """Return what the error bound must know of the kernel, with how many additions for D follow each other."""
        order = self.backward.order
        channels = self.dots_channels
        threads = (128 if channels % 128 == 0 else 64) // order.dots_run
        depth = channels // threads - 1 + (threads - 1).bit_length()
        tanh_error = TANH_REL if order.softcap == "tanh" else 0.0
        return BackwardModel(self.dtype, self.tile_n, depth, heads=order.heads, tanh_error=tanh_error)


def backward_of(family: str) -> Backward:
    """Return what is known of a family's backward; ValueError if nothing is."""
    traits = traits_of(family)
    if traits.backward is None:
        raise ValueError(f"no backward of {traits.title} ({traits.version}) is known")
    return traits.backward


def backward_config(problem: AttentionProblem, *, family: str) -> BackwardConfig:
    """Return what a family launches for the gradients of a problem; ValueError where nothing is compiled for it.

    >>> backward_config(AttentionProblem(1, 1, 1, 64, 64, 128, causal=True), family="flash3.dew").tile_m
    64
    """
    problem.check_plain(f"the backward of {family}", frozenset({"top_left"}))
    tiles = backward_of(family).tiles
    head_dim = next((d for d in sorted(tiles) if d >= max(problem.head_dim, problem.head_dim_v)), None)
    if head_dim is None:
        raise ValueError(f"head_dim must be at most {max(tiles)}, got {problem.head_dim}")
    is_masked = problem.causal or problem.window != (-1, -1)
    return BackwardConfig(problem.dtype, head_dim, *tiles[head_dim][is_masked], family)


def check_reproduced(problem: AttentionProblem, config: BackwardConfig) -> None:
    """Raise ValueError for a problem whose gradients' bits the twin does not know."""
    problem.check_plain(f"the twin of the backward of {config.family}")
    if rule := config.backward.refuses(problem):
        raise ValueError(f"the twin of the backward of {config.family} cannot run this: {rule}")


@dataclass(frozen=True, slots=True)
class BackwardVariant:
    """Compile-time switches of the backward kernel. Tile shapes are those of the descriptors' blocks.

    Parameters
    ----------
    splits_channels : bool
        Whether the two warpgroups divide the dQ of a tile by channels; otherwise by rows.
    is_wide : bool
        Whether the two warpgroups share a tile's 64 keys, as from head_dim 160 on; otherwise each has 64 keys.
    qk_boxes, v_boxes : int
        Boxes of the channels of Q and K, and of V and dO, see :func:`fa3_kernels.plan.call.boxes`.
    is_deterministic : bool
        Whether the parts of dQ are added in a fixed order.
    goes_round : bool
        Whether tiles start at the rows beside their own keys, see :mod:`fa3_kernels.plan.key_tiles`.
    folds : bool
        Whether tiles with many rows turn back, see the same module.
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
    dq_parts: int = field(init=False)  # that a warpgroup's share of dQ is handed on in
    slot_threads: int = field(init=False)

    def __post_init__(self) -> None:
        """Fill the derived fields."""
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
    """Everything about a launch but its addresses and, for packed sequences, its number of rows.

    Parameters
    ----------
    problem : AttentionProblem
        For packed sequences every length is the longest that there may be.
    config : BackwardConfig
    schedule : int64 (ctas, entries)
    kernels : tuple of Call
        In order. What differs between launches of packed sequences stands in them by name.
    """

    problem: AttentionProblem
    config: BackwardConfig
    schedule: np.ndarray
    kernels: tuple[Call, ...]

    @property
    def tables(self) -> dict[str, np.ndarray]:
        """Return the tensors that the host makes, by the names of their pointers."""
        return {"schedule": self.schedule}

    def numbers(self, rows_q: int) -> dict[str, int]:
        """Return the numbers that stand in the calls by name, for a launch of so many packed query rows.

        ``num_blocks`` is the number of row blocks of one head, over all sequences: so many have sums of dQ. ``rows_q``
        is not read for batched sequences.
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
    """Return a call of four warps whose code fuses no multiplication and addition by itself."""
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
    """Return the call that computes dQ from its sums."""
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
