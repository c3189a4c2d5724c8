"""Kinds of launches that tell orders apart; each is a function that draws such a launch.

It takes a generator and what is certain of the kernel (:class:`Subject`). It returns None if the kernel does not take
such a launch, or if its format cannot hold the numbers. :mod:`fa3verify.learn.elimination` makes the launches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps

import numpy as np
from numpy.random import Generator

from fa3verify.kernels.record import Kernel
from fa3verify.learn.launcher import LOG2_E, Form, Question
from fa3verify.learn.space import Structure


@dataclass(frozen=True, slots=True)
class Subject:
    """Holds what launches depend on: the kernel, how scores are written, what is certain, and the sizes of a launch."""

    kernel: Kernel
    form: Form
    known: Structure
    takes_causal: bool
    takes_empty: bool
    rows: int = 16
    heads: int = 1
    longest: int = 0  # keys of a launch at most; 0 for two and a half tiles, and then more than one tile

    @property
    def tile(self) -> int:
        """Return the keys of a tile, 64 where none is known."""
        return self.known.tile_n or 64

    @property
    def left(self) -> bool:
        """Tell whether tiles are visited left to right."""
        return self.known.keys != "right_to_left"

    def normal(self, rng: Generator, keys: int) -> Question:
        """Return normal inputs with a random scale, which is no power of two; for e4m3 with random descales as well."""
        queries = self.kernel.sizes.queries(self.rows)
        keys = self.kernel.sizes.keys(keys)
        q, k, v = (rng.standard_normal((1, n, self.heads, self.form.head_dim)) for n in (queries, keys, keys))
        descales = tuple(np.exp(rng.uniform(-1, 1, 3)).astype(np.float32).tolist())
        scale = float(np.exp(rng.uniform(-4 if self.form.dtype == "fp16" else -5, 0)))
        return Question(q, k, v, False, scale, 0.0, descales if self.form.dtype == "e4m3" else (1.0, 1.0, 1.0))

    def keys(self, rng: Generator) -> int:
        """Return a length of more than a tile, or any up to the longest."""
        if self.longest:
            return int(rng.integers(1, self.longest + 1))
        return int(rng.integers(self.tile + 1, 2 * self.tile + self.tile // 2 + 1))


Kind = Callable[[Generator, Subject], Question | None]


def where(holds: Callable[[Subject], bool]) -> Callable[[Kind], Kind]:
    """Make a kind of launch None, and draw nothing, of a subject of which something does not hold."""

    def only(kind: Kind) -> Kind:
        @wraps(kind)
        def made(rng: Generator, subject: Subject) -> Question | None:
            return kind(rng, subject) if holds(subject) else None

        return made

    return only


of_16_bits = where(lambda subject: subject.form.dtype != "e4m3")


def normal(rng: Generator, subject: Subject) -> Question:
    """Normal inputs over one to three tiles."""
    return subject.normal(rng, subject.keys(rng))


def wide(rng: Generator, subject: Subject) -> Question:
    """Scores four times as wide: few large weights, and maxima that step."""
    question = normal(rng, subject)
    return replace(question, q=question.q * 4)


def ramp(rng: Generator, subject: Subject) -> Question:
    """Scores that grow along the keys, in either direction: every tile has a new maximum, or none has."""
    question = normal(rng, subject)
    rise = np.linspace(0.1, 4, question.k.shape[1])[:: int(rng.choice([-1, 1]))]
    return replace(question, k=question.k * rise[None, :, None, None])


def many(rng: Generator, subject: Subject) -> Question:
    """Normal inputs of 256 rows: what differs in one output of thousands is seen."""
    return replace(subject, rows=64, heads=4).normal(rng, subject.keys(rng))


def cancelling(rng: Generator, subject: Subject) -> Question:
    """V whose large terms cancel over the keys: the order of sums shows."""
    question = normal(rng, subject)
    sign = rng.choice([-1.0, 1.0], question.v.shape) * rng.choice([1.0, 64.0], question.v.shape)
    return replace(question, v=sign * (1 + np.abs(question.v)), q=question.q * 0.5)


def few_keys(rng: Generator, subject: Subject) -> Question:
    """One tile, partly filled, under a factor that rounds otherwise where the scale is rounded first."""
    return replace(subject, rows=64).normal(rng, int(rng.integers(1, 9)))


def one_key(rng: Generator, subject: Subject) -> Question | None:
    """A single visible key and a scale of 2^-118: lse is the score alone, which is subnormal."""
    return _lone(rng, subject, 2.0 ** float(rng.integers(-12, -4)), 1.0, 2.0**-118)


@where(lambda subject: subject.form.dtype == "bf16")
def subnormal_scores(rng: Generator, subject: Subject) -> Question | None:
    """A single visible key whose raw score is subnormal in binary32."""
    return _lone(rng, subject, 2.0 ** float(rng.integers(-12, -4) - 58), 2.0**-62, None)


def _lone(rng: Generator, subject: Subject, small: float, key: float, scale: float | None) -> Question | None:
    """Return a launch in which a single key has no score of minus infinity.

    Channels of Q and K are multiplied by ``small`` and ``key``; channel 0 hides the other keys. None for e4m3, which
    has no infinity.
    """
    if subject.form.dtype == "e4m3":
        return None
    question = subject.normal(rng, 64)
    q = question.q * small
    q[..., 0] = 1
    k = question.k * key
    k[..., 0] = -np.inf
    k[0, 0 if subject.left else k.shape[1] - 1, :, 0] = 0
    return replace(question, q=q, k=k, softmax_scale=scale or question.softmax_scale)


@of_16_bits
def deep(rng: Generator, subject: Subject) -> Question:
    """Weights and factors of 2^-127 to 2^-147 on values of Inf or 2^100; the largest score is visited last."""
    question = subject.normal(rng, 2 * subject.tile)
    factor = (question.softmax_scale or 1.0) * LOG2_E
    q = np.zeros_like(question.q)
    q[..., 0] = 1
    k = np.zeros_like(question.k)
    k[..., 0] = -rng.uniform(127, 147, k.shape[:3]) / factor
    v = np.abs(question.v) * (2.0**100 if subject.form.dtype == "bf16" else 1.0)
    v[:, slice(0, subject.tile) if subject.left else slice(subject.tile, None), :, ::3] = np.inf
    top = int(rng.integers(subject.tile)) + (subject.tile if subject.left else 0)
    k[0, top, :, 0] = 0
    v[0, top] = 0
    return replace(question, q=q, k=k, v=v)


@of_16_bits
def threshold(rng: Generator, subject: Subject) -> Question:
    """Three keys of weight 1 sum to any 24-bit O; here O / l lies within an ulp of midpoints of the output's grid."""
    form = subject.form
    question = subject.normal(rng, min(subject.tile, 64))
    factor = (question.softmax_scale or 1.0) * LOG2_E
    rows = question.q.shape[1]
    q = np.zeros_like(question.q)
    q[0, :, :, 0] = form.rounded(np.linspace(1, 1.9, rows))[:, None]
    k = np.zeros_like(question.k)
    k[0, 3:, :, 0] = form.rounded(-rng.uniform(0, 6, (k.shape[1] - 3, k.shape[2])) / factor)
    total = np.exp2(np.outer(q[0, :, 0, 0], k[0, :, 0, 0]) * factor).sum(1)
    columns = np.arange(form.head_dim)
    steps = 2**form.fraction_bits
    middle = (steps + rng.integers(steps, size=columns.size) + 0.5) / steps * total[columns // 4 % rows]
    ulp = 2.0 ** (np.floor(np.log2(middle)) - 23)
    rest = (np.rint(middle / ulp) + columns % 4 - 1) * ulp
    v = np.zeros_like(question.v)
    for piece in range(3):
        v[0, piece] = form.rounded(rest)
        rest = rest - v[0, piece, 0]
    return replace(question, q=q, k=k, v=v)


def far(rng: Generator, subject: Subject) -> Question:
    """Scores all far below any finite number that stands for minus infinity."""
    question = normal(rng, subject)
    q, k = question.q.copy(), question.k.copy()
    q[..., 0] = 448 if subject.form.dtype == "e4m3" else 30000
    k[..., 0] = -np.abs(k[..., 0]) * 8 - 80
    return replace(question, q=q, k=k, softmax_scale=1.0)


@of_16_bits
def hidden_tiles(rng: Generator, subject: Subject) -> Question:
    """The two tiles that are visited first have scores of minus infinity in every key; nothing is masked."""
    question = subject.normal(rng, 3 * subject.tile)
    q, k = question.q.copy(), question.k.copy()
    q[..., 0] = np.abs(q[..., 0]) + 0.1
    seen = subject.tile - 3
    k[0, slice(None, k.shape[1] - seen) if subject.left else slice(seen, None), :, 0] = -np.inf
    return replace(question, q=q, k=k)


@of_16_bits
def hidden_rows(rng: Generator, subject: Subject) -> Question:
    """Every score is minus infinity."""
    question = subject.normal(rng, 64)
    q, k = question.q.copy(), question.k.copy()
    q[..., 0] = 1
    k[..., 0] = -np.inf
    return replace(question, q=q, k=k)


def nan_key(rng: Generator, subject: Subject) -> Question:
    """One key is NaN."""
    question = normal(rng, subject)
    k = question.k.copy()
    k[0, rng.integers(k.shape[1]), :, 0] = np.nan
    return replace(question, k=k)


def empty(rng: Generator, subject: Subject) -> Question | None:
    """No keys."""
    question = normal(rng, subject)
    return replace(question, k=question.k[:, :0], v=question.v[:, :0]) if subject.takes_empty else None


@where(lambda subject: subject.takes_causal)
def causal(rng: Generator, subject: Subject) -> Question:
    """A causal mask; where it is aligned is seen if there are more keys than queries."""
    question = replace(normal(rng, subject), causal=True)
    if subject.kernel.policy.causal == "top_left":
        n = question.k.shape[1]
        question = replace(question, q=rng.standard_normal((1, n, *question.q.shape[2:])))
    return question


@where(lambda subject: subject.takes_causal and subject.kernel.policy.causal != "top_left")
def hidden_queries(rng: Generator, subject: Subject) -> Question:
    """A causal mask over fewer keys than queries, which hides every key from the first ones."""
    question = replace(normal(rng, subject), causal=True)
    n = subject.kernel.sizes.keys(question.q.shape[1] // 2)
    return replace(question, k=question.k[:, :n], v=question.v[:, :n])


@where(lambda subject: "softcap" in subject.kernel.features)
def capped(rng: Generator, subject: Subject) -> Question:
    """A softcap of which the scores reach both ends."""
    return replace(wide(rng, subject), softcap=float(rng.choice([2.0, 30.0])), softmax_scale=0.3)


def faint(rng: Generator, subject: Subject) -> Question | None:
    """Descales of e4m3 so small that their product underflows, under a causal mask where one is taken."""
    question = subject.normal(rng, subject.keys(rng))
    is_causal = subject.takes_causal and subject.kernel.policy.causal != "top_left"
    faint = replace(question, descales=(2.0**-80, 2.0**-80, 1.0), causal=is_causal)
    return faint if subject.form.dtype == "e4m3" else None


@where(lambda subject: "gqa" in subject.kernel.features)
def grouped(rng: Generator, subject: Subject) -> Question:
    """Four query heads for two of K and V."""
    question = replace(subject, heads=4).normal(rng, subject.keys(rng))
    return replace(question, k=question.k[:, :, :2], v=question.v[:, :, :2])


# Kinds that tell switches of the arithmetic apart, and kinds that tell treatments of special values apart. All are
# launched at least once, even if no hypotheses disagree on them.
ARITHMETIC: Mapping[str, Kind] = {
    f.__name__: f
    for f in (threshold, few_keys, one_key, deep, normal, wide, ramp, cancelling, subnormal_scores, many, grouped)
}
SPECIAL: Mapping[str, Kind] = {
    f.__name__: f
    for f in (far, hidden_queries, hidden_tiles, hidden_rows, nan_key, empty, causal, capped, one_key, faint)
}
