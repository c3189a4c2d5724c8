"""What the GPU gets of a launch, as one hash: evidence measured on a launch is of everything that has
this hash.

Names of kernels, modules, records and fields, comments and the layout of files are not in it; what the compiler makes
of the kernel is not either, that is the hash of the PTX. Torch is needed for launches of the quantiser alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from fa3_kernels.plan.call import Call, Pointer
from fa3_reports.audit.calls import Descriptor, ShippedLaunch, calls_of


def launch_sha256(args: Sequence[Any], grid: Sequence[int], options: Mapping[str, int]) -> str:
    """Hash one kernel launch.

    Parameters
    ----------
    args : sequence
        Arguments in order. Numbers, strings and None count by value; tuples and records by their values in order,
        whatever their fields are called, without later fields that are at their defaults; tensors by dtype, tables
        that the host makes by shape and content too; descriptors of TMA by dtype, block, shape and strides.
    grid : sequence of int
    options : mapping
        ShippedLaunch options: num_warps, maxnreg, enable_fp_fusion.

    Raises
    ------
    TypeError
        For an argument of another kind, which might change without changing the hash.

    >>> from collections import namedtuple
    >>> one, other = namedtuple("A", "x")(2), namedtuple("B", "y")(2)
    >>> launch_sha256((one,), (1,), {}) == launch_sha256((other,), (1,), {})
    True
    >>> launch_sha256((2,), (1,), {}) == launch_sha256((2.0,), (1,), {})
    False
    """
    parts = (_text(tuple(args)), _text(tuple(grid)), _text(tuple(sorted(options.items()))))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _text(x: Any) -> str:
    """A value in one spelling."""
    if x is None or isinstance(x, bool):
        return repr(x)
    for kind in (int, float, str):  # without the names of enumerations and of numpy's scalars
        if isinstance(x, kind):
            return repr(kind(x))
    if isinstance(x, Pointer):
        return f"tensor {x.dtype}"
    if isinstance(x, Descriptor):
        return f"descriptor {x.dtype} {_text(x[1:])}"
    if isinstance(x, tuple | list):
        return "(" + ", ".join(map(_text, x)) + ")"
    if dataclasses.is_dataclass(x):
        fields = (field for field in dataclasses.fields(x) if not _is_absent(x, field))
        return _text(tuple(getattr(x, field.name) for field in fields))
    if isinstance(x, np.ndarray):
        array = np.ascontiguousarray(x)
        return f"tensor {array.dtype} {_text(array.shape)} {hashlib.sha256(array.tobytes()).hexdigest()}"
    if hasattr(x, "dtype") and hasattr(x, "data_ptr"):
        return f"tensor {str(x.dtype).removeprefix('torch.')}"
    raise TypeError(f"an argument of a launch must be a number, a record or a tensor, got {type(x).__name__}")


def _is_absent(x: Any, field: dataclasses.Field[Any]) -> bool:
    """Tell whether a field says nothing new, see :func:`fa3_kernels.plan.variant.later`."""
    return bool(field.metadata.get("is_later")) and getattr(x, field.name) == field.default


def labelled(name: str, calls: Sequence[Call]) -> dict[str, Call]:
    """Name the kernels that a launch starts: ``launch/kernel``, ``launch/kernel#2`` the second time."""
    found: dict[str, Call] = {}
    for call in calls:
        label = f"{name}/{call.kernel}"
        number = sum(key.partition("#")[0] == label for key in found) + 1
        found[label if number == 1 else f"{label}#{number}"] = call
    return found


def kind_of(launch: ShippedLaunch) -> Literal["forward", "packed", "paged", "quantize", "timeline", "backward"]:
    """Return the kind of launches that one belongs to, by which :mod:`fa3_kernels.audit.evidence` groups them.

    A forward is one of batched sequences, of packed ones, which are scheduled on the GPU, or of caches and sinks.
    """
    if launch.function == "quantize_qkv":
        return "quantize"
    if launch.function == "backward":
        return "backward"
    if launch.stamps:
        return "timeline"
    if launch.problem.cache or launch.problem.sinks:
        return "paged"
    return "packed" if launch.problem.is_varlen else "forward"


def launch_figures(launch: ShippedLaunch, call: Call) -> dict[str, object]:
    """The row's group ``launch``: what it is evidence of, grid, hash."""
    digest = launch_sha256(call.arguments, call.grid, call.options)
    return {"of": kind_of(launch), "grid": list(call.grid), "sha256": digest}


def launches_of(probes: Sequence[ShippedLaunch]) -> dict[str, dict[str, object]]:
    """Return the group ``launch`` of every kernel that the probes start, without compiling; by label."""
    return {
        label: launch_figures(probe, call)
        for probe in probes
        for label, call in labelled(probe.name, calls_of(probe)).items()
    }
