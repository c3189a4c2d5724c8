"""A verdict in words: one sentence to paste, and a page of plain text with a line per kernel, as LAPACK prints them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from fa3verify.campaign.symptoms import symptoms
from fa3verify.cases import tried
from fa3verify.judging.verdict import PARTS, assumed, ratio_text, told
from fa3verify.text import plural


def sentence(summary: Mapping[str, Any]) -> str:
    """Return one sentence of plain text that says what was judged, how much of it, and what was found."""
    kernels = summary["kernels"]
    cases, outputs = (sum(kernel[key] for kernel in kernels) for key in ("cases", "outputs"))
    names = ", ".join(kernel["name"] for kernel in kernels[:4]) + (", ..." if len(kernels) > 4 else "")
    count = len(summary["failures"])
    shown = len(symptoms(summary["failures"]))
    found = f"{plural(count, 'finding')} of {plural(shown, 'symptom')}" if count else "no finding"
    judged = f"{plural(len(kernels), 'kernel')} ({names})"
    bits = summary["layers"].get("L0", "not run")
    return (
        f"fa3verify {summary['version']}: {summary['verdict'].upper()}, {found} in {judged} on {cases:,} cases and "
        f"{outputs:,} outputs; largest error / bound {_largest(kernels)}, bits {bits.partition(':')[0]}; profile "
        f"{summary['profile']}, seed {summary['seed']}, {summary['started'][:10]}."
    )


def page(summary: Mapping[str, Any]) -> str:
    """Return the verdict as plain text of at most 100 columns but for messages: parts, kernels, findings."""
    lines = [sentence(summary), ""]
    lines += [f"{PARTS.get(key, key):<12}{status}" for key, status in summary["layers"].items()]
    head = f"{'kernel':<32}{'verdict':<14}{'cases':>8}{'outputs':>14}  {'error/bound':<12}{'properties failed':<18}"
    lines += ["", head.rstrip(), "-" * len(head.rstrip())]
    for kernel in summary["kernels"]:
        statuses = Counter(law["status"] for law in kernel["laws"])
        failed = f"{statuses['fail']} of {statuses['fail'] + statuses['pass']}"
        counted = f"{kernel['cases']:>8,}{kernel['outputs']:>14,}"
        lines.append(f"{kernel['name']:<32}{kernel['verdict']:<14}{counted}  {_largest([kernel]):<12}{failed}")
    lines += [f"\n{kernel['name']}: {assumed(kernel)}" for kernel in summary["kernels"] if assumed(kernel)]
    if rests_on := tried.line(summary["kernels"]):
        lines += ["", rests_on]
    for shown in symptoms(summary["failures"]):
        first = shown.first
        lines += ["", f"{shown.severity.upper()}: {first['kernel']}, {told(first['what'])}", f"  {first['message']}"]
        if raised := first.get("traceback"):
            lines.append(f"  raised at: {raised['frame']}")
        if shown.elsewhere:
            lines.append(f"  found as well by: {shown.elsewhere}")
        if first.get("replay"):
            lines.append(f"  fa3verify replay {first['replay']}    # from the folder of this file")
    return "\n".join(lines) + "\n"


def _largest(kernels: Any) -> str:
    """Largest error / bound of any output, of what was judged."""
    found = [kernel["worst_ratio"] for kernel in kernels if kernel["worst_ratio"] is not None]
    sides = (kernel.get("worst_ratios") or {"lse": kernel["worst_ratio_lse"]} for kernel in kernels)
    found += [ratio for worst in sides for ratio in worst.values() if ratio is not None]
    if not found:
        return "-"
    worst = max(map(float, found))
    return "below 1" if 0.9995 <= worst < 1 else ratio_text(worst)
