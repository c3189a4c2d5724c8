"""Verb audit: what the compiler makes of the shipped kernels, without a GPU."""

from __future__ import annotations

from pathlib import Path

import rich_click as click
from click.exceptions import Exit

from fa3verify.cli.exits import ENVIRONMENT, EPILOG, FINDING, OK, Verb, emit, fail, write
from fa3verify.cli.options import workers_option


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("launches", nargs=-1)
@click.option("--accept", is_flag=True, help="Write what was found as the golden file.")
@click.option(
    "--golden",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Compare with this golden file, not that of this checkout.",
)
@click.option("--json", "json_target", metavar="FILE|-", help="Also write all figures as JSON.")
@workers_option
@click.option("--quiet", is_flag=True, help="Print the verdict only.")
def audit(
    launches: tuple[str, ...], accept: bool, golden: Path | None, json_target: str | None, workers: int, quiet: bool
) -> None:
    """Compile the shipped kernels for sm_90a without a GPU; exit code 1 if registers, spills or code moved.

    LAUNCHES restricts it to some of them, by name. Needs torch and triton 3.6, no GPU.
    """
    from fa3_kernels.audit.evidence import ACCEPTED
    from fa3_reports.audit import figures as audits
    from fa3_reports.audit.golden import golden_text, read_rows
    from fa3_reports.cli.console import print_audit
    from fa3verify.cli import console

    path = golden or ACCEPTED
    accepted = read_rows(path) if path.exists() else {}
    with console.counting("compiling", quiet) as tell:
        try:
            figures = audits.compile_all(launches, workers=workers, tell=tell)
        except audits.Unavailable as error:
            fail(ENVIRONMENT, f"the kernels cannot be compiled: {error}")
    broken = audits.broken_rules(figures)
    moved = audits.compare(accepted, figures, partial=bool(launches))
    if accept:
        write(golden_text({**accepted, **figures} if launches else figures), str(path))
    emit({"kernels": figures, "broken": broken, "moved": moved, "accepted": accept}, json_target)
    if json_target != "-":
        print_audit(figures, broken, moved, accept, quiet=quiet)
    raise Exit(FINDING if broken or (moved and not accept) else OK)
