"""What the terminal shows of ``hunt``, ``compare`` and ``learn``; verdicts are in :mod:`fa3verify.cli.console`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa3verify.cli.console import FAIL, say

if TYPE_CHECKING:
    from fa3verify.commands.learn import Learning
    from fa3verify.search.run import Hunt


def print_hunt(hunted: Hunt, file: Path, *, quiet: bool) -> None:
    """Print the table of largest known errors, where the kernel failed, and the path of the table."""
    if not quiet:
        say(hunted.page())
    say(*(f"{hunted.kernel} on {ground}: {message}" for ground, message, _ in hunted.failures), mark=FAIL)
    say(f"written to {file}")


def print_comparisons(kernels: list[str], found: list[Any], *, quiet: bool) -> None:
    """Print one line for each comparison, after the kernel's name if that is not empty; None has no line.

    With ``quiet`` comparisons of equal bits have none either.
    """
    for kernel, each in zip(kernels, found, strict=True):
        if each is not None and not (quiet and each.is_equal):
            say(f"{kernel}: {each.told()}" if kernel else each.told())


def print_learning(found: Learning, file: Path | None) -> None:
    """Print what was learned at each head_dim, unsound steps, and the proposal's file, None if none was written."""
    for each in found.found:
        title = f"{found.kernel} in {each.dtype} at head_dim {each.head_dim}"
        say(f"{title}: {each.launches} launches in {each.seconds:.0f} s", *(f"  {words}" for words in each.words()))
    say(*found.failed, mark=FAIL)
    say(*found.findings, mark="[red]FINDING[/red] ")
    if file is None:
        say("no order is known, so nothing was written; the bound of any order judges this kernel")
    else:
        say(f"written to {file}: a proposal, which acquits no kernel")
        say(f"next: fa3verify verify {found.kernel} --order {file}")
