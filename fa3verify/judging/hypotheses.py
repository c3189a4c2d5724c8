"""What the bound assumes of a kernel that states no order of operations: its sums, and one of several hypotheses.

Hypotheses exclude each other: P is summed before it is rounded, or after. A kernel is judged under each, and passes if
one of them holds in every case and every property of its campaign; no element and no case may choose for itself. The
choice is made in :mod:`fa3verify.campaign.results`; which hypotheses there are, each operation says
(:mod:`fa3verify.operations`).
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
    "tf32": "products in tf32",
}


class Sums(NamedTuple):
    """In which arithmetic the bound of any order adds products, and who says so: the kernel or its device.

    Behind that ``source`` has what else the bound assumes of a kernel with a ``score_mod``.
    """

    accumulator: Accumulator
    source: str

    def __str__(self) -> str:
        return f"{_WORDS[self.accumulator]} ({self.source})"


def sums_of(kernel: Kernel) -> Sums:
    """Return the sums that are assumed of a kernel that states no order: those it declares, else those of its device.

    On a CPU they are in binary32. On a Hopper GPU a kernel may multiply with the tensor core or without, so that either
    is assumed; on other GPUs Hopper's tensor core stands for their own, which was not measured. An e4m3 kernel is held
    to binary32 on GPUs other than Hopper and Ada, as they have no e4m3 products, or sharper ones. Products of binary32
    operands are in binary32 everywhere: tf32 is declared.
    """
    sums = _sums(kernel)
    further = kernel.mods.assumption if kernel.mods else ""
    return sums._replace(source=f"{sums.source}; {further}") if further else sums


def _sums(kernel: Kernel) -> Sums:
    if kernel.accumulator is not None:
        return Sums(kernel.accumulator, "declared")
    if kernel.dtype == "fp32":
        return Sums("fp32", 'accumulator="tf32" is not declared')
    if not kernel.device.startswith("cuda"):
        return Sums("fp32", f"device: {kernel.device.upper() if kernel.device == 'cpu' else kernel.device}")
    from fa3verify.tensors.convert import gpu_of

    gpu = gpu_of(kernel.device)
    if gpu is None:
        return Sums("either", f"device: {kernel.device}, which is not here")
    capability = (gpu.major, gpu.minor)
    if capability == _HOPPER:
        return Sums("either", f"device: {gpu.name}")
    is_sharp = kernel.dtype == "e4m3" and capability != _ADA
    return Sums("fp32" if is_sharp else "either", f"device: {gpu.name}, whose own were not measured")


def assumed(kernel: Kernel, config: Any) -> Any:
    """Return what the bound of a kernel in a configuration assumes.

    That is the order that the kernel states, else the first hypothesis of its operation, with what the kernel quantises
    itself. For an operation without orders, such as quantising, it is the configuration itself.
    """
    operation = operations.find(kernel.operation)
    if not operation.has_orders:
        return config
    order = kernel.order and kernel.order(config)
    order = order or next(iter(operation.hypotheses(config, sums_of(kernel).accumulator).values()))
    return replace(order, quantises=kernel.quantises) if kernel.quantises.said else order


def _order(operation: str, accumulator: Accumulator, hypothesis: str, config: Any) -> Any:
    """Return the order of operations that a hypothesis assumes in one configuration."""
    orders = operations.find(operation).hypotheses(config, accumulator)
    return orders.get(hypothesis) or next(iter(orders.values()))  # a configuration may leave less to choose


def under(kernel: Kernel) -> dict[str, Kernel]:
    """Return copies of a kernel by hypothesis, each as if it stated that order; empty if the kernel states its own."""
    names = () if kernel.order else operations.find(kernel.operation).hypothesis_names(kernel.forward)
    if not names:
        return {}
    orders = {name: partial(_order, kernel.operation, sums_of(kernel).accumulator, name) for name in names}
    return {name: replace(kernel, order=order, accumulator=None) for name, order in orders.items()}


def strain(operation: Operation, measures: Mapping[str, float]) -> float:
    """Return the largest error / bound of a case over all its outputs; infinite where an output is not finite."""
    ratios = [measures["ratio_max"], *(measures.get(side.figure("ratio")) or 0.0 for side in operation.sides)]
    return math.inf if measures["nonfinite"] else max(ratios)


def assumption(sums: Sums | str, hypothesis: str) -> str:
    """Return in words what the bound of a kernel that states no order assumed."""
    return f"assumed: any order, {sums}, {hypothesis}"


def holding(ratios: Mapping[str, float]) -> str:
    """Return in words which hypotheses hold in a case, given its largest error / bound under each; empty for none.

    >>> holding({"row sum of P": 0.4, "row sum of rounded P": 2.4}), holding({})
    ('row sum of P', '')
    """
    names = [name for name, ratio in ratios.items() if ratio <= 1]
    return ", ".join(names) or ("no hypothesis" if ratios else "")
