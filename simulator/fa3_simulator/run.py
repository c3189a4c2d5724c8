"""A whole launch: its tiles are handed to the SMs, and the CTA with the most work is simulated.

:func:`estimate` is what verbs and the tuner call, and :func:`timed` simulates a launch of any kernel. Tiles go to the
CTA that is free first: our kernels hand them out by their static schedule (:mod:`fa3_kernels.plan.tile_order`), others
longest first or by the counter of FlashAttention-3 (:mod:`fa3_simulator.forward_launch`). The time is that of the
launch, plus that of the CTA with the most work (:mod:`fa3_simulator.cta`) and what CTAs of a forward wait for each
other (:mod:`fa3_simulator.contention`); or, if that is longer, what HBM needs to move every tensor once. A backward
adds the kernels in front and behind, and keys cut into parts add the kernel that merges them. Where key tiles of a
backward take turns, all CTAs are simulated together (:mod:`fa3_simulator.turns`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fa3_reference.problem import AttentionProblem
from fa3_simulator.cta import AnyConfig, Cycles, TimedCta, kernel_of
from fa3_simulator.held_out import HeldOut, held_out
from fa3_simulator.launch import Launch, hbm_cycles
from fa3_simulator.machine import Machine
from fa3_simulator.pages import over_pages
from fa3_simulator.schedules import TileBlocks

INTERVAL = (
    "cycles_low",
    "cycles_high",
    "milliseconds_low",
    "milliseconds_high",
    "interval_class",
    "interval_rows",
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Simulated time of a launch; cycles are SM clocks.

    Parameters
    ----------
    cycles : float
        From launch to the end of the last CTA, or to when HBM has moved every tensor once, if that is later; plus
        ``around_cycles``, and those of the kernel that makes the schedule of packed sequences.
    cta_cycles : float
        Duration of the CTA that ends last.
    hbm_cycles : float
        Time in which HBM moves every tensor of the main kernel once.
    tensor_cycles, mufu_cycles, smem_cycles : float
        How long the tensor core, the special-function unit, and the port of shared memory are busy in that CTA.
    tiles : tuple of TileBlocks
        Tiles of that CTA, in order.
    clock_mhz : float
        SM clock.
    around_cycles : float
        Duration of the kernels in front of and behind the main one: those of a backward, and the one that merges the
        parts of the keys.
    held_out : HeldOut, optional
        What timings of launches alike say of it, None where too few were timed; estimates that differ in it are equal.
    """

    cycles: float
    cta_cycles: float
    hbm_cycles: float
    tensor_cycles: float
    mufu_cycles: float
    smem_cycles: float
    tiles: tuple[TileBlocks, ...]
    clock_mhz: float
    around_cycles: float = 0.0
    held_out: HeldOut | None = field(default=None, compare=False)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The ends of the 90 % interval of the cycles of a measured launch; None where too few alike were timed."""
        return self.held_out and self.held_out.interval(self.cycles)

    def interval_figures(self) -> dict[str, float | str | None]:
        """Return what is stated of the measured time.

        Returns
        -------
        dict of str to float, str or None
            By :data:`INTERVAL` the ends of the 90 % interval in cycles and milliseconds, and its class and number of
            timings; None for each where nothing is said.
        """
        known = self.held_out
        ends = (*known.interval(self.cycles), *known.interval(self.seconds * 1e3)) if known else [None] * 4
        return dict(zip(INTERVAL, (*ends, known and known.group, known and known.rows), strict=True))

    @property
    def main_cycles(self) -> float:
        """Cycles of the main kernel alone."""
        return self.cycles - self.around_cycles

    @property
    def seconds(self) -> float:
        """Time of the launch at :attr:`clock_mhz`."""
        return self.cycles / (self.clock_mhz * 1e6)

    @property
    def tensor_efficiency(self) -> float:
        """Tensor work over time, of the longest CTA."""
        return self.tensor_cycles / self.cta_cycles


def in_words(problem: AttentionProblem) -> str:
    """Return a problem in words, half a line long.

    >>> in_words(AttentionProblem(32, 32, 8, 1, 8192, 128))
    'fp16 d128 dense, 32 x 32/8 heads, 1 x 8192'
    """
    p = problem
    packed = f", {p.q_shape[0]} x {sum(p.seqlens_k)} packed" if p.seqlens_k else ""
    packed += f", pages of {p.cache.page_size}" if p.cache and p.cache.page_size else ""
    heads = f"{p.nheads}/{p.nheads_kv}" if p.group > 1 else p.nheads
    packed += f", chunks of {p.attention_chunk}" if p.attention_chunk else ""
    mask = "causal" if p.causal else "dense" if p.window == (-1, -1) else "window {} {}".format(*p.window)
    return f"{p.dtype} d{p.head_dim} {mask}, {p.batch} x {heads} heads, {p.seqlen_q} x {p.seqlen_k}{packed}" + (
        f", softcap {p.softcap:g}" if p.softcap else ""
    )


def timed(launch: Launch, cta: TimedCta, ctas: int) -> Estimate:
    """Simulate a launch, whose tiles are handed out to so many CTAs like ``cta``."""
    machine = cta.machine
    tiles = launch.longest(ctas, cta.tile_cost() if launch.tile_cost is None else launch.tile_cost)
    longest = cta.run(tiles) if tiles else Cycles(0.0, 0.0, 0.0, 0.0)
    waited = 0.0
    if launch.waits and tiles:
        alone, waited = launch.waits(*cta.tile_times(cta.alone), tiles, longest.cta)
        longest = longest._replace(cta=alone)
    hbm = hbm_cycles(launch.hbm_bytes, machine, cta.clock_mhz)
    beside = launch.front_cycles + machine["launch_cycles"] + launch.drains * machine["drain_cycles"]
    return Estimate(
        cycles=max(longest.cta + waited, hbm) + beside + launch.around_cycles,
        cta_cycles=longest.cta,
        hbm_cycles=hbm,
        tensor_cycles=longest.tensor,
        mufu_cycles=longest.mufu,
        smem_cycles=longest.smem,
        tiles=tiles,
        clock_mhz=cta.clock_mhz,
        around_cycles=launch.around_cycles,
    )


def estimate(
    problem: AttentionProblem, config: AnyConfig, machine: Machine, clock_mhz: float | None = None
) -> Estimate:
    """Simulate a launch, with the kernels in front of and behind the main one.

    Parameters
    ----------
    problem : AttentionProblem
        With windows, sequences of their own lengths and, forward, keys in a cache too.
    config : Config or BackwardSchedule
        The kernel: a Config for a forward, a BackwardSchedule for a backward.
    machine : Machine
        The GPU.
    clock_mhz : float, optional
        SM clock, the machine's maximum by default.

    Returns
    -------
    Estimate
        The simulated time and what it is made of.

    Raises
    ------
    ValueError
        For a problem that no program is written for, and for a launch that is too large.
    """
    clock = clock_mhz or machine["max_clock_mhz"]
    kernel = kernel_of(config).compiled(problem)
    launch = kernel.launch(problem, machine, clock)
    found = timed(
        launch, TimedCta(kernel.as_program(), over_pages(problem, config, machine), clock), int(machine["sms"])
    )
    return replace(found, held_out=held_out(problem, config, machine, found.cycles))
