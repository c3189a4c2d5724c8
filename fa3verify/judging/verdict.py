"""The vocabulary of verdicts: the parts of a campaign, what a finding is about, and what was wrong with an output.

Readers see bits, bound, baseline and properties. Files have the keys of 0.1.0 (L0, L1, L2, laws), so that old
summaries, replay files and baselines stay readable. The verdict itself is drawn in :mod:`fa3verify.judging.gate` and
:mod:`fa3verify.campaign.summary`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

EXIT_CODES = {"pass": 0, "fail": 1, "inconclusive": 5, "question": 6}
BOUND_LAWS = ("error_within_bound", "gradients_within_bound")  # properties that compare outputs with the truth
PARTS = {"L0": "bits", "L1": "bound", "L2": "baseline", "laws": "properties"}  # key of a file: what readers see


class Part(StrEnum):
    """The part of a campaign that found something or wrote a replay file; the values are the words of files."""

    BITS = "L0"
    BOUND = "L1"
    BASELINE = "L2"
    LAW = "law"
    FAMILY = "family"
    OUTPUT = "output"
    LOADING = "loading"
    GIVEN_UP = "given up"
    LARGEST = "largest"
    HUNT = "hunt"
    STUDY = "study"  # in files of 0.2.0 and before


@dataclass(frozen=True, slots=True)
class What:
    """What a finding, a refutation or a replay file is about: a part, and the name of the law, rule, family or output.

    ``subject`` is empty for parts that need none. Files have both in one text, such as ``law kv_head_order``.
    """

    part: Part
    subject: str = ""

    def __str__(self) -> str:
        return f"{self.part} {self.subject}".rstrip()

    to_json = __str__

    @classmethod
    def from_json(cls, text: str) -> What:
        """Read the text of a file; ValueError if it begins with no part.

        >>> What.from_json("given up"), What.from_json("law kv_head_order").subject
        (What(part=<Part.GIVEN_UP: 'given up'>, subject=''), 'kv_head_order')
        """
        for part in Part:
            if f"{text} ".startswith(f"{part} "):
                return cls(part, text[len(part) + 1 :])
        raise ValueError(f"what must begin with one of {', '.join(Part)}, got {text!r}")

    @property
    def told(self) -> str:
        """Return the words that readers see.

        >>> What(Part.BOUND, "error / bound").told, What(Part.LAW, "kv_head_order").told, What(Part.FAMILY, "x").told
        ('bound, error / bound', 'property kv_head_order', 'family x')
        """
        if self.part is Part.LAW:
            return f"property {self.subject}"
        return f"{PARTS[self.part]}, {self.subject}" if self.part in PARTS else str(self)


Value = Literal["nan", "inf", "-inf", "finite"]


def value_of(x: float) -> Value:
    """Return whether a number is NaN, an infinity or finite.

    >>> value_of(2.5), value_of(-math.inf)
    ('finite', '-inf')
    """
    return "nan" if math.isnan(x) else "finite" if math.isfinite(x) else "inf" if x > 0 else "-inf"


@dataclass(frozen=True, slots=True)
class Seen:
    """What was wrong with an output: what its worst element was and should have been, and the error / bound.

    ``got`` and ``expected`` are None where the element is not known, and ``ratio`` where bits were compared. The ratio
    is infinite where an output is not finite and the truth is. ``rule`` is the row of the table of special values that
    is broken, None for other findings.
    """

    output: str
    got: Value | None = None
    expected: Value | None = None
    ratio: float | None = None
    rule: str | None = None

    @property
    def is_endless(self) -> bool:
        """Tell whether the error is infinite: NaN or an infinity was got or expected, or the bound allows none."""
        return self.ratio == math.inf or {self.got, self.expected} & {"nan", "inf", "-inf"} != set()

    @property
    def kind(self) -> str:
        """Return the kind of the error: nan, infinity or finite; empty where the element is not known."""
        values = {self.got, self.expected}
        return "" if None in values else "nan" if "nan" in values else "finite" if values == {"finite"} else "infinity"


def ratio_text(ratio: float) -> str:
    """Write error / bound with three digits, and with more where they would hide on which side of 1 it is.

    >>> [ratio_text(x) for x in (0.998, 0.99999, 1.0, 1.0004, 68.2, 836, float("inf"))]
    ['0.998', '0.99999', '1.00', '1.0004', '68.2', '836', 'inf']
    """
    digits = 3
    while float(f"{ratio:.{digits}g}") == 1 != ratio and digits < 17:
        digits += 1
    return f"{ratio:#.{digits}g}".removesuffix(".")
