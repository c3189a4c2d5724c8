"""Call a library of XLA custom calls without XLA: a call frame and the few runtime functions a CUDA handler asks for.

The structures are those of XLA's foreign function interface (xla/ffi/api/c_api.h, version 0.4), a stable C interface.
The caller provides stream and memory, so that a kernel can be captured in a CUDA graph and timed like any other.
:mod:`fa3verify.known.flash3_dew` calls its library through this module.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fa3_reference.rules import require

EXECUTE = 3  # XLA_FFI_ExecutionStage
# XLA_FFI_ArgType, XLA_FFI_AttrType
BUFFER = 1
SCALAR = 3
VERSION = (0, 4)
DTYPES = {"float16": 10, "bfloat16": 16, "float32": 11}  # XLA_FFI_DataType
# Python type of an attribute: its XLA_FFI_DataType, and how it is stored.
_SCALARS = {bool: (1, c.c_bool), int: (5, c.c_int64), float: (12, c.c_double)}
# Order of the function pointers in XLA_FFI_Api.
FUNCTIONS = (
    "Error_Create",
    "Error_GetDetails",
    "Error_Destroy",
    "Handler_Register",
    "Stream_Get",
    "Type_Register",
    "InvokeContext_Get",
    "State_Set",
    "State_Get",
    "DeviceMemory_Allocate",
    "DeviceMemory_Free",
    "ThreadPool_Schedule",
    "ThreadPool_NumThreads",
    "Future_Create",
    "Future_SetAvailable",
    "Future_SetError",
    "RunId_Get",
    "DeviceOrdinal_Get",
    "InvokeContext_FindExtension",
)


def _structure(name: str, *fields: tuple[str, Any]) -> type[c.Structure]:
    """Return a class of structures with these fields behind the structure's own size and a list of extensions."""
    return type(name, (c.Structure,), {"_fields_": [("struct_size", c.c_size_t), ("extensions", c.c_void_p), *fields]})


_Version = _structure("Version", ("major", c.c_int), ("minor", c.c_int))
_Api = _structure("Api", ("version", _Version), ("internal", c.c_void_p), ("functions", c.c_void_p * len(FUNCTIONS)))
_Buffer = _structure(
    "Buffer", ("dtype", c.c_int), ("data", c.c_void_p), ("rank", c.c_int64), ("dims", c.POINTER(c.c_int64))
)
_List = _structure("List", ("size", c.c_int64), ("types", c.c_void_p), ("values", c.c_void_p))
_Attributes = _structure(
    "Attributes", ("size", c.c_int64), ("types", c.c_void_p), ("names", c.c_void_p), ("values", c.c_void_p)
)
_Frame = _structure(
    "Frame",
    ("api", c.c_void_p),
    ("context", c.c_void_p),
    ("stage", c.c_int),
    ("arguments", _List),
    ("results", _List),
    ("attributes", _Attributes),
    ("future", c.c_void_p),
)
_ErrorArgs = _structure("ErrorArgs", ("message", c.c_char_p), ("code", c.c_int))
_StreamArgs = _structure("StreamArgs", ("context", c.c_void_p), ("stream", c.c_void_p))
_MemoryArgs = _structure(
    "MemoryArgs", ("context", c.c_void_p), ("size", c.c_size_t), ("alignment", c.c_size_t), ("data", c.c_void_p)
)
_OrdinalArgs = _structure("OrdinalArgs", ("context", c.c_void_p), ("ordinal", c.c_int32))


class _Span(c.Structure):
    _fields_ = [("text", c.c_char_p), ("length", c.c_size_t)]


class _Scalar(c.Structure):
    _fields_ = [("dtype", c.c_int), ("value", c.c_void_p)]


_Callback = c.CFUNCTYPE(c.c_void_p, c.c_void_p)


def _made(kind: type[c.Structure], **values: Any) -> Any:
    """Return a structure of a kind with its size filled in and without extensions."""
    return kind(c.sizeof(kind), None, **values)


def _give(kind: type[c.Structure], field: str, value: Callable[[Any], int], address: int) -> None:
    """Fill a field of the structure at an address with what is asked for in it."""
    asked = c.cast(address, c.POINTER(kind))[0]
    setattr(asked, field, value(asked))


class Runtime:
    """The functions that a handler may call: for the stream, scratch memory, the device, and to report an error.

    ``stream`` returns the address of a CUDA stream; ``allocate`` takes bytes and returns the address of GPU memory that
    lives as long as the calls. Every other function reports an error. ``message`` is the last error.
    """

    def __init__(self, stream: Callable[[], int], allocate: Callable[[int], int]) -> None:
        self.message = ""
        known = {
            "Error_Create": self._error,
            "Stream_Get": partial(_give, _StreamArgs, "stream", lambda _: stream()),
            "DeviceMemory_Allocate": partial(_give, _MemoryArgs, "data", lambda wanted: allocate(wanted.size)),
            "DeviceMemory_Free": lambda _: None,  # torch's allocator keeps it
            "DeviceOrdinal_Get": partial(_give, _OrdinalArgs, "ordinal", lambda _: 0),
        }
        self._callbacks = [_Callback(known.get(name, partial(self._refuse, name))) for name in FUNCTIONS]
        pointers = [c.cast(f, c.c_void_p).value for f in self._callbacks]
        version = _made(_Version, major=VERSION[0], minor=VERSION[1])
        self.api = _made(_Api, version=version, functions=(c.c_void_p * len(FUNCTIONS))(*pointers))

    def _error(self, address: int) -> int:
        self.message = c.cast(address, c.POINTER(_ErrorArgs))[0].message.decode()
        return 1  # any pointer that is not null

    def _refuse(self, name: str, _address: int) -> int:
        self.message = f"the library asks for {name}, which is not provided"
        return 1


class Call:
    """One prepared custom call on fixed tensors, which it launches each time that it is called.

    Parameters
    ----------
    handler : ctypes function
        What :func:`handler` returns.
    operands, results : sequences of tensors
        float16, bfloat16 or float32, contiguous and aligned, or ValueError; anything with ``shape``, ``dtype``,
        ``data_ptr()`` and ``is_contiguous()``.
    attributes : mapping
        Python bool, int and float values.
    runtime : Runtime
    """

    def __init__(
        self,
        handler: Any,
        operands: Sequence[Any],
        results: Sequence[Any],
        attributes: Mapping[str, float],
        runtime: Runtime,
    ) -> None:
        self._handler = handler
        self._runtime = runtime
        self._kept: list[Any] = [operands, results]  # whatever the frame points to lives as long as the call
        self.frame = _made(
            _Frame,
            api=c.addressof(runtime.api),
            stage=EXECUTE,
            arguments=self._list(operands),
            results=self._list(results),
            attributes=self._attributes(attributes),
        )
        self.frame.struct_size = _Frame.future.offset  # the interface counts the last field out

    def _keep(self, value: Any) -> int:
        self._kept.append(value)
        return c.addressof(value)

    def _array(self, kind: Any, values: Sequence[Any]) -> int:
        return self._keep((kind * len(values))(*values))

    def _list(self, tensors: Sequence[Any]) -> Any:
        buffers = []
        for x in tensors:
            require(
                x.is_contiguous() and x.data_ptr() % 16 == 0,
                "the buffers of XLA are contiguous and begin at a multiple of 16 bytes",
            )
            dims = (c.c_int64 * len(x.shape))(*x.shape)
            self._kept.append(dims)
            dtype = DTYPES[str(x.dtype).removeprefix("torch.")]
            buffers.append(self._keep(_made(_Buffer, dtype=dtype, data=x.data_ptr(), rank=len(x.shape), dims=dims)))
        types = self._array(c.c_int, [BUFFER] * len(buffers))
        return _made(_List, size=len(buffers), types=types, values=self._array(c.c_void_p, buffers))

    def _attributes(self, values: Mapping[str, float]) -> Any:
        names = []
        scalars = []
        for name in sorted(values):  # the interface looks them up in this order
            dtype, kind = _SCALARS[type(values[name])]
            scalars.append(self._keep(_Scalar(dtype, self._keep(kind(values[name])))))
            names.append(self._keep(_Span(name.encode(), len(name))))
        return _made(
            _Attributes,
            size=len(names),
            types=self._array(c.c_int, [SCALAR] * len(names)),
            names=self._array(c.c_void_p, names),
            values=self._array(c.c_void_p, scalars),
        )

    def __call__(self) -> None:
        """Launch on the current stream; RuntimeError with the library's own message if it refuses."""
        if self._handler(c.byref(self.frame)):
            raise RuntimeError(self._runtime.message)


def handler(path: Path, name: str) -> Any:
    """Return the custom call of a name from a library; OSError or AttributeError where there is none."""
    function = getattr(c.CDLL(str(path)), name)
    function.restype = c.c_void_p
    function.argtypes = [c.c_void_p]
    return function
