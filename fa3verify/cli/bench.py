"""Verb bench: our kernels beside their peers, timed on a Hopper GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rich_click as click
from click.exceptions import Exit

from fa3verify.cli.exits import ENVIRONMENT, EPILOG, FINDING, NOTHING, OK, fail, one_line_errors, require_device
from fa3verify.cli.options import peers_option

GRIDS = (
    "paper", "fresh", "ragged", "ablation", "decode", "gqa", "drift", "length", "schedules", "unseen", "unseen2",
    "unseen3", "backward", "host",
)  # fmt: skip


def require_profiler() -> str:
    """Nsight Compute's command; leave with the reason if it is not there."""
    import shutil

    found = shutil.which("ncu")
    if found is None:
        fail(ENVIRONMENT, "--counters needs ncu, Nsight Compute's command, on the PATH")
    return found


@click.command(epilog=EPILOG)
@click.option(
    "--grid",
    type=click.Choice(GRIDS),
    default="paper",
    show_default=True,
)
@click.option("--dtype", "dtypes", type=click.Choice(["fp16", "bf16", "e4m3"]), multiple=True, help="All by default.")
@click.option("--head-dim", "head_dims", type=int, multiple=True, help="All of the grid by default.")
@click.option("--seqlen", "seqlens", type=int, multiple=True, help="All of the grid by default.")
@click.option("--causal/--no-causal", default=None, help="Both by default.")
@click.option(
    "--kernels", "names", metavar="NAME", multiple=True, help="Names or patterns (gluon*, flash3); all by default."
)
@peers_option
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("out/bench"), show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Bursts per kernel and cell.")
@click.option("--pause", type=click.FloatRange(0), default=0.3, show_default=True, help="Seconds before every burst.")
@click.option("--sustained/--no-sustained", default=True, help="Time 40 ms under the kernel's own heat as well.")
@click.option("--budget", type=click.FloatRange(0), default=float("inf"), help="Seconds after which no cell is begun.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True)
@click.option("--counters", is_flag=True, help="Count one launch of each by Nsight Compute instead: OUT/counters.csv.")
@click.option("--quiet", is_flag=True, help="Print the path of the report only.")
def bench(grid: str, dtypes: Any, causal: bool | None, out: Path, counters: bool, quiet: bool, **options: Any) -> None:
    """Time the GPU kernels beside their peers on a Hopper GPU: cool bursts, SM clock logged, bits checked first.

    Finished cells are kept in OUT/bench.jsonl: the same command goes on where it stopped, another one adds to it.
    Grid host is what a call costs on the host, in OUT/host.md.
    """
    with one_line_errors():
        from fa3verify.cli import console, console_device
        from fa3verify.gpu.bench.cells import select

        if grid == "host":
            require_device("bench")
            from fa3verify.gpu import host_cost
            from fa3verify.gpu.bench import run as bench_run

            tell = console.teller(quiet)
            click.echo(host_cost.write(out, bench_run.provenance([], {}), tell))
            raise Exit(OK)
        filters = {"head_dims": options["head_dims"], "seqlens": options["seqlens"], "causal": causal}
        cells = select(grid, dtypes or ("fp16", "bf16", "e4m3"), **filters)
        if not cells:
            fail(NOTHING, f"no cell of grid {grid} passes the filters")
        require_device("bench")
        from fa3verify.gpu.bench import run as bench_run
        from fa3verify.gpu.bench.timing import Pace

        pace = Pace(options["rounds"], options["pause"], options["sustained"])
        settings = bench_run.Settings(cells, out, options["names"], pace, options["budget"], options["seed"])
        if counters:
            from fa3verify.gpu import counted

            click.echo(counted.run(settings, require_profiler(), console.teller(quiet)))
            raise Exit(OK)
        try:
            results, left = bench_run.run(settings, console.teller(quiet))
        except bench_run.ContextLost as error:
            fail(FINDING, str(error))
        wrong = bench_run.failed(results)
        console_device.print_bench(results, grid, left, wrong, out, quiet=quiet)
        raise Exit(FINDING if wrong else OK)
