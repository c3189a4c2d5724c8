"""The quadratics of the multi-function unit, read from ``mufu_tables.json``.

Every function is sig = (C0 << c0_shift + C1 * r + (C2 << c2_shift) * square(r) + rounding) >> shift with
[C0, C1, C2] from a table indexed by leading fraction bits and r the bits below them. :mod:`mufu_loops` computes with
them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Table:
    """Quadratics of one function: rows (C0, C1, C2) and the fixed-point constants they share."""

    rows: tuple[tuple[int, int, int], ...]
    rounding: int
    shift: int
    c0_shift: int
    c2_shift: int

    def value(self, segment: int, r: int, square: int) -> int:
        """Return sig of a segment; ``r`` are the bits below the segment's, ``square`` the truncated square of them."""
        c0, c1, c2 = self.rows[segment]
        return ((c0 << self.c0_shift) + c1 * r + (c2 << self.c2_shift) * square + self.rounding) >> self.shift


def _load() -> dict[str, Table]:
    stored = json.loads(Path(__file__).with_name("mufu_tables.json").read_text())
    return {
        name: Table(tuple((a, b, c) for a, b, c in t["table"]), t["rc"], t["shift"], t["c0_shift"], t["c2_shift"])
        for name, t in stored.items()
    }


# fitted from the results of an NVIDIA H200, tanh from an H100's; each then agreed on all inputs
TABLES: dict[str, Table] = _load()


# Segments of tanh by the exponent field of x: the first segment of the binade, how many leading fraction bits tell its
# segments apart, and the exponent of the unit in which their sum counts.
TANH_BINADES = {
    119: (0, 0, -41),
    120: (1, 0, -40),
    121: (2, 0, -39),
    122: (3, 1, -39),
    123: (5, 1, -38),
    124: (7, 2, -38),
    125: (11, 2, -37),
    126: (15, 2, -36),
    127: (19, 3, -37),
    128: (27, 4, -39),
    129: (43, 3, -37),
}
