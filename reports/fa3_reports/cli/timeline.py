"""Verb timeline: what our kernel stamped inside a launch, drawn beside the same launch simulated."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from fa3verify.cli.exits import EPILOG, FINDING, Verb, emit, fail, require_device
from fa3verify.cli.options import Options, machine_option, problem_options, refuse_options, schedule_options
from fa3verify.cli.simulate import setup

if TYPE_CHECKING:
    from fa3_reference.problem import AttentionProblem
    from fa3_reports.stamps import Stamps
    from fa3_simulator.cta import AnyConfig

# Options that a file of stamps does not record.
GROUPED = (
    "nheads_kv",
    "pack_gqa",
    "num_splits",
    "seqlen_q",
    "seqlens_q",
    "seqlens_k",
    "window",
    "page_size",
)


def record_stamps(problem: AttentionProblem, config: AnyConfig, path: Path) -> tuple[float, Stamps | None, str]:
    """Record stamps on this machine's GPU into a file; return its clock in MHz, the stamps, and an empty text.

    Stamps that are no evidence, as they slowed the kernel too much, are None, and the text says why. ValueError for a
    schedule that the kernel with stamps does not have; exit without a GPU.
    """
    from fa3_reports.stamps import read
    from fa3_simulator.cta import kernel_of

    ours = kernel_of(config).built_here
    if ours is None or (ours.num_stages, ours.softmax_stages) != (2, 2):
        got = "{2} stages and {4}".format(*kernel_of(config).row)
        raise ValueError(f"--record runs kernel gluon with 2 stages and a softmax of 2, got {config.family} with {got}")
    require_device("timeline --record")
    from fa3_reports.measured.timelines import record
    from fa3verify.bench.tuning import options_of

    _, sm_mhz = record(problem, options_of(ours, problem), path)
    try:
        return sm_mhz, read(path), ""
    except ValueError as error:
        return sm_mhz, None, str(error)


def _stated(stamps: Stamps, options: Options) -> None:
    """Set the options to the problem that a file is of; ValueError for options that contradict it."""
    names = ("dtype", "head_dim", "tile", "seqlen", "causal")
    stated = {name: getattr(stamps, name) for name in names} | stamps.options
    refused = ("backward", "clock_mhz", *GROUPED, *stated)
    refuse_options(refused, "a timeline takes problem, schedule and clock from its file and does not take {}")
    options.update(stated)


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("file", metavar="STAMPS.csv", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--trace",
    "target",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="FILE",
    help="Write both timelines there as Chrome JSON, for Perfetto.",
)
@click.option("--record", is_flag=True, help="Record STAMPS.csv first, on a GPU, of the problem that the options name.")
@problem_options
@machine_option
@schedule_options
@click.option("--quiet", is_flag=True, help="Print the path of --trace only.")
def timeline(
    file: Path,
    target: Path,
    record: bool,
    json_target: str | None,
    clock_mhz: float | None,
    quiet: bool,
    **options: Any,
) -> None:
    """Draw what CTA 0 of our forward stamped beside what is simulated, at the clock that was measured.

    An instrument that slows its kernel by more than 3 % is no evidence: its file is refused.
    """
    from fa3_reports.stamps import aligned, cycles_per_block, read
    from fa3_simulator.timeline import bars
    from fa3verify.cli import timeline as drawn
    from fa3verify.commands.simulate import traced_family

    options["what_if"] = ()
    stamps, refusal = None, ""
    if record:
        refused = ("backward", "p_in_smem", "clock_mhz", *GROUPED)
        refuse_options(refused, "--record runs our forward kernel at the clock it gets and does not take {}")
    else:
        stamps = read(file)
        _stated(stamps, options)
    problem, config, machine = setup(options)
    if record:
        clock_mhz, stamps, refusal = record_stamps(problem, config, file)
    first = traced_family("", problem, config, machine, stamps.sm_mhz if stamps else clock_mhz, is_drawn=True)
    simulated = bars(first.program, first.trace)
    timelines = {f"{first.program.name}, simulated {machine.name}": simulated}
    if stamps:
        slower = f"{stamps.slowdown - 1:+.1%} by the stamps"
        timelines[f"{stamps.kernel}, measured at {stamps.sm_mhz:.0f} MHz, {slower}"] = aligned(stamps, simulated)
    figures = drawn.write_trace(target, timelines, first.estimate.clock_mhz, first.trace.cycles)
    if stamps:
        figures["simulated_cycles_per_block"] = cycles_per_block(simulated)
        figures["measured_cycles_per_block"] = stamps.cycles_per_block
    emit(figures, json_target)
    if json_target != "-":
        if not quiet:
            drawn.print_timelines(timelines, first.trace.cycles)
        drawn.print_trace(target, figures, quiet=quiet)
        if stamps and not quiet:
            both = (figures[f"{kind}_cycles_per_block"] for kind in ("simulated", "measured"))
            click.echo("cycles per key block: {:.0f} simulated and {:.0f} measured".format(*both))
    if refusal:
        fail(FINDING, refusal)
