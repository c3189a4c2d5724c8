"""A verdict as plain text: one sentence to paste, and the line about bits lost.

Reports have the sentence, and the terminal (:mod:`fa3verify.cli.console`) prints :func:`bits_line`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fa3verify.campaign.findings import symptoms
from fa3verify.campaign.run import KernelRun, Run
from fa3verify.judging.bits_lost import BitsLost, bits_text
from fa3verify.judging.verdict import ratio_text
from fa3verify.text import plural

_SHOWN = 4  # the most kernels that one line names


def sentence(run: Run) -> str:
    """Return one sentence that says what was judged, on how much, and what was found."""
    kernels = run.kernels
    cases = sum(kernel.cases for kernel in kernels)
    outputs = sum(kernel.outputs for kernel in kernels)
    names = ", ".join(kernel.name for kernel in kernels[:_SHOWN]) + (", ..." if len(kernels) > _SHOWN else "")
    count = len(run.failures)
    shown = len(symptoms(run.failures))
    findings = f"{plural(count, 'finding')} of {plural(shown, 'symptom')}" if count else "no finding"
    judged = f"{plural(len(kernels), 'kernel')} ({names})"
    bits = run.layers.get("L0", "not run")
    return (
        f"fa3verify {run.version}: {run.verdict.upper()}, {findings} in {judged} on {cases:,} cases and "
        f"{outputs:,} outputs; largest error / bound {_largest(kernels)}, bits {bits.partition(':')[0]}; profile "
        f"{run.profile}, seed {run.seed}, {run.started[:10]}."
    )


def _largest(kernels: Sequence[KernelRun]) -> str:
    """Return as text the largest error / bound of any output of some kernels; a dash where nothing was judged."""
    ratios = (ratio for kernel in kernels for ratio in (kernel.worst_ratio, *kernel.side_ratios.values()))
    worst = max((ratio for ratio in ratios if ratio is not None), default=None)
    if worst is None:
        return "-"
    # ratio_text would need more than three digits here
    return "below 1" if 0.9995 <= worst < 1 else ratio_text(worst)


def ranked(kernels: Iterable[KernelRun]) -> list[tuple[KernelRun, BitsLost]]:
    """Return the kernels that have a number of bits lost, with it; the one that loses most comes first."""
    known = [(kernel, kernel.bits_lost) for kernel in kernels if kernel.bits_lost]
    return sorted(known, key=lambda each: -each[1].mean)


def bits_line(kernels: Iterable[KernelRun]) -> str:
    """Return one line about the bits that kernels lose, the one that loses most first; empty if none has a number."""
    known = ranked(kernels)
    if len(known) == 1:
        ((kernel, lost),) = known
        most = f"most in {lost.worst_family}: {bits_text(lost.worst)}"
        return f"{kernel.name} loses {bits_text(lost.mean)} bits over the ideal {kernel.dtype} kernel, {most}"
    each = [
        f"{kernel.name} {bits_text(lost.mean)} ({lost.worst_family} {bits_text(lost.worst)})"
        for kernel, lost in known[:_SHOWN]
    ]
    more = f", and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    head = "bits lost over the ideal kernel of each format (and in its worst family)"
    return f"{head}: {', '.join(each)}{more}" if each else ""
