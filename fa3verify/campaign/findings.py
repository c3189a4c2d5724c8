"""Findings: what failed, on which case in one line, and of which cause; those of one cause stand together.

A reader has them as symptoms: the gravest first, and those that show one symptom of a kernel as one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from fa3verify.campaign.run import Finding, MovedFigure
from fa3verify.cases.case import Case
from fa3verify.files import Json
from fa3verify.judging.clauses import NO_RESULT, clause_of
from fa3verify.judging.verdict import BOUND_LAWS, law_of, part_of, told

SEVERITIES = {  # the gravest first: what it means
    "no result": "The kernel raised, hung, or returned what it does not declare.",
    "infinite error": "NaN or an infinity where the exact result has none, none where it has one, or any error where "
    "the bound allows none.",
    "wrong values": "Beyond the error bound, outside what the stated order of operations can give, or with other bits "
    "than the twin.",
    "broken property": "Two calls of the kernel that must agree do not.",
    "worse than the baseline": "Within its bound, but an error figure has grown.",
}
_COMPARED = re.compile(r"(\w+)\[[^]]*\]: got (\S+), expected (\S+?)[ ,;]")
_NOT_FINITE = {"nan", "inf", "-inf"}
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


class Sign(NamedTuple):
    """Holds what findings of one symptom have in common: ``what`` is an output or a cause."""

    severity: str
    kernel: str
    what: str
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Symptom:
    """Findings of one kernel that show the same: the first, which is the smallest, and where else it was found."""

    severity: str
    first: Finding
    also: tuple[tuple[str, int], ...]  # what was judged, and how many other findings

    @property
    def elsewhere(self) -> str:
        """Return where else it was found, in words; empty where nowhere."""
        return "; ".join(what if count == 1 else f"{what} ({count})" for what, count in self.also)


def symptoms(found: Iterable[Finding]) -> list[Symptom]:
    """Return findings by symptom, the gravest first, otherwise in the order they have.

    Infinite errors are one symptom of an output and a kind (NaN, an infinity, a finite value), whichever rule saw them;
    a rule that says no kind joins the only one of its output. Findings that name the same replay file are one. All
    others are one for each cause, and findings of files that name no cause stand alone.
    """
    groups: dict[Sign, list[Finding]] = {}
    place: dict[tuple[str, str], Sign] = {}  # where a replay file of a kernel is
    gravest = list(SEVERITIES)
    numbered = [(severity(each), number, each) for number, each in enumerate(found)]
    for grave, number, each in sorted(
        numbered, key=lambda item: (gravest.index(item[0]), _COMPARED.search(item[2].message) is None)
    ):
        sign = _sign(grave, each, str(number), groups)
        if each.replay is not None:
            sign = place.setdefault((sign.kernel, each.replay), sign)
        groups.setdefault(sign, []).append(each)
    return [
        Symptom(sign.severity, members[0], tuple(Counter(told(each.what) for each in members[1:]).items()))
        for sign, members in groups.items()
    ]


def _sign(grave: str, found: Finding, number: str, known: Iterable[Sign]) -> Sign:
    """Return what tells the symptom of a finding from others."""
    if grave != "infinite error":
        return Sign(grave, found.kernel, found.cause or number)
    if compared := _COMPARED.search(found.message):
        values = set(compared.groups()[1:])
        kind = "nan" if "nan" in values else "infinity" if values & _NOT_FINITE else "finite"
        return Sign(grave, found.kernel, compared[1], kind)
    rule = found.what.partition(" ")[2]
    output = (rule.endswith("error / bound") and rule.removesuffix("error / bound").strip()) or "out"
    alike = [sign for sign in known if (sign.kernel, sign.what) == (found.kernel, output) and sign.kind]
    return alike[0] if len(alike) == 1 else Sign(grave, found.kernel, output)


def why(symptom: Symptom) -> str:
    """Return why a kernel fails by one symptom, in about three words, such as ``lse inf, not -inf``."""
    found = symptom.first
    rule = told(found.what).partition(", ")[2]
    match symptom.severity:
        case "no result":
            raised = re.match(r"\w+(?:Error|Exception|Interrupt|Exit)\b", found.message)
            return f"raises {raised[0]}" if raised else "gives no result"
        case "infinite error":
            return _infinite(found.message, rule)
        case "broken property":
            return f"broken: {str(law_of(found.what)).replace('_', ' ')}"
        case "worse than the baseline":
            return symptom.severity
    return next((words for word, words in _RULES.items() if word in rule), "beyond its bound")


_RULES = {"bits": "other bits", "outside": "outside stated order"}


def _infinite(message: str, rule: str) -> str:
    """An error without an end, by the first value that has it, else by the rule that saw it."""
    if compared := _COMPARED.search(message):
        output = message[: compared.end(1)].rpartition(": ")[2].split()[0]
        got, expected = (x if x in _NOT_FINITE else "finite" for x in compared.groups()[1:])
        return f"{output} {got}, not {expected}"
    if "non-finite" in rule:
        return rule
    return f"{rule.removesuffix('error / bound')}error infinite"


def with_clause(found: Finding, operation: str) -> Finding:
    """Return a finding about a kernel of an operation with the clause that it breaks."""
    what = NO_RESULT if severity(found) == NO_RESULT else found.what
    return replace(found, clause=clause_of(what, operation))


def severity(found: Finding) -> str:
    """Return which of :data:`SEVERITIES` a finding is."""
    what = found.what
    message = found.message
    if (found.cause or what) != what or part_of(what) in ("loading", "family", "study"):
        return "no result"
    compared = _COMPARED.search(message)
    endless = "non-finite" in what or "observed inf" in message or "ratio inf" in message
    if endless or (compared and _NOT_FINITE & set(compared.groups()[1:])):
        return "infinite error"
    if part_of(what) == "L2":
        return "worse than the baseline"
    law = law_of(what)
    return "broken property" if law and law not in BOUND_LAWS else "wrong values"
