"""Verb logprobs: what kernels do to the log-probabilities of a language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rich_click as click
from click.exceptions import Exit

from fa3verify.cli.exits import EPILOG, Verb


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("model", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option(
    "--text",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    multiple=True,
    help="A text, or a .npy file of token ids; repeat it.",
)
@click.option(
    "--kernel",
    multiple=True,
    help="Such as twin.flash3.bf16; eager and sdpa are those of Transformers. Repeat it.",
)
@click.option(
    "--rest",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    help="Format of all but attention: fp32 (default) shows what a kernel does, 16 bits what users see.",
)
@click.option(
    "--measured",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    nargs=2,
    help="Instead of texts and kernels: two .npz files, such as a trainer's and an engine's, in bf16 or --rest.",
)
@click.option("--tokens", type=click.IntRange(2), default=512, show_default=True, help="Of each text, the first.")
@click.option("--rotated", is_flag=True, help="Rotate Q and K of e4m3 kernels by a Hadamard matrix first.")
@click.option("--decode", is_flag=True, help="Beside a prefill, call kernels token by token.")
@click.option("--page-size", type=click.IntRange(0), default=0, help="With --decode: keys of a page of the cache.")
@click.option("--by-token", is_flag=True, help="Deviations of rounding by token, from eight noisy runs a format.")
@click.option(
    "--budget", type=click.FloatRange(0, min_open=True), help="Nats RMS: which layers keep the second kernel."
)
@click.option("--gate", type=click.FloatRange(0, min_open=True), help="Nats RMS beyond which the exit code is 1.")
@click.option("--json", type=click.Path(path_type=Path, dir_okay=False), help="Write all figures as JSON.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write a page with pictures.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the signs of the prediction.")
@click.option("--workers", type=click.IntRange(0), default=0, help="Processes of several texts; 0 is one per core.")
def logprobs(**options: Any) -> None:
    """Run the texts through MODEL, a folder of Transformers, with each kernel as its attention (needs transformers).

    Differences of log-probabilities stand beside what rounding is predicted to do, by place, layer and head, and every
    call of a kernel is judged. With --measured two programs ran elsewhere, and one sentence says whether their
    difference is rounding, or which known mistake explains it. Exit code 1 if a call is wrong, decoding differs from
    prefill elsewhere than the plans say, a budget or gate is exceeded, or a difference is no rounding.
    """
    from fa3verify.models.command import LogprobsRequest, answer

    told, is_right = answer(LogprobsRequest(**options))
    click.echo(told)
    raise Exit(0 if is_right else 1)
