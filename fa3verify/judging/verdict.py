"""The words in which a verdict is told: bits, bound, baseline, properties.

Files keep the keys of 0.1.0 (L0, L1, L2, laws), so that old summaries, replay files and baselines stay readable.
"""

from __future__ import annotations

EXIT_CODES = {"pass": 0, "fail": 1, "inconclusive": 5}
BOUND_LAWS = ("error_within_bound", "gradients_within_bound")  # of the properties, those that compare with the truth
PARTS = {"L0": "bits", "L1": "bound", "L2": "baseline", "laws": "properties"}  # key of a file: what readers see


def told(what: str) -> str:
    """Return what was judged or failed, as readers are told it.

    >>> told("L1 error / bound"), told("law kv_head_order"), told("family peaky")
    ('bound, error / bound', 'property kv_head_order', 'family peaky')
    """
    key, _, rest = what.partition(" ")
    if key == "law":
        return f"property {rest}"
    return f"{PARTS[key]}, {rest}" if key in PARTS else what


def part_of(what: str) -> str:
    """Return what a finding or a replay file is about: a key of :data:`PARTS`, or law, family, study, loading ..."""
    return what.partition(" ")[0]


def law_of(what: str) -> str | None:
    """Return the name of the law that a finding or a replay file is about, None if it is about a case."""
    return what.partition(" ")[2] if part_of(what) == "law" else None


def ratio_text(ratio: float) -> str:
    """Write error / bound with three digits, and with more where they would hide on which side of 1 it is.

    >>> [ratio_text(x) for x in (0.998, 0.99999, 1.0, 1.0004, 68.2, 836, float("inf"))]
    ['0.998', '0.99999', '1.00', '1.0004', '68.2', '836', 'inf']
    """
    digits = 3
    while float(f"{ratio:.{digits}g}") == 1 != ratio and digits < 17:
        digits += 1
    return f"{ratio:#.{digits}g}".removesuffix(".")
