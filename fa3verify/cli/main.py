"""The command ``fa3verify``. Every verb imports what is heavy inside its function, so that --help answers at once."""

from __future__ import annotations

from typing import Any

import rich_click as click

from fa3verify import __version__
from fa3verify.cli.atlas import atlas
from fa3verify.cli.bench import bench
from fa3verify.cli.compare import compare
from fa3verify.cli.exits import EPILOG, USAGE, fail
from fa3verify.cli.hazards import hazards
from fa3verify.cli.info import info
from fa3verify.cli.invariance import invariance
from fa3verify.cli.kernels import kernels
from fa3verify.cli.learn import learn
from fa3verify.cli.merge import merge
from fa3verify.cli.replay import replay
from fa3verify.cli.report import report
from fa3verify.cli.search import hunt
from fa3verify.cli.simulate import simulate
from fa3verify.cli.trace import trace
from fa3verify.cli.tune import tune
from fa3verify.cli.verify import verify

JOURNEYS = {
    "Judge a kernel": (verify, learn, replay, report, kernels, merge, atlas),
    "Look for the worst": (hunt, compare, invariance),
    "Choose a schedule, without a GPU": (tune, simulate, trace, hazards),
    "On a GPU": (bench,),
    "Other": (info,),
}
# Verbs of earlier versions, and what does the same now.
MOVED = {
    "adversary": "python -m fa3_reports adversary, from a checkout",
    "audit": "python -m fa3_reports audit, from a checkout",
}


class Verbs(click.RichGroup):
    """The group of all verbs, which says of an old one where it went."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in MOVED:
            fail(USAGE, f"{args[0]} is now {MOVED[args[0]]}")
        return super().resolve_command(ctx, args)


@click.group(cls=Verbs, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fa3verify")
def main() -> None:
    """Numerics verification for FlashAttention-3 on NVIDIA Hopper."""


for journey, verbs in JOURNEYS.items():
    for verb in verbs:
        main.add_command(verb)
    main.add_panel(click.RichCommandPanel(journey, commands=[str(verb.name) for verb in verbs]))
