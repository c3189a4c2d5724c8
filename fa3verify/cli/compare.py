"""Verb compare: whether two kernels or configurations, or one kernel in other calls, return the same bits.

The comparisons and the proof are in ``fa3verify.compare``; here options become tasks, and results are printed.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, get_args

import rich_click as click
from click.exceptions import Exit

from fa3_reference.rules import require
from fa3verify.cli.exits import EPILOG, FINDING, NOTHING, OK, Verb, emit, require_writable
from fa3verify.cli.options import Options, group, peers_option, refuse_options, workers_option

if TYPE_CHECKING:
    from fa3verify.campaign.tasks import CallTask
    from fa3verify.compare.axes import Fields

Axes = dict[str, list[int | str]]  # values by what changes; an empty list stands for the axis's own values
PROOF = ("window", "page_size", "max_batch", "max_seqlen_q", "max_seqlen_k", "plan_only")  # options only of --prove
RUNS = ("batch", "workers")  # options that --prove does not take
size_options = group(
    click.option("--causal/--dense", default=None, help="The mask; dense, with --prove causal."),
    click.option("--head-dim", type=click.IntRange(8, 256), help="128, or what both take."),
    click.option("--seqlen-k", type=click.IntRange(0), help="Keys; 300, with --prove 2000."),
    click.option("--seqlen-q", type=click.IntRange(1), help="Queries; 4, with --prove 1."),
    click.option("--nheads-kv", type=click.IntRange(1), help="Heads of K and V; 1, with --prove 8."),
    click.option("--nheads", type=click.IntRange(1), help="Heads; 2, with --prove 32."),
    click.option(
        "--batch",
        type=click.IntRange(1),
        help="Sequences; 1. Without any size two kernels are compared on what both claim, and an axis of one kernel "
        "has sizes of its own.",
    ),
)
proof_options = group(
    click.option("--plan-only", is_flag=True, help="With --prove: run nothing."),
    click.option("--max-seqlen-k", type=click.IntRange(1), default=8192, show_default=True),
    click.option("--max-seqlen-q", type=click.IntRange(1), default=512, show_default=True),
    click.option(
        "--max-batch",
        type=click.IntRange(2),
        default=64,
        show_default=True,
        help="With --prove: the most sequences, queries and keys of the batches that it speaks of.",
    ),
    click.option("--page-size", type=click.IntRange(0), default=0, help="With --prove: keys of a page, 0 of none."),
    click.option(
        "--window",
        type=click.IntRange(-1),
        nargs=2,
        metavar="LEFT RIGHT",
        help="With --prove: keys beside the diagonal; -1 is all.",
    ),
    click.option("--prove", is_flag=True, help="Decide it for all batches over the plan of KERNEL, then run a few."),
)


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("kernel")
@click.argument("other", required=False)
@click.option(
    "--over",
    "axes",
    multiple=True,
    metavar="AXIS[=VALUES]",
    help="What changes: batch, position, neighbours, seqlen_k, chunk, decode, num_splits, pack_gqa, tile_m, tile_n; of "
    "two kernels any size of the problem. VALUES are FIRST:STOP[:STEP] or a list with commas; neighbours are LENGTH of "
    "one or COUNTxLENGTH. With --prove neighbours, batch or chunk, without values; by default the first two.",
)
@size_options
@proof_options
@workers_option
@click.option("--json", "json_target", metavar="FILE|-", help="Write the comparisons, or the proof, as JSON.")
@peers_option
@click.option("--quiet", is_flag=True, help="Print nothing but what differs; with --prove one line.")
def compare(kernel: str, other: str | None, axes: tuple[str, ...], **options: Any) -> None:
    """Compare the bits of KERNEL and OTHER on what both claim, or of KERNEL in calls that differ in what a serving
    stack may change.

    KERNEL[FIELD=VALUE,...] is a kernel in another configuration. What is equal is so of the calls that ran; --prove
    says it of all batches, where the plan of a kernel is known: tile, parts of the keys, packing and path are functions
    of few statistics of a batch, which are enumerated, and calls of every class run.

    \b
    fa3verify compare twin.fp16 "twin.fp16[tile_n=64]"
    fa3verify compare twin.bf16 --over seqlen_k=120:140
    fa3verify compare "flash3.bf16[num_splits=4]" --prove --seqlen-k 4000
    fa3verify compare sglang.bf16 --prove --page-size 16 --over chunk

    Exit code 1 if anything differs, with --prove if any call within the limits does; 5 if nothing ran, or the
    plan does not decide.
    """
    from fa3verify.compare.axes import SIZES

    require_writable(options["json_target"])
    chosen = dict(map(_axis, axes))
    require(len(chosen) == len(axes), f"an axis is named once, with all its values, got {', '.join(axes)}")
    sizes = {name: options[name] for name in SIZES if options[name] is not None}
    if options["prove"]:
        raise Exit(_prove(kernel, other, chosen, sizes, options))
    refuse_options(PROOF, "{} go with --prove")
    from fa3verify.compare import tasks as comparisons

    made = comparisons.pairs_of(kernel, other, chosen, sizes) if other else comparisons.tasks_of(kernel, chosen, sizes)
    raise Exit(_run(kernel, other, made, options))


def _run(kernel: str, other: str | None, tasks: list[CallTask], options: Options) -> int:
    """Run comparisons, write and print their results, and return the exit code."""
    from fa3verify.cli import console, console_search
    from fa3verify.compare import tasks as comparisons
    from fa3verify.kernels.twins import is_twin

    quiet = options["quiet"]
    with console.counting("comparisons", quiet) as tell:
        results = comparisons.run(tasks, options["workers"], tell)
    if emit(comparisons.body(results, tasks), options["json_target"]):
        labels = [task.arguments.get("kernel", "") for task in tasks]
        console_search.print_comparisons(labels, results, quiet=quiet)
        if not (other or quiet) and is_twin(kernel) and any(each and each.is_equal for each in results):
            click.echo(f"of all batches: fa3verify compare '{kernel}' --prove")
    ran = [each for each in results if each is not None]
    if any(each.is_equal is None for each in ran) or not ran:
        return NOTHING
    return FINDING if any(each.first for each in ran) else OK


def _prove(kernel: str, other: str | None, axes: Axes, sizes: Fields, options: Options) -> int:
    """Decide for all batches whether a row of a kernel has the same bits, print the answer, and return the exit code.

    ValueError for options that --prove does not take, and for two kernels.
    """
    from fa3verify.compare.proof import BatchLimits, prove, words
    from fa3verify.compare.proof.plans import Change

    require(not other, f"--prove is of one kernel, got {kernel} and {other}")
    refuse_options(RUNS, "--prove does not take {}")
    known: tuple[Change, ...] = get_args(Change)
    if wrong := [name for name, values in axes.items() if name not in known or values]:
        raise ValueError(f"--prove goes over {', '.join(known)}, with all values, got {', '.join(wrong)}")
    limits = BatchLimits(options["max_batch"], options["max_seqlen_q"], options["max_seqlen_k"])
    window = {"window": options["window"]} if options["window"] is not None else {}
    proof = prove(
        kernel,
        changes=[name for name in known if name in axes],
        limits=limits,
        runs=not options["plan_only"],
        page_size=options["page_size"],
        **sizes,
        **window,
    )
    if emit(proof.to_json(), options["json_target"]):
        click.echo(words.headline(proof))
        for answer in () if options["quiet"] else proof.answers:
            click.echo("\n".join(words.lines(answer, proof.own)))
    return {True: OK, False: FINDING, None: NOTHING}[proof.is_invariant]


def _axis(text: str) -> tuple[str, list[int | str]]:
    """Read ``AXIS`` or ``AXIS=VALUES``; without values the list is empty. ValueError for values of another form.

    Values are a range of numbers, a list of numbers or COUNTxLENGTH, or a list of true and false.
    """
    name, equals, values = text.partition("=")
    if not equals:
        return name, []
    if match := re.fullmatch(r"(\d+):(\d+)(?::(\d+))?", values):
        first, stop, step = (int(n or 1) for n in match.groups())
        if step and first < stop:
            return name, list(range(first, stop, step))
    elif re.fullmatch(r"\d+(x\d+)?(,\d+(x\d+)?)*", values):
        return name, [int(n) if n.isdecimal() else n for n in values.split(",")]
    elif re.fullmatch(r"(true|false)(,(true|false))*", values):
        return name, [word == "true" for word in values.split(",")]
    raise ValueError(f"values must be FIRST:STOP, FIRST:STOP:STEP or a list such as 1,2,3, got {values!r}")
