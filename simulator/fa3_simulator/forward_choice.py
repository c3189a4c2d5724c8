"""Which forward configuration a family launches for a problem, and which channels it computes.

The same of a backward is in :mod:`fa3_simulator.backward_choice`; all configurations that may be simulated are in
:mod:`fa3_simulator.tune`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fa3_kernels.plan.choose import (
    H200_SMS,
    can_pack,
    check_head_dims,
    choose_num_splits,
    choose_pack_gqa,
    is_launchable,
    over_cache,
    without_lengths,
)
from fa3_kernels.plan.config import Config, require
from fa3_kernels.plan.families import OURS, traits_of
from fa3_kernels.plan.plan import plan_of
from fa3_kernels.plan.request import Choices, request_for
from fa3_reference.problem import AttentionProblem


def channels(problem: AttentionProblem, family: str = OURS) -> tuple[int, int]:
    """Return the channels of Q and K, and those of V and O, that a launch of a family computes.

    A family that pads takes the next size that it compiles. A family that does not pad computes the problem's own
    channels, whether it is built for them or not.

    Raises
    ------
    ValueError
        For an unknown family, for a head_dim that TMA cannot copy, and, except in our own kernels, for V of another
        width than Q.

    >>> [channels(AttentionProblem(1, 1, 1, 64, 64, 192, d), "gluon") for d in (80, 128, 192)]
    [(192, 96), (192, 128), (192, 192)]
    """
    check_head_dims(problem)
    traits = traits_of(family)
    require(
        traits.is_built_here or problem.head_dim_v == problem.head_dim,
        f"{traits.title} is simulated with head_dim_v equal to head_dim, got {problem.head_dim_v} and "
        f"{problem.head_dim}",
    )
    if traits.pads_head_dim:
        return traits.compiled_head_dims(problem)
    return problem.head_dim, problem.head_dim


def promotion_interval(problem: AttentionProblem, family: str, tile_n: int) -> int:
    """Return the number of keys after which e4m3 sums are promoted, 0 for never.

    It is the largest of 128, 96, 64 and 32 that divides ``tile_n``, where the family promotes.
    """
    if problem.dtype != "e4m3" or not traits_of(family).promotes:
        return 0
    return next((keys for keys in (128, 96, 64, 32) if tile_n % keys == 0), 0)


def schedule_for(
    problem: AttentionProblem,
    family: str = OURS,
    *,
    tile: tuple[int, int] | None = None,
    num_splits: Any = None,  # an int, which callers pass among fields of other types
    pack_gqa: bool | None = None,
    sms: int = H200_SMS,
    **changes: Any,
) -> Config:
    """Return the configuration that a family launches for a problem, with another tile and other fields of
    :class:`Config`.

    A tile that the family launches comes with the family's choice of turns and of P in registers or shared memory;
    another tile has turns, and P in registers. Heads and keys that nothing is said of are apart and in one piece; with
    a window, of packed sequences and over a cache they are as a call of our functions has them on ``sms``
    multiprocessors. A ``num_splits`` of 0 chooses from the shape.

    Raises
    ------
    ValueError
        As :func:`channels` and :class:`Config`; for a ``tile`` of None where the family's own tile is not known; and
        for whatever a launch of ours refuses, with its words.

    >>> chosen = schedule_for(AttentionProblem(1, 16, 16, 8192, 8192, 192))
    >>> chosen.head_dim, chosen.tile_m, chosen.tile_n, chosen.pingpong
    (192, 128, 64, True)
    """
    computed, computed_v = channels(problem, family)
    asked = without_lengths(problem)
    shipped = traits_of(family).shipped(asked)
    require(tile or shipped, f"{family} has no known tile for {problem.dtype} at head_dim {problem.head_dim}: name one")
    tile_m, tile_n = tile or shipped[:2]  # type: ignore[index]  # known, as there is no tile
    fields: dict[str, Any] = {
        "head_dim": computed,
        "head_dim_v": computed_v,
        "tile_m": tile_m,
        "tile_n": tile_n,
        "promotion_interval": promotion_interval(problem, family, tile_n),
    }
    if shipped is not None and shipped[:2] == (tile_m, tile_n):
        fields |= {"pingpong": shipped.pingpong, "pv_from_registers": shipped.pv_from_registers}
    config = Config(problem.dtype, family=family, **fields | changes)
    parts = (0 if problem.cache else 1) if num_splits is None else num_splits
    packs = False if pack_gqa is None and is_plain(problem) else pack_gqa
    if not config.traits.is_built_here:
        return replace(config, num_splits=parts or config.traits.splits(problem, tile_m, tile_n), pack_gqa=bool(packs))
    request_for(problem, Choices(num_splits=parts, pack_gqa=packs))
    config = replace(config, pack_gqa=choose_pack_gqa(asked, config) if packs is None else packs and can_pack(problem))
    config = replace(config, num_splits=parts or choose_num_splits(asked, config, sms))
    return over_cache(asked, config) if problem.cache and tile is None else config


def is_plain(problem: AttentionProblem) -> bool:
    """Tell whether a problem is a batch that is dense or causal; others are as servers call them."""
    return not problem.is_varlen and not problem.is_windowed


def served(problem: AttentionProblem, config: Config) -> dict[str, str]:
    """Return in words what a call as servers make it launches, by the name ``launches``; {} for other problems."""
    if is_plain(problem):
        return {}
    heads = f"heads {'packed' if config.pack_gqa else 'apart'}, " if problem.group > 1 else ""
    plan = plan_of(request_for(problem, Choices(config.num_splits, config.pack_gqa)), H200_SMS)
    kernels = ", ".join(call.kernel for call in plan.kernels)
    beside = "" if is_launchable(problem, config) else ", but no launch of ours has this tile and schedule"
    return {"launches": f"{config.tile_m}x{config.tile_n}, {heads}num_splits {config.num_splits}: {kernels}{beside}"}
