"""One run of a kernel: on operands of its own, checked afterwards, with outputs that nobody else holds.

A kernel gets read-only copies, and the harness keeps the originals: no kernel can change what it is judged against, and
one that changes its copies is caught. What it returns is copied too, because a kernel that returned one buffer twice
would otherwise have two runs compared with themselves. Every part of a verdict runs kernels through :func:`run`.
"""

from __future__ import annotations

import os
from copy import copy
from dataclasses import fields, replace
from typing import Any

import numpy as np

from fa3_reference.problem import AttentionProblem, Descale, Operands
from fa3verify import operations
from fa3verify.kernels import loading, watch
from fa3verify.kernels.handed import unchanged
from fa3verify.kernels.record import REFUSALS, Kernel, Unfilled
from fa3verify.tensors import interpreter
from fa3verify.text import Failure, of_error


class KernelError(Exception):
    """A kernel raised, changed its operands, or returned what it does not declare; the message is one line."""

    @property
    def failure(self) -> Failure:
        """Return how the call failed, with the type and the traceback of what the kernel raised."""
        cause = self.__cause__
        if cause is None or isinstance(cause, operations.WrongOutput):
            return Failure(str(self))
        return replace(Failure.of(cause), message=str(self))


class Refused(KernelError):
    """A kernel raised one of :data:`fa3verify.kernels.record.REFUSALS`: perhaps it does not support the problem."""


def run(kernel: Kernel, problem: AttentionProblem, operands: Operands, config: Any) -> dict[str, np.ndarray]:
    """Run a kernel once.

    Parameters
    ----------
    kernel : Kernel
    problem : AttentionProblem
    operands : Operands
        The kernel sees read-only copies; these stay as they are.
    config
        Configuration of the kernel's operation; the kernel sees a copy.

    Returns
    -------
    dict
        Outputs by name, in the dtypes and shapes that the operation and the configuration declare; NaN and Inf as the
        kernel returned them. They are contiguous copies.

    Raises
    ------
    Refused
        If the kernel raised ValueError, NotImplementedError or AssertionError, or Triton's interpreter met what it does
        not support.
    KernelError
        If it raised anything else but KeyboardInterrupt and Unfilled, changed its operands, or returned what it does
        not declare.
    """
    process = os.getpid()
    interpreter.correct()
    loading.compile_for_many_shapes()
    copies = sealed(operands)
    arrays = {f.name: getattr(x := getattr(copies, f.name), "values", x) for f in fields(copies)}  # a descale's values
    try:
        # np.errstate ends what the kernel sets for its own sums.
        with watch.warming(kernel.name), np.errstate(), unchanged(arrays):
            returned = kernel.code.run(copy(problem), copies, copy(config))
        named = operations.find(kernel.operation).named(returned, problem, config)
    except operations.WrongOutput as error:
        raise KernelError(str(error)) from error
    except (KeyboardInterrupt, Unfilled):
        raise
    except REFUSALS as error:
        raise Refused(interpreter.advised(of_error(error))) from error
    except BaseException as error:  # a third party's kernel may raise anything, SystemExit included
        kind = Refused if _is_unsupported(error) else KernelError
        raise kind(interpreter.advised(of_error(error))) from error
    finally:
        if os.getpid() != process:
            os._exit(1)  # a process that the kernel forked must not go on with the harness's work
    return {name: np.array(x, order="C") for name, x in named.items()}


def _is_unsupported(error: BaseException | None) -> bool:
    """Tell whether Triton's interpreter met what it does not support: it wraps that once in every function it runs."""
    kind = type(error)
    if error is None or (kind.__module__, kind.__name__) != ("triton.runtime.errors", "InterpreterError"):
        return isinstance(error, NotImplementedError)
    return _is_unsupported(error.__cause__)


def sealed(operands: Operands) -> Operands:
    """Return a copy of operands whose arrays are read-only."""
    return replace(operands, **{f.name: _sealed(getattr(operands, f.name)) for f in fields(operands)})


def _sealed(x: Any) -> Any:
    """Return a read-only copy of an array or a descale; None of None."""
    if isinstance(x, Descale):
        return replace(x, values=_sealed(x.values))
    if x is None:
        return None
    x = np.array(x, order="C")
    x.flags.writeable = False
    return x
