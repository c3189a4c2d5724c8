"""The first screen of a run's report: a sentence that anybody can repeat, the number that ranks, and one figure.

The figure has the relative RMSE of every kernel by family of inputs, and below it that of the ideal kernel on the same
inputs, so that a reader sees what no kernel of the format can avoid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fa3verify.campaign.symptoms import symptoms
from fa3verify.cases import tried
from fa3verify.judging import bits_lost
from fa3verify.report.notation import DASH, number
from fa3verify.text import plural


def headline(summary: Mapping[str, Any]) -> str:
    """Return the verdict in one sentence without a word of the trade."""
    kernels = summary["kernels"]
    cases = sum(kernel["cases"] for kernel in kernels)
    one = len(kernels) == 1
    name = kernels[0]["name"] if one else f"the {len(kernels)} kernels"
    if summary["verdict"] == "pass":
        who = f"{name} was" if one else f"All {len(kernels)} kernels were"
        return f"{who} right in all {cases:,} cases that were tried."
    if summary["verdict"] == "fail":
        return f"{_wrong(summary)} ({plural(len(summary['failures']), 'finding')} in {cases:,} cases)."
    return f"No verdict: too little of {name} was tried ({plural(cases, 'case')}, none of which failed)."


def _wrong(summary: Mapping[str, Any]) -> str:
    """Return who failed, and what the gravest symptom is."""
    shown = symptoms(summary["failures"])
    names = [name for name in dict.fromkeys(s.first["kernel"] for s in shown) if name != "-"]
    others = len(summary["kernels"]) - len(names)
    who = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    rest = f", {plural(others, 'other kernel')} did not" if names and others > 0 else ""
    return f"{who or 'a study'} failed{rest}: {shown[0].severity}"


def not_said(summary: Mapping[str, Any]) -> str:
    """Return what a pass does not say, in one sentence; empty for any other verdict."""
    if summary["verdict"] != "pass":
        return ""
    found = [kernel["tried"] for kernel in summary["kernels"] if kernel.get("tried", {}).get("calls")]
    if not found:
        return "It says nothing of sizes that were not tried."
    words = tried.in_words(tried.common(found))
    return f"It says nothing of other sizes: head_dim {words['head_dim']} and keys {words['seqlen_k']} were tried."


def ranked(summary: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return name, bits lost, and its worst family, of every kernel that has the number; the first loses most."""
    known = [(kernel, lost) for kernel in summary["kernels"] if (lost := kernel.get("bits_lost"))]
    known.sort(key=lambda each: -float(each[1]["mean"]))
    return [
        {
            "name": kernel["name"],
            "dtype": str(kernel["dtype"]),
            "bits": bits_lost.bits_text(lost["mean"]),
            "worst": bits_lost.bits_text(lost["worst"]),
            "family": lost["worst_family"],
        }
        for kernel, lost in known
    ]


def heat_map(summary: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the figure: ``rows`` (name and kind) and ``families``, each with its cells; None where nothing is judged.

    A cell has ``text``, ``title``, ``shade`` from 0, the smallest error, to 1, and ``state``: wrong where an error
    leaves its bound, worst where a kernel loses most bits.
    """
    kernels = [kernel for kernel in summary["kernels"] if any("rel_rmse_ideal" in f for f in kernel["families"])]
    families = list(dict.fromkeys(f["family"] for kernel in kernels for f in kernel["families"]))
    if not families:
        return None
    errors = [_float(f[key]) for k in kernels for f in k["families"] for key in ("rel_rmse_seen", "rel_rmse_ideal")]
    levels = [math.log10(x) for x in errors if x and math.isfinite(x)] or [0.0]
    scale = max(min(levels), max(levels) - _DECADES), max(levels)
    rows = [(kernel, kind) for kernel in kernels for kind in _kinds(kernel)]
    return {
        "rows": [
            {
                "name": kernel["name"] if kind == "kernel" else _KINDS[kind].format(kernel.get("dtype") or "kernel"),
                "kind": kind,
            }
            for kernel, kind in rows
        ],
        "families": [
            {"name": name, "cells": [_cell(kernel, name, kind, scale) for kernel, kind in rows]} for name in families
        ],
        "least": number(10 ** scale[0]),
        "most": number(10 ** scale[1]),
    }


_DECADES = 4  # that shades tell apart: one family of hardly any error would make all others alike
_KINDS = {"ideal": "ideal {}", "bits": "bits lost"}


def _kinds(kernel: Mapping[str, Any]) -> Sequence[str]:
    has_bits = any(f.get("bits_lost") is not None for f in kernel["families"])
    return ("kernel", "ideal", "bits") if has_bits else ("kernel", "ideal")


def _cell(kernel: Mapping[str, Any], family: str, kind: str, scale: tuple[float, float]) -> dict[str, str]:
    """One cell; empty where a kernel does not take a family."""
    found = next((f for f in kernel["families"] if f["family"] == family), None)
    if found is None or found.get("rel_rmse_ideal") is None:
        return {"text": "", "title": f"{kernel['name']} was not judged on {family}", "shade": "", "state": "none"}
    if kind == "bits":
        bits = found.get("bits_lost")
        text = DASH if bits is None else f"{float(bits):.2f}" if math.isfinite(float(bits)) else "∞"
        lost = kernel.get("bits_lost") or {}
        state = "worst" if lost.get("worst_family") == family else "bits"
        return {"text": text, "title": f"{kernel['name']} on {family}: bits lost", "shade": "", "state": state}
    error = _float(found["rel_rmse_seen" if kind == "kernel" else "rel_rmse_ideal"])
    wrong = kind == "kernel" and (_float(found["ratio_max"]) > 1 or bool(found.get("nonfinite")))
    ideal = number(found["rel_rmse_ideal"])
    title = f"{kernel['name']} on {family}: relative RMSE {number(error)}, of the ideal {ideal}"
    return {"text": _short(error), "title": title, "shade": _shade(error, scale), "state": "wrong" if wrong else kind}


def _shade(error: float, scale: tuple[float, float]) -> str:
    low, high = scale
    if not error:
        return "0"
    level = math.log10(error) if math.isfinite(error) else high
    return f"{max(0.0, level - low) / (high - low or 1):.2f}"


def _short(error: float) -> str:
    """Two digits, or one where the exponent has two, as narrow as they can be written.

    >>> _short(2.13e-4), _short(1.39e-12), _short(0.0), _short(float("inf"))
    ('2.1e-4', '1e-12', '0', '∞')
    """
    if not math.isfinite(error):
        return "∞"
    digits = 1 if 1e-9 <= error < 1e10 else 0
    return f"{error:.{digits}e}".replace("e-0", "e-").replace("e+0", "e") if error else "0"


def _float(value: Any) -> float:
    """A figure; infinite ones of a summary that was read again are texts, and unknown ones count as none."""
    return 0.0 if value is None else float(value)
