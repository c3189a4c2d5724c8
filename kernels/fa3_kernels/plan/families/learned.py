"""An order of operations that was found from a kernel's outputs: its file, and the family that it describes.

The name of such a family is the path of its file, which ends in ``.json``: twin, bound, comparisons and simulation then
take it as they take any other. It is a proposal; nothing here says that a kernel is right.
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

SCHEMA = "fa3verify.order/1"
SUFFIX = ".json"
_ROWS = 128  # of a tile; bits follow from it only where tiles that are hidden meet NaN or Inf
_SCHEDULE = {
    (is_fp8, n): regs for is_fp8 in (False, True) for n, regs in ((1, (56, 255)), (2, (40, 232)), (3, (32, 160)))
}


@dataclass(frozen=True, slots=True)
class LearnedOrder:
    """Holds what was learned of a kernel.

    Parameters
    ----------
    kernel : str
        Its name when it was asked.
    dtype : {"fp16", "bf16", "e4m3"}
        Format of its operands.
    tiles : mapping of int to (int, int)
        By head_dim: keys of a tile, dense and under a causal mask; 0 where it takes no mask.
    promotion_interval : int
        Keys after which e4m3 sums of P V are promoted; 0 where they are chained.
    order : Order
        One of those that no launch refuted.
    features : frozenset of str
        What was launched beyond dense attention of equal heads.
    free : mapping of str to tuple
        Fields of the order that no launch separates, with the values that are left.
    findings : tuple of str
        Its steps that are no sound choice.
    launches, outputs : int
        Of the kernel; values of fresh launches, of which none differed.
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
        """Return its JSON values; infinities are written as words."""
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
        """Return the family that it describes; its schedule is assumed to be FlashAttention-3's."""
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
        """Return what of a problem was never launched; empty where all was."""
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
    """Read what :meth:`LearnedOrder.to_json` gives.

    Raises
    ------
    ValueError
        If there is no such file, or it is damaged or foreign; the message names it.
    """
    try:
        body = json.loads(Path(path).read_text(encoding="utf-8"))
        if body["schema"] != SCHEMA:
            raise ValueError(f"its schema must be {SCHEMA}, got {body['schema']!r}")
        if body["dtype"] not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {body['dtype']!r}")
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
    return str(x) if isinstance(x, float) and math.isinf(x) else x


def _value(x: Any) -> Any:
    return float(x) if x in ("inf", "-inf") else x
