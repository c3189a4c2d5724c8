"""Simulates all legal tiles and schedules for a problem and ranks them; the verb ``tune`` prints the ranking.

One launch is simulated in :mod:`fa3_simulator.run`. What a launch chooses without simulating is in
``fa3_kernels.plan.choose``.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby, product
from typing import Any

import numpy as np

from fa3_kernels.plan.choose import MAX_SPLITS, can_pack, choose_num_splits, without_lengths
from fa3_kernels.plan.config import K_STEP, SWITCHES, Config
from fa3_kernels.plan.families import OURS, traits_of
from fa3_kernels.plan.request import Choices, request_for
from fa3_reference.problem import AttentionProblem
from fa3_simulator import backward_choice
from fa3_simulator.cta import AnyConfig, kernel_of
from fa3_simulator.footprint import misfits
from fa3_simulator.forward_choice import channels, promotion_interval
from fa3_simulator.forward_launch import tile_heads
from fa3_simulator.machine import Machine
from fa3_simulator.roofline import lower_bound
from fa3_simulator.run import Estimate, estimate
from fa3_simulator.schedules import TileBlocks

PEER = "flash3"  # the family whose choice is marked among the schedules
TOP = (1, 3)  # numbers of schedules, those simulated fastest, for which :func:`agreement` returns a regret


@dataclass(frozen=True, slots=True)
class Ranked:
    """One configuration with its simulated time and its distance to what no configuration can beat.

    Parameters
    ----------
    config : Config or BackwardSchedule
        The configuration; a BackwardSchedule where gradients were asked for.
    estimate : Estimate
        Its simulated time.
    gap : float
        Cycles over those of :func:`fa3_simulator.roofline.lower_bound`, minus 1.
    is_gluon_buildable : bool
        Whether a launch of our kernels for the problem has its tile and its schedule.
    is_flash3_choice : bool
        Whether FlashAttention-3 launches its tile and its schedule when asked to choose.
    """

    config: AnyConfig
    estimate: Estimate
    gap: float
    is_gluon_buildable: bool
    is_flash3_choice: bool

    @property
    def launched_by(self) -> str:
        """Initials of the families whose launch takes this tile and schedule: G for ours, F for FlashAttention-3."""
        return "G" * self.is_gluon_buildable + "F" * self.is_flash3_choice

    @property
    def is_launchable(self) -> bool:
        """Tell whether this is a forward of our own kernels that a launch can take."""
        return kernel_of(self.config).built_here is not None and self.is_gluon_buildable


def candidates(
    problem: AttentionProblem, *, family: str = OURS, pack_gqa: bool | None = False, sms: int = 0
) -> Iterator[Config]:
    """Yield the forward configurations whose fields are legal; most do not fit, which :func:`misfit` tells.

    They have the channels that a launch of the family computes. A family that promotes does so every 128 keys, or every
    tile if it has fewer, as ours ships. ``pack_gqa`` None yields configurations with packed heads and without. Keys are
    cut into parts too where a problem has fewer tiles than ``sms``.
    """
    if traits_of(family).is_built_here:
        request_for(problem, Choices(pack_gqa=pack_gqa))
    head_dim, head_dim_v = channels(problem, family)
    packs = (pack_gqa,) if pack_gqa is not None else (False, True) if can_pack(problem) else (False,)
    axes: list[Iterable[Any]] = [(64, 128, 192), range(32, 257, K_STEP[problem.dtype]), (2, 3, 4)]
    axes += [choices.values() for choices in SWITCHES]
    for tile_m, tile_n, stages, *chosen, registers, packed in product(*axes, (True, False), packs):
        switches = dict(ChainMap(*chosen))
        if tile_m == 64 and switches["pingpong"]:  # one warpgroup has nobody to take turns with
            continue
        config = Config(
            problem.dtype,
            head_dim,
            tile_m,
            tile_n,
            pack_gqa=packed,
            num_stages=stages,
            pv_from_registers=registers,
            head_dim_v=head_dim_v,
            family=family,
            promotion_interval=promotion_interval(problem, family, tile_n),
            **switches,
        )
        for num_splits in part_counts(problem, config, sms):
            yield replace(config, num_splits=num_splits)


def part_counts(problem: AttentionProblem, config: Config, sms: int) -> list[int]:
    """Return the numbers of key parts that are worth simulating, ascending.

    They are one, the family's own choice, and those that fill the SMs once and twice.

    >>> part_counts(AttentionProblem(1, 32, 8, 1, 65536, 128), Config(pack_gqa=True), 132)
    [1, 16, 33]
    """
    rows = [sequence.seqlen_q * (problem.group if config.pack_gqa else 1) for sequence in problem.sequences()]
    tiles = tile_heads(problem, config) // problem.batch * sum(-(-count // config.tile_m) for count in rows)
    if tiles >= sms:
        return [1]
    most = min(-(-problem.seqlen_k // config.tile_n), MAX_SPLITS)
    of_packed = choose_num_splits(without_lengths(problem), config, sms) if problem.is_varlen else 0
    chosen = of_packed or config.traits.splits(problem, config.tile_m, config.tile_n)
    wanted = (chosen, sms // tiles, 2 * sms // tiles)
    return sorted({1, *(max(1, min(count, most)) for count in wanted)})


def misfit(config: AnyConfig, machine: Machine) -> str | None:
    """Return why a configuration does not fit an SM, in words, or None if it fits."""
    return next(misfits(kernel_of(config).cta([TileBlocks(1)]), machine), None)


def check_fits(config: AnyConfig, machine: Machine) -> None:
    """Raise ValueError for a configuration that does not fit an SM; the message names tiles that would fit."""
    if reason := misfit(config, machine):
        raise ValueError(f"this schedule does not fit an SM of the {machine.name}: {reason}{_hint(config, machine)}")


def _hint(config: AnyConfig, machine: Machine) -> str:
    """Return in words which tiles fit with the other fields as they are: of each number of rows the one with most
    keys."""
    columns = list(kernel_of(config).other_tiles())
    if not columns:
        return ""
    fitting = (next((other for other in column if not misfit(other, machine)), None) for column in columns)
    tiles = " or ".join(f"{other.tile_m}x{other.tile_n}" for other in fitting if other)
    return f"; with {config.num_stages} stages and this schedule {'a tile of ' if tiles else 'no tile'}{tiles} fits"


def tune(
    problem: AttentionProblem,
    machine: Machine,
    clock_mhz: float | None = None,
    *,
    family: str = OURS,
    pack_gqa: bool | None = None,
    backward: bool = False,
) -> list[Ranked]:
    """Simulate every configuration of a family that fits, forward or backward, and rank by time.

    ``pack_gqa`` True takes only forward configurations with the heads of a group packed, False only those without, and
    None both.

    Returns
    -------
    list of Ranked
        Fastest first; where HBM makes several equally fast, the one whose longest CTA would end first. Empty where
        nothing fits.
    """
    configs = (
        backward_choice.candidates(problem, family, machine)
        if backward
        else candidates(problem, family=family, pack_gqa=pack_gqa, sms=int(machine["sms"]))
    )
    ranked = []
    why_not = cache(partial(misfit, machine=machine))  # of many configurations that differ in no program
    for config in configs:
        kernel = kernel_of(config)
        if why_not(kernel.as_program().config):
            continue
        simulated = estimate(problem, config, machine, clock_mhz)
        gap = simulated.cycles / lower_bound(problem, config, machine, clock_mhz).cycles - 1
        ranked.append(Ranked(config, simulated, gap, kernel.is_chosen(problem, OURS), kernel.is_chosen(problem, PEER)))
    return sorted(ranked, key=lambda r: (r.estimate.cycles, r.estimate.cta_cycles))


def regret(ranked: list[Ranked], among: list[Ranked]) -> float | None:
    """Return how much slower the first of ``among`` is than the first of ``ranked``: 0.1 is 10 %; None if ``among`` is
    empty."""
    return among[0].estimate.cycles / ranked[0].estimate.cycles - 1 if among else None


def without_duplicates(ranked: list[Ranked]) -> list[list[Ranked]]:
    """Return the fastest variant of every tile, and the fastest that each family launches, if that is another one.

    Entries that take the same time, as HBM limits them all, are in one list, where a tile occurs once and an entry that
    a family launches comes first.
    """
    facts: set[tuple[tuple[int, int], str]] = set()
    entries = []
    for entry in ranked:
        tile = entry.config.tile_m, entry.config.tile_n
        own = {(tile, fact) for fact in ("fastest", *entry.launched_by)}
        if own - facts:
            entries.append(entry)
        facts |= own
    groups = (list(alike) for _, alike in groupby(entries, lambda entry: entry.estimate.cycles))
    return [_once(sorted(alike, key=lambda entry: not entry.launched_by)) for alike in groups]


def _once(alike: list[Ranked]) -> list[Ranked]:
    """Return the first entry of every tile."""
    tiles = {(entry.config.tile_m, entry.config.tile_n): entry for entry in reversed(alike)}
    return [entry for entry in alike if entry in tiles.values()]


def agreement(simulated: np.ndarray, measured: np.ndarray) -> tuple[float, tuple[float, ...]]:
    """Return how well simulated cycles order measured ones, two arrays (schedules,): Kendall's tau, and regrets.

    tau is 0 where all entries of one array are equal. There is one regret for each k of :data:`TOP`: the best measured
    time of the k simulated fastest, over the best measured of all, minus 1.
    """
    from scipy.stats import kendalltau  # imported here, as it takes a second

    order = measured[np.argsort(simulated, kind="stable")]
    tau, _ = map(float, kendalltau(simulated, measured))
    return 0.0 if np.isnan(tau) else tau, tuple(float(order[:k].min() / order.min() - 1) for k in TOP)
