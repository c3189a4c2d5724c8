"""Command line. Heavy imports happen inside the commands, so that --help answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rich_click as click
from click.exceptions import Exit

from fa3verify import __version__
from fa3verify.cli.exits import (
    ENVIRONMENT,
    EPILOG,
    FINDING,
    NOTHING,
    OK,
    emit,
    fail,
    one_line_errors,
    require_device,
    write,
)
from fa3verify.cli.simulate import simulate
from fa3verify.cli.trace import trace
from fa3verify.cli.tune import tune


@click.group(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fa3verify")
def main() -> None:
    """Numerics verification for FlashAttention-3 on NVIDIA Hopper."""


@main.command(epilog=EPILOG)
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
    """Judge KERNELS (all twins by default): laws, error bound, drift; write a report."""
    with one_line_errors():
        from fa3verify import candidates
        from fa3verify.campaign import verify
        from fa3verify.cli import console

        names = (*kernels, *references) or tuple(c.name for c in candidates.built_in())
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


@main.command(epilog=EPILOG)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--kernel", metavar="NAME", help="Run another kernel on the same case.")
@click.option("--json", "json_target", metavar="FILE|-", help="Write the figures as JSON.")
def replay(file: Path, kernel: str | None, json_target: str | None) -> None:
    """Run a replay FILE again: exit code 1 if the kernel still breaks its bound or law."""
    with one_line_errors():
        from fa3verify.campaign import replay as replays
        from fa3verify.cli import console

        body = replays.read(file)
        holds, message, measures = replays.run(body, kernel)
        emit({"holds": holds, "message": message, "measures": measures}, json_target)
        if json_target != "-":
            console.print_replay(body, holds, message, measures)
        raise Exit(OK if holds else FINDING)


@main.command(epilog=EPILOG)
@click.option("--json", "json_target", metavar="FILE|-", help="Write the list as JSON.")
def kernels(json_target: str | None) -> None:
    """List the kernels that can be judged, and why one cannot run here."""
    with one_line_errors():
        from fa3verify import candidates
        from fa3verify.cli import console

        known = list(candidates.discover().values())
        emit({"kernels": [console.kernel_row(c) for c in known]}, json_target)
        if json_target != "-":
            console.print_kernels(known)


@main.command(epilog=EPILOG)
@click.argument("launches", nargs=-1)
@click.option("--accept", is_flag=True, help="Write what was found as the golden file.")
@click.option(
    "--golden",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Compare with this golden file, not the shipped one.",
)
@click.option("--json", "json_target", metavar="FILE|-", help="Also write all figures as JSON.")
@click.option("--workers", type=click.IntRange(0), default=0, help="Processes; 0 is one per core.")
@click.option("--quiet", is_flag=True, help="Print the verdict only.")
def audit(
    launches: tuple[str, ...], accept: bool, golden: Path | None, json_target: str | None, workers: int, quiet: bool
) -> None:
    """Compile the shipped kernels for sm_90a without a GPU; exit code 1 if registers, spills or code moved.

    LAUNCHES restricts it to some of them, by name. Needs torch and triton 3.6, no GPU.
    """
    with one_line_errors():
        from importlib import import_module

        from fa3_kernels.audit.golden import GOLDEN, golden_text, read_rows
        from fa3verify.cli import console

        audits: Any = import_module("fa3_kernels.audit.figures")
        path = golden or GOLDEN
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
            console.print_audit(figures, broken, moved, accept, quiet=quiet)
        raise Exit(FINDING if broken or (moved and not accept) else OK)


@main.command(epilog=EPILOG)
@click.option(
    "--grid",
    type=click.Choice(["paper", "ablation", "decode", "gqa", "drift", "schedules"]),
    default="paper",
    show_default=True,
)
@click.option("--dtype", "dtypes", type=click.Choice(["fp16", "bf16", "e4m3"]), multiple=True, help="All by default.")
@click.option("--head-dim", "head_dims", type=int, multiple=True, help="All of the grid by default.")
@click.option("--seqlen", "seqlens", type=int, multiple=True, help="All of the grid by default.")
@click.option("--causal/--no-causal", default=None, help="Both by default.")
@click.option(
    "--kernels", "names", metavar="NAME", multiple=True, help="Names or patterns (gluon*, fa3); all by default."
)
@click.option("--peers", type=click.Path(path_type=Path, file_okay=False), help="Folder with the peers' libraries.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("out/bench"), show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Bursts per kernel and cell.")
@click.option("--pause", type=click.FloatRange(0), default=0.3, show_default=True, help="Seconds before every burst.")
@click.option("--sustained/--no-sustained", default=True, help="Time 40 ms under the kernel's own heat as well.")
@click.option("--budget", type=click.FloatRange(0), default=float("inf"), help="Seconds after which no cell is begun.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True)
@click.option("--quiet", is_flag=True, help="Print the path of the report only.")
def bench(grid: str, dtypes: Any, causal: bool | None, out: Path, quiet: bool, **options: Any) -> None:
    """Time the GPU kernels beside their peers on a Hopper GPU: cool bursts, SM clock logged, bits checked first.

    Finished cells are kept in OUT/bench.jsonl: the same command goes on where it stopped, another one adds to it.
    """
    with one_line_errors():
        from fa3verify.cli import console
        from fa3verify.gpu.bench import run as bench_run
        from fa3verify.gpu.bench.cells import select
        from fa3verify.gpu.bench.timing import Pace

        filters = {"head_dims": options["head_dims"], "seqlens": options["seqlens"], "causal": causal}
        cells = select(grid, dtypes or ("fp16", "bf16", "e4m3"), **filters)
        if not cells:
            fail(NOTHING, f"no cell of grid {grid} passes the filters")
        pace = Pace(options["rounds"], options["pause"], options["sustained"])
        settings = bench_run.Settings(
            cells, out, options["peers"], options["names"], pace, options["budget"], options["seed"]
        )
        require_device("bench")
        try:
            results, left = bench_run.run(settings, console.teller(quiet))
        except bench_run.ContextLost as error:
            fail(FINDING, str(error))
        wrong = bench_run.failed(results)
        console.print_bench(results, grid, left, wrong, out, quiet=quiet)
        raise Exit(FINDING if wrong else OK)


@main.command(epilog=EPILOG)
@click.option("--json", "json_target", metavar="FILE|-", help="Write it as JSON.")
def info(json_target: str | None) -> None:
    """Print versions, extras found, cache and environment variables."""
    with one_line_errors():
        from fa3verify.cli import console

        facts = console.environment()
        emit(facts, json_target)
        if json_target != "-":
            console.print_info(facts)


@main.command(epilog=EPILOG)
@click.argument("run", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("out"), show_default=True)
def report(run: Path, out: Path) -> None:
    """Build the report again from RUN, a run.nc that verify wrote."""
    with one_line_errors():
        from fa3verify.campaign import verify
        from fa3verify.report.build import rebuild

        verify.prepare_output(out)
        click.echo(rebuild(run, out))


for command in (simulate, trace, tune):
    main.add_command(command)
