"""What was found in a call of attention that was made, and its words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fa3verify.cases.tried import spans

Verdict = Literal["pass", "fail", "question"]
_MOST_RANGES = 8  # that are written


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
        Heads, queries and channels of out that leave their bound, or nothing.
    gradients : str
        How many rows of which gradients were checked, of which kind of backward the bound is, and which of them leave
        it; empty for a call without.
    explained : str
        What would make the call right, or what contract it keeps; empty where no single one explains every row.
    bits_lost : float
        Bits of accuracy that out loses over an ideal kernel, which rounds the exact output once.
    unjudged : int
        Values of which nothing is promised, because operands hold NaN or infinities or may overflow.
    assumed : str
        The order of operations of which the bound is.
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

    def __bool__(self) -> bool:
        return self.verdict != "fail"

    def __str__(self) -> str:
        word = {"pass": "PASS, nothing wrong in", "fail": "FAIL, errors in", "question": "QUESTION in"}[self.verdict]
        unjudged = f"{self.unjudged:,} values are not judged, as their operands hold NaN or Inf, or overflow"
        lines = (
            f"{word} {self.rows:,} of {self.rows_of:,} rows; "
            f"largest error {self.ratio:.3g} times its bound, at {self.seen}",
            self.wrong and f"leaving their bound: {self.wrong}",
            self.gradients,
            self.explained,
            unjudged if self.unjudged else "",
            f"{self.bits_lost:.2f} bits lost over the ideal kernel; assumed: {self.assumed}",
        )
        return "\n".join(filter(None, lines))


def ranges(numbers: set[int]) -> str:
    """Write whole numbers as ranges; if there are many ranges, only the first, the last and the count."""
    text = spans(numbers)
    return text if text.count(",") < _MOST_RANGES else f"{min(numbers)} to {max(numbers)} ({len(numbers)} of them)"
