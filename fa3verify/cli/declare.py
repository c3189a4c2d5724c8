"""Verb declare: draft the decorator of a function that is no kernel yet."""

from __future__ import annotations

import rich_click as click

from fa3verify.cli.exits import EPILOG, Verb
from fa3verify.cli.options import peers_option, workers_option


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("function", metavar="FILE.py:FUNCTION")
@click.option("--write", "is_written", is_flag=True, help="Put the draft above the function in its file.")
@workers_option
@peers_option
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
def declare(function: str, is_written: bool, workers: int, quiet: bool) -> None:
    """Call a bare FUNCTION in processes of their own and print the @fa3verify.kernel(...) that it seems to need.

    Each keyword stands below what was seen of it. A draft acquits no kernel: what no contract explains stays wrong when
    it is verified. Exit code 2 if it could not be called.
    """
    from fa3verify.cli import console
    from fa3verify.commands import declare

    with console.counting("trials", quiet) as tell:
        text = declare.declare(function, workers, tell)
    click.echo(text)
    if is_written:
        declare.write(function, text)
