"""Verb kernels: what can be judged here, why something cannot, and what "here" is."""

from __future__ import annotations

import rich_click as click

from fa3verify.cli.exits import EPILOG, Verb, emit
from fa3verify.cli.options import peers_option


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("files", nargs=-1, metavar="[FILE.py]...")
@peers_option
@click.option("--json", "json_target", metavar="FILE|-", help="Write the list as JSON.")
def kernels(files: tuple[str, ...], json_target: str | None) -> None:
    """List the kernels that can be judged, and why one cannot run here; then versions, extras, cache and variables.

    With FILE.py, those that it declares: each is called once with a few queries and keys.
    """
    from fa3verify.cases import probing
    from fa3verify.cli import console
    from fa3verify.kernels import loading
    from fa3verify.known import registry

    known = [probing.tried_here(kernel) for file in files for kernel in loading.declared(file)]
    known = known or list(registry.discover().values())
    facts = console.environment()
    emit({"kernels": [console.kernel_row(c) for c in known], "environment": facts}, json_target)
    if json_target != "-":
        console.print_kernels(known, with_faults=not files)
        console.print_environment(facts)
