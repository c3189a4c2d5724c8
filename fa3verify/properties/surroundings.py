"""What lies around a call, which it must leave as it is and must not depend on: settings, and the environment."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from fa3verify.operations import WrongOutput

_BACKENDS = ("flash", "mem_efficient", "math", "cudnn")
# A name, how it is read and how it is set, and values under which a call must be right.
Setting = tuple[str, Callable[[], Any], Callable[[Any], Any], tuple[Any, ...]]


def settings() -> Iterator[Setting]:
    """Yield what a call must leave as it is and must not depend on: its name, how it is read and set, and values."""
    yield (
        "numpy's handling of errors",
        np.geterr,
        lambda x: np.seterr(**x),
        (dict.fromkeys(np.geterr(), "ignore"), np.geterr()),
    )
    yield "the working directory", os.getcwd, os.chdir, ("/",)
    if torch := sys.modules.get("torch"):
        yield "torch's default dtype", torch.get_default_dtype, torch.set_default_dtype, (torch.float64, torch.float32)
        yield "whether gradients are recorded", torch.is_grad_enabled, torch.set_grad_enabled, (False, True)
        yield (
            "deterministic algorithms",
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda how: torch.use_deterministic_algorithms(how[0], warn_only=how[1]),
            ((False, True),),
        )
        backends = partial(_attention_backends, torch.backends.cuda)
        yield "torch's backends of attention", backends, partial(_set_backends, torch.backends.cuda), (backends(),)
        yield "torch's number of threads", torch.get_num_threads, torch.set_num_threads, (2, 1)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            # What was made on one stream may be used on another when it is done.
            yield (
                "the current stream",
                torch.cuda.current_stream,
                lambda stream: (torch.cuda.synchronize(), torch.cuda.set_stream(stream)),
                (torch.cuda.Stream(),),
            )


def _attention_backends(cuda: Any) -> tuple[bool, ...]:
    return tuple(getattr(cuda, f"{name}_sdp_enabled")() for name in _BACKENDS)


def _set_backends(cuda: Any, enabled: tuple[bool, ...]) -> None:
    for name, is_on in zip(_BACKENDS, enabled, strict=True):
        getattr(cuda, f"enable_{name}_sdp")(is_on)


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Set at the end of a ``with`` block what calls have left otherwise, so that no other property meets it.

    torch's own context of backends does so where two threads are in it at once: it is one for the whole process.
    """
    before = [(write, read()) for _, read, write, _ in settings()]
    try:
        yield
    finally:
        for write, value in before:
            write(value)


def keeping_environment(kernel: Callable[[], Any]) -> Any:
    """Call a kernel, and raise WrongOutput if it leaves a variable of the environment that it has set.

    It may have set the same one in every call before. One that it sets, and sets back, is written twice. Those that
    torch's compiler sets for itself, such as the folder of its cache, are no doing of the kernel's.
    """
    written: list[bytes] = []
    set_variable = os.putenv

    def noted(name: bytes, value: bytes) -> None:
        writer = sys._getframe(2).f_globals.get("__name__", "")  # behind the method of os.environ
        written.extend([] if writer.startswith("torch.") else [name])
        set_variable(name, value)

    os.putenv = noted  # type: ignore[assignment]
    try:
        returned = kernel()
    finally:
        os.putenv = set_variable
    if left := [os.fsdecode(name) for name in written if written.count(name) == 1]:
        raise WrongOutput(f"leaves {' and '.join(left)} set in the environment")
    return returned
