"""What the terminal shows of the times of kernels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from fa3verify.timed.results import Results


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
