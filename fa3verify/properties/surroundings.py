"""What lies around a call, which it must leave as it is and must not depend on: settings, and the environment."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from fa3verify.operations import WrongOutput

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
        deterministic = partial(torch.use_deterministic_algorithms, warn_only=True)
        yield "deterministic algorithms", torch.are_deterministic_algorithms_enabled, deterministic, (False,)
        yield "torch's number of threads", torch.get_num_threads, torch.set_num_threads, (2, 1)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            yield "the current stream", torch.cuda.current_stream, torch.cuda.set_stream, (torch.cuda.Stream(),)


def keeping_environment(kernel: Callable[[], Any]) -> Any:
    """Call a kernel, and raise WrongOutput if it leaves a variable of the environment that it has set.

    It may have set the same one in every call before. One that it sets, and sets back, is written twice.
    """
    written: Counter[object] = Counter()
    set_variable = os.putenv
    os.putenv = lambda name, value: (written.update([name]), set_variable(name, value))[1]
    try:
        returned = kernel()
    finally:
        os.putenv = set_variable
    if left := [os.fsdecode(name) for name, count in written.items() if count == 1]:  # type: ignore[arg-type]
        raise WrongOutput(f"leaves {' and '.join(left)} set in the environment")
    return returned
