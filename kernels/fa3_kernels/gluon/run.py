"""Run calls on a GPU: Triton compiles a kernel once per plan, then its launcher is called without Triton's argument handling.

Triton looks at all arguments of every launch and encodes four TMA descriptors, which takes longer than small problems
take on the GPU. Here a call is bound to its compiled kernel once. A launch then puts in addresses, and descriptors that
are encoded again only for an address, shape or strides not seen before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

from fa3_kernels.gluon.combine import combine
from fa3_kernels.gluon.descriptors import descriptor
from fa3_kernels.gluon.forward_fp8 import forward_fp8
from fa3_kernels.gluon.forward_fp16 import forward_fp16
from fa3_kernels.gluon.forward_lockstep import forward_lockstep
from fa3_kernels.gluon.packed_order import packed_order
from fa3_kernels.plan.plan import Call, Pointer
from fa3_kernels.plan.views import View

KERNELS: dict[str, Any] = {
    "forward_fp16": forward_fp16,
    "forward_fp8": forward_fp8,
    "forward_lockstep": forward_lockstep,
    "packed_order": packed_order,
    "combine": combine,
}
MAX_DESCRIPTORS = 1024  # that are kept of one view of a plan
Layout = tuple[int, tuple[int, ...], tuple[int, ...]]  # address, shape, strides in elements


@dataclass(frozen=True, slots=True)
class _Typed:
    """A tensor as Triton's compiler reads it: the type of its elements, its address and how it lies."""

    dtype: torch.dtype
    address: int
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    def data_ptr(self) -> int:
        return self.address

    def stride(self) -> tuple[int, ...]:
        return self.strides


class Descriptors:
    """The encoded descriptors of one view: what a launch passes for it, by address, shape and strides."""

    def __init__(self, view: View, meta: Mapping[str, Any]) -> None:
        self.view, self.name = view, view.name
        dtype = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
        self.encoding = (meta["swizzle"], meta["elem_size"], dtype, meta["block_size"])
        driver: Any = triton.runtime.driver.active
        self.fill = driver.utils.fill_tma_descriptor
        self.known: dict[Layout, list] = {}
        self.last: tuple = ((), (), (), [])  # the shape and strides of a tensor, and what its view has of them

    def encode(self, key: Layout) -> list:
        """Encode the descriptor of an address, a shape and strides, and keep it."""
        last = self.last  # one tuple, since threads may launch at once
        if key[1:] != last[0]:
            shape, strides = self.view.of(*key[1:])
            last = self.last = (key[1:], shape, strides, [*shape, *strides])
        _, shape, strides, sizes = last
        if len(self.known) >= MAX_DESCRIPTORS:
            self.known.clear()
        arguments = self.known[key] = [self.fill(key[0], *self.encoding, shape, strides, 0), *sizes]
        return arguments


class BoundCall:
    """A call with its compiled kernel, for all launches of one plan."""

    def __init__(self, call: Call, layouts: Mapping[str, Layout], addresses: Mapping[str, int]) -> None:
        given = [_as_compiled(x, layouts, addresses) for x in call.arguments]
        kernel = KERNELS[call.kernel].warmup(*given, grid=call.grid, **call.options)
        launcher, meta = kernel.run, kernel.metadata  # the first loads the binary
        if meta.global_scratch_size or meta.profile_scratch_size or meta.launch_cooperative_grid or meta.launch_pdl:
            raise RuntimeError(f"{call.kernel} was compiled for a launch that is not supported here")
        self.launch = _of_encoded_descriptors(launcher.launch)
        self.function, self.metadata = kernel.function, kernel.packed_metadata
        views = [x for x in call.arguments if isinstance(x, View)]  # they come first
        encodings = meta.tensordesc_meta or ()
        self.views = [Descriptors(view, encoding) for view, encoding in zip(views, encodings, strict=True)]
        rest = call.arguments[len(views) :]
        self.pointers = [(i, x.name) for i, x in enumerate(rest) if isinstance(x, Pointer)]

    def __call__(self, call: Call, layouts: Mapping[str, Layout], addresses: Mapping[str, int], stream: int) -> None:
        """Start the kernel on a stream of the current device."""
        arguments: list[Any] = []
        for view in self.views:
            key = layouts[view.name]
            arguments += view.known.get(key) or view.encode(key)
        rest = list(call.arguments[len(self.views) :])
        for position, name in self.pointers:
            rest[position] = addresses[name]
        ctas, across = (*call.grid, 1)[:2]
        self.launch(
            ctas, across, 1, stream, self.function, False, False, None, None, self.metadata, None, None, None,
            *arguments, *rest,
        )  # fmt: skip


def _of_encoded_descriptors(launch: Any) -> Any:
    """The launch function that takes encoded descriptors: Triton 3.6 wraps it for kernels that have descriptors."""
    names = launch.__code__.co_freevars if hasattr(launch, "__code__") else ()
    return launch.__closure__[names.index("launcher")].cell_contents if "launcher" in names else launch


def _as_compiled(argument: Any, layouts: Mapping[str, Layout], addresses: Mapping[str, int]) -> Any:
    """An argument of a call as Triton's compiler takes it."""
    if isinstance(argument, View):
        return descriptor(argument, _Typed(getattr(torch, argument.dtype), *layouts[argument.name]))
    if isinstance(argument, Pointer):
        return _Typed(getattr(torch, argument.dtype), addresses[argument.name])
    return argument
