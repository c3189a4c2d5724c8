"""Verb atlas: every kernel that runs here, each judged by a campaign of its own, side by side in one page."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import rich_click as click
from click.exceptions import Exit

from fa3verify.cli.exits import ENVIRONMENT, EPILOG, FINDING, OK, USAGE, Verb, fail
from fa3verify.cli.options import memory_bytes, peers_option, pool_options, seed_option


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("kernels", nargs=-1)
@peers_option
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("out/atlas"), show_default=True)
@click.option("--profile", type=click.Choice(["quick", "release", "soak"]), default="quick", show_default=True)
@seed_option
@click.option("--resume", is_flag=True, help="Keep the kernels that OUT/atlas.json has judged already.")
@click.option(
    "--check",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Judge nothing: say in one line each what is wrong with an atlas.json that is to be sent.",
)
@pool_options
def atlas(
    kernels: tuple[str, ...], out: Path, profile: Any, seed: int, resume: bool, check: Path | None, **options: Any
) -> None:
    """Judge KERNELS (names or patterns, all by default) and write OUT/atlas.json, its pages and OUT/worst.

    Of each kernel: largest known errors with their inputs and the effort behind them, error bound, RMSE against both
    references, accumulator loss over long rows, policy, determinism. Kernels that cannot run here are listed with the
    reason. The report of each is in OUT/campaigns.
    """
    if check is not None:
        from fa3verify.campaign import atlas_check
        from fa3verify.text import one_line

        lines = atlas_check.mistakes(check)
        for line in lines or ["its form is right; whether its figures are, fa3verify replay says"]:
            click.echo(one_line(f"{check}: {line}"), err=bool(lines))
        raise Exit(USAGE if lines else OK)
    from fa3verify.cli import console
    from fa3verify.commands import publish, verify
    from fa3verify.known import registry

    known = registry.discover()
    chosen = tuple(dict.fromkeys(_chosen(kernels, known)))
    if all(name in known and known[name].unavailable for name in chosen):
        fail(ENVIRONMENT, f"none of these kernels runs here: {known[chosen[0]].unavailable}")
    settings = verify.Settings(
        chosen,
        profile,
        seed,
        out,
        workers=options["workers"],
        task_limit_s=options["task_limit"],
        memory_bytes=memory_bytes(options["memory_limit"]),
    )
    made = publish.run(settings, known, console.teller(False), resume=resume)
    click.echo(out / "atlas.html")
    judged = [each for each in made.kernels if each.name not in known or not known[each.name].unavailable]
    raise Exit(OK if all(entry.verdict == "pass" for entry in judged) else FINDING)


def _chosen(kernels: tuple[str, ...], known: Any) -> list[str]:
    """Return the given names, and for a pattern the names that match it; ValueError for a pattern without a match."""
    names = []
    for kernel in kernels or ("*",):
        matching = [name for name in known if fnmatchcase(name, kernel)] if "*" in kernel else [kernel]
        if not matching:
            raise ValueError(f"no kernel matches {kernel!r}; fa3verify kernels lists them")
        names += matching
    return names
