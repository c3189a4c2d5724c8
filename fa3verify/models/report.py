"""What a watch has seen and where, what it cost, and the page that tells it."""

from __future__ import annotations

import contextlib
import math
import sys
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from fa3_reference.problem import AttentionProblem
from fa3verify.checking.checked import CheckedCall

_OWN = str(Path(__file__).parent)
_FRAMES = 16
_names: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()  # of outermost modules
_KINDS = ("outputs", "gradients")
_MOST_FINDINGS = 4  # layers of which a finding is written out
_BINS = 8  # of steps
_LAUNCHES = 200  # of which one is wrong, in what the page says of chances


class CallSite(NamedTuple):
    """Function, layer, optimizer step and innermost frames of a call."""

    function: str
    layer: str
    step: int
    stack: traceback.StackSummary

    def __str__(self) -> str:
        return f"{self.function} in {self.layer}, step {self.step}"


def site_of(function: str, step: int) -> CallSite:
    """Return where the caller of this package, who calls a function, is.

    The layer is the innermost module on the stack that an outermost one knows by name: one of this stack, or one that
    was seen before, as autograd's threads have no model on theirs. Without modules it is the calling line.
    """
    frames = [x for x, _ in traceback.walk_stack(sys._getframe()) if not x.f_code.co_filename.startswith(_OWN)]
    selves = (x.f_locals.get("self") for x in frames if x.f_code.co_varnames[:1] == ("self",))
    modules = [x for x in selves if isinstance(x, torch.nn.Module)]
    if modules and not any(id(modules[-1]) in names for names in _names.values()):
        _names[modules[-1]] = {id(x): name for name, x in modules[-1].named_modules()}
    stack = traceback.StackSummary.extract([(x, x.f_lineno) for x in frames[:_FRAMES]], lookup_lines=False)
    line = f"{Path(stack[0].filename).name}:{stack[0].lineno} {stack[0].name}"
    named = (name for x in modules for names in _names.values() if (name := names.get(id(x))))
    return CallSite(function, next(named, type(modules[0]).__name__ if modules else line), step, stack)


class WatchedPart(NamedTuple):
    """A part of one call that was checked: where it stands, and what :func:`fa3verify.check` found.

    ``kind`` is "outputs" or "gradients", ``rows_of`` counts the rows of the call, ``where`` says which part it is.
    """

    site: CallSite
    kind: str
    rows_of: int
    where: str
    found: CheckedCall

    def __str__(self) -> str:
        title = f"{self.kind} of {self.site}, {self.where}, below as sequence 0 and heads from 0 on:"
        return "\n    ".join([title, *str(self.found).splitlines()])


class WatchReport:
    """What a watch has seen. Its truth value is "nothing wrong was found", its text the page.

    Attributes
    ----------
    calls : Counter of str
        Calls by function.
    checked : list of WatchedPart
    shapes : Counter of (str, AttentionProblem)
        Drawn calls by function and shape.
    reasons : Counter of str
        What was not looked at, and why.
    not_finite : dict of str to str
        Where NaN or an infinity was first: in "operands", in "out" of finite ones, or in "masked out", which may have
        rows that see no key.
    dumps : dict of str to Path
        Files with the tensors of the first wrong part of a layer, for ``fa3verify check``.
    spent_s : Counter of str
        Seconds that went into outputs, gradients, and calls that were not drawn.
    steps : int
        Steps of optimizers; assign to count otherwise.
    """

    def __init__(self, one_in: float, budget: float, seed: int, rank: int, folder: Path) -> None:
        if one_in < 1 or not budget > 0:
            raise ValueError(f"one_in must be at least 1 and budget above 0, got {one_in} and {budget}")
        self.one_in = one_in
        self.budget = budget
        self.seed = seed
        self.rank = rank
        self.folder = folder
        self.calls: Counter[str] = Counter()
        self.checked: list[WatchedPart] = []
        self.shapes: Counter[tuple[str, AttentionProblem]] = Counter()
        self.reasons: Counter[str] = Counter()
        self.not_finite: dict[str, str] = {}
        self.dumps: dict[str, Path] = {}
        self.spent_s: dict[str, float] = dict.fromkeys((*_KINDS, "calls not drawn"), 0.0)
        self.steps = 0
        self.most_held_bytes = 0
        self._rate: dict[str, float] = {}  # seconds by unit of work, of the last check
        self._began_s = time.perf_counter()
        self._ended_s = math.inf

    def __bool__(self) -> bool:
        return all(x.found for x in self.checked) and "out" not in self.not_finite

    def __str__(self) -> str:
        return "\n".join((*self._head(), *(self._tables() if self.checked else ()), *self._tail()))

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start, at most until the end."""
        return min(time.perf_counter(), self._ended_s) - self._began_s

    def detection(self, one_of: int = _LAUNCHES) -> float:
        """Return the probability that an error in one row of one head would have been found.

        In each of the calls that were seen it is there with probability 1 / one_of, at a row that is drawn anew.
        """
        n = self.calls.total()
        seen = sum(max(x.found.rows, x.found.screened) / x.rows_of for x in self.checked if x.kind == "outputs")
        return 1 - (1 - min(seen / n, 1) / one_of) ** n if n else 0.0

    def _has_time(self, kind: str, work: float) -> bool:
        """Tell whether there is time for a check whose cost is proportional to ``work``.

        Outputs and gradients may each take an equal part of the budget. The first check of each is made unasked, and
        the others wait until both together are within the budget again.
        """
        if kind not in self._rate:
            return True
        needed_s = self._rate[kind] * work
        allowed_s = self.budget * self.elapsed_s
        return (
            self.spent_s[kind] + needed_s <= allowed_s / len(self._rate)
            and sum(self.spent_s.values()) + needed_s <= allowed_s
        )

    @contextlib.contextmanager
    def _spending(self, kind: str, work: float = 0) -> Iterator[None]:
        """Charge the time of the context to an account, and remember what a unit of its work costs."""
        began = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            self.spent_s[kind] += seconds
            if work:
                self._rate[kind] = seconds / work

    def _head(self) -> Iterable[str]:
        n = Counter(x.kind for x in self.checked)
        word = "FAIL" if not self else "PASS" if self.checked else "SAW NOTHING"
        calls = ", ".join(f"{count:,} of {name}" for name, count in self.calls.items())
        first = {x.site.layer: x for x in reversed(self.checked) if not x.found}
        wrong = {layer: [not x.found for x in self.checked if x.site.layer == layer] for layer in reversed(first)}
        asked = [x for x in self.checked if x.found.verdict == "question"]
        return (
            f"fa3verify watch, rank {self.rank}: {word}, {n['outputs']:,} outputs and {n['gradients']:,} sets of "
            f"gradients checked in {self.steps:,} steps; calls seen: {calls or 'none'}",
            *(
                f"wrong in {sum(own)} of {len(own)} checks of {layer}, first: {first[layer]}"
                for layer, own in list(wrong.items())[:_MOST_FINDINGS]
            ),
            *(f"another contract than FlashAttention-3's {len(asked)} times, first: {x}" for x in asked[:1]),
            *self.not_finite.values(),
        )

    def _tables(self) -> Iterable[str]:
        """Write the errors by layer, and by steps."""
        layers = dict.fromkeys(x.site.layer for x in self.checked)
        width = max(map(len, ("layer", *layers)))
        yield f"{'layer':<{width}}  outputs  error/bound  bits lost  gradients  error/bound"
        for layer in layers:
            outs, gradients = ([x for x in self.checked if (x.site.layer, x.kind) == (layer, kind)] for kind in _KINDS)
            lost = sum(x.found.bits_lost for x in outs) / (len(outs) or 1)
            cells = f"{len(outs):7}  {_largest(outs):>11}  {lost:9.2f}  {len(gradients):9}  {_largest(gradients):>11}"
            yield f"{layer:<{width}}  {cells}"
        size = self.steps // _BINS + 1
        bins = [[x for x in self.checked if x.site.step // size == i] for i in range(_BINS)]
        yield "error/bound from step " + ", ".join(f"{i * size}: {_largest(x)}" for i, x in enumerate(bins) if x)

    def _tail(self) -> Iterable[str]:
        unjudged = Counter(
            {"values of which operands or scores are not finite": sum(x.found.unjudged for x in self.checked)}
        )
        reasons = (f"{n:,} {reason}" for reason, n in sorted((self.reasons + unjudged).items()))
        spent = ", ".join(f"{name} {s:.3g} s" for name, s in self.spent_s.items())
        dumps = ", ".join(path.name for path in self.dumps.values())
        return (
            f"not looked at: {'; '.join(reasons) or 'nothing that was drawn'}",
            f"drawn 1 in {self.one_in:g} by seed {self.seed}; an error in one row of one head, in 1 of {_LAUNCHES} of "
            f"these calls, would have been found with probability {self.detection():.3g}",
            f"cost: {sum(self.spent_s.values()) / self.elapsed_s:.2%} of {self.elapsed_s:.1f} s, budget "
            f"{self.budget:.2%} ({spent}); at most {self.most_held_bytes / 1e6:.1f} MB waited for gradients",
            f"in {self.folder}: {len(self.shapes)} shapes of drawn calls; wrong parts of calls: {dumps or 'none'}",
        )


def _largest(parts: Sequence[WatchedPart]) -> str:
    return f"{max(x.found.ratio for x in parts):.3g}" if parts else "-"
