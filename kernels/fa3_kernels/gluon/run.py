"""Run the calls of a plan on a GPU, without Triton's own handling of arguments.

Triton looks at all arguments of every launch and encodes four TMA descriptors each time, which takes longer than small
problems take on the GPU. Here a call is bound once to its compiled kernel. A launch then puts in addresses and sizes,
and encodes descriptors only for an address, shape or strides not seen before. The launch modules
(:mod:`fa3_kernels.gluon.launch`, ``launch_backward``, ``launch_append``) make a :class:`PlanOnGpu` and run calls with
it; calls are described in :mod:`fa3_kernels.plan.call`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

from fa3_kernels.gluon import surplus_barriers
from fa3_kernels.gluon.append import append
from fa3_kernels.gluon.assembler import own_ptxas
from fa3_kernels.gluon.backward import backward
from fa3_kernels.gluon.backward_ends import backward_finish, backward_start
from fa3_kernels.gluon.combine import combine
from fa3_kernels.gluon.dependent import check_wait
from fa3_kernels.gluon.descriptors import descriptor
from fa3_kernels.gluon.forward_fp8 import forward_fp8
from fa3_kernels.gluon.forward_fp16 import forward_fp16
from fa3_kernels.gluon.forward_lockstep import forward_lockstep
from fa3_kernels.gluon.packed_order import packed_order
from fa3_kernels.plan.call import Block, Call, LaunchNumber, Pointer, View

KERNELS: dict[str, Any] = {
    "forward_fp16": forward_fp16,
    "forward_fp8": forward_fp8,
    "forward_lockstep": forward_lockstep,
    "packed_order": packed_order,
    "append": append,
    "combine": combine,
    "backward_start": backward_start,
    "backward": backward,
    "backward_finish": backward_finish,
}
MAX_KEPT = 1024  # requests, plans of each, descriptors of each view of a plan
Key = tuple[int, ...]  # the address of a tensor, and of its shape and strides what differs between launches of a plan
Operands = tuple[tuple[Key, torch.Tensor], ...]  # in the order of a call's views: q, k, v and out of a forward


@dataclass(frozen=True, slots=True)
class FakeTensor:
    """Stands for a tensor when Triton compiles: the type of its elements and its address are all that it reads.

    An address of 0 is as aligned as those of tensors that a kernel copies by TMA.
    """

    dtype: Any
    address: int = 0

    def data_ptr(self) -> int:
        return self.address


class Kept(dict[Any, Any]):
    """Keeps what launches share, by what it depends on, up to :data:`MAX_KEPT` entries.

    Any of it may be dropped at any time: what a CUDA graph has captured stays valid.
    """

    def keep(self, key: Any, value: Any) -> Any:
        """Add a value, after all others are dropped if there are too many, and return it."""
        if len(self) >= MAX_KEPT:
            self.clear()
        self[key] = value
        return value


class LoadedKernel(NamedTuple):
    """A kernel that Triton compiled and loaded: its launcher, and how descriptors are encoded for it.

    ``encodings`` has swizzle, element size, type and block of each descriptor; ``fill`` encodes one.
    """

    launch: Callable[..., None]
    function: Any
    metadata: tuple[int, ...]
    encodings: tuple[tuple[Any, ...], ...]
    fill: Callable[..., Any]


class Descriptors:
    """The encoded descriptors of one view, by the key of the tensor: what a launch passes for the view."""

    def __init__(self, view: View | Block, encoding: tuple[Any, ...], fill: Callable[..., Any]) -> None:
        self.view = view
        self.encoding = encoding
        self.fill = fill
        self.known = Kept()  # by key
        self.last: tuple = (None, (), (), [])  # of a key all but the address, and the shape and strides of its view

    def encode(self, key: Key, x: torch.Tensor) -> list:
        """Encode the descriptor of a tensor, and keep it."""
        last = self.last  # one tuple, since threads may launch at once
        if key[1:] != last[0]:
            shape, strides = self.view.of(x.shape, x.stride())
            last = self.last = (key[1:], shape, strides, [*shape, *strides])
        _, shape, strides, sizes = last
        return self.known.keep(key, [self.fill(key[0], *self.encoding, shape, strides, 0), *sizes])


class BoundCall:
    """A call of a plan with its compiled kernel, for all launches of the plan.

    ``values`` are addresses and sizes of the first launch, ``shared`` those that all launches share.
    """

    def __init__(self, call: Call, operands: Operands, values: Mapping[str, int], shared: Mapping[str, int]) -> None:
        """Compile the kernel, and note at which places of its arguments a launch puts in values of its own."""
        known = {**values, **shared}
        compiled = compile_call(call.of(known), operands, known)
        self.launch, self.function, self.metadata = compiled[:3]
        self.is_dependent = bool(call.options.get("launch_pdl"))
        views = [x for x in call.arguments if isinstance(x, View | Block)]  # they come first
        encodings = zip(views, compiled.encodings, strict=True)
        self.views = [Descriptors(view, encoding, compiled.fill) for view, encoding in encodings]
        rest = [*(*call.grid, 1, 1)[:3], *call.arguments[len(views) :]]
        named = {i: x.name for i, x in enumerate(rest) if isinstance(x, Pointer | LaunchNumber)}
        rest += [None] * (len(KERNELS[call.kernel].params) - len(call.arguments))  # what the call leaves at its default
        self.rest = [shared.get(named[i], x) if i in named else x for i, x in enumerate(rest)]
        self.named = [(i, name) for i, name in named.items() if name not in shared]

    def __call__(self, operands: Operands, values: Mapping[str, int], stream: int) -> None:
        """Start the kernel on a stream of the current device; ``values`` are addresses and sizes."""
        rest = self.rest.copy()
        for position, name in self.named:
            rest[position] = values[name]
        arguments: list[Any] = []
        for view, (key, x) in zip(self.views, operands):
            arguments += view.known.get(key) or view.encode(key, x)
        self.launch(
            *rest[:3],
            stream,
            self.function,
            False,
            self.is_dependent,
            None,
            None,
            self.metadata,
            None,
            None,
            None,
            *arguments,
            *rest[3:],
        )


class PlanOnGpu:
    """Holds what the launches of a plan share on a GPU: its tables, its sizes, and the kernels bound to its calls.

    RuntimeError if it has tables and is made while a CUDA graph is captured: their copies cannot be captured.
    """

    def __init__(
        self, tables: Mapping[str, np.ndarray], device: torch.device, numbers: Mapping[str, int] | None = None
    ) -> None:
        if tables and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a launch whose plan is not on the GPU cannot be captured: run it once before")
        self.tables = {name: torch.from_numpy(table).to(device) for name, table in tables.items()}
        self.shared = {**(numbers or {}), **{name: table.data_ptr() for name, table in self.tables.items()}}
        self.stream = torch.cuda.current_stream(device).cuda_stream  # on which the tables were made
        self.bound: dict[str, BoundCall] = {}

    def run_anywhere(self, calls: tuple[Call, ...], values: Mapping[str, int], device: torch.device) -> None:
        """Start kernels that take no descriptors as :meth:`run` does, whichever device is the current one."""
        if torch._C._cuda_getDevice() == device.index:
            self.run(calls, (), values, device)
        else:
            with torch.cuda.device(device):
                self.run(calls, (), values, device)

    def run(self, calls: tuple[Call, ...], operands: Operands, values: Mapping[str, int], device: torch.device) -> None:
        """Start the kernels of a launch on the current stream; ``values`` are what the launches of a plan do not
        share.
        """
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        if torch._C._cuda_isCurrentStreamCapturing() and self not in _captured:
            _captured.append(self)
        if stream != self.stream:
            for table in self.tables.values():
                table.record_stream(torch.cuda.current_stream(device))  # not freed while this stream may read it
        for call in calls:
            bound = self.bound.get(call.kernel)
            if bound is None:
                bound = self.bound[call.kernel] = BoundCall(call, operands, values, self.shared)
            bound(operands, values, stream)


_captured: list[PlanOnGpu] = []  # a graph reads their tables whenever it is replayed, so they are never dropped


def compile_call(call: Call, operands: Operands, values: Mapping[str, int]) -> LoadedKernel:
    """Compile the kernel of a call, or find it among those that Triton has stored, and load it.

    RuntimeError for a kernel that needs scratch memory or a cooperative launch, and as :func:`surplus_barriers.check`
    and :func:`check_wait` say.
    """
    tensors = iter(x for _, x in operands)

    def given(argument: Any) -> Any:
        if isinstance(argument, View | Block):
            return descriptor(argument, next(tensors))
        if isinstance(argument, Pointer):
            return FakeTensor(getattr(torch, argument.dtype), values[argument.name])
        return argument

    with surplus_barriers.left_out(), own_ptxas():
        kernel = KERNELS[call.kernel].warmup(*map(given, call.arguments), grid=call.grid, **call.options)
    surplus_barriers.check(kernel.asm.get("ptx", ""))
    check_wait(call, kernel.asm.get("ptx", ""))
    # reading ``run`` loads the binary, which sets ``function``
    launcher = kernel.run
    meta = kernel.metadata
    if meta.global_scratch_size or meta.profile_scratch_size or meta.launch_cooperative_grid:
        raise RuntimeError(f"{call.kernel} was compiled for a launch that is not supported here")
    driver: Any = triton.runtime.driver.active
    encodings = tuple(
        (x["swizzle"], x["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[x["elem_type"]], x["block_size"])
        for x in meta.tensordesc_meta or ()
    )
    launch = _of_encoded_descriptors(launcher.launch)
    return LoadedKernel(launch, kernel.function, kernel.packed_metadata, encodings, driver.utils.fill_tma_descriptor)


def _of_encoded_descriptors(launch: Any) -> Any:
    """Return the launch function that takes encoded descriptors.

    Triton 3.6 wraps that function for kernels with descriptors; the wrapper holds it in a closure, as ``launcher``.
    """
    names = launch.__code__.co_freevars if hasattr(launch, "__code__") else ()
    return launch.__closure__[names.index("launcher")].cell_contents if "launcher" in names else launch
