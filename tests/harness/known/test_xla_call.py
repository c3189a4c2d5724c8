"""A call frame holds what a custom call's handler reads: sizes, shapes, sorted attributes, a runtime that answers."""

from __future__ import annotations

import ctypes as c

import numpy as np
import pytest

from fa3verify.known import xla_call
from fa3verify.known.xla_call import Call, Runtime

Handler = c.CFUNCTYPE(c.c_void_p, c.c_void_p)


class Tensor:
    """A numpy array with the face of a torch tensor."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.array = np.zeros(shape, np.float32)
        self.shape, self.dtype = shape, "torch.float32"
        self.first = 0  # byte of the array at which it begins

    def data_ptr(self) -> int:
        return self.array.ctypes.data + self.first

    def is_contiguous(self) -> bool:
        return self.array.flags.c_contiguous


def frame_at(address: int):
    return c.cast(address, c.POINTER(xla_call._Frame))[0]


def ask(frame, name: str, arguments) -> int | None:
    """Call a function of the runtime as a library does: by its place in the table."""
    api = c.cast(frame.api, c.POINTER(xla_call._Api))[0]
    function = xla_call._Callback(api.functions[xla_call.FUNCTIONS.index(name)])
    return function(c.addressof(arguments))


def call(body) -> Call:
    tensors = [Tensor((2, 3)), Tensor((4,)), Tensor((2, 3))]
    runtime = Runtime(lambda: 0x55, lambda size: 0x1000 + size)
    handler = Handler(body)
    handler.argtypes = [c.c_void_p]
    return Call(handler, tensors[:2], tensors[2:], {"zeta": 2.5, "alpha": True, "mid": -1}, runtime)


def test_sizes_are_those_of_the_interface():
    # sizeof and offsetof as a C compiler gives them for xla/ffi/api/c_api.h 0.4 on x86-64
    frame = call(lambda _: None).frame
    assert frame.struct_size == 168
    assert (frame.arguments.struct_size, frame.attributes.struct_size) == (40, 48)
    assert c.sizeof(xla_call._Buffer) == 48
    version = c.cast(frame.api, c.POINTER(xla_call._Api))[0].version
    assert (version.struct_size, version.major, version.minor) == (24, 0, 4)
    assert c.sizeof(xla_call._Api) == 16 + 24 + 8 + 8 * 19


def test_buffers_and_attributes_arrive_in_order():
    seen: dict[str, object] = {}

    def body(address: int) -> None:
        frame = frame_at(address)
        buffers = c.cast(frame.arguments.values, c.POINTER(c.POINTER(xla_call._Buffer)))
        seen["shapes"] = [
            [buffers[i][0].dims[j] for j in range(buffers[i][0].rank)] for i in range(frame.arguments.size)
        ]
        c.cast(buffers[1][0].data, c.POINTER(c.c_float))[0] = 7.0
        names = c.cast(frame.attributes.names, c.POINTER(c.POINTER(xla_call._Span)))
        values = c.cast(frame.attributes.values, c.POINTER(c.POINTER(xla_call._Scalar)))
        seen["names"] = [names[i][0].text for i in range(frame.attributes.size)]
        seen["zeta"] = c.cast(values[2][0].value, c.POINTER(c.c_double))[0]
        seen["mid"] = c.cast(values[1][0].value, c.POINTER(c.c_int64))[0]

    made = call(body)
    made()
    assert seen == {"shapes": [[2, 3], [4]], "names": [b"alpha", b"mid", b"zeta"], "zeta": 2.5, "mid": -1}
    assert made._kept[0][1].array[0] == 7.0


def test_the_runtime_gives_stream_scratch_and_device():
    seen = []

    def body(address: int) -> None:
        frame = frame_at(address)
        stream = xla_call._made(xla_call._StreamArgs)
        memory = xla_call._made(xla_call._MemoryArgs, size=64)
        ordinal = xla_call._made(xla_call._OrdinalArgs, ordinal=9)
        for name, arguments in (
            ("Stream_Get", stream),
            ("DeviceMemory_Allocate", memory),
            ("DeviceOrdinal_Get", ordinal),
        ):
            assert ask(frame, name, arguments) is None
        seen.append((stream.stream, memory.data, ordinal.ordinal))

    call(body)()
    assert seen == [(0x55, 0x1040, 0)]


def test_an_error_of_the_library_is_raised_with_its_message():
    def refuse(address: int) -> int | None:
        return ask(frame_at(address), "Error_Create", xla_call._made(xla_call._ErrorArgs, message=b"no such head_dim"))

    with pytest.raises(RuntimeError, match="no such head_dim"):
        call(refuse)()


def test_what_is_not_provided_is_named():
    def body(address: int) -> int | None:
        return ask(frame_at(address), "ThreadPool_Schedule", xla_call._made(xla_call._StreamArgs))

    with pytest.raises(RuntimeError, match="asks for ThreadPool_Schedule, which is not provided"):
        call(body)()


def test_a_view_that_xla_could_not_hand_over_is_refused():
    handler = Handler(lambda _: None)
    runtime = Runtime(lambda: 0x55, lambda size: 0x1000 + size)
    spread, late = Tensor((2, 3)), Tensor((4,))
    spread.array = np.zeros((3, 2), np.float32).T
    late.first = 4
    for tensor in (spread, late):
        with pytest.raises(ValueError, match="contiguous and begin at a multiple of 16 bytes"):
            Call(handler, [tensor], [Tensor((4,))], {}, runtime)
