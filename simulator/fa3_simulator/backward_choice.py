"""This module says which backward schedule: what a family launches for a problem, and all that fit an SM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

from fa3_kernels.plan.choose import check_head_dims
from fa3_kernels.plan.config import WARPGROUP_ROWS
from fa3_kernels.plan.traits import OURS
from fa3_reference.problem import AttentionProblem
from fa3_simulator.backward_schedule import HEAD_DIMS, BackwardSchedule, DqPath


def _alike(schedule: BackwardSchedule) -> tuple[BackwardSchedule, BackwardSchedule]:
    """Whatever the mask."""
    return schedule, schedule


_WIDE = {"scores_transposed": False, "dout_stages": 1, "ds_stages": 1}
_OURS_WIDE = BackwardSchedule(head_dim=256, tile_m=64, tile_n=64, dout_stages=1, ds_stages=1, splits_roles=True)
_FLASH3 = BackwardSchedule(family="flash3")
# By whether the kernel is ours.
_PATHS: dict[bool, tuple[DqPath, ...]] = {True: ("tma warp",), False: ("tma warp", "registers")}
# What is launched, by head_dim: dense, and with a causal mask or a window. Upstream hopper/flash_bwd_launch_template.h.
_SHIPPED: dict[str, dict[int, tuple[BackwardSchedule, BackwardSchedule]]] = {
    "flash3": {
        64: _alike(replace(_FLASH3, head_dim=64, tile_m=128)),
        96: _alike(replace(_FLASH3, head_dim=96, v_in_registers=True)),
        128: (replace(_FLASH3, tile_m=80, dq_transposed=True), _FLASH3),
        192: _alike(replace(_FLASH3, head_dim=192, tile_n=96, consumers=3, **_WIDE)),
        256: _alike(replace(_FLASH3, head_dim=256, tile_n=80, dq="registers", dq_transposed=True, **_WIDE)),
    },
    OURS: {
        64: _alike(BackwardSchedule(head_dim=64, tile_m=128)),
        128: _alike(BackwardSchedule()),
        256: _alike(_OURS_WIDE),
    },
}


def compiled_head_dim(problem: AttentionProblem) -> int:
    """The smallest compiled size that holds the channels; ValueError where there is none, and for e4m3."""
    if problem.dtype == "e4m3":
        raise ValueError("the backward is for fp16 and bf16, got e4m3")
    check_head_dims(problem)
    wanted = max(problem.head_dim, problem.head_dim_v)
    if wanted > HEAD_DIMS[-1]:
        raise ValueError(f"head_dim must be at most {HEAD_DIMS[-1]}, got {wanted}")
    return next(d for d in HEAD_DIMS if d >= wanted)


def _known(problem: AttentionProblem, family: str) -> tuple[BackwardSchedule, BackwardSchedule]:
    known = _SHIPPED.get("flash3" if family.startswith("flash3") else family)
    if known is None:
        raise ValueError(f"a backward schedule is known of {', '.join(_SHIPPED)}, got {family}")
    sizes = [d for d in known if d >= compiled_head_dim(problem)]
    if not sizes:
        raise ValueError(f"head_dim must be at most {max(known)} for a backward of {family}, got {problem.head_dim}")
    return known[min(sizes)]


def shipped_schedule(problem: AttentionProblem, family: str = OURS) -> BackwardSchedule:
    """Return what a family launches for the gradients of a problem; ValueError where no schedule of it is known.

    >>> shipped_schedule(AttentionProblem(1, 1, 1, 64, 64, 128), "flash3").tile_m
    80
    """
    return _known(problem, family)[problem.causal or problem.window != (-1, -1)]


def schedule_for(
    problem: AttentionProblem, family: str = OURS, *, tile: tuple[int, int] | None = None, **changes: Any
) -> BackwardSchedule:
    """Return what is launched, with another tile and other fields of :class:`BackwardSchedule`; ValueError as there.

    dQ of another tile is transposed where its rows are none of wgmma.
    """
    schedule = shipped_schedule(problem, family)
    if tile and tile != (schedule.tile_m, schedule.tile_n):
        transposed = tile[0] % WARPGROUP_ROWS != 0 or _known(problem, family)[True].dq_transposed
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

    Ours has as many as it ships with: scores that run ahead need two of Q, and what splits roles shares one of dO.
    """
    slots = ((2, 2, 2), (2, 2, 1), (2, 1, 1), (1, 1, 1))
    if base.is_ours:
        slots = ((2, 1, 1),) if fields["splits_roles"] else ((2, 2, 2),)
    for q, dout, ds in slots:
        yield replace(base, num_stages=q, dout_stages=dout, ds_stages=ds, **fields)
    raise ValueError("no number of slots fits")
