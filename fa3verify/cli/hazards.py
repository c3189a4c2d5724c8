"""Verb hazards: races, deadlocks and misused barriers of the schedules that ship, for any number of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING

import rich_click as click
from click.exceptions import Exit

from fa3verify.cli import described
from fa3verify.cli.exits import EPILOG, FINDING, NOTHING, OK, Verb, emit
from fa3verify.cli.options import machine_option

if TYPE_CHECKING:
    from fa3_simulator.cta import AnyConfig
    from fa3verify.hazards import Checked

SHOWN = 3  # the most kernels that a line names


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("kernels", nargs=-1, metavar="[KERNEL]...")
@machine_option
@described.set_option
@click.option("--json", "json_target", metavar="FILE", help="Write what was found as JSON; - for standard output.")
def hazards(kernels: tuple[str, ...], machine: str, settings: tuple[str, ...], json_target: str | None) -> None:
    """Look for races, deadlocks and misused barriers, whatever the tiles of a CTA and in every order.

    A KERNEL is a launch that audit compiles, such as fp16_d128_dense or backward_d64_dense, or FlashAttention-3's, such
    as flash3_fp16_d128; the beginning of names stands for all of them. Without any, all kernels. FILE.py:NAME is a
    kernel that somebody described. It is schedules, as the simulator has them, that are looked at, and not compiled
    code.
    """
    from fa3_simulator.machine import load
    from fa3verify import hazards as shapes

    on = load(machine)
    own = [kernel for kernel in kernels if described.is_described(kernel)]
    ours = tuple(kernel for kernel in kernels if kernel not in own)
    known = shapes.check(_chosen(shapes.named(), ours), on) if ours or not own else ()
    proofs = (described.check(kernel, settings, on) for kernel in own)
    found = []
    for checked in chain(known, (shapes.Checked((name,), name, proof) for name, proof in proofs)):
        found.append(checked)
        if json_target != "-":
            _print(checked)
    emit({"shapes": [checked.to_json() for checked in found]}, json_target)
    if any(checked.proof.findings and not checked.proof.is_undecided for checked in found):
        raise Exit(FINDING)
    raise Exit(OK if all(checked.proof.is_complete for checked in found) else NOTHING)


def _chosen(known: Mapping[str, AnyConfig], wanted: tuple[str, ...]) -> dict[str, AnyConfig]:
    """Return the kernels whose names begin with a wanted one, all if none is wanted; ValueError if one has no match."""
    for name in wanted:
        if not any(x.startswith(name) for x in known):
            beginnings = ", ".join(dict.fromkeys("_".join(x.split("_")[:2]) for x in known))
            raise ValueError(f"no kernel is called {name} or begins so; those known begin with {beginnings}")
    return {name: x for name, x in known.items() if not wanted or name.startswith(wanted)}


def _print(checked: Checked) -> None:
    """Print what was found in one schedule, which several kernels may share."""
    proof = checked.proof
    names = checked.kernels
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    tried = f"{proof.words} lists of tiles, of up to {proof.longest} blocks"
    claim = "stand for all" if proof.is_complete else "tried, then the search ended"
    verdict = (
        "not proven" if proof.is_undecided else f"{len(proof.findings)} findings" if proof.findings else "no hazard"
    )
    click.echo(f"{verdict}: {', '.join(names[:SHOWN])}{more} ({tried} {claim})")
    for finding in proof.findings:
        click.echo(f"  {finding.kind}: {finding.text}")
