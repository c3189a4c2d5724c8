"""What the terminal shows of bits, of recordings, of the adversary, and of compiled kernels."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fa3_reports.adversary.search import Adversary
from fa3_reports.audit.golden import is_compiled
from fa3_reports.recordings import Recording
from fa3verify.cli.console import STYLE
from fa3verify.files import Json
from fa3verify.text import plural


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


def print_adversary(bred: Adversary, out: Path, *, quiet: bool) -> None:
    """Print the largest error / bound of every island and of every dtype, and what lies beyond 1."""
    console = Console(highlight=False)
    for dtype, islands in bred.found.items():
        for name, found in {**({} if quiet else islands), "": bred.total(dtype)}.items():
            figures = " ".join(f"{found.height(record):7.4f}" for record in bred.search.JUDGE.records)
            sums = f"{found.problems:>9,} problems {found.generations:>7,} generations"
            console.print(f"{dtype:5}{name:27}{figures}   {sums}, {found.above_1} above 1", soft_wrap=True)
        for name, found in islands.items():
            for cause, find in found.violations.items():
                console.print(f"[red]FAIL[/red] {dtype} {name}: error / bound {find.value:.4g}, {cause}")
    console.print(f"columns: {bred.search.COLUMNS}")
    console.print(f"written to {escape(str(out))}", soft_wrap=True)


def print_adversary_replay(found: list[tuple[str, str, dict[str, float]]]) -> None:
    """Print one line for each individual."""
    for what, stored, ratios in found:
        figures = ", ".join(f"{name} {ratio:.6g}" for name, ratio in ratios.items())
        Console(highlight=False).print(f"{escape(what)}: stored {stored}; now {figures}", soft_wrap=True)


def print_audit(
    figures: Mapping[str, Json], broken: list[str], moved: list[str], accepted: bool, *, quiet: bool
) -> None:
    """Print the figures of every kernel, what broke a rule, what moved, and the verdict."""
    console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
    compiled = {name: f for name, f in figures.items() if is_compiled(f)}
    if not quiet:
        table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
        table.add_column("kernel", no_wrap=True)
        for name in ("regs", "spill", "smem", "GMMA", "TMA", "MUFU", "FFMA", "LDSM/STSM", "PRMT", "BAR"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("first step", overflow="fold")
        for name, f in compiled.items():
            barriers = f["barriers"]["BAR.SYNC"] + f["barriers"]["BAR.ARV"]
            row = [f["registers"]["entry"], f["memory"]["spill_bytes"], f["memory"]["smem_bytes"]]
            row += [sum(f[group].values()) for group in ("tensor", "tma", "special")]
            row += [f["fp32"]["FFMA"], f"{f['moves']['LDSM']}/{f['moves']['STSM']}", f["moves"]["PRMT"], barriers]
            table.add_row(escape(name), *map(str, row), f["loops"][0].split(" BAR")[0] if f["loops"] else "")
        console.print(table)
    for text in broken:
        console.print(f"[red]BROKEN[/red] {escape(text)}", soft_wrap=True)
    for text in moved:
        console.print(f"[yellow]MOVED[/yellow] {escape(text)}", soft_wrap=True)
    if moved and accepted:
        console.print(f"accepted: {len(moved)} figures written to the golden file")
    verdict = "fail" if broken or (moved and not accepted) else "pass"
    console.print(
        f"[{STYLE[verdict]}]AUDIT {verdict.upper()}[/] {plural(len(compiled), 'kernel')}, {len(moved)} figures moved"
    )
