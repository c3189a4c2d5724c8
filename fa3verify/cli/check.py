"""Verb check: the tensors of one call of attention, from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rich_click as click
from click.exceptions import Exit

from fa3verify.cli.exits import EPILOG, Verb, emit


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
    emit(asdict(found), json_target)
    if json_target != "-":
        click.echo(str(found))
    raise Exit(EXIT_CODES[found.verdict])
