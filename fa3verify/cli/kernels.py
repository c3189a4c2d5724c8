"""Verbs kernels, declare, cases and check: what can be judged here, and how functions and programs become kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rich_click as click
from click.exceptions import Exit

from fa3verify.cli.exits import EPILOG, Verb, emit
from fa3verify.cli.options import peers_option, seed_option, workers_option


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("files", nargs=-1, metavar="[FILE.py]...")
@peers_option
@click.option("--json", "json_target", metavar="FILE|-", help="Write the list as JSON.")
def kernels(files: tuple[str, ...], json_target: str | None) -> None:
    """List the kernels that can be judged, and why one cannot run here; then versions, extras, cache and variables.

    With FILE.py, those that it declares: each is called once with a few queries and keys.
    """
    from fa3verify.cases import probing
    from fa3verify.cli import console
    from fa3verify.kernels import loading
    from fa3verify.known import registry

    known = [probing.tried_here(kernel) for file in files for kernel in loading.declared(file)]
    known = known or list(registry.discover().values())
    facts = console.environment()
    if emit({"kernels": [console.kernel_row(c) for c in known], "environment": facts}, json_target):
        console.print_kernels(known, with_faults=not files)
        console.print_environment(facts)


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("function", metavar="FILE.py:FUNCTION")
@click.option("--write", "is_written", is_flag=True, help="Put the draft above the function in its file.")
@workers_option
@peers_option
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
def declare(function: str, is_written: bool, workers: int, quiet: bool) -> None:
    """Call a bare FUNCTION in processes of their own and print the @fa3verify.kernel(...) that it seems to need.

    Each keyword stands below what was seen of it. A draft acquits no kernel: what no contract explains stays wrong when
    it is verified. Exit code 2 if it could not be called.
    """
    from fa3verify.cli import console
    from fa3verify.commands import declare

    with console.counting("trials", quiet) as tell:
        text = declare.declare(function, workers, tell)
    click.echo(text)
    if is_written:
        declare.write(function, text)


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


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("dump", type=click.Path(path_type=Path))
@click.option("--layout", type=click.Choice(["bshd", "bhsd"]), help="Of arrays with four dimensions.")
@click.option("--causal", is_flag=True, default=None, help="Aligned at the last query and key.")
@click.option("--top-left", is_flag=True, default=None, help="The causal mask is aligned at the first query and key.")
@click.option("--window", type=int, nargs=2, metavar="LEFT RIGHT", help="Keys beside the diagonal; -1 is unlimited.")
@click.option("--softcap", type=float)
@click.option("--softmax-scale", type=float, help="1 / sqrt(head_dim) by default.")
@click.option("--rows", metavar="N|all", help="Rows to check.")
@click.option("--seed", type=int, help="Draws the rows.")
@click.option("--accumulator", type=click.Choice(["either", "fp32", "wgmma", "tf32"]), help="What adds the products.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Of a folder, where its report is.")
@click.option("--json", "json_target", metavar="FILE|-", help="Write what was found as JSON.")
@click.pass_context
def check(
    context: click.Context, dump: Path, out: Path | None, json_target: str | None, rows: str | None, **said: Any
) -> None:
    """Check the tensors of a call in DUMP: q, k, v, out, and whatever else fa3verify.check takes, by these names.

    DUMP is an .npz, a .safetensors or torch's .pt, and none is read with pickle. Exit code 1 if something is wrong, 6
    if the call keeps another contract than FlashAttention-3's. A folder that fa3verify cases wrote is judged as verify
    judges a kernel.
    """
    given: Any = {name: x for name, x in said.items() if x is not None}
    if dump.is_dir():
        from fa3verify.cli.verify import verify
        from fa3verify.kernels.filled import CaseFolder

        if given or rows is not None:
            raise click.UsageError("a folder of cases says of itself what it is: only --out and --json go with it")
        folder = CaseFolder(dump)
        context.invoke(
            verify,
            kernels=(folder.name,),
            quick=True,
            seed=folder.declared["seed"],
            out=out or Path("out"),
            json_target=json_target,
        )
    from dataclasses import asdict

    from fa3verify.checking.check import check
    from fa3verify.checking.dumps import load
    from fa3verify.judging.verdict import EXIT_CODES

    given = load(dump) | given
    if rows is not None:
        given["rows"] = rows if rows == "all" else int(rows)
    found = check(**given)
    if emit(asdict(found), json_target):
        click.echo(str(found))
    raise Exit(EXIT_CODES[found.verdict])
