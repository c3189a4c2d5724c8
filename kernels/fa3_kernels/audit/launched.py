"""What the GPU gets of a launch, as one hash: evidence measured on a launch is of everything that has this hash.

Names of modules, records and fields, comments and the layout of files are not in it; what the compiler makes of the kernel
is not either, that is the hash of the PTX. Torch is imported by :func:`launches_of` alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from fa3_kernels.audit.record import Call
    from fa3_kernels.audit.shipped import Launch


def launch_sha256(kernel: str, args: Sequence[Any], grid: Sequence[int], options: Mapping[str, Any]) -> str:
    """Hash one kernel launch.

    Parameters
    ----------
    kernel : str
        The kernel function's name.
    args : sequence
        Arguments in order. Numbers, strings and None count by value; tuples and records by their values in order, whatever
        their fields are called; tensors by dtype, and by shape and content where there is any (an array, a tensor on
        the CPU, one whose attribute ``content`` is one of these); descriptors of TMA by dtype, block, shape and strides.
    grid : sequence of int
    options : mapping
        Launch options: num_warps, maxnreg, enable_fp_fusion.

    Raises
    ------
    TypeError
        For an argument of another kind, which might change without changing the hash.

    >>> from collections import namedtuple
    >>> launch_sha256("f", (namedtuple("A", "x")(2),), (1,), {}) == launch_sha256("f", (namedtuple("B", "y")(2),), (1,), {})
    True
    >>> launch_sha256("f", (2,), (1,), {}) == launch_sha256("f", (2.0,), (1,), {})
    False
    """
    parts = (kernel, _text(tuple(args)), _text(tuple(grid)), _text(tuple(sorted(options.items()))))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _text(x: Any) -> str:
    """A value in one spelling."""
    if x is None or isinstance(x, bool):
        return repr(x)
    for kind in (int, float, str):  # without the names of enumerations and of numpy's scalars
        if isinstance(x, kind):
            return repr(kind(x))
    if isinstance(x, tuple | list):
        return "(" + ", ".join(map(_text, x)) + ")"
    if hasattr(x, "block_shape"):
        sizes = (x.block_shape, x.shape, x.strides)
        return f"descriptor {_dtype(x.base)} {_text(sizes)}"
    if dataclasses.is_dataclass(x):
        return _text(tuple(getattr(x, field.name) for field in dataclasses.fields(x)))
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return _tensor(x)
    raise TypeError(f"an argument of a launch must be a number, a record or a tensor, got {type(x).__name__}")


def _dtype(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def _tensor(x: Any) -> str:
    held = getattr(x, "content", x)
    if not isinstance(held, np.ndarray) and held.device.type != "cpu":
        return f"tensor {_dtype(x)}"
    array = np.ascontiguousarray(held)
    return f"tensor {_dtype(x)} {_text(array.shape)} {hashlib.sha256(array.tobytes()).hexdigest()}"


def labelled(name: str, calls: Sequence[Call]) -> dict[str, Call]:
    """Name the kernels that a launch starts: ``launch/kernel``, ``launch/kernel#2`` the second time."""
    found: dict[str, Call] = {}
    for call in calls:
        label = f"{name}/{call.kernel.__name__}"
        number = sum(key.partition("#")[0] == label for key in found) + 1
        found[label if number == 1 else f"{label}#{number}"] = call
    return found


def launch_figures(launch: Launch, call: Call) -> dict[str, Any]:
    """The row's group ``launch``: what it is evidence of, grid, hash."""
    digest = launch_sha256(call.kernel.__name__, call.args, call.grid, call.options)
    return {"of": launch.evidence, "grid": list(call.grid), "sha256": digest}


def launches_of(probes: Sequence[Launch]) -> dict[str, dict[str, Any]]:
    """Return the group ``launch`` of every kernel that the probes start, without compiling; by label. Needs torch and Triton."""
    from fa3_kernels.audit.record import record

    return {
        label: launch_figures(probe, call)
        for probe in probes
        for label, call in labelled(probe.name, record(probe)).items()
    }
