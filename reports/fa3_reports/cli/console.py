"""What the terminal shows of bits and recordings."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape

from fa3_reports.recordings import Recording


def print_bits(tables: dict[str, dict[str, int]], broken: list[list[str]]) -> None:
    """Print one line per table and one per row that breaks its rule."""
    console = Console(highlight=False)
    for row in broken[:20]:
        console.print(f"[red]FAIL[/red] {escape(','.join(row))}", soft_wrap=True)
    if len(broken) > 20:
        console.print(f"... and {len(broken) - 20} more")
    for file, sums in tables.items():
        counts = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in sums.items())
        console.print(f"{file}: {counts}", soft_wrap=True)


def print_recording(recording: Recording, found: dict[str, Any]) -> None:
    """Print what of a recording was compared, what differs, and what was left out with its reasons."""
    console = Console(highlight=False)
    for line in found["differing"][:20]:
        console.print(f"[red]DIFFERS[/red] {escape(line)}", soft_wrap=True)
    counts = f"{found['launches']:,} launches, {found['outputs']:,} outputs, {len(found['differing'])} differ"
    facts = f"{recording.facts.get('version', '')}, {recording.facts.get('gpu', '')}"
    console.print(f"{recording.library} ({facts}): {counts}", soft_wrap=True)
    for reason, count in {**found["refused"], "left out for their cost": found["left_out"]}.items():
        if count:
            console.print(f"  {count:,} not compared: {escape(reason)}", soft_wrap=True)
