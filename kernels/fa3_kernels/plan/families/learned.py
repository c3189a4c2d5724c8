"""Orders of operations that were learned from a kernel's outputs: their file, and the family that a file describes.

``fa3verify`` learns such an order and writes its file. The name of the family is the path of the file, which ends in
``.json``; twin, bound, comparisons and simulation then take it as they take any other family
(:func:`fa3_kernels.plan.families.traits_of`). A learned order describes a kernel and does not say that the kernel is
right.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from fa3_kernels.plan.families.record import Shipped, Size, Traits
from fa3_kernels.plan.order import Order
from fa3_reference.problem import DTYPES, AttentionProblem, Dtype
from fa3_reference.rules import require

SCHEMA = "fa3verify.order/1"
SUFFIX = ".json"
_ROWS = 128  # of a tile; bits depend on it only where hidden tiles hold NaN or Inf
_SCHEDULE = {
    (is_fp8, n): regs for is_fp8 in (False, True) for n, regs in ((1, (56, 255)), (2, (40, 232)), (3, (32, 160)))
}


@dataclass(frozen=True, slots=True)
class LearnedOrder:
    """Holds what was learned of a kernel.

    Parameters
    ----------
    kernel : str
        The kernel's name when it was learned.
    dtype : {"fp16", "bf16", "e4m3"}
        Format of its operands.
    tiles : mapping of int to (int, int)
        By head_dim: keys of a tile of dense problems, and of those with a causal mask; 0 if it takes no mask.
    promotion_interval : int
        Keys after which e4m3 sums of P V are promoted; 0 where they are chained.
    order : Order
        One of the orders that no launch refuted.
    features : frozenset of str
        What was launched beyond dense attention of equal heads.
    free : mapping of str to tuple
        Fields of the order whose values no launch distinguishes, with the values that are possible.
    findings : tuple of str
        Steps of the order that are no sound choice.
    launches, outputs : int
        Launches of the kernel that were learned from, and values of fresh launches that were compared; none differed.
    """

    kernel: str
    dtype: Dtype
    tiles: Mapping[int, tuple[int, int]]
    promotion_interval: int
    order: Order
    features: frozenset[str]
    free: Mapping[str, tuple[Any, ...]]
    findings: tuple[str, ...]
    launches: int
    outputs: int

    def to_json(self) -> dict[str, Any]:
        """Return the order as values of JSON, which :func:`read` reads; infinities are written as words."""
        return {
            "schema": SCHEMA,
            "kernel": self.kernel,
            "dtype": self.dtype,
            "tiles": {str(d): list(tile) for d, tile in self.tiles.items()},
            "promotion_interval": self.promotion_interval,
            "order": {f.name: _written(getattr(self.order, f.name)) for f in fields(Order)},
            "features": sorted(self.features),
            "free": {name: [_written(x) for x in values] for name, values in self.free.items()},
            "findings": list(self.findings),
            "launches": self.launches,
            "outputs": self.outputs,
        }

    @property
    def traits(self) -> Traits:
        """Return the family that the order describes; its schedule is assumed to be FlashAttention-3's."""
        is_fp8 = self.dtype == "e4m3"
        step = 32 if is_fp8 else 16
        sizes = {
            (is_fp8, -(-d // step) * step): Size(Shipped(_ROWS, dense), Shipped(_ROWS, causal or dense))
            for d, (dense, causal) in self.tiles.items()
        }
        return Traits(
            f"{self.kernel} as learned",
            f"{self.launches} launches",
            sizes,
            tile=lambda problem, size: size.other if problem.causal else size.shipped,
            registers=_SCHEDULE,
            dtypes=(self.dtype,),
            order=self.order,
            pads_head_dim=True,
            promotes=self.promotion_interval > 0,
            is_reproduced=True,
            features=self.features,
            choices=frozenset({"promotion_interval"}) if is_fp8 else frozenset(),
            refuses=self._refuses,
        )

    def _refuses(self, problem: AttentionProblem) -> str:
        """Return in words what of a problem was never launched; empty if everything was."""
        if problem.head_dim not in self.tiles or problem.head_dim_v != problem.head_dim:
            known = ", ".join(map(str, self.tiles))
            return f"head_dim {problem.head_dim} with head_dim_v {problem.head_dim_v} was not learned, {known} was"
        asked = {
            "causal": problem.causal,
            "window": problem.window != (-1, -1),
            "softcap": problem.softcap > 0,
            "varlen": problem.is_varlen,
            "gqa": problem.group > 1,
        }
        missing = [name for name, is_asked in asked.items() if is_asked and name not in self.features]
        return f"{' and '.join(missing)} was not learned" if missing else ""


def read(path: str | Path) -> LearnedOrder:
    """Read the file of a learned order.

    Raises
    ------
    ValueError
        If the file cannot be read, is no JSON of this schema, or has a field that :class:`Order` refuses; the message
        names the file.
    """
    try:
        body = json.loads(Path(path).read_text(encoding="utf-8"))
        require(body["schema"] == SCHEMA, f"its schema must be {SCHEMA}, got {body['schema']!r}")
        require(body["dtype"] in DTYPES, f"dtype must be one of {', '.join(DTYPES)}, got {body['dtype']!r}")
        return LearnedOrder(
            kernel=str(body["kernel"]),
            dtype=body["dtype"],
            tiles={int(d): (int(dense), int(causal)) for d, (dense, causal) in body["tiles"].items()},
            promotion_interval=int(body["promotion_interval"]),
            order=Order(**{name: _value(x) for name, x in body["order"].items()}),
            features=frozenset(map(str, body["features"])),
            free={name: tuple(map(_value, values)) for name, values in body["free"].items()},
            findings=tuple(map(str, body["findings"])),
            launches=int(body["launches"]),
            outputs=int(body["outputs"]),
        )
    except OSError as error:
        raise ValueError(f"no learned order can be read from {path}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is no learned order: {error}") from None


@cache
def traits_of_file(path: str) -> Traits:
    """Return the family that a file describes, read once; ValueError as :func:`read` says."""
    return read(path).traits


def _written(x: Any) -> Any:
    """Return a value as JSON can hold it: an infinity becomes a word."""
    return str(x) if isinstance(x, float) and math.isinf(x) else x


def _value(x: Any) -> Any:
    """Undo :func:`_written`."""
    return float(x) if x in ("inf", "-inf") else x
