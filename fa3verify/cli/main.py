"""The command ``fa3verify``. Every verb imports what is heavy inside its function, so that --help answers at once."""

from __future__ import annotations

import rich_click as click

from fa3verify import __version__
from fa3verify.cli.atlas import atlas
from fa3verify.cli.audit import audit
from fa3verify.cli.bench import bench
from fa3verify.cli.compare import compare
from fa3verify.cli.exits import EPILOG
from fa3verify.cli.hazards import hazards
from fa3verify.cli.info import info
from fa3verify.cli.invariance import invariance
from fa3verify.cli.kernels import kernels
from fa3verify.cli.learn import learn
from fa3verify.cli.merge import merge
from fa3verify.cli.replay import replay
from fa3verify.cli.report import report
from fa3verify.cli.search import adversary, hunt
from fa3verify.cli.simulate import simulate
from fa3verify.cli.trace import trace
from fa3verify.cli.tune import tune
from fa3verify.cli.verify import verify

JOURNEYS = {
    "Judge a kernel": (verify, learn, replay, report, kernels, merge, atlas),
    "Look for the worst": (hunt, compare, invariance, adversary),
    "Choose a schedule, without a GPU": (tune, simulate, trace, hazards, audit),
    "On a GPU": (bench,),
    "Other": (info,),
}


@click.group(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fa3verify")
def main() -> None:
    """Numerics verification for FlashAttention-3 on NVIDIA Hopper."""


for journey, verbs in JOURNEYS.items():
    for verb in verbs:
        main.add_command(verb)
    main.add_panel(click.RichCommandPanel(journey, commands=[str(verb.name) for verb in verbs]))
