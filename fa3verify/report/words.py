"""A verdict as plain text: one sentence to paste, the page ``report.txt``, and the line about bits lost.

:mod:`fa3verify.report.build` writes the page, with a line for each kernel as LAPACK's tests print them; the terminal
(:mod:`fa3verify.cli.console`) prints :func:`bits_line`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from fa3verify.campaign.findings import symptoms
from fa3verify.campaign.run import KernelRun, Run
from fa3verify.cases import tried
from fa3verify.judging.bits_lost import BitsLost, bits_text
from fa3verify.judging.verdict import PARTS, ratio_text
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


def page(run: Run) -> str:
    """Return the page of plain text: the sentence, the parts of the verdict, a line for each kernel, and symptoms."""
    lines = [sentence(run), ""]
    lines += [f"{PARTS.get(key, key):<12}{status}" for key, status in run.layers.items()]
    head = f"{'kernel':<32}{'verdict':<14}{'cases':>8}{'outputs':>14}  {'error/bound':<12}{'properties failed':<18}"
    lines += ["", head.rstrip(), "-" * len(head.rstrip())]
    for kernel in run.kernels:
        statuses = Counter(law.status for law in kernel.laws)
        failed = f"{statuses['fail']} of {statuses['fail'] + statuses['pass']}"
        counted = f"{kernel.cases:>8,}{kernel.outputs:>14,}"
        lines.append(f"{kernel.name:<32}{kernel.verdict:<14}{counted}  {_largest([kernel]):<12}{failed}")
    lines += [f"\n{kernel.name}: {kernel.assumption}" for kernel in run.kernels if kernel.assumption]
    if rests_on := tried.line([kernel.tried for kernel in run.kernels]):
        lines += ["", rests_on]
    for shown in symptoms(run.failures):
        first = shown.first
        lines += ["", f"{shown.severity.upper()}: {first.kernel}, {first.what.told}", f"  {first.message}"]
        beside = (
            ("raised at: ", first.traceback and first.traceback["frame"]),
            ("found as well by: ", shown.elsewhere),
            ("fa3verify replay ", first.replay and f"{first.replay}    # from the folder of this file"),
        )
        lines += [f"  {head}{text}" for head, text in beside if text]
    for asked in run.questions:
        lines += ["", f"QUESTION: {asked.seen.kernel}: {asked.meaning}", f"  {asked.seen.message}"]
        lines += [f"  elsewhere: {asked.public}", f"  {asked.answer}"]
        if asked.seen.replay:
            lines.append(f"  fa3verify replay {asked.seen.replay}    # from the folder of this file")
    return "\n".join(lines) + "\n"


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
