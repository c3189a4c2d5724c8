"""Verb trace: the simulated timeline of one CTA for Perfetto, beside a measured one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from fa3verify.cli.exits import EPILOG, FINDING, emit, fail, letters, one_line_errors, require_device
from fa3verify.cli.options import Options, given_options, machine_option, problem_options, schedule_options
from fa3verify.cli.simulate import setup, trace_cta

if TYPE_CHECKING:
    from fa3_simulator.timeline import Bar
    from fa3verify.timed.stamps import Stamps

GROUPED = ("nheads_kv", "pack_gqa", "num_splits", "seqlen_q")  # what a file of stamps does not say


@click.command(epilog=EPILOG)
@problem_options
@machine_option
@schedule_options
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--measured",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="STAMPS.csv",
    help="Draw a measured timeline beside it; problem, schedule and clock are those of the file.",
)
@click.option("--measure", is_flag=True, help="Record that timeline now, on a GPU, as OUT with suffix .stamps.csv.")
@click.option("--quiet", is_flag=True, help="Print the path only.")
def trace(
    out: Path,
    clock_mhz: float | None,
    json_target: str | None,
    measured: Path | None,
    measure: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Write the simulated timeline of one CTA to OUT as Chrome JSON, for Perfetto."""
    with one_line_errors():
        from fa3_simulator.run import longest_cta
        from fa3_simulator.timeline import bars, chrome_trace
        from fa3verify.files import write_text
        from fa3verify.timed.stamps import aligned, cycles_per_block

        if measure and measured:
            raise ValueError("--measure records what --measured reads: give one of them")
        stamps = _stamps(measured, options) if measured else None
        refusal = ""
        if measure:
            clock_mhz, stamps, refusal = _measure(out.with_suffix(".stamps.csv"), options)
        problem, config, machine = setup(options)
        tiles = longest_cta(problem, config, int(machine["sms"]))
        clock = stamps.sm_mhz if stamps else clock_mhz or machine["max_clock_mhz"]
        program, _, run = trace_cta(config, machine, clock, tiles)
        simulated = bars(program, run)
        processes = {f"{program.name}, simulated {machine.name}": simulated}
        figures = {"cycles": run.cycles}
        if stamps:
            slowed = f"{stamps.slowdown - 1:+.1%} by the stamps"
            name = f"{stamps.kernel}, measured at {stamps.sm_mhz:.0f} MHz, {slowed}"
            processes[name] = aligned(stamps, simulated)
            figures["simulated_cycles_per_block"] = cycles_per_block(simulated)
            figures["measured_cycles_per_block"] = stamps.cycles_per_block
        events = chrome_trace(processes, clock)
        write_text(out, json.dumps(events))
        count = len(events["traceEvents"])
        emit({"events": count, **figures}, json_target)
        if json_target != "-":
            click.echo(out if quiet else f"{out}: {count} events, {run.cycles:.0f} cycles")
        if stamps and not quiet and json_target != "-":
            _print_both(processes, figures)
        if refusal:
            fail(FINDING, refusal)


def _print_both(processes: dict[str, list[Bar]], figures: dict[str, float]) -> None:
    """Both timelines as text, of the same cycles."""
    from fa3_simulator.timeline import text_gantt

    start = 0.3 * min(max(bar.stop for bar in drawn) for drawn in processes.values())
    for name, drawn in processes.items():
        click.echo(f"{name}\n{text_gantt(drawn, start, start + 6000, letters())}")
    each = " and ".join(f"{figures[f'{kind}_cycles_per_block']:.0f} {kind}" for kind in ("simulated", "measured"))
    click.echo(f"cycles per key block: {each}")


def _measure(path: Path, options: Options) -> tuple[float, Stamps | None, str]:
    """Record stamps on the GPU here: the clock it ran at, and the stamps or why they are no evidence."""
    from fa3_kernels.plan.config import Config
    from fa3verify.timed.stamps import read

    if given := given_options(("backward", "p_in_smem", "page_size", "clock_mhz", *GROUPED)):
        raise ValueError(f"--measure runs our forward kernel at the clock it gets and does not take {', '.join(given)}")
    problem, config, _ = setup(options)
    assert isinstance(config, Config)  # as --backward is not taken
    if not config.traits.is_built_here or (config.num_stages, config.softmax_stages) != (2, 2):
        raise ValueError(
            "--measure runs kernel gluon with 2 stages and a softmax of 2, "
            f"got {config.family} with {config.num_stages} and {config.softmax_stages}"
        )
    require_device("trace --measure")
    from fa3verify.bench.timelines import record
    from fa3verify.bench.tuning import cell_of, options_of

    _, sm_mhz = record(cell_of(problem), options_of(config, problem), path)
    try:
        return sm_mhz, read(path), ""
    except ValueError as error:
        return sm_mhz, None, str(error)


def _stamps(path: Path, options: Options) -> Stamps:
    """Read measured stamps; what they say of the problem becomes the options."""
    from fa3verify.timed.stamps import read

    stamps = read(path)
    names = ("dtype", "head_dim", "tile", "seqlen", "causal")
    stated = {name: getattr(stamps, name) for name in names} | stamps.options
    if given := given_options(("backward", "clock_mhz", *GROUPED, *stated)):
        raise ValueError(
            f"--measured takes problem, schedule and clock from the file and does not take {', '.join(given)}"
        )
    options.update(stated)
    return stamps
