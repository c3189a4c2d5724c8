"""What the bound assumes of a kernel that states no order: its sums, and hypotheses about the whole
kernel.

Hypotheses exclude each other: P is summed before it is rounded, or after. A kernel is judged under each, and passes if
one of them holds in every case and every property of its campaign; no element and no case may choose for itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from fa3verify import operations
from fa3verify.kernels.record import Kernel
from fa3verify.operations import Operation
from fa3verify.operations.operation import Accumulator

_HOPPER = (9, 0)  # compute capability of the tensor core whose sums were measured
_ADA = (8, 9)  # its e4m3 products are said to keep as few bits (MMA-Sim); nothing of it was measured here
_WORDS: dict[Accumulator, str] = {
    "fp32": "sums in binary32",
    "wgmma": "sums of Hopper's tensor core",
    "either": "sums of Hopper's tensor core or in binary32",
}


class Sums(NamedTuple):
    """Whose sums the bound of any order assumes, and who says so."""

    accumulator: Accumulator
    source: str

    def __str__(self) -> str:
        return f"{_WORDS[self.accumulator]} ({self.source})"


def sums_of(kernel: Kernel) -> Sums:
    """Return which sums are assumed of a kernel that states no order: those that it declares, or of its device.

    On a Hopper GPU a kernel may multiply with the tensor core or without, and on other GPUs Hopper's stands for their
    own, which was not measured. An e4m3 kernel on a GPU without products of e4m3, or with sharper ones than Hopper's,
    is held to binary32, as every kernel on a CPU is.
    """
    if kernel.accumulator is not None:
        return Sums(kernel.accumulator, "declared")
    if not kernel.device.startswith("cuda"):
        return Sums("fp32", f"device: {kernel.device.upper() if kernel.device == 'cpu' else kernel.device}")
    from fa3verify.tensors.convert import gpu_of

    found = gpu_of(kernel.device)
    if found is None:
        return Sums("either", f"device: {kernel.device}, which is not here")
    capability = (found.major, found.minor)
    if capability == _HOPPER:
        return Sums("either", f"device: {found.name}")
    is_sharp = kernel.dtype == "e4m3" and capability != _ADA
    return Sums("fp32" if is_sharp else "either", f"device: {found.name}, whose own were not measured")


def assumed(kernel: Kernel, config: Any) -> Any:
    """Return what the bound of a kernel in a configuration assumes: the order that it states, else the first
    hypothesis of its operation; where an operation has no orders, the configuration itself.
    """
    operation = operations.find(kernel.operation)
    if not operation.has_orders:
        return config
    if kernel.order is not None:
        return kernel.order(config)
    return next(iter(operation.hypotheses(config, sums_of(kernel).accumulator).values()))


def _order(operation: str, accumulator: Accumulator, hypothesis: str, config: Any) -> Any:
    """Return the order of operations that one hypothesis says."""
    found = operations.find(operation).hypotheses(config, accumulator)
    return found.get(hypothesis) or next(iter(found.values()))  # a configuration may leave less to choose


def under(kernel: Kernel) -> dict[str, Kernel]:
    """Return a kernel under each hypothesis by name, as if it stated that order; none of one that states its own."""
    names = () if kernel.order else operations.find(kernel.operation).hypothesis_names(kernel.forward)
    if not names:
        return {}
    orders = {name: partial(_order, kernel.operation, sums_of(kernel).accumulator, name) for name in names}
    return {name: replace(kernel, order=order, accumulator=None) for name, order in orders.items()}


def strain(operation: Operation, measures: Mapping[str, float]) -> float:
    """Return how far a case goes towards a bound: its largest error / bound, above 1 where it leaves it."""
    ratios = [measures["ratio_max"], *(measures.get(side.figure("ratio")) or 0.0 for side in operation.sides)]
    return math.inf if measures["nonfinite"] else max(ratios)


def assumption(sums: Sums | str, hypothesis: str) -> str:
    """Return in words what the bound of a kernel that states no order assumed."""
    return f"assumed: any order, {sums}, {hypothesis}"


def holding(ratios: Mapping[str, float]) -> str:
    """Return in words which hypotheses a case leaves, of the largest error / bound under each.

    >>> holding({"row sum of P": 0.4, "row sum of rounded P": 2.4}), holding({})
    ('row sum of P', '')
    """
    kept = [name for name, ratio in ratios.items() if ratio <= 1]
    return ", ".join(kept) or ("no hypothesis" if ratios else "")
