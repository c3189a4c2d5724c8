"""Kernels that somebody described, and families, as verbs take them: ``FILE.py:KERNEL,stages=3`` or ``flash3``.

``simulate``, ``hazards`` and ``tune`` use this. The figures are :mod:`fa3_simulator.described`'s.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from fa3_reference.rules import require
from fa3verify.cli.options import Options, group
from fa3verify.files import Json

if TYPE_CHECKING:
    from fa3_simulator.accounts import Traced
    from fa3_simulator.described import Choice, TimedLaunch
    from fa3_simulator.description import Schedule, Values
    from fa3_simulator.machine import Machine
    from fa3_simulator.run import Estimate
    from fa3_simulator.unbounded import Proof

set_option = click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="A parameter of described kernels."
)
what_if_option = click.option(
    "--what-if",
    "what_if",
    multiple=True,
    metavar="NAME=xN|+N",
    help="Another machine: tensor, mufu, vector, port, l2, hbm or barriers N times as fast (mufu=x2), or more smem "
    "(+64K bytes) or registers (+16 a thread).",
)
described_options = group(what_if_option, set_option)
SHOWN = 5  # the most findings that are printed
ERROR = 0.05  # of a simulated time of somebody's kernel
VECTOR = 0.2  # how far off the vector counts that somebody declared may be
SUFFIXES = {"K": 2**10, "M": 2**20}


def is_described(kernel: str) -> bool:
    """Tell whether a kernel is named by the file that describes it."""
    return kernel.split(",")[0].split(":")[0].endswith(".py")


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def pair(text: str) -> tuple[str, str]:
    """Return the name and the value of a setting; ValueError for another text."""
    name, equals, value = text.partition("=")
    require(bool(name and equals), f"a setting is NAME=VALUE, got {text}")
    return name, value


def schedule_of(kernel: str, settings: Sequence[str] = ()) -> Schedule:
    """Return the schedule that ``FILE.py:KERNEL,NAME=VALUE`` names, with the settings of ``--set`` in front of its own.

    KERNEL may be left out where the file describes one. ValueError for what is not there.
    """
    from fa3_simulator.description import described

    place, *own = kernel.split(",")
    path, _, name = place.partition(":")
    known = described(Path(path))
    require(name in known or (not name and len(known) == 1), f"name one of {path}: {', '.join(known)}")
    values = {name: _value(value) for name, value in map(pair, (*settings, *own))}
    return known[name or next(iter(known))](**values)


def machine_if(machine: Machine, changes: Sequence[str]) -> Machine:
    """Return a machine with the changes of ``--what-if``; ValueError for one that is not known."""
    from fa3_simulator.what_if import RATES, SIZES, changed

    for text in changes:
        name, value = pair(text)
        is_rate = value.startswith("x")
        known = RATES if is_rate else SIZES
        require(
            name in known and value[:1] in ("x", "+"),
            f"--what-if takes {', '.join(RATES)} as NAME=xN, and {', '.join(SIZES)} as NAME=+N, got {text}",
        )
        unit = SUFFIXES.get(value[-1], 1)
        number = float(value[1:].rstrip("KM")) * unit
        machine = changed(machine, name, number) if is_rate else changed(machine, name, more=number)
    return machine


def traced_schedule(schedule: Schedule, machine: Machine, clock: float | None) -> tuple[TimedLaunch, Traced]:
    """Return the timed launch of a schedule, and its longest CTA with a record."""
    from fa3_simulator.accounts import Traced, first_blocks, trace_cta
    from fa3_simulator.described import timed

    found = timed(schedule, machine, clock)
    program, tables, trace = trace_cta(found.cta.kernel, machine, clock, first_blocks(found.estimate.tiles))
    return found, Traced(schedule.name, found.estimate, program, tables, trace)


def figures_of(schedule: Schedule, machine: Machine, clock: float | None, found: TimedLaunch, traced: Traced) -> Json:
    """Return what is printed of a described kernel, with the names that families have."""
    from fa3_simulator.clock import under_load
    from fa3_simulator.described import timed
    from fa3_simulator.hazards import check
    from fa3_simulator.overlap import measure
    from fa3_simulator.what_if import changed, speedups

    estimate = found.estimate

    def again(clock_mhz: float) -> Estimate:
        return timed(schedule, machine, clock_mhz).estimate

    overlap = measure(traced.program, traced.tables, traced.trace)
    idle = sum(overlap.ledger.values()) or 1
    moved = [
        timed(schedule, changed(machine, "vector", 1 / (1 + share)), clock).estimate.cycles / estimate.cycles - 1
        for share in (-VECTOR, VECTOR)
    ]
    return {
        "schedule": schedule.name,
        "machine": machine.name,
        "clock_mhz": estimate.clock_mhz,
        "cycles": round(estimate.cycles),
        "milliseconds": estimate.seconds * 1e3,
        "tflops": found.tflops,
        "hbm_tb_per_s": found.launch.hbm_bytes / estimate.seconds / 1e12,
        "ctas_on_an_sm": found.together,
        "tensor_efficiency": overlap.tensor_efficiency,
        "overlap_efficiency": overlap.overlap_efficiency,
        "binds": "hbm" if estimate.hbm_cycles > estimate.cta_cycles else overlap.binds,
        "times_as_fast_if_free": speedups(traced.program, machine, clock, traced.trace),
        "idle_tensor_share": {cause: ticks / idle for cause, ticks in overlap.ledger.items()},
        **under_load(machine, found.launch.dtype, estimate, again, found.launch.flops),
        "moves_by_vector_counts": moved,
        "hazards": [
            hazard._asdict()
            for hazard in check(schedule.program(estimate.tiles[: 1 + found.launch.persistent]), machine)
        ],
    }


def loaded_line(figures: Mapping[str, float], machine: Machine) -> str:
    """Return the figures of :func:`fa3_simulator.clock.under_load`, what they were fitted on, and another cap here."""
    import subprocess

    from fa3verify.timed.timing import query

    fitted_w = machine.clock["power_cap_w"].value
    try:
        here_w = float(query("power.limit"))
    except (OSError, subprocess.CalledProcessError, ValueError):
        here_w = fitted_w  # no GPU, or none that says
    return (
        f"{figures['milliseconds_under_load']:.4g} ms, {figures['tflops_under_load']:.0f} TFLOP/s at "
        f"{figures['clock_under_load_mhz']:.0f} MHz, the clock predicted under load "
        f"(of a cool burst, fitted on one {machine.name} at {fitted_w:.0f} W"
        + (f"; the GPU here is capped at {here_w:.0f} W)" if here_w != fitted_w else ")")
    )


def waiting_lines(figures: Json) -> list[str]:
    """Return in words what would help a schedule, and what its tensor cores wait for, most of the time first."""
    free = ", ".join(f"{thing} {ratio:.2f}" for thing, ratio in figures["times_as_fast_if_free"].items())
    idle = sorted(figures["idle_tensor_share"].items(), key=lambda item: -item[1])
    waits = ", ".join(f"{cause} {share:.0%}" for cause, share in idle if share >= 0.005)
    return [f"times as fast if free: {free}", f"idle tensor core: {waits}"]


def print_figures(figures: Json, machine: Machine) -> None:
    """Print the figures of :func:`figures_of`."""
    click.echo(f"{figures['schedule']} on {figures['machine']} at {figures['clock_mhz']:.0f} MHz")
    rate = f"{figures['tflops']:.0f} TFLOP/s" if figures["tflops"] else f"{figures['hbm_tb_per_s']:.2f} TB/s"
    low, high = figures["moves_by_vector_counts"]
    lines = [
        f"{figures['cycles']} cycles, {figures['milliseconds']:.4g} ms, {rate}, {figures['ctas_on_an_sm']} CTA an SM",
        *([loaded_line(figures, machine)] if "clock_under_load_mhz" in figures else []),
        f"with vector counts {VECTOR:.0%} lower or higher {low:+.1%} or {high:+.1%}",
        f"tensor efficiency {figures['tensor_efficiency']:.3f}, overlap efficiency {figures['overlap_efficiency']:.3f} "
        f"({figures['binds']} binds)",
        *waiting_lines(figures),
        *(f"{hazard['kind']}: {hazard['text']}" for hazard in figures["hazards"][:SHOWN]),
    ]
    for line in lines:
        click.echo(f"  {line}")
    if not figures["hazards"]:
        click.echo("  hazards: none in this CTA, in any order (of any tiles: fa3verify hazards)")
    elif len(figures["hazards"]) > SHOWN:
        click.echo(f"  and {len(figures['hazards']) - SHOWN} more findings")


def differing(first: Traced, second: Traced) -> Json:
    """Return the cycles of two launches by cause, and what the second takes more by each."""
    from fa3_simulator.accounts import account, differences

    sides = account(first), account(second)
    return {"kernels": [first.name, second.name], "causes": sides, "more": differences(*sides)}


def print_difference(figures: Json) -> None:
    """Print the figures of :func:`differing`; the differences add up to the last line."""
    first, second = figures["causes"]
    for name, causes in zip(figures["kernels"], figures["causes"], strict=True):
        click.echo(f"{name}: {sum(causes.values())} cycles")
    for cause, cycles in figures["more"].items():
        click.echo(f"  {cycles:+10d}  {cause} ({first.get(cause, 0)}, {second.get(cause, 0)})")
    click.echo(f"  {sum(figures['more'].values()):+10d}  together, of the second")


def ranges_of(over: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values of each parameter of ``--over``: ``stages=2:4`` has both ends, ``bn=96:192:16`` a step, and
    ``bn=64,128`` is a list.

    ValueError for a range without values.
    """
    ranges = {}
    for name, text in map(pair, over):
        first, *others = text.split(":")
        if others:
            step = int(others[1]) if len(others) > 1 else 1
            ranges[name] = list(range(int(first), int(others[0]) + 1, step))
        else:
            ranges[name] = [_value(each) for each in text.split(",")]
        require(bool(ranges[name]), f"--over {name}={text} has no value")
    return ranges


def _words(values: Values) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def print_choices(choices: Sequence[Choice], otherwise: Values, top: int) -> None:
    """Print a ranking of described schedules, with a bar for the time of each, and its first in a sentence.

    ``otherwise`` are the values that would be first if vector counts were higher.
    """
    fitting = [found for choice in choices if (found := choice.timed)]
    longest = max((found.estimate.cycles for found in fitting[:top]), default=1.0)
    for place, choice in enumerate(choices[:top], 1):
        words = f"{place:>3} {_words(choice.values)}"
        if choice.timed is None:
            click.echo(f"{words}: does not fit: {choice.misfit}")
            continue
        cycles = choice.timed.estimate.cycles
        click.echo(
            f"{words}: {cycles:.0f} cycles, {choice.timed.tflops:.0f} TFLOP/s {'#' * round(24 * cycles / longest)}"
        )
    if len(choices) > top:
        click.echo(f"    and {len(choices) - top} more; of all, {len(choices) - len(fitting)} do not fit")
    if len(fitting) < 2:
        return
    first = choices[0].values
    ahead = fitting[1].estimate.cycles / fitting[0].estimate.cycles - 1
    held = "is still the first" if otherwise == first else f"gives way to {_words(otherwise)}"
    click.echo(
        f"Take {_words(first)}: {ahead:.1%} ahead of the next; with vector counts {VECTOR:.0%} higher it {held}. "
        f"Choices within {ERROR:.0%} are a tie."
    )


def tune(kernel: str, options: Options, machines: Sequence[str], clock: float | None, *, prints: bool) -> Json:
    """Rank the choices of ``--over`` for a described kernel on each machine, print them, and return them as JSON."""
    from fa3_simulator import described as timing
    from fa3_simulator.machine import load
    from fa3_simulator.what_if import changed

    schedule = schedule_of(kernel, options["settings"])
    over = ranges_of(options["over"])
    told = {}
    for machine in (machine_if(load(name), options["what_if"]) for name in machines):
        choices = timing.tune(schedule, machine, over, clock)
        slower = timing.tune(schedule, changed(machine, "vector", 1 / (1 + VECTOR)), over, clock)
        if prints:
            click.echo(f"{schedule.name} on {machine.name}:")
            print_choices(choices, slower[0].values, options["top"])
        told[machine.name] = [
            {**choice.values, "misfit": choice.misfit}
            | ({"cycles": round(found.estimate.cycles), "tflops": found.tflops} if (found := choice.timed) else {})
            for choice in choices
        ]
    return {"schedule": schedule.name, "ranked": told}


def check(kernel: str, settings: Sequence[str], machine: Machine) -> tuple[str, Proof]:
    """Return the name of a described kernel with its file, and the proof that it is safe."""
    from fa3_simulator.described import hazards

    schedule = schedule_of(kernel, settings)
    return f"description {kernel.split(':')[0].split(',')[0]}:{schedule.name}", hazards(schedule, machine)
