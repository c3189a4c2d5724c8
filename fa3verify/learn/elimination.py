"""Launches on which hypotheses disagree; those whose twins return the kernel's bits are kept.

Kinds of launches stand in :mod:`fa3verify.learn.inputs`; :mod:`fa3verify.learn.learner` says in which order they are
made. Where no hypothesis is left, the answers are compared with those of faulty twins, which may explain them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator

from fa3_kernels.faults.table import Fault, description, faulty
from fa3_kernels.plan.config import default_config
from fa3_kernels.plan.families import FAMILIES
from fa3_kernels.plan.order import Order
from fa3_kernels.twin.forward import forward
from fa3verify.kernels.calls import KernelError
from fa3verify.learn.inputs import ARITHMETIC, SPECIAL, Kind, Subject
from fa3verify.learn.launcher import KEYS, Hypothesis, Launcher, Question, differing
from fa3verify.learn.space import part
from fa3verify.operations.forward import Result

_SAMPLE = 12  # hypotheses whose twins answer a launch before the kernel is asked
_ENOUGH = 6  # different answers among them with which no better launch is looked for
_TRIES = 6  # launches of each kind that are tried to find one on which hypotheses disagree


class Step(NamedTuple):
    """One launch of the kernel: its kind, and how many hypotheses were alive before and after it."""

    kind: str
    before: int
    after: int


class Asking(NamedTuple):
    """A launch that was made: its kind, its inputs, and the kernel's answer."""

    kind: str
    question: Question
    answer: Result


@dataclass(slots=True)
class Elimination:
    """Makes launches and remembers them; the hypotheses that are alive are passed to each method and returned.

    While ``defers`` is true, an answer with an lse that is not finite is not used yet: how a kernel treats NaN and
    empty rows belongs to a later stage, and would refute a right order here. ``refuted`` are the last hypotheses that
    were alive, if none is left.
    """

    launcher: Launcher
    subject: Subject
    rng: Generator
    log: list[Step] = field(default_factory=list)
    history: list[Asking] = field(default_factory=list)
    deferred: list[Asking] = field(default_factory=list)
    refuted: list[Order] = field(default_factory=list)
    defers: bool = True

    def guess(self, order: Order) -> Hypothesis:
        """Return the hypothesis of an order with the tiles and the promotion that are certain; tiles of 128 if not."""
        known = self.subject.known
        return Hypothesis(known.tile_n or 128, known.tile_causal or known.tile_n, known.promotion_interval, order)

    def twin(self, order: Order, question: Question) -> Result:
        """Return the answer of the twin with this order."""
        return self.guess(order).answer(question, self.launcher.dtype, self.launcher.out_dtype)

    def keep(self, alive: Sequence[Order], kind: str, question: Question, fields: Sequence[str] = ()) -> list[Order]:
        """Launch the kernel, and return the orders whose twins give its answer.

        All orders are returned if the kernel refuses the launch or its answer is deferred. ``fields`` are the fields of
        an order on which the answer depends, if that is known: one twin then stands for many orders.
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
            known_by = part(order, fields) if fields else order
            if known_by not in agrees:
                agrees[known_by] = differing(self.twin(order, question), answer) == 0
            if agrees[known_by]:
                kept.append(order)
        self.log.append(Step(kind, len(alive), len(kept)))
        self.refuted = self.refuted if kept else list(alive)
        return kept

    def recall(self, alive: Iterable[Order]) -> list[Order]:
        """Return the orders that agree with the deferred answers; from then on no answer is deferred."""
        self.defers = False
        kept = list(alive)
        for asking in self.deferred:
            kept = self.agreeing(kept, asking)
        return kept

    def made(self, kind: Kind) -> Question | None:
        """Return a launch of a kind, None if the kernel takes no such launch."""
        return kind(self.rng, self.subject)

    def ask_each(self, alive: Sequence[Order], kinds: Mapping[str, Kind]) -> list[Order]:
        """Launch every kind once, even if no hypotheses disagree: it may refute all of them."""
        kept = list(alive)
        for name, kind in kinds.items():
            question = self.made(kind)
            if question is not None and kept:
                kept = self.keep(kept, name, question)
        return kept

    def split(self, alive: Sequence[Order], kinds: Mapping[str, Kind]) -> list[Order]:
        """Launch what splits the hypotheses most, until twice in a row nothing is found that splits them."""
        kept = list(alive)
        idle = 0
        while len(kept) > 1 and idle < 2:
            best = self._best(kept, kinds)
            if best is None:
                idle += 1
                continue
            before = len(kept)
            kept = self.keep(kept, *best)
            idle += len(kept) == before  # such as where the answer is deferred
        return kept

    def _best(self, alive: Sequence[Order], kinds: Mapping[str, Kind]) -> tuple[str, Question] | None:
        """Return the launch to which a sample of the hypotheses has most different answers, None if all have one."""
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
    """Return bytes that are equal for equal answers; every NaN equals every NaN."""
    parts = (answer.out.astype(np.float32), np.zeros(0, np.float32) if answer.lse is None else answer.lse)
    return b"".join(np.where(np.isnan(x), np.float32(np.nan), x).tobytes() for x in parts)


_Suspect = Callable[..., Result]  # an order whose twin is run with a mistake: of a question and ``twin``
_MOST = 6  # refuted orders that are tried; all are alike but for fields that no launch had separated


def mistakes(game: Elimination, refuted: Sequence[Order]) -> tuple[str, ...]:
    """Return the planted mistakes with which some order gives every answer of the kernel, in words.

    The orders that were refuted last are tried, and those of every known family with the tiles that it ships. An order
    that already agrees without a mistake is left out. The result is empty if no mistake explains the answers.

    Parameters
    ----------
    game : Elimination
        The launches that were made; if there are none, one of each kind is made here.
    refuted : sequence of Order
        The orders that were refuted last.
    """
    if not game.history:
        game.defers = False
        game.subject = replace(game.subject, longest=KEYS)
        for name, kind in {**ARITHMETIC, **SPECIAL}.items():
            if question := game.made(kind):
                game.keep([], name, question)
    askings = sorted(game.history, key=lambda asking: asking.question.q.size * asking.question.k.shape[1])
    suspects = [x for x in _suspects(game, refuted) if not _agrees(partial(x, twin=forward), askings)]
    return tuple(
        description(fault) for fault in Fault if any(_agrees(partial(x, twin=faulty(fault)), askings) for x in suspects)
    )


def _suspects(game: Elimination, refuted: Sequence[Order]) -> Iterator[_Suspect]:
    for order in refuted[:_MOST]:
        yield partial(_of_order, game, order)
    for family, traits in FAMILIES.items():
        if game.launcher.dtype in traits.dtypes and traits.is_reproduced:
            yield partial(_of_family, game.launcher, family)


def _of_order(game: Elimination, order: Order, question: Question, twin: Any) -> Result:
    return game.guess(order).answer(question, game.launcher.dtype, game.launcher.out_dtype, twin)


def _of_family(launcher: Launcher, family: str, question: Question, twin: Any) -> Result:
    problem = question.problem(launcher.dtype)
    config = default_config(problem, family=family, out_dtype=launcher.out_dtype)
    return Result(*twin(problem, question.operands(launcher.dtype), config))


def _agrees(answered: Any, askings: Sequence[Asking]) -> bool:
    """Tell whether a suspect gives every answer of the kernel, and takes more than half of the launches."""
    count = 0
    for asking in askings:
        try:
            answer = answered(asking.question)
        except ValueError:
            continue
        if differing(answer, asking.answer):
            return False
        count += 1
    return 2 * count > len(askings)
