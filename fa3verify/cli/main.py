"""The command ``fa3verify``. Every verb imports what is heavy inside its function, so that --help answers at once."""

from __future__ import annotations

import rich_click as click

from fa3verify.cli.bench import bench
from fa3verify.cli.compare import compare
from fa3verify.cli.exits import EPILOG
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


@click.group(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fa3verify")
def main() -> None:
    """Numerics verification for FlashAttention-3 on NVIDIA Hopper."""


for journey, verbs in JOURNEYS.items():
    for verb in verbs:
        main.add_command(verb)
    main.add_panel(click.RichCommandPanel(journey, commands=[str(verb.name) for verb in verbs]))
