"""Which backward schedules there are: the one that a family launches for a problem, and all that fit an SM.

The same of a forward is in :mod:`fa3_simulator.forward_choice` and :func:`fa3_simulator.tune.candidates`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

from fa3_kernels.plan.backward import backward_of
from fa3_kernels.plan.choose import check_head_dims
from fa3_kernels.plan.config import WARPGROUP_ROWS, require
from fa3_kernels.plan.families import OURS
from fa3_reference.problem import AttentionProblem
from fa3_simulator.backward import backward
from fa3_simulator.backward_schedule import BackwardSchedule, DqPath
from fa3_simulator.footprint import misfits
from fa3_simulator.machine import Machine
from fa3_simulator.schedules import TileBlocks

# Ways of dQ to memory that a kernel may have, by whether it is ours.
_PATHS: dict[bool, tuple[DqPath, ...]] = {True: ("tma warp",), False: ("tma warp", "registers")}
_WIDE = {"scores_transposed": False, "dout_stages": 1, "ds_stages": 1}
# Fields that a family launches beside the tile, by head_dim; upstream's are in hopper/flash_bwd_launch_template.h.
_LAYOUTS: dict[str, dict[int, dict[str, Any]]] = {
    "flash3": {
        64: {},
        96: {"v_in_registers": True},
        128: {},
        192: {"consumers": 3, **_WIDE},
        256: {"dq": "registers", "dq_transposed": True, **_WIDE},
    },
    OURS: {
        64: {},
        96: {},
        128: {},
        160: {"ds_stages": 1, "splits_roles": True},
        192: {"ds_stages": 1, "splits_roles": True},
        256: {"dout_stages": 1, "ds_stages": 1, "splits_roles": True},
    },
}
_TWINS = {"flash3": "flash3.dew", OURS: OURS}  # the builds of which the plans know tiles
_TILE_96 = ((64, 128), (64, 128))  # upstream's tiles at head_dim 96, without a mask and with one, which plans lack


def _known(problem: AttentionProblem, family: str) -> tuple[str, int]:
    """Return the family of _LAYOUTS that a family belongs to, and the head_dim that it computes a problem with.

    ValueError where no schedule of the family is known, for e4m3, and for a head_dim that is too large.
    """
    known = "flash3" if family.startswith("flash3") else family
    require(known in _LAYOUTS, f"a backward schedule is known of {', '.join(_LAYOUTS)}, got {family}")
    require(problem.dtype != "e4m3", "the backward is for fp16 and bf16, got e4m3")
    check_head_dims(problem)
    wanted = max(problem.head_dim, problem.head_dim_v)
    sizes = [d for d in _LAYOUTS[known] if d >= wanted]
    require(bool(sizes), f"head_dim must be at most {max(_LAYOUTS[known])}, got {wanted}")
    return known, min(sizes)


def shipped_schedule(problem: AttentionProblem, family: str = OURS) -> BackwardSchedule:
    """Return the schedule that a family launches for the gradients of a problem; ValueError where none is known.

    >>> shipped_schedule(AttentionProblem(1, 1, 1, 64, 64, 128), "flash3").tile_m
    80
    """
    known, head_dim = _known(problem, family)
    is_masked = problem.causal or problem.window != (-1, -1)
    tile_m, tile_n = backward_of(_TWINS[known]).tiles.get(head_dim, _TILE_96)[is_masked]
    layout = dict(_LAYOUTS[known][head_dim])
    layout.setdefault("dq_transposed", tile_m % WARPGROUP_ROWS != 0)
    return BackwardSchedule(head_dim, tile_m, tile_n, known, **layout)


def schedule_for(
    problem: AttentionProblem, family: str = OURS, *, tile: tuple[int, int] | None = None, **changes: Any
) -> BackwardSchedule:
    """Return the schedule that is launched, with another tile and other fields of :class:`BackwardSchedule`.

    With another tile dQ is transposed if its rows are no multiple of the 64 that wgmma takes. ValueError as in
    :class:`BackwardSchedule` and :func:`shipped_schedule`.
    """
    schedule = shipped_schedule(problem, family)
    if tile and tile != (schedule.tile_m, schedule.tile_n):
        known, head_dim = _known(problem, family)
        transposed = tile[0] % WARPGROUP_ROWS != 0 or "dq_transposed" in _LAYOUTS[known][head_dim]
        changes = {"tile_m": tile[0], "tile_n": tile[1], "dq_transposed": transposed} | changes
    return replace(schedule, **changes)


def candidates(problem: AttentionProblem, family: str, machine: Machine) -> Iterator[BackwardSchedule]:
    """Yield the schedules whose products wgmma can compute and that fit an SM, each with as many slots as fit.

    They have the channels that a launch of the family computes. Either S is transposed, so that P and dS stay in
    registers, or dV and dK are. dQ is transposed if the rows of a tile are no multiple of the 64 that wgmma takes; from
    head_dim 192 on both ways are tried. Tiles of our kernel are powers of two.

    Raises
    ------
    ValueError
        As :func:`shipped_schedule`.
    """
    base = BackwardSchedule(head_dim=shipped_schedule(problem, family).head_dim, tile_m=64, family=family)
    ours = base.is_ours
    rows, keys = ((64, 128), (64, 128)) if ours else (range(48, 129, 16), range(48, 193, 16))
    for tile_m, tile_n, consumers, path, scores, v in product(
        rows, keys, (2, 3), _PATHS[ours], (True, False), (False, True)
    ):
        layout: dict[str, Any] = {"scores_transposed": scores, "v_in_registers": v, "dq": path}
        if ours and (consumers > 2 or not scores or v):
            continue  # our kernel is written in one way
        layout["splits_roles"] = ours and tile_m == tile_n == WARPGROUP_ROWS
        for transposed in (False, True):
            if transposed != (tile_m % WARPGROUP_ROWS > 0) and base.head_dim < 192:
                continue
            sizes = {"tile_m": tile_m, "tile_n": tile_n, "consumers": consumers, "dq_transposed": transposed}
            fields = layout | sizes
            with suppress(ValueError):  # a product that wgmma cannot compute, or no number of slots fits
                slots = _with_slots(base, fields)
                yield next(s for s in slots if not any(misfits(backward(s, [TileBlocks(1)]), machine)))


def _with_slots(base: BackwardSchedule, fields: dict[str, Any]) -> Iterator[BackwardSchedule]:
    """Yield a schedule with fewer and fewer slots; ValueError if all of them are drawn.

    Our kernel only has the numbers that it ships with: scores that run ahead need two slots of Q, and at head_dim 256
    there is room for one slot of dO.
    """
    slots = ((2, 2, 2), (2, 2, 1), (2, 1, 1), (1, 1, 1))
    if base.is_ours:
        slots = ((2, 2 if base.is_in_boxes else 1, 1),) if fields["splits_roles"] else ((2, 2, 2),)
    for q, dout, ds in slots:
        yield replace(base, num_stages=q, dout_stages=dout, ds_stages=ds, **fields)
    raise ValueError("no number of slots fits")
