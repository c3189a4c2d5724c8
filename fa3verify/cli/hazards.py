"""Verb hazards: races, deadlocks and misused barriers of a schedule, for any number of blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import rich_click as click
from click.exceptions import Exit

from fa3verify.cli import described
from fa3verify.cli.exits import EPILOG, FINDING, NOTHING, OK, Verb, emit
from fa3verify.cli.options import machine_option, problem_options, refuse_options, schedule_options
from fa3verify.cli.simulate import family_of

if TYPE_CHECKING:
    from fa3verify.hazards import Checked

SHOWN = 3  # the most kernels that a line names


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("kernels", nargs=-1, metavar="[KERNEL]...")
@problem_options
@machine_option
@schedule_options
@described.described_options
def hazards(kernels: tuple[str, ...], json_target: str | None, **options: Any) -> None:
    """Look for races, deadlocks and misused barriers, whatever the tiles of a CTA and in every order.

    A KERNEL is what simulate takes: a family, of which the options say the tile and the schedule, or FILE.py:NAME of a
    kernel that somebody described. It is schedules, as the simulator has them, that are looked at, and not compiled
    code.
    """
    from fa3verify.hazards import check, check_schedule

    refuse_options(("clock_mhz",), "hazards are of any clock, and do not take {}")
    machine = described.machine_of(options["machine"], options["what_if"])
    tell(
        (
            check_schedule(kernel, described.schedule_of(kernel, options["settings"]), machine)
            if described.is_described(kernel)
            else check(family_of(kernel, options)[1])
            for kernel in kernels or (options["kernel"],)
        ),
        json_target,
    )


def tell(proofs: Iterable[Checked], json_target: str | None) -> None:
    """Print proofs as they come, write them as JSON, and exit: 1 for a hazard, 5 where a proof is not complete."""
    found = []
    for checked in proofs:
        found.append(checked)
        if json_target != "-":
            _print(checked)
    emit({"shapes": [checked.to_json() for checked in found]}, json_target)
    if any(checked.proof.findings and not checked.proof.is_undecided for checked in found):
        raise Exit(FINDING)
    raise Exit(OK if all(checked.proof.is_complete for checked in found) else NOTHING)


def _print(checked: Checked) -> None:
    """Print what was found in one schedule, which several kernels may share."""
    proof = checked.proof
    names = checked.kernels
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    claim = "stand for all" if proof.is_complete else "tried, then the search ended"
    verdict = (
        "not proven" if proof.is_undecided else f"{len(proof.findings)} findings" if proof.findings else "no hazard"
    )
    click.echo(
        f"{verdict}: {', '.join(names[:SHOWN])}{more} "
        f"({proof.words} lists of tiles, of up to {proof.longest} blocks {claim})"
    )
    for finding in proof.findings:
        click.echo(f"  {finding.kind}: {finding.text}")
