"""Verb invariance: whether the bits of a row depend on more than the row, decided over the plan of a launch."""

from __future__ import annotations

from typing import Any

import rich_click as click
from click.exceptions import Exit

from fa3verify.cli.exits import EPILOG, FINDING, NOTHING, OK, emit, one_line_errors, require_writable
from fa3verify.cli.options import peers_option


@click.command(epilog=EPILOG)
@click.argument("kernel")
@click.option(
    "--vary",
    "changes",
    multiple=True,
    type=click.Choice(["neighbours", "batch", "chunk"]),
    help="What changes between calls: the sequences beside in a packed call, how many sequences of equal lengths there "
    "are, or how many queries the call has that ends in the row: decode, chunk or whole prefill. By default the first "
    "two.",
)
@click.option("--nheads", type=click.IntRange(1), default=32, show_default=True)
@click.option("--nheads-kv", type=click.IntRange(1), default=8, show_default=True)
@click.option("--head-dim", type=click.IntRange(8, 256), default=128, show_default=True)
@click.option("--dense", is_flag=True, help="No causal mask.")
@click.option(
    "--window", type=click.IntRange(-1), nargs=2, metavar="LEFT RIGHT", help="Keys beside the diagonal; -1 is all."
)
@click.option("--seqlen-q", type=click.IntRange(1), default=1, show_default=True, help="Queries of the row's sequence.")
@click.option("--seqlen-k", type=click.IntRange(1), default=2000, show_default=True, help="Keys of it.")
@click.option("--page-size", type=click.IntRange(0), default=0, help="Keys of a page; 0, the default, is one piece.")
@click.option("--max-batch", type=click.IntRange(2), default=64, show_default=True, help="Limits of what is spoken of.")
@click.option("--max-seqlen-q", type=click.IntRange(1), default=512, show_default=True)
@click.option("--max-seqlen-k", type=click.IntRange(1), default=8192, show_default=True)
@click.option("--plan-only", is_flag=True, help="Run nothing.")
@click.option("--json", "json_target", metavar="FILE|-", help="Write the answer as JSON.")
@peers_option
@click.option("--quiet", is_flag=True, help="Print one line.")
def invariance(kernel: str, changes: tuple[Any, ...], json_target: str | None, quiet: bool, **options: Any) -> None:
    """Decide whether a row of KERNEL has the same bits in every batch, and print which calls give it which.

    KERNEL is a twin, a kernel that has one, or either with the choices of a caller in brackets. Tile, parts of the
    keys, packing and path are functions of few statistics of a batch: they are enumerated, and calls of every class
    run. No GPU is needed; on one the kernel itself runs.

    \b
    fa3verify invariance twin.bf16
    fa3verify invariance "flash3.bf16[num_splits=4]" --seqlen-k 4000
    fa3verify invariance vllm.e4m3 --page-size 16 --vary neighbours
    fa3verify invariance sglang.bf16 --page-size 16 --vary chunk

    Exit code 0 where there is one class, 1 with the smallest call that leaves it, 5 where the plan does not decide.
    """
    with one_line_errors():
        from fa3verify.invariance import BatchLimits, words
        from fa3verify.invariance import invariance as decide

        require_writable(json_target)
        limits = BatchLimits(options["max_batch"], options["max_seqlen_q"], options["max_seqlen_k"])
        sizes = {
            name: options[name] for name in ("nheads", "nheads_kv", "head_dim", "seqlen_q", "seqlen_k", "page_size")
        }
        if options["window"] is not None:
            sizes["window"] = options["window"]
        causal = not options["dense"]
        found = decide(kernel, changes=changes, limits=limits, runs=not options["plan_only"], causal=causal, **sizes)
        emit(found.to_json(), json_target)
        if json_target != "-":
            click.echo(words.headline(found))
            for answer in () if quiet else found.answers:
                click.echo("\n".join(words.lines(answer, found.own)))
        raise Exit({True: OK, False: FINDING, None: NOTHING}[found.is_invariant])
