"""Launch what hypotheses disagree on, and keep those whose twins return the kernel's bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from fa3_kernels.plan.order import Order
from fa3verify.kernels.calls import KernelError
from fa3verify.learn.inputs import Kind, Subject
from fa3verify.learn.launcher import Hypothesis, Launcher, Question, differing
from fa3verify.learn.space import part
from fa3verify.operations.forward import Result

_SAMPLE = 12  # hypotheses that a launch is tried on before it is made
_ENOUGH = 6  # answers among them, with which it is made at once
_TRIES = 6  # launches of each kind that are tried for one that splits what is left


class Step(NamedTuple):
    """One launch of the kernel: its kind, how many hypotheses were alive before and behind it."""

    kind: str
    before: int
    after: int


class Asking(NamedTuple):
    """A launch that was made, by its kind, with the kernel's answer."""

    kind: str
    question: Question
    answer: Result


@dataclass(slots=True)
class Elimination:
    """Holds what was launched so far; ``alive`` is always given, so that stages may start from others.

    While ``defers`` is true, an answer with an lse that is not finite waits: what a kernel makes of NaN and of empty
    rows are switches of a later stage, and would refute a right order here.
    """

    launcher: Launcher
    subject: Subject
    rng: Generator
    log: list[Step] = field(default_factory=list)
    history: list[Asking] = field(default_factory=list)
    deferred: list[Asking] = field(default_factory=list)
    refuted: list[Order] = field(default_factory=list)  # the last hypotheses, where none is left
    defers: bool = True

    def guess(self, order: Order) -> Hypothesis:
        """Return the hypothesis with this order, and what is certain."""
        known = self.subject.known
        return Hypothesis(known.tile_n or 128, known.tile_causal or known.tile_n, known.promotion_interval, order)

    def twin(self, order: Order, question: Question) -> Result:
        """Return the answer of the hypothesis with this order."""
        return self.guess(order).answer(question, self.launcher.dtype, self.launcher.out_dtype)

    def keep(self, alive: Sequence[Order], kind: str, question: Question, fields: Sequence[str] = ()) -> list[Order]:
        """Launch, and return the orders whose twins answer alike.

        ``fields`` are all that the answer depends on, where that is known: one twin then stands for many orders.
        """
        try:
            answer = self.launcher(question)
        except (KernelError, ValueError):
            self.log.append(Step(f"{kind}, refused", len(alive), len(alive)))
            return list(alive)
        asking = Asking(kind, question, answer)
        self.history.append(asking)
        if self.defers and answer.lse is not None and not np.isfinite(answer.lse).all():
            self.deferred.append(asking)
            self.log.append(Step(f"{kind}, deferred", len(alive), len(alive)))
            return list(alive)
        return self.agreeing(alive, asking, fields)

    def agreeing(self, alive: Sequence[Order], asking: Asking, fields: Sequence[str] = ()) -> list[Order]:
        """Return the orders whose twins answer a launch as the kernel did."""
        kind, question, answer = asking
        agrees: dict[object, bool] = {}
        kept = []
        for order in alive:
            of = part(order, fields) if fields else order
            if of not in agrees:
                agrees[of] = differing(self.twin(order, question), answer) == 0
            if agrees[of]:
                kept.append(order)
        self.log.append(Step(kind, len(alive), len(kept)))
        self.refuted = self.refuted if kept else list(alive)
        return kept

    def recall(self, alive: Iterable[Order]) -> list[Order]:
        """Return the orders that agree with the answers that waited; none waits from now on."""
        self.defers = False
        kept = list(alive)
        for asking in self.deferred:
            kept = self.agreeing(kept, asking)
        return kept

    def made(self, kind: Kind) -> Question | None:
        """Return a launch of a kind, None where there is none."""
        return kind(self.rng, self.subject)

    def ask_each(self, alive: Sequence[Order], kinds: Mapping[str, Kind]) -> list[Order]:
        """Launch every kind once, needed or not: what belongs to no hypothesis is seen by these alone."""
        kept = list(alive)
        for name, kind in kinds.items():
            question = self.made(kind)
            if question is not None and kept:
                kept = self.keep(kept, name, question)
        return kept

    def split(self, alive: Sequence[Order], kinds: Mapping[str, Kind]) -> list[Order]:
        """Launch what splits the hypotheses most, until nothing that is tried splits them twice in a row."""
        kept = list(alive)
        idle = 0
        while len(kept) > 1 and idle < 2:
            found = self._best(kept, kinds)
            if found is None:
                idle += 1
                continue
            before = len(kept)
            kept = self.keep(kept, *found)
            idle += len(kept) == before  # as where the answer waits
        return kept

    def _best(self, alive: Sequence[Order], kinds: Mapping[str, Kind]) -> tuple[str, Question] | None:
        """The launch, of some of every kind, to which a sample of the hypotheses has most answers; None below two."""
        chosen = self.rng.permutation(len(alive))[:_SAMPLE]
        sample = [alive[i] for i in chosen]
        most = 1
        best = None
        for name, kind in list(kinds.items()) * _TRIES:
            question = self.made(kind)
            if question is None:
                continue
            answers = len({_bits(self.twin(order, question)) for order in sample})
            if answers > most:
                most = answers
                best = name, question
            if answers >= min(len(sample), _ENOUGH):
                break
        return best


def _bits(answer: Result) -> bytes:
    """Return what equals for equal answers: NaN of any payload is one."""
    parts = (answer.out.astype(np.float32), np.zeros(0, np.float32) if answer.lse is None else answer.lse)
    return b"".join(np.where(np.isnan(x), np.float32(np.nan), x).tobytes() for x in parts)
