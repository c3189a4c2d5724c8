"""The words in which a verdict is told: bits, bound, baseline, properties.

Files keep the keys of 0.1.0 (L0, L1, L2, laws), so that old summaries, replay files and baselines stay readable.
"""

from __future__ import annotations

PARTS = {"L0": "bits", "L1": "bound", "L2": "baseline", "laws": "properties"}  # key of a file: what readers see


def told(what: str) -> str:
    """What was judged or failed, as readers are told it.

    >>> told("L1 error / bound"), told("law kv_head_order"), told("family peaky")
    ('bound, error / bound', 'property kv_head_order', 'family peaky')
    """
    key, _, rest = what.partition(" ")
    if key == "law":
        return f"property {rest}"
    return f"{PARTS[key]}, {rest}" if key in PARTS else what
