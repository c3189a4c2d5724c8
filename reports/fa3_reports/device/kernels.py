"""How the kernels of speed tables are called and drawn: one title, colour and marker each, on every page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from fa3verify.report.svg import SERIES


class Look(NamedTuple):
    """Title and drawing of a kernel."""

    title: str
    colour: str
    marker: str
    line: str = "-"


LOOKS: dict[str, Look] = {
    "gluon": Look("ours", SERIES[0], "o"),
    "gluon.chained": Look("ours, chained", SERIES[6], "o", "--"),
    "gluon.deterministic": Look("ours, fixed order", SERIES[6], "o", "--"),
    "gluon.one_split": Look("ours, one split", SERIES[6], "o", "--"),
    "gluon.no_pingpong": Look("ours, no pingpong", SERIES[6], "v", "--"),
    "gluon.no_overlap": Look("ours, no overlap", SERIES[6], "^", "--"),
    "gluon.no_specialisation": Look("ours, no producer warp", SERIES[6], "<", "--"),
    "flash3": Look("FlashAttention-3 (fa3-fwd)", SERIES[2], "s"),
    "flash3.dew": Look("FlashAttention-3 (dew)", SERIES[5], "D"),
    "flash4": Look("FlashAttention-4", SERIES[3], "P"),
    "cudnn": Look("cuDNN", SERIES[1], "^"),
    "cudnn.fp8": Look("cuDNN", SERIES[1], "^"),
    "flash2": Look("FlashAttention-2", SERIES[4], "v"),
    "flex": Look("FlexAttention", SERIES[7], "x"),
}


def look(name: str) -> Look:
    """Return how a kernel is shown; names nobody foresaw have their own title and share a colour."""
    return LOOKS.get(name, Look(name.replace("gluon.", "ours, "), SERIES[7], "x", ":"))


def is_ours(name: str) -> bool:
    return name.partition(".")[0] == "gluon"


def in_order(names: Iterable[str]) -> list[str]:
    """Sort kernels as :data:`LOOKS` has them; others behind."""
    order = list(LOOKS)
    return sorted(set(names), key=lambda name: (order.index(name) if name in order else len(order), name))
