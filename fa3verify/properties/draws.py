"""Where the choices of a trial come from: a Hypothesis backend whose trials are independent of each
other and of code.

The standard backend makes most trials by changing earlier ones, so that 60 trials of a law hold about 20 seeds, and
mixes in constants that it finds in loaded modules, so that an edited kernel is examined by other trials than before.
Here the n-th trial of a stream is drawn afresh from a generator seeded by the stream's name and n, and from nothing
else. Shrinking is Hypothesis's own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, PrimitiveProvider

_UNBOUNDED = 2**64  # integers that are drawn from a range without an end
_OCTAVES = 40.0  # below an end of its range from which a number is drawn, at most
_EXTRA_SIZE = 8  # characters, or bytes, beyond the least that a text must have, at most


class IndependentDraws(PrimitiveProvider):
    """A backend of Hypothesis that draws every trial from a generator of its own.

    Integers are uniform, numbers go over all magnitudes. ``stream`` names the generators; a subclass states it, as
    Hypothesis makes the instances itself.
    """

    stream = ""

    def __init__(self, conjecturedata: Any, /) -> None:
        super().__init__(conjecturedata)
        self.trials = 0
        self.random = Random(self.stream)

    @contextmanager
    def per_test_case_context_manager(self) -> Iterator[None]:
        """Begin a trial with its own generator."""
        self.random = Random(f"{self.stream} {self.trials}")
        self.trials += 1
        yield

    def draw_boolean(self, p: float = 0.5) -> bool:
        """True with probability ``p``."""
        return self.random.random() < p

    def draw_integer(
        self,
        min_value: int | None = None,
        max_value: int | None = None,
        *,
        weights: dict[int, float] | None = None,
        shrink_towards: int = 0,
    ) -> int:
        """Draw each value equally often, but for those that have weights; from 2^64 values if an end is open."""
        if min_value is None:
            min_value = -_UNBOUNDED // 2 if max_value is None else max_value - _UNBOUNDED
        if max_value is None:
            max_value = min_value + _UNBOUNDED
        share = self.random.random()
        for value, weight in (weights or {}).items():
            share -= weight
            if share < 0:
                return value
        return self.random.randint(min_value, max_value)

    def draw_float(
        self,
        *,
        min_value: float = -math.inf,
        max_value: float = math.inf,
        allow_nan: bool = True,
        smallest_nonzero_magnitude: float,
    ) -> float:
        """Draw an end of the range, or a value that is uniform in it or in its octaves; always finite.

        An infinite end stands for the largest finite number, unless both ends are the same.
        """
        if min_value == max_value:
            return min_value
        low = max(min_value, -sys.float_info.max)
        high = min(max_value, sys.float_info.max)
        kind = self.random.choice(("end", "uniform", "octaves", "octaves"))
        if kind == "end":
            x = self.random.choice((low, high))
        elif kind == "uniform":
            share = self.random.random()
            x = low * (1 - share) + high * share
        else:
            x = self._in_octaves(low, high, smallest_nonzero_magnitude)
        x = min(max(x, low), high)
        if abs(x) >= smallest_nonzero_magnitude:
            return x
        if low <= 0 <= high:
            return next((end for end in (low, high) if end == 0), 0.0)  # a zero with the sign of the end
        return math.copysign(smallest_nonzero_magnitude, x)

    def _in_octaves(self, low: float, high: float, least: float) -> float:
        """Draw a number whose logarithm is uniform over the octaves below an end of the range, forty at most."""
        end = self.random.choice([x for x in (low, high) if x])
        other = min(abs(low), abs(high)) if (low < 0) == (high < 0) else 0.0
        octaves = math.log2(abs(end) / max(other, least, sys.float_info.min))
        return end * 2.0 ** -self.random.uniform(0.0, min(max(octaves, 0.0), _OCTAVES))

    def _size(self, min_size: int, max_size: int) -> int:
        return self.random.randint(min_size, min(max_size, min_size + _EXTRA_SIZE))

    def draw_string(self, intervals: Any, *, min_size: int = 0, max_size: int = 10**10) -> str:
        """Each character equally often."""
        size = self._size(min_size, max_size) if len(intervals) else 0
        return "".join(intervals.char_in_shrink_order(self.random.randrange(len(intervals))) for _ in range(size))

    def draw_bytes(self, min_size: int = 0, max_size: int = 10**10) -> bytes:
        """Each byte equally often."""
        return self.random.randbytes(self._size(min_size, max_size))


@contextmanager
def independent(stream: str) -> Iterator[str]:
    """Register a backend that draws the trials of a stream, for the duration of a ``with`` block.

    Yields
    ------
    str
        Its name, for ``hypothesis.settings(backend=...)``.
    """
    name = f"fa3verify: {stream}"
    AVAILABLE_PROVIDERS[name] = type("IndependentDraws", (IndependentDraws,), {"stream": stream})
    try:
        yield name
    finally:
        del AVAILABLE_PROVIDERS[name]
