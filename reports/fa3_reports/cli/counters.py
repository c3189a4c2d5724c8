"""Verb counters: one launch of each kernel under Nsight Compute."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import rich_click as click

from fa3_reports.cli.bench import budget_option, cells_of, launch_options
from fa3verify.cli.exits import ENVIRONMENT, EPILOG, Verb, fail, require_device
from fa3verify.cli.options import seed_option


def require_profiler() -> str:
    """Nsight Compute's command; leave with the reason if it is not there."""
    found = shutil.which("ncu")
    if found is None:
        fail(ENVIRONMENT, "counters needs ncu, Nsight Compute's command, on the PATH")
    return found


@click.command(cls=Verb, epilog=EPILOG)
@launch_options
@budget_option
@seed_option
@click.option("--quiet", is_flag=True, help="Print the path of the table only.")
def counters(out: Path, quiet: bool, **options: Any) -> None:
    """Count one launch of each kernel of each cell by Nsight Compute: OUT/counters.csv."""
    cells = cells_of(options)
    require_device("counters")
    from fa3_reports.bench import run as bench_run
    from fa3_reports.measured import counted
    from fa3verify.cli import console

    settings = bench_run.BenchSettings(cells, out, options["names"], budget_s=options["budget"], seed=options["seed"])
    click.echo(counted.run(settings, require_profiler(), console.teller(quiet)))
