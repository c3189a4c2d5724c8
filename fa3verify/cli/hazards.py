"""Verb hazards: races, deadlocks and misused barriers of the schedules that ship, for any number of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import rich_click as click
from click.exceptions import Exit

from fa3verify.cli.exits import EPILOG, FINDING, NOTHING, OK, emit, one_line_errors

SHOWN = 3  # names of kernels on a line


@click.command(epilog=EPILOG)
@click.argument("kernels", nargs=-1, metavar="[KERNEL]...")
@click.option("--machine", default="h200", show_default=True, help="h100, h200 or a .toml file.")
@click.option("--json", "json_target", metavar="FILE", help="Write what was found as JSON; - for standard output.")
def hazards(kernels: tuple[str, ...], machine: str, json_target: str | None) -> None:
    """Look for races, deadlocks and misused barriers, whatever the tiles of a CTA and in every order.

    A KERNEL is a launch that audit compiles, such as fp16_d128_dense or backward_d64_dense, or FlashAttention-3's, such
    as flash3_fp16_d128; the beginning of names stands for all of them. Without any, all kernels. It is their schedules,
    as the simulator has them, that are looked at, and not compiled code.
    """
    with one_line_errors():
        from fa3_simulator.machine import load
        from fa3verify import hazards as shapes

        chosen = _chosen(shapes.named(), kernels)
        rows = []
        for checked in shapes.check(chosen, load(machine)):
            rows.append(_row(checked))
            if json_target != "-":
                _print(rows[-1])
        emit({"shapes": rows}, json_target)
        if any(row["findings"] for row in rows):
            raise Exit(FINDING)
        raise Exit(OK if all(row["is_complete"] for row in rows) else NOTHING)


def _chosen(known: Mapping[str, Any], wanted: tuple[str, ...]) -> dict[str, Any]:
    for name in wanted:
        if not any(x.startswith(name) for x in known):
            raise ValueError(f"no kernel is called {name} or begins so; those known begin with {_beginnings(known)}")
    return {name: x for name, x in known.items() if not wanted or name.startswith(wanted)}


def _beginnings(known: Mapping[str, Any]) -> str:
    return ", ".join(dict.fromkeys("_".join(name.split("_")[:2]) for name in known))


def _row(checked: Any) -> dict[str, Any]:
    proof = checked.proof
    return {
        "kernels": list(checked.kernels),
        "program": checked.program,
        "findings": [x._asdict() for x in proof.findings],
        "is_complete": proof.is_complete,
        "words": proof.words,
        "longest": proof.longest,
    }


def _print(row: dict[str, Any]) -> None:
    names = row["kernels"]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    tried = f"{row['words']} lists of tiles, of up to {row['longest']} blocks"
    claim = "stand for all" if row["is_complete"] else "tried, then the search ended"
    verdict = f"{len(row['findings'])} findings" if row["findings"] else "no hazard"
    click.echo(f"{verdict}: {', '.join(names[:SHOWN])}{more} ({tried} {claim})")
    for finding in row["findings"]:
        click.echo(f"  {finding['kind']}: {finding['text']}")
