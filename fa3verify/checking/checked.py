"""What was found in a call of attention that was made, and its words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from fa3verify.cases.tried import spans
from fa3verify.operations.operation import error_over_bound

Verdict = Literal["pass", "fail", "question"]
_MOST_RANGES = 8  # that are written


@dataclass(frozen=True, kw_only=True)
class CheckedRows:
    """Rows of some heads of one output, and one sequence: what was returned, what is due, and how far it may be off.

    Parameters
    ----------
    name : {"out", "lse", "dq", "dk", "dv"}
        The output.
    sequence, head : int
        The sequence, and the first of the heads.
    rows : int array (rows,)
        Positions of queries in the sequence, or of keys.
    got, truth, bound : arrays (rows, heads, channels)
        lse has one channel; NaN is due nowhere.
    is_of_contract : bool array (rows, heads), or bool
        Where no arithmetic says what is due: no key has weight, or NaN is near.
    """

    name: str
    sequence: int
    head: int
    rows: np.ndarray
    got: np.ndarray
    truth: np.ndarray
    bound: np.ndarray
    is_of_contract: np.ndarray | bool = False

    @cached_property
    def ratio(self) -> np.ndarray:
        """Errors over their bounds, (rows, heads, channels)."""
        return error_over_bound(self.got, self.truth, self.bound)

    @property
    def largest(self) -> float:
        """The largest error over its bound."""
        return float(np.max(self.ratio, initial=0.0))

    @property
    def beyond(self) -> np.ndarray:
        """Which rows of which heads leave their bound, bool (rows, heads)."""
        return self.ratio.max(axis=2, initial=0.0) > 1

    @property
    def kind(self) -> str:
        """What a row is of."""
        return "key" if self.name in ("dk", "dv") else "query"

    @property
    def place(self) -> str:
        """The place of the largest error, what is there, and what is due."""
        at = tuple(map(int, np.unravel_index(int(np.argmax(self.ratio)), self.ratio.shape)))
        where = f"sequence {self.sequence}, head {self.head + at[1]}, {self.kind} {self.rows[at[0]]}"
        channel = "" if self.name == "lse" else f", channel {at[2]}"
        numbers = f"got {float(self.got[at]):.6g}, expected {self.truth[at]:.6g}, bound {self.bound[at]:.3g}"
        return f"{self.name} of {where}{channel}: {numbers}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCall:
    """What was found in a call; it is true where nothing is wrong, which is not to say that all of it is right.

    Parameters
    ----------
    verdict : {"pass", "fail", "question"}
        A pass says that nothing wrong was found in these rows. A question is a contract other than FlashAttention-3's,
        such as another value in rows without a key.
    rows, rows_of : int
        Rows of out (one query, one head) that were checked, and that there are.
    ratio : float
        Largest error over its bound, of out, lse and gradients; above 1 is wrong.
    seen : str
        The place of the largest error in the order of its array, with what is there and what is due.
    wrong : str
        Which rows of which outputs leave their bound, a line each, or nothing.
    explained : str
        What would make the call right, or what contract it keeps; empty where no single one explains every row.
    bits_lost : float
        Bits of accuracy that out loses in these rows over an ideal kernel, which rounds the exact output once.
    unjudged : int
        Values of which nothing is promised, because operands hold NaN or infinities or may overflow.
    assumed : str
        The order of operations of which the bound is.
    gradients : str
        How many rows of which gradients were checked, and of which kind of backward the bound is; empty without any.
    screened : int
        Rows that were computed on a GPU, of which those that were checked are the worst; 0 for a sample.
    """

    verdict: Verdict
    rows: int
    rows_of: int
    ratio: float
    seen: str
    wrong: str
    explained: str
    bits_lost: float
    unjudged: int
    assumed: str
    gradients: str = ""
    screened: int = 0

    def __bool__(self) -> bool:
        return self.verdict != "fail"

    def __str__(self) -> str:
        word = {"pass": "PASS, nothing wrong in", "fail": "FAIL, errors in", "question": "QUESTION in"}[self.verdict]
        unjudged = f"{self.unjudged:,} values are not judged, as their operands hold NaN or Inf, or overflow"
        worst = f", the worst of {self.screened:,} that were computed on the GPU" if self.screened else ""
        lines = (
            f"{word} {self.rows:,} of {self.rows_of:,} rows{worst}; "
            f"largest error {self.ratio:.3g} times its bound, at {self.seen}",
            self.wrong and f"leaving their bound: {self.wrong}",
            self.gradients,
            self.explained,
            unjudged if self.unjudged else "",
            f"{self.bits_lost:.2f} bits lost over the ideal kernel; assumed: {self.assumed}",
        )
        return "\n".join(filter(None, lines))


def largest(checked: Iterable[CheckedRows]) -> float:
    """Return the largest error over its bound."""
    return max((x.largest for x in checked), default=0.0)


def where(checked: Sequence[CheckedRows]) -> str:
    """Return which rows leave their bound: of each output how many, and in which heads, positions and channels."""
    told = []
    for name in dict.fromkeys(x.name for x in checked if x.largest > 1):
        wrong = [x for x in checked if x.name == name]
        heads = {x.head + int(i) for x in wrong for i in np.flatnonzero(x.beyond.any(axis=0))}
        rows = {int(i) for x in wrong for i in x.rows[x.beyond.any(axis=1)]}
        channels = {int(i) for x in wrong for i in np.flatnonzero((x.ratio > 1).any(axis=(0, 1)))}
        count = sum(int(x.beyond.sum()) for x in wrong)
        kinds = "keys" if wrong[0].kind == "key" else "queries"
        told.append(
            f"{count:,} rows of {name}, heads {_ranges(heads)}; {kinds} {_ranges(rows)}; channels {_ranges(channels)}"
        )
    return "\n".join(told)


def _ranges(numbers: set[int]) -> str:
    """Write whole numbers as ranges; if there are many ranges, only the first, the last and the count."""
    text = spans(numbers)
    return text if text.count(",") < _MOST_RANGES else f"{min(numbers)} to {max(numbers)} ({len(numbers)} of them)"
