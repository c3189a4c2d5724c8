"""Verb tune: rank every tile and schedule that fits; compile or time the best ones our kernels can be launched with."""

from __future__ import annotations

from typing import Any

import rich_click as click
from click.exceptions import Exit

from fa3verify.cli.exits import EPILOG, FINDING, emit, one_line_errors, require_device, require_writable, write
from fa3verify.cli.options import KERNEL_HELP, backward_option, is_given, problem_options
from fa3verify.cli.simulate import problem_of


@click.command(epilog=EPILOG)
@problem_options
@click.option(
    "--machine",
    "machines",
    multiple=True,
    default=("h200",),
    show_default=True,
    help="h100, h200 or a .toml file; of several, what changes between them is said.",
)
@backward_option
@click.option("--top", type=click.IntRange(1), default=10, show_default=True)
@click.option("--kernel", metavar="FAMILY", default="gluon", show_default=True, help=KERNEL_HELP)
@click.option("--compile", "compiles", is_flag=True, help="Compile the top ones our kernels take: registers, spills.")
@click.option("--measure", type=click.IntRange(2), metavar="K", help="Time the top K our kernels take on a GPU.")
@click.option("--csv", "csv_target", metavar="FILE|-", help="Write the table as csv.")
def tune(
    machines: tuple[str, ...],
    json_target: str | None,
    csv_target: str | None,
    compiles: bool,
    measure: int | None,
    **options: Any,
) -> None:
    """Simulate every tile and schedule that fits, with keys in parts and heads packed too, and rank them."""
    with one_line_errors():
        from fa3_kernels.plan.families import OURS, traits_of
        from fa3_simulator import tune as tuning
        from fa3_simulator.machine import load
        from fa3verify.cli.ranking import csv_of, print_changes, print_legend, print_ranking
        from fa3verify.commands.tune import compiled, measured, ranking_of, shown

        builds = compiles or measure is not None
        backward = options["backward"]
        if backward and (builds or options["pack_gqa"]):
            raise ValueError("--backward does not take --compile, --measure and --pack-gqa")
        if builds and len(machines) > 1:
            raise ValueError("--compile and --measure are of one --machine")
        kernel = options["kernel"]
        if builds and not traits_of(kernel).is_built_here:
            raise ValueError(f"--compile and --measure are for --kernel {OURS}, got {kernel}")
        if measure is not None:
            require_device("tune --measure")
        require_writable(json_target, csv_target)
        problem = problem_of(options)
        pack = options["pack_gqa"] if is_given("pack_gqa") else None
        rankings = []
        for machine in {machine.name: machine for machine in map(load, machines)}.values():
            clock = options["clock_mhz"] or machine["max_clock_mhz"]
            ranked = tuning.tune(problem, machine, clock, family=kernel, pack_gqa=pack, backward=backward)
            if not ranked:
                raise ValueError(f"no schedule for head_dim {options['head_dim']} fits an SM of the {machine.name}")
            best = shown(ranked, options["top"], compiles, measure)
            ranking = ranking_of(problem, machine, kernel, ranked, best)
            ranking = compiled(ranking, best, problem) if compiles else ranking
            rankings.append(measured(ranking, best[:measure], problem) if measure else ranking)
        first, *others = rankings
        hazards = [hazard for ranking in rankings for hazard in ranking.hazards]
        beside = {"others": [ranking.to_json() for ranking in others]} if others else {}
        emit(first.to_json() | beside, json_target)
        write(csv_of(rankings), csv_target)
        if "-" not in (json_target, csv_target):
            for ranking in rankings:
                print_ranking(ranking, builds=builds)
            for ranking in others:
                print_changes(ranking, first)
            print_legend(first.held_out, hazards)
        if hazards:
            raise Exit(FINDING)
