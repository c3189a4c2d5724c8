"""Findings, and the questions that explain some: their records, their order, and their groups for readers.

:func:`finding` makes a :class:`Finding`. :func:`ordered` puts findings of one cause side by side, as files have them.
:func:`symptoms` groups findings that show the same fault of a kernel, the gravest first, as the report and the terminal
show them. Which figures fail is decided in :mod:`fa3verify.judging.gate`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from fa3verify.cases.case import Case
from fa3verify.files import Json
from fa3verify.judging.clauses import NO_RESULT, clause_of
from fa3verify.judging.verdict import BOUND_LAWS, Part, Seen, What
from fa3verify.records import NOT_WRITTEN, OLDER
from fa3verify.text import Failure

ENDLESS = "infinite error"
SEVERITIES = {  # what each severity means, the gravest first
    NO_RESULT: "The kernel raised, hung, or returned what it does not declare.",
    ENDLESS: "NaN or an infinity where the exact result has none, none where it has one, or any error where "
    "the bound allows none.",
    "wrong values": "Beyond the error bound, outside what the stated order of operations can give, or with other bits "
    "than the twin.",
    "broken property": "Two calls of the kernel that must agree do not.",
    "worse than the baseline": "Within its bound, but an error figure has grown.",
}


@dataclass(frozen=True, slots=True)
class MovedFigure:
    """A figure of a family that is worse than the stored baseline allows: its name, its limit and the stored value."""

    family: str
    profile: str
    seed: int
    measure: str
    limit: float
    baseline: float | None


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that failed.

    Parameters
    ----------
    kernel : str
        Name of the kernel, "-" for a finding about none.
    what : What
        What found it, in files one text: ``L1 error / bound``, ``law NAME``, ``family NAME``, ``loading``.
    message : str
        One line.
    case : str, optional
        The case on one line.
    cause : str, optional
        Findings of one cause are neighbours; files of version 0.1.0 name none.
    replay : str, optional
        Path of its replay file.
    baseline : MovedFigure, optional
        The figure that got worse, for a finding of the part baseline.
    traceback : dict, optional
        Where the kernel raised, as :func:`fa3verify.text.of_traceback` gives it.
    content : dict, optional
        What its replay file will hold: a case, or for a law a trial, in JSON.
    clause : str, optional
        The clause that the kernel does not meet, as ``docs/conformance.md`` names it.
    seen : Seen, optional
        What was wrong with the worst element of an output, for a finding about values.
    raised : str, optional
        For a kernel that gave no result: the type of the exception, or "" where it raised none. None where it gave a
        result.
    """

    kernel: str
    what: What
    message: str
    case: str | None = field(default=None, metadata=OLDER)
    cause: str | None = field(default=None, metadata=OLDER)
    replay: str | None = None
    baseline: MovedFigure | None = field(default=None, metadata=OLDER)
    traceback: dict[str, str] | None = field(default=None, metadata=OLDER)
    content: Json | None = field(default=None, metadata=NOT_WRITTEN)
    clause: str | None = field(default=None, metadata=OLDER)
    seen: Seen | None = field(default=None, metadata=OLDER)
    raised: str | None = field(default=None, metadata=OLDER)


@dataclass(frozen=True, slots=True)
class ContractQuestion:
    """Asks whether a kernel means a contract that it has and did not declare: FlashAttention-3 has another one.

    Parameters
    ----------
    kernel : str
        The name under which it was judged by all that is asked, such as ``mine.py:attention[causal=top_left]``.
    meaning : str
        The contract in one line, and the part of a campaign that was asked for, if it was not all of it.
    public : str
        Which public kernels do it either way.
    seen : Finding
        What it explains: the smallest finding that the kernel has without the declaration, with its replay file.
    declaration : str
        What answers all questions of the kernel, in Python, with what it declares already; one that does not mean it is
        to be mended.
    """

    kernel: str
    meaning: str
    public: str
    seen: Finding
    declaration: str

    @property
    def answer(self) -> str:
        """Return in words what answers it."""
        return f"if it is meant, declare {self.declaration}; if not, mend it"


def finding(
    kernel: str,
    what: What,
    told: str | Failure,
    content: Json | None = None,
    *,
    seen: Seen | None = None,
    baseline: MovedFigure | None = None,
) -> Finding:
    """Return one finding, whose replay file is not written yet.

    ``told`` is its message, or how the kernel failed where it gave no result. ``content`` is the case, or for a law the
    trial, in JSON; None where there is none to replay. Findings have the same cause where they have the same ``what``,
    and failures where they have the same message, in whichever family they were met.
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
    """Return one line for a case or a trial; None for anything else, such as a case that a dying worker half wrote."""
    from fa3verify.properties import Trial

    try:
        return (Trial if what.part is Part.LAW else Case).from_json(content).describe() if content else None
    except (ValueError, KeyError, TypeError):
        return None


def lines(found: Finding, replay: str | None) -> list[str]:
    """Return the lines that follow a finding's message: where it was raised, its case, and how to replay it.

    ``replay`` is the path of its replay file; what is None or unknown has no line.
    """
    frame = found.traceback and found.traceback["frame"]
    facts = {"raised at": frame, "case": found.case, "replay": replay and f"fa3verify replay {replay}"}
    return [f"{name}: {fact}" for name, fact in facts.items() if fact]


def work(content: Json | None) -> int:
    """Return the size of a case or a trial in JSON, about its number of scores; 0 for what has no problem."""
    problem = content.get("case", content).get("problem") if isinstance(content, dict) else None
    if not problem:
        return 0
    return problem["batch"] * problem["nheads"] * (problem["seqlen_q"] + 1) * (problem["seqlen_k"] + 1)


def ordered(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings with those of one kernel and cause side by side.

    The smallest problem comes first within a cause, and the cause that has the smallest problem comes first.
    """
    by_cause: dict[tuple[str, str | None], list[Finding]] = {}
    for each in sorted(found, key=lambda each: work(each.content)):
        by_cause.setdefault((each.kernel, each.cause), []).append(each)
    return tuple(each for cluster in by_cause.values() for each in cluster)


def clusters(found: Iterable[Finding]) -> list[tuple[Finding, int]]:
    """Return the first finding of every cause of a kernel and the number of others, in their given order.

    A finding without a cause, as in files of version 0.1.0, stands for itself.
    """
    alike: dict[tuple[str, str], list[Finding]] = {}
    for number, each in enumerate(found):
        alike.setdefault((each.kernel, each.cause or str(number)), []).append(each)
    return [(first, len(others)) for first, *others in alike.values()]


# What findings of one symptom share: severity, kernel and cause; for infinite errors severity, kernel, output and kind.
Sign = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Symptom:
    """Findings of one kernel that show the same fault: the first of them, and where else the fault was found."""

    severity: str
    first: Finding
    also: tuple[tuple[str, int], ...]  # what found it as well, and in how many findings

    @property
    def elsewhere(self) -> str:
        """Return in words where else it was found; empty where nowhere."""
        return "; ".join(what if count == 1 else f"{what} ({count})" for what, count in self.also)


def symptoms(found: Iterable[Finding]) -> list[Symptom]:
    """Group findings into symptoms, the gravest first, otherwise in their given order.

    Infinite errors of one output and one kind (NaN, an infinity, a finite value) are one symptom, whichever rule saw
    them; a finding that does not say the kind joins if its output has shown one kind only. Findings with the same
    replay file are one symptom. All other findings are one symptom for each cause, and a finding without a cause, as in
    older files, is a symptom of its own.
    """
    groups: dict[Sign, list[Finding]] = {}
    place: dict[tuple[str, str], Sign] = {}  # the symptom in which a replay file of a kernel stands
    gravest = list(SEVERITIES)
    numbered = [(severity(each), number, each) for number, each in enumerate(found)]
    # Within a severity, findings that name a kind come first, so that the others can join them.
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
    """Return the sign of a finding's symptom: a known one that it joins, or one of its own."""
    seen = found.seen
    if grave != ENDLESS or seen is None:
        return grave, found.kernel, found.cause or number
    of_output = grave, found.kernel, seen.output
    alike = [sign for sign in known if sign[:3] == of_output and sign[3]]
    return alike[0] if len(alike) == 1 and not seen.kind else (*of_output, seen.kind)


def with_clause(found: Finding, operation: str) -> Finding:
    """Return a finding about a kernel of an operation with the clause that it breaks, None where there is none."""
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
