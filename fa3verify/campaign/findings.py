"""Findings: what failed, on which case in one line, and of which cause; those of one cause stand together.

A reader has them as symptoms: the gravest first, and those that show one symptom of a kernel as one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from fa3verify.campaign.run import Finding, MovedFigure
from fa3verify.cases.case import Case
from fa3verify.files import Json
from fa3verify.judging import gate
from fa3verify.judging.clauses import NO_RESULT, clause_of
from fa3verify.judging.verdict import BOUND_LAWS, Part, Seen, What
from fa3verify.text import Failure

ENDLESS = "infinite error"
SEVERITIES = {  # the gravest first: what it means
    NO_RESULT: "The kernel raised, hung, or returned what it does not declare.",
    ENDLESS: "NaN or an infinity where the exact result has none, none where it has one, or any error where "
    "the bound allows none.",
    "wrong values": "Beyond the error bound, outside what the stated order of operations can give, or with other bits "
    "than the twin.",
    "broken property": "Two calls of the kernel that must agree do not.",
    "worse than the baseline": "Within its bound, but an error figure has grown.",
}


def finding(
    kernel: str,
    what: What,
    told: str | Failure,
    content: Json | None = None,
    *,
    seen: Seen | None = None,
    baseline: MovedFigure | None = None,
) -> Finding:
    """Return one finding, told by a message or by how the kernel failed, whose replay file is not written yet.

    ``content`` is the case, or for a law the trial, in JSON. A kernel that failed gave nothing to judge: the cause is
    then the message, wherever it was found.
    """
    failure = told if isinstance(told, Failure) else None
    return Finding(
        kernel,
        what,
        str(told),
        case=_described(what, content),
        cause=failure.cause if failure else str(what),
        baseline=baseline,
        traceback=failure and failure.traceback,
        content=content,
        seen=seen,
        raised=failure and failure.raised,
    )


def _described(what: What, content: Json | None) -> str | None:
    """One line for a case or a trial; None for what is neither, such as a case that was only half written."""
    from fa3verify.properties import Trial

    try:
        return (Trial if what.part is Part.LAW else Case).from_json(content).describe() if content else None
    except (ValueError, KeyError, TypeError):
        return None


def lines(found: Finding, replay: str | None) -> list[str]:
    """Return what follows the message of a finding, with the place of its replay file: a line a fact that is known."""
    frame = found.traceback and found.traceback["frame"]
    facts = {"raised at": frame, "case": found.case, "replay": replay and f"fa3verify replay {replay}"}
    return [f"{name}: {fact}" for name, fact in facts.items() if fact]


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
    alike: dict[tuple[str, str], list[Finding]] = {}
    for number, each in enumerate(found):
        alike.setdefault((each.kernel, each.cause or str(number)), []).append(each)
    return [(first, len(others)) for first, *others in alike.values()]


Sign = tuple[str, ...]  # what findings of one symptom share: severity, kernel, and a cause or an output and a kind


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
        numbered, key=lambda item: (gravest.index(item[0]), item[2].seen is None or not item[2].seen.kind)
    ):
        sign = _sign(grave, each, str(number), groups)
        if each.replay is not None:
            sign = place.setdefault((each.kernel, each.replay), sign)
        groups.setdefault(sign, []).append(each)
    return [
        Symptom(severity(first), first, tuple(Counter(each.what.told for each in others).items()))
        for first, *others in groups.values()
    ]


def _sign(grave: str, found: Finding, number: str, known: Iterable[Sign]) -> Sign:
    """Return what tells the symptom of a finding from others."""
    seen = found.seen
    if grave != ENDLESS or seen is None:
        return grave, found.kernel, found.cause or number
    of_output = grave, found.kernel, seen.output
    alike = [sign for sign in known if sign[:3] == of_output and sign[3]]
    return alike[0] if len(alike) == 1 and not seen.kind else (*of_output, seen.kind)


def why(symptom: Symptom) -> str:
    """Return why a kernel fails by one symptom, in about three words, such as ``lse inf, not -inf``."""
    found = symptom.first
    subject = found.what.subject
    match symptom.severity:
        case "no result":
            return f"raises {found.raised}" if found.raised else "gives no result"
        case "infinite error" if found.seen and subject != gate.NON_FINITE:
            return _infinite(found.seen)
        case "broken property":
            return f"broken: {subject.replace('_', ' ')}"
        case "worse than the baseline":
            return symptom.severity
    return _RULES.get(subject, "beyond its bound")


_RULES = {  # of the gate, in fewer words
    gate.NON_FINITE: gate.NON_FINITE,
    gate.OTHER_BITS: "other bits",
    gate.OUTSIDE: "outside stated order",
}


def _infinite(seen: Seen) -> str:
    """An error without an end, by the first element that has it, else by the output; of the main ones none is named."""
    if seen.kind:
        return f"{seen.output} {seen.got}, not {seen.expected}"
    return f"{'' if seen.output == 'out' else seen.output.replace('_', ' ') + ' '}error infinite"


def with_clause(found: Finding, operation: str) -> Finding:
    """Return a finding about a kernel of an operation with the clause that it breaks."""
    what = NO_RESULT if severity(found) == NO_RESULT else str(found.what)
    return replace(found, clause=clause_of(what, operation))


def severity(found: Finding) -> str:
    """Return which of :data:`SEVERITIES` a finding is."""
    what = found.what
    if found.raised is not None or what.part in (Part.LOADING, Part.FAMILY, Part.STUDY):
        return NO_RESULT
    if found.seen and found.seen.is_endless:
        return ENDLESS
    if what.part is Part.BASELINE:
        return "worse than the baseline"
    return "broken property" if what.part is Part.LAW and what.subject not in BOUND_LAWS else "wrong values"
