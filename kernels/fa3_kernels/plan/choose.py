"""Choose the configuration of a launch of our own, with PackGQA and splits from the shape, and check how large it is.

:mod:`fa3_kernels.plan.request` and :mod:`fa3_kernels.plan.plan` call this. Other families ship what their file in
:mod:`fa3_kernels.plan.families` says.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from fa3_kernels.plan import tile_times
from fa3_kernels.plan.config import WARPGROUP_ROWS, Config, default_config, require
from fa3_kernels.plan.families import OURS, traits_of
from fa3_kernels.plan.tile_order import TILE_COST, check_entries, count_items, shape_of
from fa3_kernels.plan.tile_times import can_pack
from fa3_kernels.plan.tiles import power_of_two
from fa3_kernels.plan.variant import smem_bytes
from fa3_reference.problem import AttentionProblem

MAX_SPLITS = 128
COMBINE_COST = 5.0  # of a second launch, in key blocks, which take about 1.1 us where few CTAs run; assumed
SPLIT_COST = 0.2  # of one more part, in key blocks; measured on an H200: 32 more take 5 us, 3 us where keys are long
MERGED_BYTES = 4e6  # of partial results that are written and read in the time of a key block, at 3.6 TB/s
H200_SMS = 132
SMEM_BYTES = 232448  # of a CTA (CUDA programming guide, compute capability 9.0)
SMEM_OVERHEAD_BYTES = 512  # mbarriers and arguments of the partitions: 188 to 384 in the shipped kernels (audit.json)
SIGNIFICANT_BITS = 3  # to which the longest lengths of packed sequences are rounded up
INDICES = 1 << 31  # that int32 counts
FREE_REGISTERS = 128  # that O, S and P may take, of the 160 of a thread of three consumer warpgroups


@lru_cache(maxsize=4096, typed=True)
def longest(length: int) -> int:
    """Round the longest length up to three significant bits, so that batches of about one length share a plan.

    >>> [longest(n) for n in (1, 7, 100, 1000, 4097)]
    [1, 7, 112, 1024, 5120]
    """
    step = 1 << max(0, length.bit_length() - SIGNIFICANT_BITS)
    return -(-length // step) * step


def without_lengths(problem: AttentionProblem) -> AttentionProblem:
    """Return a problem of packed sequences as the host knows it: with the longest length in place of all lengths.

    Other problems are returned as they are.
    """
    if not problem.is_varlen:
        return problem
    q, k = ((longest(n),) * problem.batch for n in (problem.seqlen_q, problem.seqlen_k))
    return replace(problem, seqlens_q=q, seqlens_k=k, seqlen_q=q[0], seqlen_k=k[0])


def choose_pack_gqa(problem: AttentionProblem, config: Config) -> bool:
    """Tell whether to pack the heads of a group: if the launch then ends earlier by the fitted times.

    Where no times were fitted, heads are packed if that makes fewer row tiles.

    >>> problem = AttentionProblem(1, 8, 1, 16, 1024, 128)
    >>> choose_pack_gqa(problem, default_config(problem))  # 16 rows of 8 heads: one tile instead of 8
    True
    """
    if not can_pack(problem):
        return False
    known = () if problem.is_varlen else tile_times.of(problem, config.head_dim, config.head_dim_v)
    for tile in known:
        if (tile.tile_m, tile.tile_n) == (config.tile_m, config.tile_n):
            plain_cycles, packed_cycles = tile_times.cycles_of(problem, tile)
            return packed_cycles < plain_cycles
    packed, plain = (count_items(shape_of(problem, pack_gqa=pack), config.tile_m) for pack in (True, False))
    return packed < plain


def choose_num_splits(
    problem: AttentionProblem, config: Config, num_sms: int = H200_SMS, merged_bytes: float = MERGED_BYTES
) -> int:
    """Return the number of splits with the shortest estimated time on ``num_sms`` CTAs, the fewest of equal ones.

    >>> problem = AttentionProblem(1, 8, 8, 1, 65536, 128)
    >>> choose_num_splits(problem, default_config(problem))  # 8 tiles of 512 key blocks on 132 SMs
    16
    """
    shape = shape_of(problem, pack_gqa=config.pack_gqa)
    tiles = count_items(shape, config.tile_m)
    blocks = -(-max(shape.seqlens_k) // config.tile_n)
    rows = sum(shape.seqlens_q) * problem.nheads
    of_part = SPLIT_COST + 8 * rows * config.head_dim_v / merged_bytes  # 4 bytes are written and read again

    def time(splits: int) -> float:
        waves = -(-tiles * splits // num_sms)
        return waves * (-(-blocks // splits) + TILE_COST) + (COMBINE_COST + of_part * splits if splits > 1 else 0)

    return min(range(1, max(1, min(blocks, MAX_SPLITS)) + 1), key=time)


def check_tile(config: Config) -> None:
    """Raise ValueError for a configuration of our family that Gluon cannot build, or that no SM has room for.

    Three warpgroups leave a thread 160 registers, of which O takes head_dim / 2, S tile_n / 2 and P tile_n / 4.
    """
    tile_m = config.tile_m
    tile_n = config.tile_n
    held = config.head_dim // 2 + 3 * tile_n // 4
    needed = smem_bytes(config) + SMEM_OVERHEAD_BYTES
    require(config.traits.takes_keys(tile_n), f"tile_n must be a power of two from 32 to 256, got {tile_n}")
    require(
        config.consumers < 3 or held <= FREE_REGISTERS,
        f"tile_m {tile_m} needs head_dim / 2 + 3 tile_n / 4 registers of {FREE_REGISTERS} for O, S and P, "
        f"got {held} with head_dim {config.head_dim} and tile_n {tile_n}",
    )
    require(
        needed <= SMEM_BYTES,
        f"a tile must fit {SMEM_BYTES} bytes of shared memory, {tile_m} x {tile_n} at head_dim {config.head_dim} "
        f"and {config.dtype} needs {needed}",
    )


def check_head_dims(problem: AttentionProblem) -> None:
    """Raise ValueError for a head_dim whose rows TMA cannot copy."""
    multiple = 16 if problem.dtype == "e4m3" else 8
    for name in ("head_dim", "head_dim_v"):
        size = getattr(problem, name)
        require(size % multiple == 0, f"{name} must be a multiple of {multiple} (TMA), got {size}")


def check_outputs(rows: int, head_dim: int, num_splits: int) -> None:
    """Raise ValueError if int32 cannot count the rows of the output, or what threads store themselves.

    That is with splits, whose partial rows and their elements are counted. Otherwise TMA stores O, and ``head_dim`` may
    be 1.
    """
    require(
        rows * (max(num_splits, head_dim) if num_splits > 1 else 1) < INDICES,
        "at most 2^31 rows of output, or elements and rows of splits, "
        f"got {rows} rows of {head_dim} and {num_splits} splits",
    )


def check_sizes(problem: AttentionProblem, num_splits: int = 1) -> None:
    """Raise ValueError for a problem that is larger than a launch of our kernels counts.

    int32 counts the rows of the output, with splits their elements too, and the keys; an entry of the schedule holds a
    tile's place.
    """
    rows = problem.batch * problem.seqlen_q if problem.seqlens_q is None else sum(problem.seqlens_q)
    keys = problem.seqlen_k if problem.seqlens_k is None else sum(problem.seqlens_k)
    check_entries(problem.seqlen_q, num_splits, problem.batch, problem.nheads)
    check_outputs(problem.nheads * rows, traits_of(OURS).compiled_head_dims(problem)[0], num_splits)
    require(keys < INDICES, f"at most 2^31 - 1 keys fit the int32 that counts them, got {keys}")


def check_lockstep(
    problem: AttentionProblem, num_splits: int, pack_gqa: bool | None, tile: tuple[int, int] | None = None
) -> None:
    """Raise ValueError for what the kernel without warp specialisation does not take, which the ablation study runs."""
    rules = (
        (problem.dtype != "e4m3", f"fp16 or bf16, got {problem.dtype}"),
        (
            64 < problem.head_dim == problem.head_dim_v <= 128,
            f"one head_dim in (64, 128], got {problem.head_dim} and {problem.head_dim_v}",
        ),
        (
            not problem.is_varlen and not problem.is_windowed and problem.softcap == 0,
            "dense or causal problems without varlen, window and softcap",
        ),
        (
            problem.seqlen_k >= (problem.seqlen_q if problem.causal else 1),
            f"at least one key for every row, got {problem.seqlen_q} queries and {problem.seqlen_k} keys",
        ),
        (num_splits == 1 and not pack_gqa, f"num_splits 1 and no pack_gqa, got {num_splits} and {pack_gqa}"),
        (tile in (None, (128, 128)), f"tiles of 128 x 128, got {tile}"),
    )
    for ok, rule in rules:
        require(ok, f"without warp specialisation the kernel takes {rule}")


def config_of(
    problem: AttentionProblem,
    *,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    pingpong: bool | None = None,
    intra_wg_overlap: bool = True,
    warp_specialize: bool = True,
    tile: tuple[int, int] | None = None,
    num_sms: int = H200_SMS,
    **changes,
) -> Config:
    """Return the configuration that :func:`fa3_kernels.gluon.launch.forward` uses, which the twin then takes.

    Parameters
    ----------
    problem : AttentionProblem
        For packed sequences only their number and the longest length matter, as a launch knows no more.
    num_splits : int
        0 lets :func:`choose_num_splits` decide.
    pack_gqa : bool, optional
        :func:`choose_pack_gqa` decides by default. Groups of more than 64 heads are never packed, which no bit of a
        launch with the same splits depends on.
    pingpong : bool, optional
        As ships by default.
    intra_wg_overlap : bool
    warp_specialize : bool
        False is the kernel of the ablation, see :func:`check_lockstep`.
    tile : (int, int), optional
        Query rows, 128 or for fp16 and bf16 192, and keys of a tile, instead of the shipped ones; see
        :func:`check_tile`. Bits depend on the keys.
    num_sms : int
        Multiprocessors of the GPU; num_splits = 0 alone depends on it.
    **changes
        e4m3: promotion_interval and out_dtype, as in :class:`fa3_kernels.plan.config.Config`.

    Raises
    ------
    ValueError
        For a problem or a choice that no kernel is compiled for.
    """
    problem = without_lengths(problem)
    check_head_dims(problem)
    changes |= {} if pingpong is None else {"pingpong": pingpong}
    config = default_config(problem, tile=tile, intra_wg_overlap=intra_wg_overlap, **changes)
    if tile:
        check_tile(config)
    if not warp_specialize:
        check_lockstep(problem, num_splits, pack_gqa, tile)
        return replace(config, warp_specialized=False, pingpong=False)
    pack = choose_pack_gqa(problem, config) if pack_gqa is None else pack_gqa and can_pack(problem)
    config = replace(config, pack_gqa=pack)
    require(num_splits >= 0, f"num_splits must be 0 (chosen from the shape) or positive, got {num_splits}")
    return replace(config, num_splits=num_splits or choose_num_splits(problem, config, num_sms))


def over_cache(problem: AttentionProblem, config: Config) -> Config:
    """Return the configuration for a launch over a cache.

    Where the queries of a sequence have no more rows than one warpgroup, as in steps of decoding, tiles are of one
    warpgroup. A second one would multiply empty rows, and a block would take twice as long. K and V have more stages
    where rows are short, so that as many bytes are on their way as with long ones.

    >>> step = AttentionProblem(8, 32, 8, 1, 1024, 128)
    >>> over_cache(step, config_of(step)).tile_m
    64
    """
    rows = problem.seqlen_q * (power_of_two(problem.group) if config.pack_gqa else 1)
    if rows > WARPGROUP_ROWS:
        return config
    stages = 4 if config.head_dim <= 64 and not config.is_fp8 else config.num_stages
    return replace(config, tile_m=WARPGROUP_ROWS, pingpong=False, num_stages=stages)


def is_launchable(problem: AttentionProblem, config: Config) -> bool:
    """Tell whether our kernels, launched with these choices for a problem, run this configuration and no other.

    For another family's configuration it tells whether ours has one with the same tile and schedule, at the channels
    that ours computes.

    >>> problem = AttentionProblem(1, 16, 16, 8192, 8192, 192)
    >>> [is_launchable(problem, Config(head_dim=d, tile_n=64)) for d in (192, 256)]
    [True, False]
    """
    c = config
    choices: dict[str, Any] = {"promotion_interval": c.promotion_interval, "out_dtype": c.out_dtype} if c.is_fp8 else {}
    is_narrow = problem.cache is not None and c.tile_m == WARPGROUP_ROWS  # such tiles are taken over caches alone
    try:
        check_sizes(problem, c.num_splits)
        launched = config_of(
            problem,
            num_splits=c.num_splits,
            pack_gqa=c.pack_gqa,
            pingpong=c.pingpong,
            intra_wg_overlap=c.intra_wg_overlap,
            tile=None if is_narrow else (c.tile_m, c.tile_n),
            **choices,
        )
        launched = over_cache(without_lengths(problem), launched) if is_narrow else launched
        same = {} if c.traits.is_built_here else {"family": OURS, "head_dim": launched.head_dim}
        return replace(c, integer_max=None, **same) == launched
    except ValueError:
        return False
