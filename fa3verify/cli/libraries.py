"""Verb libraries: other people's kernels side by side, each judged by a campaign of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rich_click as click
from click.exceptions import Exit

from fa3verify.cli.exits import ENVIRONMENT, EPILOG, FINDING, OK, fail, one_line_errors
from fa3verify.cli.options import memory_bytes, peers_option, pool_options


@click.command(epilog=EPILOG)
@click.argument("kernels", nargs=-1)
@peers_option
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=Path("out/libraries"), show_default=True
)
@click.option("--profile", type=click.Choice(["quick", "release", "soak"]), default="quick", show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True)
@pool_options
def libraries(kernels: tuple[str, ...], out: Path, profile: Any, seed: int, **options: Any) -> None:
    """Judge KERNELS (all libraries that run here by default) and write a table of them: OUT/libraries.md and .json.

    A column each: verdict, coverage, largest error / bound, bits against the twin, RMSE against both references,
    accumulator loss over long rows, declared policy, whether a call repeats its bits. OUT/LIBRARY has the reports.
    """
    with one_line_errors():
        from fa3verify.adapters import peers
        from fa3verify.campaign import libraries, verify
        from fa3verify.cli import console

        listed = {} if kernels else {c.name: c.unavailable for c in peers.candidates()}
        chosen = kernels or tuple(name for name, reason in listed.items() if reason is None)
        if not chosen:
            fail(ENVIRONMENT, f"no library runs here: {next(iter(listed.values()))}")
        missing = {name: reason for name, reason in listed.items() if reason}
        settings = verify.Settings(
            chosen, profile, seed, out, workers=options["workers"], task_limit_s=options["task_limit"],
            memory_bytes=memory_bytes(options["memory_limit"]),
        )  # fmt: skip
        rows = libraries.run(settings, missing, console.teller(False))
        click.echo(out / "libraries.md")
        judged = [row for row in rows if row["name"] not in missing]
        raise Exit(OK if all(row.get("verdict") == "pass" for row in judged) else FINDING)
