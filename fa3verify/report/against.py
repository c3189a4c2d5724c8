"""Compare two runs, for ``fa3verify report --against``: which has the better kernel, family by family of inputs.

For every case that both runs have judged, the new root mean square error is divided by the old one. A family is called
better or worse if the confidence interval of the geometric mean of these ratios lies on one side of 1. A family with
fewer than LEAST_CASES cases, as most have in the quick profile, or with pooled figures alone, as in an atlas, has no
interval and is called lower or higher on these inputs. Whether the kernel is better is told by an interval over all
families, in which the mean ratio of each counts as one draw. Which single figures changed is listed by
:mod:`fa3verify.report.moved`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
from scipy.special import stdtrit  # scipy.stats, which has it as t.ppf, takes a second to import

from fa3verify.campaign import atlas
from fa3verify.campaign.run import KernelRun, Run
from fa3verify.files import Json
from fa3verify.judging.family import FamilyRow
from fa3verify.report import dataset, moved
from fa3verify.report.build import write_both
from fa3verify.report.tables import DASH, PageColumn, PageTable, count, number, written
from fa3verify.text import plural

CONFIDENCE = 0.95
LEAST_CASES = 3  # an interval needs so many
NOTICED = 0.01  # a smaller relative difference is not called lower or higher
LEAST_ERROR = 2.0**-40  # stands for an error of 0 in a ratio; smaller than any format's relative error
MEASURES = ("rel_rmse_unrounded", "rel_rmse_seen")  # the first one that both sides have is compared
Word = Literal["worse", "better", "higher", "lower", "not told apart", "equal", "only before", "only now"]
WORDS: tuple[Word, ...] = ("worse", "better", "higher", "lower", "not told apart", "equal")


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two sides: a run or an atlas.

    ``cases[kernel][family][case]`` are figures by name; empty for an atlas, which has no cases. A case is named by its
    key without the kernel, so that both sides name it alike.
    """

    name: str
    atlas: Run
    cases: Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]] = field(default_factory=dict)

    @property
    def kernels(self) -> dict[str, KernelRun]:
        return {kernel.name: kernel for kernel in self.atlas.kernels}


@dataclass(frozen=True, slots=True)
class FamilyRatio:
    """How the errors of a family of inputs compare: a word, and the ratio new / old with its confidence interval.

    ``ratio``, ``low`` and ``high`` are NaN where they are unknown. ``because`` is the reason for the word where there
    is no interval, else empty.
    """

    name: str
    word: Word
    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan
    cases: int = 0
    because: str = ""


@dataclass(frozen=True, slots=True)
class KernelPair:
    """Two kernels that were compared, by their names on the old and the new side, and how their families compare.

    ``bits_lost`` are those of the old and the new one; None if either has no such number.
    """

    old: str
    new: str
    families: tuple[FamilyRatio, ...]
    bits_lost: tuple[float, float] | None

    @property
    def shared(self) -> list[FamilyRatio]:
        """Return the families that both have."""
        return [family for family in self.families if not family.word.startswith("only")]

    @property
    def overall(self) -> FamilyRatio:
        """Return how all shared families compare together, each with the same weight."""
        ratios = [family.ratio for family in self.shared if family.ratio > 0]
        return _told("all families", np.log(ratios), len(ratios))

    def sentence(self) -> str:
        """Say in a line or two whether the new one is better, and in how many families.

        >>> print(KernelPair("a", "b", (FamilyRatio("normal", "equal", 1.0),), (0.5, 0.5)).sentence())
        b beside a: 1 family, equal in 1. It loses 0.500 bits, as before.
        """
        shared = self.shared
        if not shared:
            return f"{self.new} has no family of inputs in both runs."
        counts = {word: sum(family.word == word for family in shared) for word in WORDS}
        words = ", ".join(f"{word} in {count(counts[word])}" for word in WORDS if counts[word])
        beside = "" if self.new == self.old else f" beside {self.old}"
        overall = self.overall
        text = ""
        # Only with an interval (NaN differs from itself) and a ratio for every family.
        if overall.low == overall.low and overall.word != "equal" and all(family.ratio > 0 for family in shared):
            interval = f"{number(overall.low)} to {number(overall.high)}"
            text = f" is {overall.word}, its error {number(overall.ratio)} times as large ({interval})"
        families = "1 family" if len(shared) == 1 else f"{count(len(shared))} families"
        return f"{self.new}{beside}{text}: {families}, {words}.{self._ranking()}"

    def _ranking(self) -> str:
        if self.bits_lost is None:
            return ""
        old, new = self.bits_lost
        return f" It loses {new:.3f} bits, {'as before' if old == new else f'{old:.3f} before'}."


def read(path: Path) -> Side:
    """Read a ``run.nc`` or an ``atlas.json``; ValueError for any other or a damaged file."""
    name = "/".join(path.parts[-2:])
    if path.suffix != ".nc":
        return Side(name, atlas.read(path))
    return of_run(name, dataset.from_tree(dataset.load(path)))


def of_run(name: str, run: Run) -> Side:
    """Return a run as a side."""
    cases: dict[str, dict[str, dict[str, Mapping[str, float]]]] = {}
    for row in run.cases:
        drawn = replace(row.case, kernel="").key()  # the same on both sides, under whatever name a kernel runs
        cases.setdefault(row.kernel, {}).setdefault(row.family, {})[drawn] = row.measures
    return Side(name, atlas.of(run), cases)


def joined(sides: Sequence[Side]) -> Side:
    """Return several sides as one; of a kernel that two have, the later stands."""
    if len(sides) == 1:
        return sides[0]
    first, *others = (side.atlas for side in sides)
    return Side(" and ".join(side.name for side in sides), atlas.joined(first, others))


def pairs(old: Side, new: Side, given: Iterable[tuple[str, str]] = ()) -> list[tuple[str, str]]:
    """Return the (old, new) names of the kernels to compare; ``given`` are pairs that a user chose.

    First come the pairs of ``given``, then kernels that have the same name on both sides. Of the others, two are a pair
    if each is the only one of their operation and format on its side.

    Raises
    ------
    ValueError
        For a name in ``given`` that a side does not have.
    """
    chosen = list(given)
    for names, side in zip(zip(*chosen, strict=True), (old, new), strict=False):
        for name in names:
            if name not in side.kernels:
                raise ValueError(f"{side.name} has no kernel {name}; it has {', '.join(sorted(side.kernels))}")
    taken = {name for pair in chosen for name in pair}
    chosen += [(name, name) for name in old.kernels if name in new.kernels and name not in taken]
    before, after = (_by_kind(side, {pair[i] for pair in chosen}) for i, side in enumerate((old, new)))
    alone = ((names, after.get(kind, [])) for kind, names in before.items())
    return chosen + [(names[0], others[0]) for names, others in alone if len(names) == len(others) == 1]


def _by_kind(side: Side, taken: Collection[str]) -> dict[tuple[str, str | None], list[str]]:
    """Return the names of a side's kernels that are in no pair yet, by operation and format."""
    by_kind: dict[tuple[str, str | None], list[str]] = {}
    for name, kernel in side.kernels.items():
        if name not in taken:
            by_kind.setdefault((kernel.operation, kernel.dtype), []).append(name)
    return by_kind


def compared(old: Side, new: Side, names: tuple[str, str]) -> KernelPair:
    """Compare two kernels, named as on the old and the new side, family by family."""
    before, after = names
    sides = [
        {family.family: family for family in side.kernels[name].families}
        for side, name in zip((old, new), names, strict=True)
    ]
    families = []
    for family in dict.fromkeys((*sides[0], *sides[1])):
        if family not in sides[1] or family not in sides[0]:
            families.append(FamilyRatio(family, "only before" if family in sides[0] else "only now"))
        elif old.cases and new.cases:
            both = [side.cases.get(name, {}).get(family, {}) for side, name in zip((old, new), names, strict=True)]
            families.append(of_cases(family, *both))
        else:
            families.append(_of_pooled(family, sides[0][family], sides[1][family]))
    lost = [side.atlas.bits_lost.get(name) for side, name in zip((old, new), names, strict=True)]
    ranked = None if lost[0] is None or lost[1] is None else (lost[0], lost[1])
    return KernelPair(before, after, tuple(families), ranked)


def of_cases(name: str, old: Mapping[str, Mapping[str, float]], new: Mapping[str, Mapping[str, float]]) -> FamilyRatio:
    """Compare a family by the cases that both sides have judged, whose figures are given by case."""
    shared = [case for case in old if case in new]
    if not shared:
        return FamilyRatio(name, "not told apart", because="no case is in both")
    measure = next((m for m in MEASURES if m in old[shared[0]] and m in new[shared[0]]), MEASURES[0])
    errors = np.array([[side[case].get(measure, math.nan) for side in (old, new)] for case in shared])
    lost = [
        np.array([side[case].get("nonfinite", 0) > 0 for case in shared]) | ~np.isfinite(errors[:, i])
        for i, side in enumerate((old, new))
    ]
    if broken := _not_finite(name, int(lost[0].sum()), int(lost[1].sum()), "case", len(shared)):
        return broken
    if (lost[0] != lost[1]).any():
        return FamilyRatio(name, "not told apart", cases=len(shared), because="not finite in as many, other cases")
    if lost[0].all():
        return FamilyRatio(name, "not told apart", cases=len(shared), because="no case is finite on either side")
    errors = np.maximum(errors[~(lost[0] | lost[1])], LEAST_ERROR)
    return _told(name, np.log(errors[:, 1] / errors[:, 0]), len(shared))


def _told(name: str, logs: np.ndarray, cases: int) -> FamilyRatio:
    """Return what the natural logarithms of ratios new / old of errors show, by Student's t interval of their mean.

    Equal where all ratios are 1; higher, lower or not told apart where there are too few for an interval.
    """
    if not logs.any():
        return FamilyRatio(name, "equal", 1.0, 1.0, 1.0, cases)
    mean = float(logs.mean())
    if len(logs) < LEAST_CASES:
        return _unsure(name, math.exp(mean), cases, f"no interval of {plural(cases, 'case')}")
    half = float(stdtrit(len(logs) - 1, (1 + CONFIDENCE) / 2) * logs.std(ddof=1) / math.sqrt(len(logs)))
    word: Word = "better" if mean + half < 0 else "worse" if mean - half > 0 else "not told apart"
    return FamilyRatio(name, word, math.exp(mean), math.exp(mean - half), math.exp(mean + half), cases)


def _not_finite(name: str, before: int, after: int, noun: str, cases: int = 0) -> FamilyRatio | None:
    """Return worse or better where more or fewer of something are not finite than before; None for as many."""
    if before == after:
        return None
    because = f"not finite in {plural(after, noun)}, {before} before"
    return FamilyRatio(name, "worse" if after > before else "better", cases=cases, because=because)


def _unsure(name: str, ratio: float, cases: int, because: str) -> FamilyRatio:
    """Return what a ratio without an interval shows: whether the error is higher or lower on these inputs."""
    word: Word = "higher" if ratio > 1 + NOTICED else "lower" if ratio < 1 - NOTICED else "not told apart"
    return FamilyRatio(name, word, ratio, cases=cases, because=because)


def _of_pooled(name: str, before: FamilyRow, now: FamilyRow) -> FamilyRatio:
    """Compare a family by its pooled figures alone.

    If the two sides judged other cases, the only thing that can be told is that outputs are not finite now.
    """
    old, new = before.figures, now.figures
    broken = _not_finite(name, int(old.get("nonfinite") or 0), int(new.get("nonfinite") or 0), "output")
    judged = [f"{row.number('cases'):.0f}" for row in (now, before)]
    has_other_cases = judged[0] != judged[1] or before.seeds != now.seeds
    if broken and (broken.word == "worse" or not has_other_cases):
        return broken
    if has_other_cases:
        return FamilyRatio(name, "not told apart", because=f"other cases: {judged[0]}, {judged[1]} before")
    if dict(old) == dict(new):
        return FamilyRatio(name, "equal", 1.0)
    measure = next((m for m in MEASURES if old.get(m) and new.get(m)), None)
    ratio = math.nan if measure is None else float(new[measure] or 0) / float(old[measure] or 1)
    return _unsure(name, ratio, 0, "no interval of an atlas")


def table(found: KernelPair) -> PageTable:
    """Return the families of a pair as a table, the worst first."""
    order = (*WORDS[:1], "only before", "only now", *WORDS[1:])
    rows: list[Json] = [
        {
            "family": family.name,
            "word": family.word,
            "times": number(family.ratio) if family.ratio == family.ratio else DASH,
            "interval": f"{number(family.low)} to {number(family.high)}" if family.low == family.low else DASH,
            "cases": count(family.cases) if family.cases else DASH,
            "because": family.because or DASH,
            "_worst": family.word == "worse",
        }
        for family in sorted(found.families, key=lambda family: (order.index(family.word), family.name))
    ]
    columns = (
        PageColumn("family of inputs", "family"),
        PageColumn("now", "word"),
        PageColumn("error, now / before", "times", written),
        PageColumn(f"{100 * CONFIDENCE:g} % interval", "interval", written),
        PageColumn("cases", "cases", written),
        PageColumn("because", "because"),
    )
    return PageTable(f"against-{found.new}", f"{found.new} beside {found.old}", columns, rows)


def notes(old: Side, new: Side, chosen: Sequence[tuple[str, str]]) -> list[str]:
    """Return sentences about what limits the comparison; none where nothing does."""
    runs = [f"{side.atlas.profile}, seed {side.atlas.seed}" for side in (old, new)]
    alone = [sorted(set(side.kernels) - {pair[i] for pair in chosen}) for i, side in enumerate((old, new))]
    renamed = [f"{a} and {b}" for a, b in chosen if a != b]
    limits = (
        (
            runs[0] != runs[1],
            f"The runs tried different things ({runs[0]}; {runs[1]}): only cases that are in both are compared.",
        ),
        (not (old.cases and new.cases), "An atlas holds no cases, so that no family of it has an interval."),
        (alone[0], f"Only before: {', '.join(alone[0])}. Name a pair by --pair OLD=NEW."),
        (alone[1], f"Only now: {', '.join(alone[1])}. Name a pair by --pair OLD=NEW."),
        (renamed, f"Compared under two names: {', '.join(renamed)}."),
    )
    return [sentence for holds, sentence in limits if holds]


def write_pages(
    out: Path, new: Iterable[Path], old: Path, given: Iterable[tuple[str, str]] = ()
) -> tuple[Path, list[str]]:
    """Write ``against.html`` and ``against.md`` into ``out``; return the page's path and a sentence for every pair.

    Raises
    ------
    ValueError
        For a file that is neither an atlas nor a run, or damaged, and as :func:`pairs`.
    """
    before = read(old)
    after = joined([read(path) for path in new])
    chosen = pairs(before, after, given)
    compared_pairs = [compared(before, after, pair) for pair in chosen]
    details = moved.moved(before.atlas, after.atlas, chosen)
    context: Json = {
        "old": before.name,
        "new": after.name,
        "sentences": [pair.sentence() for pair in compared_pairs] or ["No kernel is in both."],
        "notes": notes(before, after, chosen),
        "tables": [table(pair) for pair in compared_pairs],
        "moved": replace(details, title=f"What moved, figure by figure: {plural(len(details.rows), 'row')}"),
    }
    return write_both(out, "against", context), context["sentences"]
