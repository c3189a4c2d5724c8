"""Verb hazards: the schedules of all kernels that ship, and of FlashAttention-3, for any number of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import rich_click as click

from fa3verify.cli.exits import EPILOG, Verb
from fa3verify.cli.options import machine_option

if TYPE_CHECKING:
    from fa3_simulator.cta import AnyConfig


@click.command(cls=Verb, epilog=EPILOG)
@click.argument("kernels", nargs=-1, metavar="[KERNEL]...")
@machine_option
@click.option("--json", "json_target", metavar="FILE", help="Write what was found as JSON; - for standard output.")
def hazards(kernels: tuple[str, ...], machine: str, json_target: str | None) -> None:
    """Look for races, deadlocks and misused barriers in the schedules that ship, whatever the tiles of a CTA.

    A KERNEL is a launch that audit compiles, such as fp16_d128_dense or backward_d64_dense, or FlashAttention-3's, such
    as flash3_fp16_d128; the beginning of names stands for all of them. Without any, all kernels.
    """
    from fa3_reports import schedules
    from fa3_simulator.machine import load
    from fa3verify.cli.hazards import tell

    tell(schedules.check(_chosen(schedules.named(), kernels), load(machine)), json_target)


def _chosen(known: Mapping[str, AnyConfig], wanted: tuple[str, ...]) -> dict[str, AnyConfig]:
    """Return the kernels whose names begin with a wanted one, all if none is wanted; ValueError if one has no match."""
    for name in wanted:
        if not any(x.startswith(name) for x in known):
            beginnings = ", ".join(dict.fromkeys("_".join(x.split("_")[:2]) for x in known))
            raise ValueError(f"no kernel is called {name} or begins so; those known begin with {beginnings}")
    return {name: x for name, x in known.items() if not wanted or name.startswith(wanted)}
