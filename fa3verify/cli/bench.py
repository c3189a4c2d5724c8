"""Verb bench: our kernels beside other people's on problems of the user's own, timed on a Hopper GPU."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import rich_click as click
from click.exceptions import Exit

from fa3_reference.rules import require
from fa3verify.cli.exits import EPILOG, FINDING, NOTHING, OK, USAGE, Verb, emit, require_device, require_writable
from fa3verify.cli.options import is_given, peers_option, refuse_options, shape_options
from fa3verify.cli.simulate import problem_of
from fa3verify.files import Json

PLANNED = """{problem}: {gflop:.4g} GFLOP, {gbytes:.4g} GB, {milliseconds:.4g} ms simulated on {machine}
  launch: {launch}"""
ROW = "{kernel:<10}  {milliseconds:9.4f}  {tflops:7.1f}  {times_ours:11.2f}  {sm_mhz:6.0f}"


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("wheels", nargs=-1, metavar="[WHEEL]...", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@shape_options
@click.option("--softcap", type=click.FloatRange(0), default=0.0, show_default=True, help="Of scores; 0 for none.")
@click.option(
    "--problem",
    "lines",
    metavar="'28/4 8 x 1 x 7700 page 16'",
    multiple=True,
    help="A problem in a line, instead of the options of one: heads, batch x [queries x] keys, dHEAD_DIM, causal, "
    "window, page, packed, chunk, backward and so on, as docs/bench.md lists them.",
)
@click.option(
    "--problems",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file of such lines, with # in front of comments.",
)
@click.option("--models", is_flag=True, help="Decoding and prompts of the public models that verify knows, over pages.")
@click.option("--dry-run", is_flag=True, help="Say what would be timed: launches, operations, bytes, simulated time.")
@click.option(
    "--kernel",
    "patterns",
    metavar="NAME",
    multiple=True,
    help="gluon (ours), flash3, cudnn and so on, or a pattern of names; all by default.",
)
@peers_option
@click.option(
    "--peers-from",
    "makes_folder",
    is_flag=True,
    help="WHEEL...: make the folder of --peers (peers by default) from wheels of vllm, fa3-fwd and others.",
)
@click.option("--json", "json_target", metavar="FILE|-", help="Write the figures as JSON.")
def bench(
    wheels: tuple[Path, ...],
    lines: tuple[str, ...],
    file: Path | None,
    models: bool,
    dry_run: bool,
    patterns: tuple[str, ...],
    makes_folder: bool,
    json_target: str | None,
    **options: Any,
) -> None:
    """Time our kernels beside other people's; a kernel whose output is wrong has no speed."""
    from fa3verify.bench import planned
    from fa3verify.cases.lines import lines_in, lines_of_models, read_line

    require(makes_folder == bool(wheels), "--peers-from needs wheels, which nothing else takes")
    if makes_folder:
        _make_folder(wheels)
    named = dict.fromkeys([*lines, *(lines_in(file) if file else ()), *(lines_of_models() if models else ())])
    beside = options.keys() - {"dtype"} if named else ()
    refuse_options(beside, "lines say all but --dtype of their problems, got {} beside them")
    dtype = f" {options['dtype']}" if is_given("dtype") else ""
    asked = [read_line(line + dtype) for line in named] or [(problem_of(options), planned.FORWARD)]
    wanted = _fitting(list(dict.fromkeys(chain(*planned.TIMED.values()))), patterns)
    run, show = planned.planned, _show_planned
    if not dry_run:
        require_device("bench")
        from fa3verify.bench.kernels import speeds

        run, show = speeds, _show_timed
    require_writable(json_target)
    found: list[Json] = []
    for each in asked:
        found.append(run(each, [name for name in planned.TIMED[each[1]] if name in wanted]))
        if json_target != "-":
            show(found[-1])
    emit({"problems": found} if named or dry_run else found[0], json_target)
    statuses = {
        (x["status"], x["kernel"].startswith("gluon")) for each in found for x in each["kernels"] if not dry_run
    }
    is_wrong = {("wrong", True), ("wrong", False), ("failed", True)} & statuses
    is_timed = dry_run or "timed" in dict(statuses)
    raise Exit(FINDING if is_wrong else OK if is_timed else NOTHING)


def _make_folder(wheels: Sequence[Path]) -> NoReturn:
    """Put the libraries of wheels into the peers' folder, and exit; a wheel that is refused stops no other one."""
    from fa3verify.known.libraries import folder
    from fa3verify.known.wheels import unpack

    where = folder() or Path("peers")
    where.mkdir(parents=True, exist_ok=True)
    code = OK
    for wheel in wheels:
        try:
            for line in unpack(wheel, where):
                click.echo(line)
        except ValueError as error:
            click.echo(f"refused: {error}", err=True)
            code = USAGE
    raise Exit(code)


def _show_timed(found: Json) -> None:
    click.echo(f"{found['problem']}, on {found['gpu']}\nkernel             ms  TFLOP/s  time / ours  SM MHz")
    for x in sorted(found["kernels"], key=lambda x: x["status"] != "timed"):
        click.echo((ROW if x["status"] == "timed" else "{status}: {kernel}: {reason}").format(**x))


def _show_planned(found: Json) -> None:
    click.echo(PLANNED.format(**found))
    for name, reason in found["kernels"].items():
        click.echo(f"  {name}: {reason or 'would be timed'}")


def _fitting(known: list[str], patterns: tuple[str, ...]) -> list[str]:
    """Return the names that fit a pattern, all without patterns; ValueError for a pattern that none fits."""
    if unknown := [pattern for pattern in patterns if not fnmatch.filter(known, pattern)]:
        raise ValueError(f"--kernel must be one of {', '.join(known)}, or a pattern of them, got {unknown[0]!r}")
    return [name for name in known if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns or "*")]
