"""Verb cases: the operands of a campaign as files, for a program that is called without Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rich_click as click

from fa3verify.cli.exits import EPILOG, Verb
from fa3verify.cli.options import seed_option


@click.command(cls=Verb, epilog=EPILOG)
@click.option("--like", default="flash_attn_func", show_default=True, help="Whose calls: flash_attn_func, sdpa, ...")
@click.option("--dtype", type=click.Choice(["fp16", "bf16", "e4m3", "fp32"]), default="fp16", show_default=True)
@click.option("--head-dim", "head_dims", type=click.IntRange(1), multiple=True, help="[default: 64 and 128]")
@click.option("--features", metavar="NAME+NAME", help="What it takes, such as causal+gqa, or none.")
@click.option("--declare", "said", multiple=True, metavar="NAME=VALUE", help="A size or a policy: max_seqlen_k=1024.")
@click.option(
    "--accumulator",
    type=click.Choice(["either", "fp32", "wgmma", "tf32"]),
    help="What adds the products; by default Hopper's tensor core or binary32, of fp32 operands binary32.",
)
@seed_option
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True)
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
def cases(
    head_dims: tuple[int, ...], features: str | None, said: tuple[str, ...], out: Path, quiet: bool, **declared: Any
) -> None:
    """Write the operands of a quick campaign into OUT, a folder for each case and a line in OUT/cases.jsonl.

    A program of any language writes CASE/out.bin, and CASE/lse.bin if it has one; fa3verify check OUT then judges it.
    """
    from fa3verify.cli import console
    from fa3verify.commands import cases

    contract = ",".join([f"features={features}"] * bool(features) + list(said))
    declared["said"] = f"@{','.join(map(str, head_dims or (64, 128)))}" + f"[{contract}]" * bool(contract)
    with console.counting("tasks", quiet) as tell:
        count, size = cases.write(out, declared, tell)
    click.echo(f"{count:,} cases, {size / 1e6:,.0f} MB of operands, in {out}; then: fa3verify check {out}")
