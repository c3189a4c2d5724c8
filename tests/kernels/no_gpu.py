"""The host side of a launch on a machine without a GPU: everything runs but Triton's compiler, its descriptors and
its launcher."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

LAUNCHER_ARGUMENTS = 13  # of Triton's launcher in front of the kernel's: grid, stream, function, hooks


class Encoded(NamedTuple):
    """What a descriptor would be encoded from."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Started(NamedTuple):
    """A kernel that would have been started: its name, grid, what Triton's launcher gets for its arguments, and whether
    it starts before the one in front of it has ended."""

    kernel: str
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    is_dependent: bool

    @property
    def descriptors(self) -> list[Encoded]:
        return [x for x in self.arguments if isinstance(x, Encoded)]


@contextmanager
def no_gpu() -> Iterator[list[Started]]:
    """CPU tensors are taken as those of an H200; what would have been started is appended to the list."""
    import torch

    from fa3_kernels import scheduler
    from fa3_kernels.gluon import launch, launch_append, launch_backward, run
    from fa3_kernels.plan.call import Block, Call, View

    started: list[Started] = []
    operand = launch.operand

    def start(*given: Any) -> None:
        started.append(Started(given[4], given[:3], given[LAUNCHER_ARGUMENTS:], given[6]))

    def encode(address: int, shape: tuple[int, ...], strides: tuple[int, ...], padding: int) -> Encoded:
        time.sleep(0)  # another thread's turn, as in Triton's launcher
        return Encoded(address, tuple(shape), tuple(strides))

    def compile_call(call: Call, *_: Any) -> run.LoadedKernel:
        views = sum(isinstance(x, View | Block) for x in call.arguments)
        return run.LoadedKernel(start, call.kernel, (), ((),) * views, encode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "operand", lambda x: operand(x)._replace(device="cuda:0"))
        patch.setattr(launch, "num_sms", lambda device: 132)
        patch.setattr(run, "compile_call", compile_call)
        for module, member, value in (
            (torch._C, "_cuda_getDevice", lambda: None),
            (torch._C, "_cuda_getCurrentRawStream", lambda index: 0),
            (torch._C, "_cuda_isCurrentStreamCapturing", lambda: False),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0)),
        ):
            patch.setattr(module, member, value, raising=False)
        for kept in (launch._families, launch_append._bound, launch_backward._launches, scheduler._bound):
            kept.clear()
        yield started
        for kept in (launch._families, launch_append._bound, launch_backward._launches, scheduler._bound):
            kept.clear()
