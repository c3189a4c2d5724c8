"""The CUDA driver through ctypes: load PTX, launch, read back."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p

import numpy as np

_DYNAMIC_SMEM, _MULTIPROCESSORS = 8, 16  # CUfunction_attribute, CUdevice_attribute


class Driver:
    """One device's primary context. RuntimeError with the driver's message when a call fails, OSError without a driver."""

    def __init__(self, device: int = 0) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        handle, count = c_int(), c_int()
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
        module, function = c_void_p(), c_void_p()
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
        slots = (c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        grid = [c_uint(n) for n in (ctas, 1, 1, threads, 1, 1, smem)]
        self._call("cuLaunchKernel", function, *grid, None, slots, None)
        self._call("cuCtxSynchronize")

    def read(self, pointer: c_uint64, shape: tuple[int, ...]) -> np.ndarray:
        """Copy 64-bit integers back."""
        out = np.empty(shape, np.int64)
        self._call("cuMemcpyDtoH_v2", out.ctypes.data_as(c_void_p), pointer, c_size_t(out.nbytes))
        return out
