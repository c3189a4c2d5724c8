"""Verbs replay, report, merge and atlas: what a campaign left is run, drawn, joined or set side by side again."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import rich_click as click
from click.exceptions import Exit

from fa3_reference.rules import require
from fa3verify.cli.exits import (
    ENVIRONMENT,
    EPILOG,
    FINDING,
    NOTHING,
    OK,
    Verb,
    emit,
    fail,
    require_outputs,
    told_anyhow,
)
from fa3verify.cli.options import memory_bytes, output_options, peers_option, pool_options, seed_option


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--kernel", metavar="NAME", help="Run another kernel on the same case.")
@click.option("--family", metavar="NAME", help="Of an atlas's replay file, the largest case of this family alone.")
@peers_option
@click.option(
    "--activations",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Where your own activations are, if not where they were.",
)
@click.option("--json", "json_target", metavar="FILE|-", help="Write the figures as JSON.")
def replay(
    file: Path, kernel: str | None, family: str | None, activations: Path | None, json_target: str | None
) -> None:
    """Run a replay FILE again: exit code 1 if the kernel still breaks its bound or property, 5 if this call alone shows
    nothing of what was found of the kernel.
    """
    from fa3verify.campaign import replay_files
    from fa3verify.cli import console
    from fa3verify.commands import replay as replays

    stored = replay_files.read(file)
    result = replays.run(stored, kernel, activations, family)
    if emit(result._asdict(), json_target):
        console.print_replay(stored, result)
    raise Exit(FINDING if not result.holds else NOTHING if stored.is_finding_of(kernel) else OK)


_FILE = click.Path(path_type=Path, dir_okay=False)
_FOLDER = click.Path(path_type=Path, file_okay=False)


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("data", type=_FILE, nargs=-1)
@click.option("--out", type=_FOLDER, default=Path("out"), show_default=True)
@click.option(
    "--against", type=_FILE, metavar="OLD", help="Say where DATA is better or worse than an older run.nc or atlas.json."
)
@click.option(
    "--pair",
    "given",
    multiple=True,
    metavar="OLD=NEW",
    help="With --against: compare these two kernels. May be repeated.",
)
@click.option(
    "--history", type=_FOLDER, metavar="DIR", help="Instead draw the number that ranks over every run.nc below DIR."
)
def report(
    data: tuple[Path, ...], out: Path, against: Path | None, given: tuple[str, ...], history: Path | None
) -> None:
    """Build the pages of DATA, a run.nc that verify wrote, again; with --against DATA may be atlases as well."""
    from fa3verify.commands import verify
    from fa3verify.report import against as beside, build, history as over_runs

    require(
        not (history and (data or against or given)),
        "--history takes runs from its folder, and neither DATA nor --against nor --pair",
    )
    require(data or history, "report needs DATA: a run.nc; or --history DIR")
    is_of_a_run = against is not None or history or (len(data) == 1 and data[0].suffix == ".nc")
    require(not given or against is not None, "--pair is for --against")
    require(is_of_a_run, "a page is of one run.nc; python -m fa3_reports atlas, from a checkout, makes that of atlases")
    chosen = [(old, new) for old, _, new in (pair.partition("=") for pair in given)]
    require(all(old and new for old, new in chosen), "--pair is OLD=NEW, the names of two kernels")
    verify.prepare_output(out)
    if against is not None:
        page, sentences = beside.write_pages(out, data, against, chosen)
        click.echo("\n".join(sentences))
    elif history:
        page = over_runs.write_pages(out, history)
    else:
        page = build.rebuild(data[0], out)
    click.echo(page)


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path, file_okay=False))
@output_options
def merge(folders: tuple[Path, ...], **options: Any) -> None:
    """Judge a campaign whose shards lie in FOLDERS, written by verify --shard; write the report of the whole."""
    from fa3verify.cli import console
    from fa3verify.commands import verify

    targets = options["json_target"], options["junit_target"]
    require_outputs(*targets, options["update_baseline"])
    settings = verify.Settings((), "quick", 0, options["out"], options["baseline"], options["update_baseline"])
    run = verify.merge(folders, settings)
    with told_anyhow(run.exit_code):
        console.tell(run, settings.out, *targets, options["quiet"])


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("kernels", nargs=-1)
@peers_option
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("out/atlas"), show_default=True)
@click.option("--profile", type=click.Choice(["quick", "release", "soak"]), default="quick", show_default=True)
@seed_option
@click.option("--resume", is_flag=True, help="Keep the kernels that OUT/atlas.json has judged already.")
@pool_options
def atlas(kernels: tuple[str, ...], out: Path, profile: Any, seed: int, resume: bool, **options: Any) -> None:
    """Judge KERNELS (names or patterns, all by default) and write OUT/atlas.json and OUT/worst.

    Of each kernel: largest known errors with their inputs and the effort behind them, error bound, RMSE against both
    references, accumulator loss over long rows, policy, determinism. Kernels that cannot run here are listed with the
    reason. The report of each is in OUT/campaigns.
    """
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
    click.echo(out / publish.atlas.FILE)
    judged = [each for each in made.kernels if each.name not in known or not known[each.name].unavailable]
    raise Exit(OK if all(entry.verdict == "pass" for entry in judged) else FINDING)


def _chosen(kernels: tuple[str, ...], known: Any) -> list[str]:
    """Return the given names, and for a pattern the names that match it; ValueError for a pattern without a match."""
    names = []
    for kernel in kernels or ("*",):
        matching = [name for name in known if fnmatchcase(name, kernel)] if "*" in kernel else [kernel]
        require(matching, f"no kernel matches {kernel!r}; fa3verify kernels lists them")
        names += matching
    return names
