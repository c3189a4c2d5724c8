"""The timeline of one CTA that the verb ``simulate`` draws: as text, and for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path

import rich_click as click

from fa3_simulator.timeline import Bar, chrome_trace, text_gantt
from fa3verify.cli.exits import letters
from fa3verify.files import Json, write_text

Timelines = dict[str, list[Bar]]  # bars by the title of a timeline


def write_trace(path: Path, timelines: Timelines, clock_mhz: float, cycles: float) -> Json:
    """Write timelines as Chrome JSON; return the number of events, and ``cycles``, the length of the first."""
    events = chrome_trace(timelines, clock_mhz)
    write_text(path, json.dumps(events))
    return {"cycles": cycles, "events": len(events["traceEvents"])}


def print_timelines(timelines: Timelines, cycles: float) -> None:
    """Print the same stretch of every timeline as text, with its title if there are two.

    It begins at 30 % of the shortest and is at most 6000 cycles long; ``cycles`` is the length of the first one.
    """
    _, *others = timelines.values()
    end = min([cycles, *(max(bar.stop for bar in drawn) for drawn in others)])
    for name, drawn in timelines.items():
        if len(timelines) > 1:
            click.echo(name)
        click.echo(text_gantt(drawn, end * 0.3, min(end * 0.3 + 6000, end), letters()))


def print_trace(path: Path, figures: Json, *, quiet: bool) -> None:
    """Print the path of the trace and its length; if quiet only the path."""
    click.echo(path if quiet else f"{path}: {figures['events']} events, {figures['cycles']:.0f} cycles")
