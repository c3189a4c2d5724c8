"""The verb learn: find the order of operations of a kernel, and check it on fresh launches.

:func:`learn` runs the probes, then the elimination, then a million fresh outputs, and :class:`Learned` is its answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fa3_kernels.plan.config import K_STEP
from fa3_kernels.plan.order import Order
from fa3_reference.problem import Dtype
from fa3_reference.rules import require
from fa3verify import operations
from fa3verify.judging.hypotheses import sums_of
from fa3verify.kernels.calls import KernelError
from fa3verify.kernels.record import Kernel
from fa3verify.learn import inputs, space
from fa3verify.learn.elimination import Asking, Elimination, Step, mistakes
from fa3verify.learn.inputs import Subject
from fa3verify.learn.launcher import KEYS, Launcher, Question, differing
from fa3verify.learn.probes import QUADS, ROW_SUMS, Probes
from fa3verify.learn.space import Structure
from fa3verify.operations.forward import Result
from fa3verify.operations.operation import error_over_bound

OUTPUTS = 1_000_000
_ROWS = (64, 192)  # queries of fresh launches
_LONGEST = 3 * KEYS  # keys of fresh launches at most: more than any that was learned from
TILES = range(16, 257, 16)  # sizes of tiles that the twin computes
LEAST_SUM_BITS = 20  # of the row sum; an lse with an approximate logarithm shows no more
LEAST_BITS = {"fp16": 23, "bf16": 23, "e4m3": 13}  # of sums; with fewer their rounding shows in the output
MOST_ERROR = 2.0**-18  # of a weight, where the largest is 1
_FEATURES = {"causal": "causal", "grouped": "gqa", "capped": "softcap"}  # feature of a kernel by kind of launch
_ATTEMPTS = 4  # rounds of fresh outputs at most, each after hypotheses that the last round refuted are gone
_BOUNDED = 8  # fresh launches that are compared with the bound of any order


@dataclass(frozen=True, slots=True)
class Learned:
    """Holds what is known of a kernel's order of operations.

    Parameters
    ----------
    kernel : str
    dtype : {"fp16", "bf16", "e4m3"}
    head_dim : int
        Head dim of every launch.
    structure : Structure
        What is certain, whether a hypothesis survives or not.
    orders : tuple of Order
        The hypotheses that no launch refuted; empty if none fits the kernel.
    steps : tuple of Step
        The launches that told them apart.
    launches : int
        All launches of the kernel, fresh ones included.
    seconds : float
    outputs, differing : int
        How many output values of fresh launches were compared with the twin of the first order, and how many differ.
        Fresh launches did not serve to choose the order.
    differs_at : str
        The first fresh launch with a difference, in words; empty without one.
    ratio : float
        Largest error over the bound of any order, in some of the fresh launches.
    findings : tuple of str
        Steps of the order that are not sound, a sentence each.
    mistakes : tuple of str
        Mistakes with which a known order gives every answer of the kernel, if no hypothesis does.
    features : frozenset of str
        Features beyond dense attention of equal heads that were launched.
    why : str
        Why no hypothesis survives; empty if one does.
    """

    kernel: str
    dtype: Dtype
    head_dim: int
    structure: Structure
    orders: tuple[Order, ...]
    steps: tuple[Step, ...]
    launches: int
    seconds: float
    outputs: int = 0
    differing: int = 0
    differs_at: str = ""
    ratio: float = 0.0
    findings: tuple[str, ...] = ()
    mistakes: tuple[str, ...] = ()
    features: frozenset[str] = frozenset()
    why: str = ""

    @property
    def is_whole(self) -> bool:
        """Tell whether an order is known that no launch refutes."""
        return bool(self.orders) and not self.differing

    @property
    def free(self) -> dict[str, tuple[Any, ...]]:
        """Return the fields that no launch separates, with the values that are left."""
        return space.free(self.orders)

    def words(self) -> Iterator[str]:
        """Yield the answer, a line each."""
        yield f"certain: {'; '.join(self.structure.words()) or 'nothing'}"
        if said := self.structure.declaration:
            yield f"to declare it: {said}"
        if not self.orders:
            yield f"no hypothesis survives: {self.why}"
            return
        count = len([step for step in self.steps if step.after < step.before])
        yield f"{self.steps[0].before:,} hypotheses told apart by {count} launches of {len(self.steps)}"
        for name, values in self.free.items():
            yield f"free, as no launch separates them: {name} {' or '.join(map(str, values))}"
        fresh = f"{self.differing:,} of {self.outputs:,} fresh outputs differ"
        yield f"{fresh}; error / bound of any order {self.ratio:.3f}"


def learn(kernel: Kernel, head_dim: int = 64, *, outputs: int = OUTPUTS, seed: int = 0) -> Learned:
    """Find the order of operations of a forward kernel from its outputs.

    Parameters
    ----------
    kernel : Kernel
        A forward kernel in fp16, bf16 or e4m3.
    head_dim : int
        Head dim of every launch; V has as many channels.
    outputs : int
        Output values of fresh launches that the first order is compared with.
    seed : int
        Seed of all launches.

    Returns
    -------
    Learned
        The orders that no launch refutes or separates, or none; and what is certain in either case.

    Raises
    ------
    ValueError
        If it is no forward kernel, cannot run here, or does not take plain attention of this head_dim.
    fa3verify.kernels.calls.KernelError
        If it raises in plain attention, or returns what it does not declare.
    """
    require(
        kernel.operation == operations.FORWARD,
        f"only forward kernels are learned, {kernel.name} computes {kernel.operation}",
    )
    require(kernel.dtype != "fp32", f"orders are learned from outputs in 16 bits, {kernel.name} is of fp32")
    require(not kernel.unavailable, f"{kernel.name} cannot run here: {kernel.unavailable}")
    began_s = time.monotonic()
    launcher = Launcher(kernel, head_dim)
    rng = np.random.default_rng(seed)
    subject = _asked(launcher, rng)
    launcher.fill(inputs.cancelling(rng, replace(subject, rows=64, longest=2 * KEYS)))
    known = _structure(launcher)
    subject = replace(subject, known=known)
    game = Elimination(launcher, subject, rng)
    why = _outside(known, kernel.dtype) or ("" if known.row_sums else "no known order of the row sum agrees")
    orders = [] if why else _orders(game)
    found = Learned(kernel.name, kernel.dtype, head_dim, known, tuple(orders), (), 0, 0.0)
    if orders:
        found = _judged(game, found, outputs, seed)
    elif not why:
        why = _refuted(game)
    if not found.is_whole:
        found = replace(found, mistakes=mistakes(game, game.refuted or found.orders))
    seconds = time.monotonic() - began_s
    features = frozenset(_FEATURES[asking.kind] for asking in game.history if asking.kind in _FEATURES)
    steps = tuple(game.log)
    done = {"steps": steps, "launches": launcher.launches, "seconds": seconds, "features": features, "why": why}
    found = replace(found, **done)
    return replace(found, findings=tuple(_unsound(found, kernel)))


def _asked(launcher: Launcher, rng: np.random.Generator) -> Subject:
    """Return the subject with what the kernel takes; raises if it does not take even plain attention."""
    plain = Subject(launcher.kernel, Probes(launcher).form, Structure(), False, False)
    question = plain.normal(rng, 64)
    launcher(question)
    square = replace(question, q=question.k, causal=True)
    none = replace(question, k=question.k[:, :0], v=question.v[:, :0])
    return replace(plain, takes_causal=launcher.takes(square), takes_empty=launcher.takes(none))


def _structure(launcher: Launcher) -> Structure:
    """Run all probes, each with what those before it found."""
    probes = Probes(launcher)
    known = Structure()
    first = probes.folding, probes.chains, probes.weights, probes.rescaling
    for probe in (*first, probes.tiles, probes.promotion, probes.widths):
        known = probe(known)
    if _outside(known, launcher.dtype):
        return known
    if launcher.dtype == "e4m3":  # the offset of 2^8 hides faint weights, so that all trees stay possible
        return replace(known, row_sums=tuple((row_sum, quad) for row_sum in ROW_SUMS for quad in QUADS))
    return probes.row_sum(known, space.certain(known, launcher.dtype))


def _outside(known: Structure, dtype: Dtype) -> str:
    """Return why no hypothesis has this structure; empty if some may have it."""
    is_fp8 = dtype == "e4m3"
    without_tiles = "P is not rounded, and its tiles leave no trace"
    reasons = (
        (not known.tile_n, without_tiles if known.probabilities == "fp32" else "no tiles were found"),
        (known.scores, f"S is kept in {known.scores}"),
        (not known.probabilities, "P is rounded in no known way"),
        (is_fp8 and known.threshold_log2, "maxima stay although P of e4m3 has no room above 1"),
        *(
            (
                step not in (0, 1, K_STEP[dtype]),
                f"{step} products are added at once, where the tensor core adds {K_STEP[dtype]}",
            )
            for step in (known.score_step, known.value_step)
        ),
        (not is_fp8 and known.promotion_interval, "sums of P V begin anew within 16-bit rows"),
        (known.tile_n not in TILES or known.tile_causal not in (0, *TILES), "no kernel in the space has such tiles"),
    )
    return next((words for is_outside, words in reasons if is_outside), "")


def _orders(game: Elimination) -> list[Order]:
    """Eliminate orders of the arithmetic first, then treatments of special values, and return those that are left."""
    kernel = game.launcher.kernel
    alive = list(space.arithmetic(game.subject.known, kernel))
    alive = game.keep(alive, "a lone key", _lone_key(game), space.OF_ONE_KEY)
    alive = game.keep(alive, "normal", inputs.normal(game.rng, game.subject))
    alive = game.split(alive, inputs.ARITHMETIC)
    alive = game.ask_each(alive, inputs.ARITHMETIC)
    alive = game.recall(dict.fromkeys(space.special(alive, kernel)))
    alive = game.ask_each(alive, inputs.SPECIAL)
    return game.split(alive, {**inputs.SPECIAL, **inputs.ARITHMETIC})


def _lone_key(game: Elimination) -> Question:
    """Return a launch in which every row sees one key: its lse is the score, scaled as the kernel does it."""
    question = replace(game.subject, rows=64, heads=4).normal(game.rng, 1)
    if question.k.shape[1] == 1:
        return question
    q = question.q.copy()
    q[..., 0] = 1
    k = question.k.copy()
    k[0, 1:, :, 0] = -np.inf
    return replace(question, q=q, k=k if game.subject.left else k[:, ::-1])


def _refuted(game: Elimination) -> str:
    """Return which launch refuted the last hypothesis, in words."""
    step = next(step for step in game.log if step.before and not step.after)
    return f"the last {step.before:,} of {game.log[0].before:,} differ where inputs are {step.kind.replace('_', ' ')}"


def _judged(game: Elimination, found: Learned, outputs: int, seed: int) -> Learned:
    """Check the first order on fresh launches; if one refutes it and leaves others, check these on other launches."""
    attempt = 0
    while True:
        attempt += 1
        held, against = _held(game, found, outputs, np.random.default_rng([seed, attempt]))
        left = game.agreeing(found.orders, against) if against and attempt < _ATTEMPTS else ()
        if not left:
            game.history += [against] if against else []
            return held
        found = replace(found, orders=tuple(left))


def _held(game: Elimination, found: Learned, outputs: int, rng: np.random.Generator) -> tuple[Learned, Asking | None]:
    """Compare the first order with fresh launches, some of them also with the bound of any order.

    They have more queries and keys than those that it was learned from: kernels may have one order for few queries, as
    in decoding, and another for many. Returns the answer, and the first launch that refutes the order or None.
    """
    against = None
    heads = 16 if game.launcher.is_filled else 4
    subjects = [replace(game.subject, rows=rows, heads=heads, longest=_LONGEST) for rows in _ROWS]
    kinds = (inputs.normal, inputs.wide, inputs.ramp, inputs.cancelling, inputs.causal, inputs.grouped, inputs.capped)
    total = wrong = count = 0
    ratio = 0.0
    while total < outputs:
        question = kinds[int(rng.integers(len(kinds)))](rng, subjects[int(rng.integers(len(subjects)))])
        if question is None:
            continue
        try:
            answer = game.launcher(question)
        except (KernelError, ValueError):
            continue
        total += answer.out.size + (0 if answer.lse is None else answer.lse.size)
        if off := differing(answer, game.twin(found.orders[0], question)):
            wrong += off
            against = against or Asking("fresh inputs", question, answer)
        if count < _BOUNDED:
            ratio = max(ratio, _any_order(game.launcher, question, answer))
        count += 1
    where = _described(against.question) if against else ""
    return replace(found, outputs=total, differing=wrong, differs_at=where, ratio=ratio), against


def _described(question: Question) -> str:
    """Return the sizes of a launch in words."""
    mask = ", causal" if question.causal else ""
    heads = f"{question.q.shape[2]} heads on {question.k.shape[2]}"
    return f"{heads} of {question.q.shape[1]} queries over {question.k.shape[1]} keys{mask}"


def _any_order(launcher: Launcher, question: Question, answer: Result) -> float:
    """Return the largest error over bound in a launch, under the hypothesis about its sums that fits best.

    Bound and truth share no code with the twin.
    """
    operation = operations.find(operations.FORWARD)
    problem = question.problem(launcher.dtype)
    operands = question.operands(launcher.dtype)
    config = launcher.kernel.config_for(problem)
    truth = operation.truth(problem, operands.dequantized(problem), config, {})
    got = answer.outputs
    ratios = []
    kernel = launcher.kernel
    sums = sums_of(kernel).accumulator if kernel.order is None else "either"
    for model in operation.hypotheses(config, sums).values():
        bound = operation.bound(problem, operands, model, {})
        ratios.append(max(float(error_over_bound(x, truth[name], bound[name]).max()) for name, x in got.items()))
    return min(ratios)


def _unsound(found: Learned, kernel: Kernel) -> list[str]:
    """Return a sentence for each step of the order, or fact of the structure, that makes results needlessly worse."""
    known = found.structure
    is_chained = found.dtype == "e4m3" and known.tile_n and not known.promotion_interval
    is_other = known.probabilities not in ("", found.dtype, "fp32") and found.dtype != "e4m3"
    is_bottom_right = "causal" in found.features and kernel.policy.whole.causal == "bottom_right"
    threshold = max((order.rescale_threshold_log2 for order in found.orders[:1]), default=0.0)
    facts = (
        (known.p_rounding == "toward_zero", "P is truncated: every output is too small by half an ulp of P on average"),
        (is_other, f"P is {known.probabilities} where the operands are {found.dtype}"),
        (is_chained, "P V is chained over all keys in 13 bits, which loses a mean of V over long rows"),
        *((True, f"every answer is that of a known order with one mistake: {words}") for words in found.mistakes),
        (0 < known.value_bits < LEAST_BITS[found.dtype], f"sums of P V keep {known.value_bits} bits"),
        (0 < known.sum_bits < LEAST_SUM_BITS, f"the row sum keeps {known.sum_bits} bits"),
        (known.weight_error > MOST_ERROR, f"weights are off by up to {known.weight_error:.1e} of the largest"),
        (
            is_bottom_right and [order.diagonal for order in found.orders[:1]] == ["top_left"],
            "a causal mask is aligned top-left, which its policy does not say",
        ),
        (threshold > 8, f"maxima stay over {threshold:g} in log2: weights may leave the range of P"),
        (found.ratio > 1, f"an error is {found.ratio:.3g} times the bound of any order"),
        (
            found.orders and found.differing,
            f"{found.differing:,} fresh outputs differ from the only hypothesis left, first in {found.differs_at}",
        ),
    )
    return [words for is_broken, words in facts if is_broken]
