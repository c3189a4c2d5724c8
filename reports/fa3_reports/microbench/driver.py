"""The CUDA driver through ctypes: load PTX, launch, read back."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p

import numpy as np

# CUfunction_attribute (two), CUdevice_attribute
_DYNAMIC_SMEM = 8
_LOCAL_BYTES = 3
_MULTIPROCESSORS = 16
# CUstream_flags, CUstreamCaptureMode: other threads may load modules meanwhile
_NON_BLOCKING = 1
_RELAXED = 2


class Driver:
    """One device's primary context. RuntimeError with the driver's words if a call fails, OSError without a driver."""

    def __init__(self, device: int = 0) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        handle = c_int()
        count = c_int()
        self.context = c_void_p()
        self._call("cuDeviceGet", byref(handle), device)
        self._call("cuDevicePrimaryCtxRetain", byref(self.context), handle)
        self._call("cuCtxSetCurrent", self.context)
        self._call("cuDeviceGetAttribute", byref(count), _MULTIPROCESSORS, handle)
        self.multiprocessors = count.value
        name = ctypes.create_string_buffer(128)
        self._call("cuDeviceGetName", name, 128, handle)
        self.name = name.value.decode()

    def _call(self, function: str, *args) -> None:
        if code := getattr(self.cuda, function)(*args):
            message = ctypes.c_char_p()
            self.cuda.cuGetErrorString(code, byref(message))
            raise RuntimeError(f"{function}: {(message.value or b'unknown').decode()} ({code})")

    def load(self, ptx: str) -> c_void_p:
        """Assemble a module and return its entry ``bench``; from any thread."""
        self._call("cuCtxSetCurrent", self.context)
        module = c_void_p()
        function = c_void_p()
        self._call("cuModuleLoadData", byref(module), ctypes.c_char_p(ptx.encode()))
        self._call("cuModuleGetFunction", byref(function), module, b"bench")
        return function

    def allocate(self, size: int) -> c_uint64:
        pointer = c_uint64()
        self._call("cuMemAlloc_v2", byref(pointer), c_size_t(size))
        self._call("cuMemsetD8_v2", pointer, ctypes.c_ubyte(0), c_size_t(size))
        return pointer

    def run(self, function: c_void_p, ctas: int, threads: int, smem: int, *arguments: c_uint64 | c_uint) -> None:
        """Launch and wait."""
        self._call("cuFuncSetAttribute", function, _DYNAMIC_SMEM, smem)
        self._launch(function, (ctas, threads, smem), arguments, None)
        self._call("cuCtxSynchronize")

    def _launch(
        self, function: c_void_p, shape: tuple[int, int, int], arguments: Sequence, stream: c_void_p | None
    ) -> None:
        """``shape``: CTAs, threads of each, bytes of dynamic shared memory. Arguments are copied before it returns."""
        ctas, threads, smem = shape
        slots = (c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        grid = [c_uint(n) for n in (ctas, 1, 1, threads, 1, 1, smem)]
        self._call("cuLaunchKernel", function, *grid, stream, slots, None)

    def local_bytes(self, function: c_void_p) -> int:
        """Bytes of local memory of a thread: 0 unless registers were spilled."""
        count = c_int()
        self._call("cuFuncGetAttribute", byref(count), _LOCAL_BYTES, function)
        return count.value

    @contextmanager
    def graph(
        self, function: c_void_p, ctas: int, threads: int, smem: int, arguments: Sequence[tuple[c_uint64, ...]]
    ) -> Iterator[Graph]:
        """A graph of one launch after another, one for each of ``arguments``, which has run once."""
        self.run(function, ctas, threads, smem, *arguments[0])  # loads the code: nothing may while a stream is captured
        stream = c_void_p()
        graph = c_void_p()
        executable = c_void_p()
        self._call("cuStreamCreate", byref(stream), c_uint(_NON_BLOCKING))
        self._call("cuStreamBeginCapture_v2", stream, c_int(_RELAXED))
        for some in arguments:
            self._launch(function, (ctas, threads, smem), some, stream)
        self._call("cuStreamEndCapture", stream, byref(graph))
        self._call("cuGraphInstantiateWithFlags", byref(executable), graph, ctypes.c_ulonglong(0))
        try:
            yield Graph(self, executable, stream)
        finally:
            self._call("cuGraphExecDestroy", executable)
            self._call("cuGraphDestroy", graph)
            self._call("cuStreamDestroy_v2", stream)

    def write(self, pointer: c_uint64, data: bytes) -> None:
        self._call("cuMemcpyHtoD_v2", pointer, ctypes.c_char_p(data), c_size_t(len(data)))

    def tensor_map(self, address: c_uint64, rows: int, box_rows: int) -> bytes:
        """The descriptor of a 4-d tensor of ``rows`` x 128 bytes, copied ``box_rows`` at a time and swizzled."""
        room = (ctypes.c_ubyte * 192)()
        start = -ctypes.addressof(room) % 64  # has to be aligned
        dims = (c_uint64 * 4)(128, rows, 1, 1)
        strides = (c_uint64 * 3)(128, 128 * rows, 128 * rows)
        box = (c_uint * 4)(128, box_rows, 1, 1)
        steps = (c_uint * 4)(1, 1, 1, 1)
        kind, plain, swizzle, promotion, fill = (c_int(n) for n in (0, 0, 3, 2, 0))
        target = ctypes.addressof(room) + start
        self._call(
            "cuTensorMapEncodeTiled",
            c_void_p(target),
            kind,
            c_uint(4),
            c_void_p(address.value),
            dims,
            strides,
            box,
            steps,
            plain,
            swizzle,
            promotion,
            fill,
        )
        return bytes(room[start : start + 128])

    def read(self, pointer: c_uint64, shape: tuple[int, ...]) -> np.ndarray:
        """Copy 64-bit integers back."""
        out = np.empty(shape, np.int64)
        self._call("cuMemcpyDtoH_v2", out.ctypes.data_as(c_void_p), pointer, c_size_t(out.nbytes))
        return out


class Graph:
    """An executable graph on a stream of its own."""

    def __init__(self, driver: Driver, executable: c_void_p, stream: c_void_p) -> None:
        self._call = driver._call
        self.executable = executable
        self.stream = stream

    def nanoseconds(self) -> float:
        """Time of one execution, between events; one before it keeps the device busy until it is enqueued."""
        begin = c_void_p()
        end = c_void_p()
        milliseconds = c_float()
        for event in (begin, end):
            self._call("cuEventCreate", byref(event), c_uint(0))
        self._call("cuGraphLaunch", self.executable, self.stream)
        self._call("cuEventRecord", begin, self.stream)
        self._call("cuGraphLaunch", self.executable, self.stream)
        self._call("cuEventRecord", end, self.stream)
        self._call("cuStreamSynchronize", self.stream)
        self._call("cuEventElapsedTime", byref(milliseconds), begin, end)
        for event in (begin, end):
            self._call("cuEventDestroy_v2", event)
        return milliseconds.value * 1e6
