"""This module says what the terminal shows of compiled kernels and of their times."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fa3_kernels.audit.golden import is_compiled
from fa3verify.cli.console import STYLE
from fa3verify.files import Json
from fa3verify.text import plural

if TYPE_CHECKING:
    from fa3verify.timed.results import Results


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


def print_bench(results: Results, grid: str, left: int, wrong: list[str], out: Path, *, quiet: bool) -> None:
    """Print ratios to every peer, what is missing, kernels whose bits differ, and the path of the report."""
    from fa3verify.timed.ratios import ratio_lines

    console = Console(highlight=False)
    if not quiet:
        for text in ratio_lines(results, grid):
            console.print(escape(text), soft_wrap=True)
        for name, reason in results.missing().items():
            console.print(f"missing {escape(name)}: {escape(reason)}", soft_wrap=True)
    for text in wrong:
        console.print(f"[red]FAIL[/red] {escape(text)}", soft_wrap=True)
    if left:
        console.print(f"{left} cells left: the same command goes on with them")
    console.print(f"report {out / 'bench.md'}", soft_wrap=True)
