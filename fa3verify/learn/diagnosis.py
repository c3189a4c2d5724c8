"""Explain a kernel that fits no hypothesis by a known mistake: its answers are compared with those of faulty twins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fa3_kernels.faults.table import Fault, description, faulty
from fa3_kernels.plan.config import default_config
from fa3_kernels.plan.families import FAMILIES
from fa3_kernels.plan.order import Order
from fa3_kernels.twin.forward import forward
from fa3verify.learn.elimination import Asking, Elimination
from fa3verify.learn.inputs import ARITHMETIC, SPECIAL
from fa3verify.learn.launcher import KEYS, Launcher, Question, differing
from fa3verify.operations.forward import Result

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
