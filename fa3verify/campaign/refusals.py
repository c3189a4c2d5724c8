"""Refused calls: the sizes that a kernel takes, found from the calls in which it raised, as what declares them.

A rule explains what was refused if the kernel takes every call that fits it and refuses nearly all that do not. It is
found by shrinking: the strictest rules under which a refused call is taken are given up one by one, as long as it is.
:mod:`fa3verify.campaign.questions` asks whether the rule is meant.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from itertools import permutations

from fa3_reference.problem import AttentionProblem
from fa3verify.cases import probing, space
from fa3verify.cases.coverage import adapted
from fa3verify.kernels import watch
from fa3verify.kernels.names import FEATURES, declaring
from fa3verify.kernels.record import Kernel
from fa3verify.kernels.sizes import PRESENT, written
from fa3verify.operations.operation import needed_features

Said = dict[str, str]  # fields of sizes, and features, as a kernel's name has them
ROUNDS = 6  # in which a call of a class that a rule has and the kernel refuses is explained as well
MOST_TAKEN = 0.25  # of the calls that a rule leaves out, where it explains what was refused
_TILE = "128"
# The strictest rules. Where one of two would do, the later one is kept.
_PLAIN: Said = {
    "max_nheads": "1",
    "max_batch": "1",
    "max_group": "1",
    "slopes_by_head": "true",
    "finite_biases": "true",
}
_LENGTHS: tuple[Said, ...] = (
    {
        "max_seqlen_k": _TILE,
        "max_seqlen_q": _TILE,
        "softmax_scale": "default",
        "min_seqlen": "1",
        "seqlen_k_multiple": _TILE,
        "seqlen_q_multiple": _TILE,
        "equal_lengths": "true",
        "queries_within_keys": "true",
    },
    {
        "max_seqlen_k": _TILE,
        "softmax_scale": "default",
        "min_seqlen": "1",
        "seqlen_k_multiple": _TILE,
        "max_seqlen_q": "1",
    },
)
PUBLIC = "FlashAttention-3 takes such calls"
MEANINGS: Mapping[str, str] = {
    "always": "it refuses calls without a causal mask",
    "combinations": "of features that are combined it takes {} alone",
    "slopes_by_head": "it refuses ALiBi slopes of (batch, nheads)",
    "finite_biases": "it refuses biases of -inf",
    "equal_lengths": "it refuses sequences that have not as many queries as keys",
    "queries_within_keys": "it refuses sequences of more queries than keys",
    "softmax_scale": "it refuses a softmax_scale other than 1 / sqrt(head_dim)",
    "min_seqlen": "it refuses sequences of fewer than {} keys",
    "seqlen_multiple": "it refuses lengths that are no multiples of {}",
    "seqlen_q_multiple": "it refuses numbers of queries that are no multiples of {}",
    "seqlen_k_multiple": "it refuses numbers of keys that are no multiples of {}",
    "max_seqlen_q": "it refuses more queries than {}",
    "max_seqlen_k": "it refuses more keys than {}",
    "max_batch": "it refuses more sequences than {}",
    "max_nheads": "it refuses more heads than {}",
    "max_group": "it refuses more than {} heads of q on one of k",
    FEATURES: "it refuses features of calls that it claims, and takes {}",
}


class _Refusals:
    """What a kernel was seen to refuse and to take, of plain inputs; calls after ``until`` count as refused.

    A rule that leaves out many calls which the kernel takes is given up before others.
    """

    def __init__(self, kernel: Kernel, until: float) -> None:
        self.kernel = kernel
        self.until = until
        self.classes = of_classes(kernel)
        self.known: dict[AttentionProblem, bool] = {}

    def has(self, problem: AttentionProblem) -> bool:
        """Tell whether the kernel refuses a problem."""
        if problem not in self.known:
            watch.trying("refusals", problem.to_json)
            self.known[problem] = time.monotonic() > self.until or probing.refuses(self.kernel, problem)
        return self.known[problem]

    def under(self, said: Said, problem: AttentionProblem) -> bool:
        """Tell whether the kernel refuses the problem that is nearest to one among those that a rule takes."""
        try:
            fitted = adapted(narrowed := declaring(self.kernel, said), problem)
        except ValueError:
            return True
        return _is_outside(narrowed, fitted) or self.has(fitted)

    def place(self, said: Said, name: str, problems: list[AttentionProblem]) -> int:
        """Return the place of the first problem that is refused under the other rules, 0 where none is."""
        rest = {other: x for other, x in said.items() if other != name}
        return next((place for place, problem in enumerate(problems) if self.under(rest, problem)), 0)

    def taken_outside(self, said: Said) -> int:
        """Return how many problems of the kernel's classes it takes that a rule leaves out."""
        return sum(not self.has(problem) for problem in self.left_out(said))

    def left_out(self, said: Said) -> list[AttentionProblem]:
        """Return the problems of the kernel's classes that a rule leaves out."""
        narrowed = declaring(self.kernel, said)
        return [problem for problem in self.classes if _is_outside(narrowed, problem)]

    def explained(self, problems: list[AttentionProblem]) -> Said:
        """Return the fewest rules under which no problem is refused, by the strictest that take the first; or none."""
        needed = needed_features(problems[0])
        features = sorted(self.kernel.features - needed)
        sides: list[Said] = [
            *({"combinations": f"{a} with {b}"} for a in sorted(needed) for b in features if PRESENT.get(b)),
            *({"combinations": f"{a} without {b}"} for a, b in permutations(sorted(needed), 2)),
            *([{"always": "causal"}] if "causal" in self.kernel.features else []),
        ]
        for side in (*sides, {FEATURES: written(features)}):
            for lengths in _LENGTHS:
                said = {**_PLAIN, **lengths, **side}
                if not any(self.under(said, problem) for problem in problems):
                    return self._loosened(said, problems)
        return {}

    def _loosened(self, said: Said, problems: list[AttentionProblem]) -> Said:
        def holds(rules: Said) -> bool:
            return not any(self.under(rules, problem) for problem in problems)

        for name in sorted(said, key=lambda name: -self.taken_outside({name: said[name]})):
            if holds(rest := {other: x for other, x in said.items() if other != name}):
                said = rest
        whole = {"seqlen_q_multiple": _TILE, "seqlen_k_multiple": _TILE}
        if "equal_lengths" in said and whole.keys() & said.keys():  # whole tiles may do without
            several = {name: x for name, x in said.items() if name != "equal_lengths"} | whole
            said = several if holds(several) else said
        for name in [name for name in said if name.startswith("max_") or name.endswith("multiple")]:
            measured = [getattr(p, name.removeprefix("max_"), int(_TILE)) for p in problems]
            said[name] = str(_least(lambda n, name=name: holds({**said, name: str(n)}), name, max(measured)))
        both = {"seqlen_q_multiple", "seqlen_k_multiple"} & said.keys()
        if len(both) == 2 and len({said[name] for name in both}) == 1:
            said["seqlen_multiple"] = said.pop("seqlen_q_multiple")
            del said["seqlen_k_multiple"]
        if FEATURES in said:
            for name in sorted(self.kernel.features - (own := declaring(self.kernel, said).features)):
                wider = {**said, FEATURES: written(sorted({name} | own))}
                said = wider if holds(wider) else said
        if said.get("max_group") == "1" and "gqa" in self.kernel.features:
            del said["max_group"]
            said[FEATURES] = written(sorted(declaring(self.kernel, said).features - {"gqa"}))
        return said


def _is_outside(kernel: Kernel, problem: AttentionProblem) -> bool:
    """Tell whether a problem is not among those that a kernel declares to take; the kernel is not called."""
    return bool(needed_features(problem) - kernel.features or kernel.misfit(problem))


def _least(holds: Callable[[int], bool], name: str, refused: int) -> int:
    """Return the least power of two that holds of a multiple, the largest number below ``refused`` of a maximum."""
    if name.endswith("multiple"):
        return next(n for n in (2, 4, 8, 16, 32, 64, int(_TILE)) if holds(n) or n == int(_TILE))
    low = 1 if name != "max_seqlen_k" else int(_TILE)
    while refused - low > 1:
        middle = (low + refused) // 2
        low, refused = (middle, refused) if holds(middle) else (low, middle)
    return low


def rule(kernel: Kernel, refused: Iterable[AttentionProblem], until: float) -> dict[str, tuple[str, int]]:
    """Return what to declare so that a kernel is asked nothing that it refuses; empty where no rule explains it.

    Parameters
    ----------
    kernel : Kernel
    refused : iterable of AttentionProblem
        Of the calls in which it raised.
    until : float
        When to give up, by the monotonic clock.

    Returns
    -------
    dict of str to (str, int)
        By field of :class:`fa3verify.kernels.sizes.Sizes`, or ``features``, its value and the place of the first
        problem that needs it. A kernel that takes such a problem with plain inputs has no rule.
    """
    seen = _Refusals(kernel, until)
    problems = list(refused)
    if not all(map(seen.has, problems)):
        return {}
    for _ in range(ROUNDS):
        said = seen.explained(problems)
        if not said:
            return {}
        more = next((problem for problem in of_classes(declaring(kernel, said)) if seen.has(problem)), None)
        if more is None:
            if time.monotonic() > until or seen.taken_outside(said) > MOST_TAKEN * len(seen.left_out(said)):
                return {}
            return {name: (value, seen.place(said, name, problems)) for name, value in said.items()}
        problems.append(more)
    return {}


def of_classes(kernel: Kernel) -> list[AttentionProblem]:
    """Return a problem of each class of sizes and masks that a kernel claims."""
    classes = ((name, c) for name, of in space.claimed(kernel).items() if name != "inputs" for c in of)
    return list(dict.fromkeys(space.case_of(kernel, {name: c}).problem for name, c in classes))
