"""Verb kernels: what can be judged here, why something cannot, and what "here" is."""

from __future__ import annotations

import rich_click as click

from fa3verify.cli.exits import EPILOG, emit, one_line_errors
from fa3verify.cli.options import peers_option


@click.command(epilog=EPILOG)
@peers_option
@click.option("--json", "json_target", metavar="FILE|-", help="Write the list as JSON.")
def kernels(json_target: str | None) -> None:
    """List the kernels that can be judged, and why one cannot run here; then versions, extras, cache and variables."""
    with one_line_errors():
        from fa3verify.cli import console
        from fa3verify.known import registry

        known = list(registry.discover().values())
        facts = console.environment()
        emit({"kernels": [console.kernel_row(c) for c in known], "environment": facts}, json_target)
        if json_target != "-":
            console.print_kernels(known)
            console.print_environment(facts)
