"""What a call costs on the host, as rows, and the rule for a row that cannot be believed without a reason."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from fa3_reports.evidence_keys import code_key

TIMED = ("flash_attn_func", "flash_attn_varlen_func")  # of fa3_kernels.api, as callers call them
MOST = 100  # times the cheapest kernel of the same situation, which no kernel that works costs on the host
# Why a kernel costs more than that, by situation and name, where it was looked into.
REASONS: dict[tuple[str, str], str] = {}


class Cost(NamedTuple):
    """Microseconds per call on the host."""

    situation: str
    kernel: str
    median_us: float
    p90_us: float


def code_keys() -> dict[str, str]:
    """Return a key for each timed function, over what it computes on the host and what it launches."""
    return {name: code_key("fa3_kernels.api", name) for name in TIMED}


def check(costs: Iterable[Cost]) -> None:
    """Refuse a cost that is 100 times a peer's and has no reason in :data:`REASONS`.

    Such a row is of something else than a call: a backend that builds a plan for every new shape, or a queue that is
    full.

    Raises
    ------
    ValueError
        With the situation, the kernel and both figures; for a cost that is not a number, too.
    """
    by_situation: dict[str, list[Cost]] = {}
    for cost in costs:
        by_situation.setdefault(cost.situation, []).append(cost)
    for situation, rows in by_situation.items():
        least = min(rows, key=lambda row: math.inf if math.isnan(row.median_us) else row.median_us)
        for row in rows:
            if row.median_us <= MOST * least.median_us or (situation, row.kernel) in REASONS:
                continue
            raise ValueError(
                f"{situation}: a host cost must be at most {MOST} times its cheapest peer's without a stated reason, "
                f"got {row.median_us:.0f} us of {row.kernel} beside {least.median_us:.1f} us of {least.kernel}"
            )
