"""How reports write numbers: with three significant digits, as powers where that is shorter, unknown ones as a dash.

Templates have these functions as filters (:mod:`fa3verify.report.build`). A value may be a number, None, or a text such
as "Infinity" from JSON; None, NaN and other texts are written as a dash.
"""

from __future__ import annotations

import math
from typing import Any

from fa3verify.judging.verdict import ratio_text

DASH = "–"


def _float(value: Any) -> float | None:
    """Return a value as a number; None for NaN and for what is no number."""
    try:
        x = float(value)
    except (TypeError, ValueError):
        return None
    return None if math.isnan(x) else x


def number(value: Any) -> str:
    """Write a quantity with three significant digits.

    >>> [number(x) for x in (0.00019456, 12.345, 1234.5, 0, None, "Infinity")]
    ['1.95e-4', '12.3', '1.23e3', '0', '–', '∞']
    """
    x = _float(value)
    if x is None:
        return DASH
    if math.isinf(x):
        return "∞" if x > 0 else "−∞"
    if x == 0:
        return "0"
    text = f"{x:.2e}"
    exponent = int(text.split("e")[1])
    if -2 <= exponent <= 2:
        return f"{float(text):.{max(0, 2 - exponent)}f}"
    return f"{text.split('e')[0]}e{exponent}"


def ratio(value: Any) -> str:
    """Write error / bound like :func:`number`, with more digits near 1, so that its side of 1 shows.

    >>> [ratio(x) for x in (0.99999, 1.0, 1.0004, 0.5, None)]
    ['0.99999', '1.00', '1.0004', '0.500', '–']
    """
    x = _float(value)
    return number(value) if x is None or not 0.95 <= x < 1.05 else ratio_text(x)


def below_one(value: Any) -> str:
    """Write error / bound like :func:`ratio`, but as "< 1.00" where it would round to 1.00 from below.

    >>> [below_one(x) for x in (0.99999, 1.0, 1.0004, 0.5, None)]
    ['< 1.00', '1.00', '1.0004', '0.500', '–']
    """
    x = _float(value)
    return "< 1.00" if x is not None and 0.9995 <= x < 1 else ratio(value)


def signed(value: Any) -> str:
    """Write a quantity with its sign, + or −."""
    x = _float(value)
    if x is None or x == 0:
        return number(value)
    return ("+" if x > 0 else "−") + number(abs(x))


def percent(value: Any) -> str:
    """Write a share as a percentage; 0 % and 100 % are written only where they are exact.

    >>> [percent(x) for x in (1.0, 0.99999, 0.5, 0.00001, 0)]
    ['100 %', '> 99.9 %', '50.0 %', '0.0010 %', '0 %']
    """
    x = _float(value)
    if x is None:
        return DASH
    if x in (0.0, 1.0):
        return f"{100 * x:.0f} %"
    if 0.9995 <= x < 1:
        return "> 99.9 %"
    return f"{100 * x:.1f} %" if abs(x) >= 0.001 else f"{100 * x:.4f} %"


def count(value: Any) -> str:
    """Write an integer with narrow spaces between groups of three digits.

    >>> count(1234567) == "1\\u202f234\\u202f567"
    True
    """
    x = _float(value)
    return DASH if x is None or math.isinf(x) else f"{round(x):,}".replace(",", "\u202f")


def moment(stamp: str) -> str:
    """Write a moment of ISO 8601 in UTC to the minute.

    >>> moment("2026-01-02T03:04:05+00:00"), moment("2026-01-02T03:04:05Z")
    ('2026-01-02 03:04 UTC', '2026-01-02 03:04 UTC')
    """
    return f"{stamp[:10]} {stamp[11:16]} UTC"
