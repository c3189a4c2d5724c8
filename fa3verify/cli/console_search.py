"""This module says what the terminal shows of searches: the adversary, the hunt and comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape


def print_adversary(body: dict[str, Any], columns: str, out: Path, *, quiet: bool) -> None:
    """Print the largest error / bound of every island and of every dtype, in these columns, and what lies beyond 1."""
    console = Console(highlight=False)
    for dtype, part in body["dtypes"].items():
        rows = (
            []
            if quiet
            else [
                (name, island, [f["value"] for f in island["best"].values()])
                for name, island in part["islands"].items()
            ]
        )
        for name, counts, ratios in [*rows, ("", part, part["ratio"].values())]:
            figures = " ".join(f"{ratio:7.4f}" for ratio in ratios)
            sums = f"{counts['problems']:>9,} problems {counts['generations']:>7,} generations"
            line = f"{dtype:5}{name:27}{figures}   {sums}, {counts['above_1']} above 1"
            console.print(line, soft_wrap=True)
        for name, island in part["islands"].items():
            for cause, find in island["violations"].items():
                console.print(f"[red]FAIL[/red] {dtype} {name}: error / bound {find['value']:.4g}, {cause}")
    console.print(f"columns: {columns}")
    console.print(f"written to {escape(str(out))}", soft_wrap=True)


def print_adversary_replay(found: list[tuple[str, str, dict[str, float]]]) -> None:
    """Print one line for each individual."""
    for what, stored, ratios in found:
        figures = ", ".join(f"{name} {ratio:.6g}" for name, ratio in ratios.items())
        Console(highlight=False).print(f"{escape(what)}: stored {stored}; now {figures}", soft_wrap=True)


def print_hunt(body: dict[str, Any], page: str, file: Path, *, quiet: bool) -> None:
    """Print the table of largest known errors, what failed, and where the files are."""
    console = Console(highlight=False)
    if not quiet:
        console.print(escape(page), soft_wrap=True)
    for failure in body["failures"]:
        words = f"{escape(body['kernel'])} on {escape(failure['ground'])}: {escape(failure['message'])}"
        console.print(f"[red]FAIL[/red] {words}", soft_wrap=True)
    console.print(f"written to {escape(str(file))}", soft_wrap=True)


def print_comparisons(kernels: list[str], found: list[Any], *, quiet: bool) -> None:
    """Print one line for each comparison, with its kernel where one is compared with itself."""
    console = Console(highlight=False)
    for kernel, each in zip(kernels, found, strict=True):
        if each is not None and not (quiet and each.is_equal):
            words = f"{kernel}: {each.told()}" if kernel else each.told()
            console.print(escape(words), soft_wrap=True)
