"""Which backward schedule: what a family launches for a problem, and all that fit an SM."""

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
from fa3_simulator.backward_schedule import BackwardSchedule, DqPath

# By whether the kernel is ours.
_PATHS: dict[bool, tuple[DqPath, ...]] = {True: ("tma warp",), False: ("tma warp", "registers")}
_WIDE = {"scores_transposed": False, "dout_stages": 1, "ds_stages": 1}
# What is launched beside the tile, by head_dim. Upstream hopper/flash_bwd_launch_template.h.
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
        192: {"ds_stages": 1, "splits_roles": True},
        256: {"dout_stages": 1, "ds_stages": 1, "splits_roles": True},
    },
}
_TWINS = {"flash3": "flash3.dew", OURS: OURS}  # the builds whose tiles the twin knows too
_TILE_96 = ((64, 128), (64, 128))  # of upstream, whose gradients the twin does not know there


def _known(problem: AttentionProblem, family: str) -> tuple[str, int]:
    """Return whose layouts a family's are, and the size it computes a problem's channels with."""
    known = "flash3" if family.startswith("flash3") else family
    require(known in _LAYOUTS, f"a backward schedule is known of {', '.join(_LAYOUTS)}, got {family}")
    require(problem.dtype != "e4m3", "the backward is for fp16 and bf16, got e4m3")
    check_head_dims(problem)
    wanted = max(problem.head_dim, problem.head_dim_v)
    sizes = [d for d in _LAYOUTS[known] if d >= wanted]
    require(bool(sizes), f"head_dim must be at most {max(_LAYOUTS[known])}, got {wanted}")
    return known, min(sizes)


def shipped_schedule(problem: AttentionProblem, family: str = OURS) -> BackwardSchedule:
    """Return what a family launches for the gradients of a problem; ValueError where no schedule of it is known.

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
    """Return what is launched, with another tile and other fields of :class:`BackwardSchedule`; ValueError as there.

    dQ of another tile is transposed where its rows are none of wgmma.
    """
    schedule = shipped_schedule(problem, family)
    if tile and tile != (schedule.tile_m, schedule.tile_n):
        known, head_dim = _known(problem, family)
        transposed = tile[0] % WARPGROUP_ROWS != 0 or "dq_transposed" in _LAYOUTS[known][head_dim]
        changes = {"tile_m": tile[0], "tile_n": tile[1], "dq_transposed": transposed} | changes
    return replace(schedule, **changes)


def candidates(problem: AttentionProblem, family: str, smem_bytes: float) -> Iterator[BackwardSchedule]:
    """Schedules whose products wgmma computes and that fit registers and shared memory, with as many slots as fit.

    Channels are those that a launch of the family computes.

    Either S is transposed, so that P and dS stay in registers, or dV and dK are. dQ is transposed where the rows of a
    tile are none of wgmma, or in both ways where a head is wide. Tiles of ours are powers of two.

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
            with suppress(ValueError):
                yield next(s for s in _with_slots(base, fields) if s.fits(smem_bytes))


def _with_slots(base: BackwardSchedule, fields: dict[str, Any]) -> Iterator[BackwardSchedule]:
    """The same schedule with fewer and fewer slots; ValueError at the end of them, where none was taken.

    Ours has as many as it ships with: scores that run ahead need two of Q, and at head_dim 256 there is room for one of
    dO.
    """
    slots = ((2, 2, 2), (2, 2, 1), (2, 1, 1), (1, 1, 1))
    if base.is_ours:
        slots = ((2, 2 if base.is_in_boxes else 1, 1),) if fields["splits_roles"] else ((2, 2, 2),)
    for q, dout, ds in slots:
        yield replace(base, num_stages=q, dout_stages=dout, ds_stages=ds, **fields)
    raise ValueError("no number of slots fits")
