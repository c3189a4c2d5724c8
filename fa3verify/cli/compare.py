"""Verb compare: whether two kernels or configurations, or one kernel in other calls, return the same bits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click
from click.exceptions import Exit

from fa3verify.cli.exits import EPILOG, FINDING, NOTHING, OK, emit, one_line_errors, require_writable, write
from fa3verify.cli.options import Options, is_given, peers_option, workers_option

if TYPE_CHECKING:
    from fa3verify.campaign.tasks import Task

Axes = dict[str, list[int | str]]  # what changes, and its values; none are its own ones


@click.command(epilog=EPILOG)
@click.argument("kernel", required=False)
@click.argument("other", required=False)
@click.option(
    "--over",
    "axes",
    multiple=True,
    metavar="AXIS[=VALUES]",
    help="What changes: batch, position, neighbours, seqlen_k, chunk, decode, num_splits, pack_gqa, tile_m, tile_n; of "
    "two kernels any size of the problem. VALUES are FIRST:STOP[:STEP] or a list with commas; neighbours are LENGTH of "
    "one or COUNTxLENGTH.",
)
@click.option(
    "--batch",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Sizes. Without any two kernels are compared on what both claim, and an axis of one kernel has sizes of its "
    "own.",
)
@click.option("--nheads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--nheads-kv", type=click.IntRange(1), default=1, show_default=True)
@click.option("--seqlen-q", type=click.IntRange(1), default=4, show_default=True)
@click.option("--seqlen-k", type=click.IntRange(0), default=300, show_default=True)
@click.option("--head-dim", type=click.IntRange(8, 256), default=128, show_default="128, or what both take")
@click.option("--causal", is_flag=True)
@workers_option
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the table as Markdown.")
@click.option("--json", "json_target", metavar="FILE|-", help="Write the comparisons as JSON.")
@peers_option
@click.option("--quiet", is_flag=True, help="Print nothing but what differs.")
def compare(kernel: str | None, other: str | None, axes: tuple[str, ...], **options: Any) -> None:
    """Compare the bits of KERNEL and OTHER on what both claim, or of KERNEL in calls that differ in what a serving
    stack may change.

    KERNEL[FIELD=VALUE,...] is a kernel in another configuration. What is equal is so of the calls that ran; invariance
    says it of all batches where the plan of a kernel is known. Without a kernel: the table of what may change for our
    kernels and for the released FlashAttention-3. Exit code 1 if a named kernel differs, 5 if nothing ran.
    """
    with one_line_errors():
        from fa3verify.cli import console, console_search
        from fa3verify.compare import table
        from fa3verify.compare.problems import SIZES
        from fa3verify.kernels.twins import is_twin

        out = options["out"]
        json_target = options["json_target"]
        quiet = options["quiet"]
        require_writable(out and str(out), json_target)
        chosen = dict(map(_axis, axes))
        if len(chosen) < len(axes):
            raise ValueError(f"an axis is named once, with all its values, got {', '.join(axes)}")
        sizes = {name: options[name] for name in SIZES if is_given(name)}
        if kernel and other:
            tasks = _pairs(kernel, other, chosen, options)
        else:
            tasks = table.tasks_of([kernel] if kernel else table.KERNELS, chosen, sizes)
        with console.counting("comparisons", quiet) as tell:
            found = table.run(tasks, options["workers"], tell)
        if out:
            names = list(dict.fromkeys(task.arguments["kernel"] for task in tasks))
            rows = {task.arguments["axis"]: task.arguments["values"] for task in tasks}
            write(table.page(names, rows, found, sizes=sizes), str(out))
        emit(table.body(found, tasks), json_target)
        if json_target != "-":
            labels = [task.arguments.get("kernel", "") for task in tasks]
            console_search.print_comparisons(labels, found, quiet=quiet)
            if kernel and not (other or quiet) and is_twin(kernel) and any(each and each.is_equal for each in found):
                click.echo(f"of all batches: fa3verify invariance '{kernel}'")
        ran = [each for each in found if each is not None]
        if any(each.is_equal is None for each in ran) or not ran:
            raise Exit(NOTHING)
        raise Exit(FINDING if kernel and any(each.first for each in ran) else OK)


def _axis(text: str) -> tuple[str, list[int | str]]:
    """An axis and its values; none are its own ones."""
    name, equals, values = text.partition("=")
    if not equals:
        return name, []
    if match := re.fullmatch(r"(\d+):(\d+)(?::(\d+))?", values):
        first = int(match[1])
        stop = int(match[2])
        step = int(match[3] or 1)
        if step and first < stop:
            return name, list(range(first, stop, step))
    elif re.fullmatch(r"\d+(x\d+)?(,\d+(x\d+)?)*", values):
        return name, [int(n) if n.isdecimal() else n for n in values.split(",")]
    elif re.fullmatch(r"(true|false)(,(true|false))*", values):
        return name, [word == "true" for word in values.split(",")]
    raise ValueError(f"values must be FIRST:STOP, FIRST:STOP:STEP or a list such as 1,2,3, got {values!r}")


def _pairs(kernel: str, other: str, axes: Axes, options: Options) -> list[Task]:
    """The comparisons of two kernels: what both claim, the problem of the sizes that are given, or one over a range."""
    from fa3verify.campaign.tasks import Task
    from fa3verify.compare.problems import SIZES
    from fa3verify.compare.table import compare_pair
    from fa3verify.known.registry import find

    for name in (name for name in (kernel, other) if ":" not in name):
        find(name)
    _check_pairs(axes, options)
    # What both take is chosen where they are loaded, unless somebody chose.
    is_sized = bool(axes) or any(is_given(name) for name in SIZES if name != "head_dim")
    chosen = (name for name in SIZES if is_given(name) or (is_sized and name not in ("head_dim", "nheads_kv")))
    sizes = {name: options[name] for name in chosen}
    ranges = {name: values or [options[name]] for name, values in axes.items()}
    ranges = ranges or ({"seqlen_k": [options["seqlen_k"]]} if is_sized else {"": []})
    given = {"a": kernel, "b": other, "sizes": sizes}
    return [
        Task("compare", f"{kernel} and {other}", compare_pair, given | {"field": name, "values": values})
        for name, values in ranges.items()
    ]


def _check_pairs(axes: Axes, options: Options) -> None:
    """Raise ValueError for what a comparison of two kernels would leave out."""
    from fa3verify.compare.problems import SIZES

    known = sorted(set(SIZES) - {"causal"})
    for name, values in axes.items():
        if name not in known:
            raise ValueError(f"two kernels are compared over a size, one of {', '.join(known)}, got {name!r}")
        if values and is_given(name):
            raise ValueError(f"{name} is given by --over or as a size, got {options[name]} beside {len(values)} values")
        if wrong := [value for value in values if type(value) is not int]:
            raise ValueError(f"values of {name} must be numbers, got {str(wrong[0]).lower()}")
    if options["out"]:
        raise ValueError("the table that --out writes is of one kernel, or of none; --json takes two as well")
