"""What the terminal shows of ``hunt``, ``compare`` and ``learn``; verdicts are in :mod:`fa3verify.cli.console`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from fa3verify.commands.learn import Learning
    from fa3verify.search.run import Hunt


def print_hunt(hunted: Hunt, file: Path, *, quiet: bool) -> None:
    """Print the table of largest known errors, where the kernel failed, and the path of the table."""
    console = Console(highlight=False)
    if not quiet:
        console.print(escape(hunted.page()), soft_wrap=True)
    for ground, message, _ in hunted.failures:
        words = f"{escape(hunted.kernel)} on {escape(ground)}: {escape(message)}"
        console.print(f"[red]FAIL[/red] {words}", soft_wrap=True)
    console.print(f"written to {escape(str(file))}", soft_wrap=True)


def print_comparisons(kernels: list[str], found: list[Any], *, quiet: bool) -> None:
    """Print one line for each comparison, after the kernel's name if that is not empty; None has no line.

    With ``quiet`` comparisons of equal bits have none either.
    """
    console = Console(highlight=False)
    for kernel, each in zip(kernels, found, strict=True):
        if each is not None and not (quiet and each.is_equal):
            words = f"{kernel}: {each.told()}" if kernel else each.told()
            console.print(escape(words), soft_wrap=True)


def print_learning(found: Learning, file: Path | None) -> None:
    """Print what was learned at each head_dim, unsound steps, and the proposal's file, None if none was written."""
    console = Console(highlight=False)
    for each in found.found:
        title = f"{found.kernel} in {each.dtype} at head_dim {each.head_dim}"
        console.print(f"{escape(title)}: {each.launches} launches in {each.seconds:.0f} s", soft_wrap=True)
        for words in each.words():
            console.print(f"  {escape(words)}", soft_wrap=True)
    for words in found.failed:
        console.print(f"[red]FAIL[/red] {escape(words)}", soft_wrap=True)
    for words in found.findings:
        console.print(f"[red]FINDING[/red] {escape(words)}", soft_wrap=True)
    if file is None:
        console.print("no order is known, so nothing was written; the bound of any order judges this kernel")
        return
    console.print(f"written to {escape(str(file))}: a proposal, which acquits no kernel", soft_wrap=True)
    console.print(f"next: fa3verify verify {escape(found.kernel)} --order {escape(str(file))}", soft_wrap=True)
