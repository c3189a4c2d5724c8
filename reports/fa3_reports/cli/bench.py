"""Verb bench: our kernels beside their peers, timed on a Hopper GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click
from click.exceptions import Exit
from rich.console import Console
from rich.markup import escape

from fa3_reports.bench.grids import GRIDS
from fa3verify.cli.exits import EPILOG, FINDING, NOTHING, OK, Verb, fail, require_device
from fa3verify.cli.options import Options, group, peers_option, seed_option

if TYPE_CHECKING:
    from fa3_reports.bench.cells import Cell
    from fa3_reports.bench.results import Results

# Options that name cells, the kernels that are launched on them, and where the results go.
launch_options = group(
    click.option(
        "--out", type=click.Path(path_type=Path, file_okay=False), default=Path("out/bench"), show_default=True
    ),
    peers_option,
    click.option(
        "--kernels",
        "names",
        metavar="NAME",
        multiple=True,
        help="Names or patterns (gluon*, flash3); all by default.",
    ),
    click.option("--causal/--no-causal", default=None, help="Both by default."),
    click.option("--seqlen", "seqlens", type=int, multiple=True, help="All of the grid by default."),
    click.option("--head-dim", "head_dims", type=int, multiple=True, help="All of the grid by default."),
    click.option(
        "--dtype", "dtypes", type=click.Choice(["fp16", "bf16", "e4m3"]), multiple=True, help="All by default."
    ),
    click.option("--grid", type=click.Choice(GRIDS), default="paper", show_default=True),
)
budget_option = click.option(
    "--budget",
    type=click.FloatRange(0),
    default=float("inf"),
    show_default="no limit",
    help="Seconds after which no cell is begun.",
)


def cells_of(options: Options) -> list[Cell]:
    """Return the cells of the grid that the options name; exit with code 5 if there are none."""
    from fa3_reports.bench.cells import select

    filters = {name: options[name] for name in ("head_dims", "seqlens", "causal")}
    cells = select(options["grid"], options["dtypes"] or ("fp16", "bf16", "e4m3"), **filters)
    if not cells:
        fail(NOTHING, f"no cell of grid {options['grid']} passes the filters")
    return cells


def print_bench(results: Results, grid: str, left: int, wrong: list[str], out: Path, *, quiet: bool) -> None:
    """Print ratios to every peer, what is missing, kernels whose bits differ, and the path of the report."""
    from fa3_reports.bench.ratios import ratio_lines

    console = Console(highlight=False)
    if not quiet:
        for text in ratio_lines(results, grid):
            console.print(escape(text), soft_wrap=True)
        for name, reason in results.missing().items():
            console.print(f"missing {escape(name)}: {escape(reason)}", soft_wrap=True)
    for text in wrong:
        console.print(f"[red]FAIL[/red] {escape(text)}", soft_wrap=True)
    if left:
        console.print(f"{left} cells left: the same command goes on with them")
    console.print(f"report {out / 'bench.md'}", soft_wrap=True)


@click.command(cls=Verb, epilog=EPILOG)
@launch_options
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Bursts per kernel and cell.")
@click.option("--pause", type=click.FloatRange(0), default=0.3, show_default=True, help="Seconds before every burst.")
@click.option("--sustained/--no-sustained", default=True, help="Time 40 ms under the kernel's own heat as well.")
@budget_option
@seed_option
@click.option("--quiet", is_flag=True, help="Print the path of the report only.")
def bench(out: Path, quiet: bool, **options: Any) -> None:
    """Time the GPU kernels beside their peers on a Hopper GPU: cool bursts, SM clock logged, bits checked first.

    Finished cells are kept in OUT/bench.jsonl: the same command goes on where it stopped, another one adds to it.
    """
    from fa3verify.cli import console

    cells = cells_of(options)
    require_device("bench")
    from fa3_reports.bench import run as bench_run
    from fa3verify.timed.timing import Pace

    pace = Pace(options["rounds"], options["pause"])
    settings = bench_run.BenchSettings(
        cells,
        out,
        options["names"],
        pace,
        budget_s=options["budget"],
        seed=options["seed"],
        sustained=options["sustained"],
    )
    try:
        results, left = bench_run.run(settings, console.teller(quiet))
    except bench_run.ContextLost as error:
        fail(FINDING, str(error))
    wrong = bench_run.failed(results)
    print_bench(results, options["grid"], left, wrong, out, quiet=quiet)
    raise Exit(FINDING if wrong else OK)
