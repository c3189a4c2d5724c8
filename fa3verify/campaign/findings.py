"""Findings: what failed, on which case in one line, and of which cause; those of one cause stand together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from fa3verify.cases.case import Case
from fa3verify.judging.verdict import law_of

_NUMBER = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?(e[-+]?\d+)?")


def finding(
    kernel: str,
    what: str,
    message: str,
    replay: dict[str, Any] | None = None,
    *,
    crashed: bool = False,
    baseline: dict[str, Any] | None = None,
    traceback: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Return one finding in JSON.

    Parameters
    ----------
    what : str
        Where it was found, as in a replay file: ``L1 error / bound``, ``law NAME``, ``family NAME``, ``loading``.
    replay : dict, optional
        The case, or for a law the trial, in JSON.
    crashed : bool
        The kernel gave nothing to judge: the cause is then the message, wherever it was found.
    baseline : dict, optional
        Which stored figure moved, so that a replay compares with it again.
    traceback : dict, optional
        Of what the kernel raised, as :func:`fa3verify.text.of_traceback` gives it.
    """
    return {
        "kernel": kernel,
        "what": what,
        "message": message,
        "case": _described(what, replay),
        "cause": _NUMBER.sub("#", message) if crashed else what,
        "replay": replay,
        "baseline": baseline,
        "traceback": traceback,
    }


def _described(what: str, replay: Mapping[str, Any] | None) -> str | None:
    """One line for a case or a trial; None for what is neither, such as a case that was only half written."""
    from fa3verify.properties import Trial

    try:
        return (Trial if law_of(what) else Case).from_json(replay).describe() if replay else None
    except (ValueError, KeyError, TypeError):
        return None


def _work(found: Mapping[str, Any]) -> int:
    """Scores of the problem of a finding; 0 without one."""
    replay = found["replay"]
    problem = replay.get("case", replay).get("problem") if isinstance(replay, dict) else None
    if not problem:
        return 0
    return problem["batch"] * problem["nheads"] * (problem["seqlen_q"] + 1) * (problem["seqlen_k"] + 1)


def ordered(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return findings by cause, the cause with the smallest problem first and in each the smallest problem first."""
    by_cause: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in sorted(found, key=_work):
        by_cause.setdefault((each["kernel"], each["cause"]), []).append(each)
    return [each for cluster in by_cause.values() for each in cluster]


def clusters(found: Iterable[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], int]]:
    """Return the first finding of every cause and the number of others, in the order they have.

    Findings of files that name no cause are all shown.
    """
    first: dict[tuple[str, str], Mapping[str, Any]] = {}
    others: dict[tuple[str, str], int] = {}
    for number, each in enumerate(found):
        key = each["kernel"], each.get("cause") or str(number)
        others[key] = others.get(key, -1) + 1
        first.setdefault(key, each)
    return [(each, others[key]) for key, each in first.items()]
