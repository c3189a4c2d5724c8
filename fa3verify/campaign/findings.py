"""Findings: what failed, on which case in one line, and of which cause; those of one cause stand together."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fa3verify.campaign.run import Finding, MovedFigure
from fa3verify.cases.case import Case
from fa3verify.files import Json
from fa3verify.judging.verdict import law_of

_NUMBER = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?(e[-+]?\d+)?")


def finding(
    kernel: str,
    what: str,
    message: str,
    content: Json | None = None,
    *,
    crashed: bool = False,
    baseline: MovedFigure | None = None,
    traceback: dict[str, str] | None = None,
) -> Finding:
    """Return one finding, whose replay file is not written yet.

    ``content`` is the case, or for a law the trial, in JSON. A kernel that ``crashed`` gave nothing to judge: the cause
    is then the message, wherever it was found.
    """
    return Finding(
        kernel,
        what,
        message,
        case=_described(what, content),
        cause=_NUMBER.sub("#", message) if crashed else what,
        baseline=baseline,
        traceback=traceback,
        content=content,
    )


def _described(what: str, content: Json | None) -> str | None:
    """One line for a case or a trial; None for what is neither, such as a case that was only half written."""
    from fa3verify.properties import Trial

    try:
        return (Trial if law_of(what) else Case).from_json(content).describe() if content else None
    except (ValueError, KeyError, TypeError):
        return None


def _work(found: Finding) -> int:
    """Scores of the problem of a finding; 0 without one."""
    content = found.content
    problem = content.get("case", content).get("problem") if isinstance(content, dict) else None
    if not problem:
        return 0
    return problem["batch"] * problem["nheads"] * (problem["seqlen_q"] + 1) * (problem["seqlen_k"] + 1)


def ordered(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings by cause, the cause with the smallest problem first and in each the smallest problem first."""
    by_cause: dict[tuple[str, str | None], list[Finding]] = {}
    for each in sorted(found, key=_work):
        by_cause.setdefault((each.kernel, each.cause), []).append(each)
    return tuple(each for cluster in by_cause.values() for each in cluster)


def clusters(found: Iterable[Finding]) -> list[tuple[Finding, int]]:
    """Return the first finding of every cause and the number of others, in the order they have.

    Findings of files that name no cause are all shown.
    """
    first: dict[tuple[str, str], Finding] = {}
    others: dict[tuple[str, str], int] = {}
    for number, each in enumerate(found):
        key = each.kernel, each.cause or str(number)
        others[key] = others.get(key, -1) + 1
        first.setdefault(key, each)
    return [(each, others[key]) for key, each in first.items()]
