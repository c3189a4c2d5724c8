"""The timeline of one CTA that the verb ``simulate`` draws: as text, as SVG, and for Perfetto beside a measured one."""

from __future__ import annotations

import json
from pathlib import Path

import rich_click as click

from fa3_reference.problem import AttentionProblem
from fa3_reference.rules import require
from fa3_simulator.cta import AnyConfig, kernel_of
from fa3_simulator.timeline import Bar, chrome_trace, svg_gantt, text_gantt
from fa3verify.cli.exits import letters, require_device
from fa3verify.cli.options import Options, given_options
from fa3verify.files import Json, write_text
from fa3verify.timed.stamps import Stamps, aligned, cycles_per_block, read

Timelines = dict[str, list[Bar]]  # bars by the title of a timeline
SVG_CYCLES = 20000  # the most cycles that are drawn
GROUPED = ("nheads_kv", "pack_gqa", "num_splits", "seqlen_q")  # options that a file of stamps does not record


def stamps_of(target: Path | None, measured: Path | None, options: Options) -> Stamps | None:
    """Read the measured stamps of --measured and set the options to the problem they were taken of; None without.

    ValueError for --measured or --measure without --trace, for both, and for options that contradict them.
    """
    measure = options["measure"]
    require(
        target or not (measured or measure),
        "--measured and --measure draw beside what --trace FILE writes: give that as well",
    )
    require(not (measured and measure), "--measure records what --measured reads: give one of them")
    if measure and (given := given_options(("backward", "p_in_smem", "page_size", "clock_mhz", *GROUPED))):
        raise ValueError(f"--measure runs our forward kernel at the clock it gets and does not take {', '.join(given)}")
    if measured is None:
        return None
    stamps = read(measured)
    names = ("dtype", "head_dim", "tile", "seqlen", "causal")
    stated = {name: getattr(stamps, name) for name in names} | stamps.options
    if given := given_options(("backward", "clock_mhz", *GROUPED, *stated)):
        raise ValueError(
            f"--measured takes problem, schedule and clock from the file and does not take {', '.join(given)}"
        )
    options.update(stated)
    return stamps


def record_stamps(problem: AttentionProblem, config: AnyConfig, path: Path) -> tuple[float, Stamps | None, str]:
    """Record stamps on this machine's GPU into a file; return its clock in MHz, the stamps, and an empty text.

    Stamps that are no evidence, as they slowed the kernel too much, are None, and the text says why. ValueError for a
    schedule that the kernel with stamps does not have; exit without a GPU.
    """
    ours = kernel_of(config).built_here
    if ours is None or (ours.num_stages, ours.softmax_stages) != (2, 2):
        got = "{2} stages and {4}".format(*kernel_of(config).row)
        raise ValueError(
            f"--measure runs kernel gluon with 2 stages and a softmax of 2, got {config.family} with {got}"
        )
    require_device("simulate --measure")
    from fa3verify.bench.timelines import record
    from fa3verify.bench.tuning import options_of

    _, sm_mhz = record(problem, options_of(ours, problem), path)
    try:
        return sm_mhz, read(path), ""
    except ValueError as error:
        return sm_mhz, None, str(error)


def side_by_side(name: str, simulated: list[Bar], stamps: Stamps | None) -> Timelines:
    """Return the simulated timeline and, if there are stamps, the measured one aligned with it, by their titles."""
    if stamps is None:
        return {name: simulated}
    measured = f"{stamps.kernel}, measured at {stamps.sm_mhz:.0f} MHz, {stamps.slowdown - 1:+.1%} by the stamps"
    return {name: simulated, measured: aligned(stamps, simulated)}


def write_svg(path: Path, drawn: list[Bar], cycles: float, title: str) -> None:
    """Write the first :data:`SVG_CYCLES` of a timeline of ``cycles`` as an SVG."""
    shown = min(cycles, SVG_CYCLES)
    write_text(path, svg_gantt(drawn, 0, shown, f"{title}: first {shown:.0f} cycles of a CTA"))


def write_trace(path: Path, timelines: Timelines, clock_mhz: float, stamps: Stamps | None) -> Json:
    """Write timelines as Chrome JSON; return the number of events and, with stamps, both cycles per key block."""
    events = chrome_trace(timelines, clock_mhz)
    write_text(path, json.dumps(events))
    figures = {"events": len(events["traceEvents"])}
    if stamps is None:
        return figures
    simulated = cycles_per_block(next(iter(timelines.values())))
    return figures | {"simulated_cycles_per_block": simulated, "measured_cycles_per_block": stamps.cycles_per_block}


def print_timelines(timelines: Timelines, cycles: float) -> None:
    """Print the same stretch of every timeline as text, with its title if there are two.

    It begins at 30 % of the shortest and is at most 6000 cycles long; ``cycles`` is the length of the simulated one.
    """
    _, *measured = timelines.values()
    end = min([cycles, *(max(bar.stop for bar in drawn) for drawn in measured)])
    for name, drawn in timelines.items():
        if len(timelines) > 1:
            click.echo(name)
        click.echo(text_gantt(drawn, end * 0.3, min(end * 0.3 + 6000, end), letters()))


def print_trace(path: Path, figures: Json, *, quiet: bool) -> None:
    """Print the path of the trace, its length and, with stamps, both cycles per key block; if quiet only the path."""
    click.echo(path if quiet else f"{path}: {figures['events']} events, {figures['cycles']:.0f} cycles")
    if not quiet and "measured_cycles_per_block" in figures:
        each = " and ".join(f"{figures[f'{kind}_cycles_per_block']:.0f} {kind}" for kind in ("simulated", "measured"))
        click.echo(f"cycles per key block: {each}")
