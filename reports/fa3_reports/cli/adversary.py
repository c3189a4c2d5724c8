"""Verb adversary: whether inputs that are bred for it leave the error bounds of our twins."""

from __future__ import annotations

from pathlib import Path

import rich_click as click
from click.exceptions import Exit

from fa3verify.cli.exits import EPILOG, FINDING, OK, Verb, write


@click.command(cls=Verb, epilog=EPILOG)
@click.option("--operation", type=click.Choice(["forward", "backward"]), default="forward", show_default=True)
@click.option("--dtype", "dtypes", type=click.Choice(["fp16", "bf16", "e4m3"]), multiple=True, help="All by default.")
@click.option("--problems", type=click.IntRange(1), default=100_000, show_default=True, help="For every dtype.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True)
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), default=Path("out/adversary.json"), show_default=True
)
@click.option("--jobs", type=click.IntRange(0), default=0, help="Processes; 0 is one per core.")
@click.option("--replay", type=click.Path(path_type=Path, dir_okay=False), help="Judge the finds of a file again.")
@click.option("--quiet", is_flag=True, help="Print the sums only.")
def adversary(
    operation: str,
    dtypes: tuple[str, ...],
    problems: int,
    seed: int,
    out: Path,
    jobs: int,
    replay: Path | None,
    quiet: bool,
) -> None:
    """Search for inputs on which our twins leave their error bound; exit code 1 if one does.

    Scores and values evolve from normal ones; of gradients all arrays do, over all orders in which parts may be added.
    The file holds, for every dtype and shape, the largest error / bound before the last rounding (of the forward's
    output also after it), and the input that has it.
    """
    from fa3_reports.adversary import search as twins
    from fa3_reports.cli.console import print_adversary, print_adversary_replay
    from fa3verify.cli import console
    from fa3verify.files import json_text

    if replay is not None:
        found = twins.replay_file(replay)
        print_adversary_replay(found)
        raise Exit(OK if all(max(ratios.values()) <= 1 for _, _, ratios in found) else FINDING)
    known = twins.dtypes_of(operation)
    if unknown := [dtype for dtype in dtypes if dtype not in known]:
        raise ValueError(f"dtype of {operation} must be among {', '.join(known)}, got {unknown[0]}")
    with console.counting("islands searched", quiet) as tell:
        bred = twins.run(dtypes or known, problems, seed, jobs, tell, operation)
    write(json_text(bred.to_json() | {"seed": seed, "problems": problems}), str(out))
    print_adversary(bred, out, quiet=quiet)
    raise Exit(FINDING if bred.above_1 else OK)
