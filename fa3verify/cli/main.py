"""The command ``fa3verify``. Every verb imports what is heavy inside its function, so that --help answers at once."""

from __future__ import annotations

import rich_click as click

from fa3verify.cli.bench import bench
from fa3verify.cli.compare import compare
from fa3verify.cli.exits import EPILOG, USAGE, fail
from fa3verify.cli.hazards import hazards
from fa3verify.cli.kernels import cases, check, declare, kernels
from fa3verify.cli.logprobs import logprobs
from fa3verify.cli.report import atlas, merge, replay, report
from fa3verify.cli.search import hunt, learn
from fa3verify.cli.simulate import simulate
from fa3verify.cli.tune import tune
from fa3verify.cli.verify import verify
from fa3verify.cli.watch import watch
from fa3verify.version import __version__

JOURNEYS = {
    "Judge a kernel": (declare, verify, check, cases, learn, replay, report, kernels, merge, atlas),
    "Look for the worst": (hunt, compare),
    "Choose a schedule, without a GPU": (tune, simulate, hazards),
    "On a GPU": (bench,),
    "In a program or a model that runs": (watch, logprobs),
}
MOVED = {  # verbs of earlier versions, and what to call instead
    "adversary": "python -m fa3_reports adversary, from a checkout",
    "audit": "python -m fa3_reports audit, from a checkout",
    "info": "kernels",
    "invariance": "compare KERNEL --prove",
    "trace": "simulate --trace FILE",
}


class Verbs(click.RichGroup):
    """The group of all verbs, which also answers to the names of verbs of earlier versions."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb of a command line; for one of an earlier version, exit with a line that says what to call."""
        if args[0] in MOVED:
            fail(USAGE, f"{args[0]} is now: {MOVED[args[0]]}")
        return super().resolve_command(ctx, args)


@click.group(cls=Verbs, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fa3verify")
def main() -> None:
    """Numerics verification for FlashAttention-3 on NVIDIA Hopper."""


for journey, verbs in JOURNEYS.items():
    for verb in verbs:
        main.add_command(verb)
    main.add_panel(click.RichCommandPanel(journey, commands=[str(verb.name) for verb in verbs]))
