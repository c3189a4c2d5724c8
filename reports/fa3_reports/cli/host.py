"""Verb host: what a call costs on the host."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from fa3verify.cli.exits import EPILOG, Verb, require_device


@click.command(cls=Verb, epilog=EPILOG)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("out/host"), show_default=True)
@click.option("--quiet", is_flag=True, help="Print the path of the table only.")
def host(out: Path, quiet: bool) -> None:
    """Time what a call costs on the host, for our kernels and their peers: OUT/host.md."""
    require_device("host")
    from fa3_reports.bench import run as bench_run
    from fa3_reports.measured import host_cost
    from fa3verify.cli import console

    click.echo(host_cost.write(out, bench_run.provenance([], {}), console.teller(quiet)))
