"""Which forward configuration a family launches for a problem, and which channels it computes.

The same of a backward is in :mod:`fa3_simulator.backward_choice`; all configurations that may be simulated are in
:mod:`fa3_simulator.tune`.
"""

from __future__ import annotations

from typing import Any

from fa3_kernels.plan.choose import check_head_dims
from fa3_kernels.plan.config import Config
from fa3_kernels.plan.families import OURS, traits_of
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
    if not traits.is_built_here and problem.head_dim_v != problem.head_dim:
        raise ValueError(
            f"{traits.title} is simulated with head_dim_v equal to head_dim, got {problem.head_dim_v} and "
            f"{problem.head_dim}"
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
    problem: AttentionProblem, family: str = OURS, *, tile: tuple[int, int] | None = None, **changes: Any
) -> Config:
    """Return the configuration that a family launches for a problem, with another tile and other fields of
    :class:`Config`.

    A tile that the family launches comes with the family's choice of turns and of P in registers or shared memory;
    another tile has turns, and P in registers. Unless ``changes`` say otherwise keys are not cut into parts and heads
    are not packed.

    Raises
    ------
    ValueError
        As :func:`channels` and :class:`Config`; and for a ``tile`` of None where the family's own tile is not known.

    >>> chosen = schedule_for(AttentionProblem(1, 16, 16, 8192, 8192, 192))
    >>> chosen.head_dim, chosen.tile_m, chosen.tile_n, chosen.pingpong
    (192, 128, 64, True)
    """
    computed, computed_v = channels(problem, family)
    shipped = traits_of(family).shipped(problem)
    if tile is None and shipped is None:
        raise ValueError(f"{family} has no known tile for {problem.dtype} at head_dim {problem.head_dim}: name one")
    tile_m, tile_n = tile or shipped[:2]  # type: ignore[index]  # known, as there is no tile
    fields: dict[str, Any] = {"promotion_interval": promotion_interval(problem, family, tile_n)}
    if shipped is not None and shipped[:2] == (tile_m, tile_n):
        fields |= {"pingpong": shipped.pingpong, "pv_from_registers": shipped.pv_from_registers}
    sizes = {"head_dim": computed, "head_dim_v": computed_v, "tile_m": tile_m, "tile_n": tile_n}
    return Config(problem.dtype, family=family, **sizes | fields | changes)
