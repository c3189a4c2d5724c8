"""Findings as a reader wants them: the gravest first, and those that show one symptom of a kernel as one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fa3verify.verdict import BOUND_LAWS, law_of, told

SEVERITIES = {  # the gravest first: what it means
    "no result": "The kernel raised, hung, or returned what it does not declare.",
    "not finite": "NaN or an infinity where the exact result has none, none where it has one, or an error where the "
    "bound allows none.",
    "wrong values": "Beyond the error bound, outside what the stated order of operations can give, or with other bits "
    "than the twin.",
    "broken property": "Two calls of the kernel that must agree do not.",
    "worse than the baseline": "Within its bound, but an error figure has grown.",
}
_COMPARED = re.compile(r"(\w+)\[[^]]*\]: got (\S+), expected (\S+?)[ ,;]")
_NOT_FINITE = {"nan", "inf", "-inf"}


@dataclass(frozen=True, slots=True)
class Symptom:
    """Findings of one kernel that show the same: the first, which is the smallest, and where else it was found."""

    severity: str
    first: Mapping[str, Any]
    also: tuple[tuple[str, int], ...]  # what was judged, and how many other findings

    @property
    def elsewhere(self) -> str:
        """Where else it was found, in words; empty where nowhere."""
        return "; ".join(what if count == 1 else f"{what} ({count})" for what, count in self.also)


def symptoms(found: Iterable[Mapping[str, Any]]) -> list[Symptom]:
    """Return findings by symptom, the gravest first, otherwise in the order they have.

    Values that are not finite are one symptom of an output, whichever rule saw them. Findings that name the same replay
    file are one. All others are one for each cause, and findings of files that name no cause stand alone.
    """
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    place: dict[tuple[str, str], tuple[str, ...]] = {}  # where a replay file of a kernel is
    numbered = [(severity(each), str(number), each) for number, each in enumerate(found)]
    for grave, number, each in sorted(numbered, key=lambda item: list(SEVERITIES).index(item[0])):
        kernel, replay = each["kernel"], each.get("replay")
        sign = _output(each) if grave == "not finite" else each.get("cause") or number
        key = (grave, kernel, sign)
        if isinstance(replay, str):
            key = place.setdefault((kernel, replay), key)
        groups.setdefault(key, []).append(each)
    return [_symptom(key[0], members) for key, members in groups.items()]


def _symptom(grave: str, members: list[Mapping[str, Any]]) -> Symptom:
    return Symptom(grave, members[0], tuple(Counter(told(each["what"]) for each in members[1:]).items()))


def severity(found: Mapping[str, Any]) -> str:
    """Return which of :data:`SEVERITIES` a finding is."""
    what, message = found["what"], found["message"]
    if found.get("cause", what) != what or what == "loading" or what.startswith(("family ", "study ")):
        return "no result"
    compared = _COMPARED.search(message)
    if "non-finite" in what or "observed inf" in message or (compared and _NOT_FINITE & set(compared.groups()[1:])):
        return "not finite"
    if what.startswith("L2 "):
        return "worse than the baseline"
    law = law_of(what)
    return "broken property" if law and law not in BOUND_LAWS else "wrong values"


def _output(found: Mapping[str, Any]) -> str:
    """Name of the output of which a value is not finite; "out" for the main ones of a rule."""
    if compared := _COMPARED.search(found["message"]):
        return compared[1]
    rule = found["what"].partition(" ")[2]
    return (rule.endswith("error / bound") and rule.removesuffix("error / bound").strip()) or "out"
