"""The command ``python -m fa3_reports``: a verb for each kind of evidence that the project publishes."""

from __future__ import annotations

import rich_click as click

from fa3_reports.cli.adversary import adversary
from fa3_reports.cli.audit import audit
from fa3_reports.cli.bench import bench
from fa3_reports.cli.bits import bits
from fa3_reports.cli.counters import counters
from fa3_reports.cli.hazards import hazards
from fa3_reports.cli.host import host
from fa3_reports.cli.mutants import mutants
from fa3_reports.cli.pages import atlas, claims, clauses, device, invariance, issue, row
from fa3_reports.cli.record import record
from fa3_reports.cli.recordings import recordings
from fa3_reports.cli.sanitize import sanitize
from fa3_reports.cli.studies import studies
from fa3_reports.cli.timeline import timeline
from fa3verify.cli.exits import EPILOG

JOURNEYS = {
    "Without a GPU": (
        studies,
        adversary,
        audit,
        hazards,
        mutants,
        recordings,
        invariance,
        device,
        claims,
        clauses,
        atlas,
        row,
        issue,
    ),
    "On a GPU": (bench, bits, record, timeline, counters, host, sanitize),
}


@click.group(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Make the evidence that the reports of fa3verify show."""


for journey, verbs in JOURNEYS.items():
    for verb in verbs:
        main.add_command(verb)
    main.add_panel(click.RichCommandPanel(journey, commands=[str(verb.name) for verb in verbs]))

if __name__ == "__main__":
    main(prog_name="python -m fa3_reports")
