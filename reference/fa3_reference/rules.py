"""What the records of all packages check their fields by."""

from __future__ import annotations


def require(ok: bool, rule: str) -> None:
    """Raise ValueError with the rule, in words, unless it is kept."""
    if not ok:
        raise ValueError(rule)


def is_integer(value: object, least: int) -> bool:
    """Tell whether a value is an integer, not a bool, and at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
