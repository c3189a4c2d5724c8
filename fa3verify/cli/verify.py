"""Verb verify: the release gate, a campaign over every input family and property."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rich_click as click
from click.exceptions import Exit

from fa3verify.cli.exits import ENVIRONMENT, EPILOG, NOTHING, fail, one_line_errors, write


@click.command(epilog=EPILOG)
@click.argument("kernels", nargs=-1)
@click.option(
    "--kernel", "references", multiple=True, metavar="MODULE:FUNCTION", help="Verify a kernel of your own as well."
)
@click.option("--profile", type=click.Choice(["quick", "release", "soak"]), default="release", show_default=True)
@click.option("--quick", is_flag=True, help="Short for --profile quick: at most a minute on two cores.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("out"), show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True)
@click.option(
    "--baseline",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Compare with this baseline, not the shipped one.",
)
@click.option(
    "--update-baseline",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the figures of this run as a baseline.",
)
@click.option("--json", "json_target", metavar="FILE|-", help="Also write the summary there; - is standard output.")
@click.option("--junit", "junit_target", type=click.Path(path_type=Path, dir_okay=False), help="Also write JUnit XML.")
@click.option("--workers", type=click.IntRange(0), default=0, help="Processes; 0 is one per core.")
@click.option(
    "--scheduler", metavar="ADDRESS", help="Run on a Dask cluster. Dask's protocol carries code: trusted clusters only."
)
@click.option("--no-studies", is_flag=True, help="Leave out the studies behind the report's figures.")
@click.option("--quiet", is_flag=True, help="Print the verdict only.")
def verify(kernels: tuple[str, ...], references: tuple[str, ...], profile: Any, quick: bool, **options: Any) -> None:
    """Judge KERNELS (all twins by default) by bits, bound, baseline and properties; write a report."""
    with one_line_errors():
        from fa3verify import candidates
        from fa3verify.campaign import verify
        from fa3verify.cli import console

        names = (*kernels, *references) or tuple(c.name for c in candidates.BUILT_IN)
        names = tuple(dict.fromkeys(names))
        for name in names:
            candidate = candidates.find(name)
            if candidate.unavailable:
                fail(ENVIRONMENT, f"kernel {name} is unavailable: {candidate.unavailable}")
        settings = verify.Settings(
            names,
            "quick" if quick else profile,
            options["seed"],
            options["out"],
            options["baseline"],
            options["update_baseline"],
            options["workers"],
            options["scheduler"],
            not options["no_studies"],
        )
        json_target, quiet = options["json_target"], options["quiet"]
        with console.progress(quiet) as progress:
            try:
                summary = verify.run(settings, progress)
            except verify.NothingSelected as error:
                fail(NOTHING, str(error))
        if options["junit_target"]:
            from fa3verify.files import write_text

            write_text(options["junit_target"], verify.junit(summary))
        write((settings.out / "summary.json").read_text(encoding="utf-8"), json_target)
        if json_target != "-":
            console.print_summary(summary, settings.out, quiet=quiet)
        console.step_summary(settings.out)
        raise Exit(summary["exit_code"])
