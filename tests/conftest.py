"""What tests of many kernels share."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Any

import numpy as np
import pytest

from fa3verify.campaign import executors, pool
from fa3verify.campaign.plan import JudgeTask, SearchLaw
from fa3verify.operations import OPERATIONS
from fa3verify.properties import handing, indices, reuse
from fa3verify.text import of_error


@pytest.fixture(scope="module")
def shared_references() -> Iterator[None]:
    """Truth, bound and enclosure are computed once for the kernels of a module that see the same operands.

    They are functions of a problem, of the values of its operands and of the assumed order, all of which are the key.
    Nobody may write into them. Operations that judge choices of a kernel are left alone.
    """
    with pytest.MonkeyPatch.context() as patch:
        for operation in OPERATIONS.values():
            for name in () if operation.judges_choices else ("truth", "bound", "enclosure"):
                patch.setattr(type(operation), name, _once(getattr(type(operation), name)))
        yield


@pytest.fixture
def short_walks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Laws that go on for as long as they may get a quarter of their time, unless nightly tests run.

    For right kernels, which are asked the same questions, but fewer; at a wrong one they end with what they find.
    """
    seconds = ((indices, "SECONDS"), (indices, "SECONDS_OF_TWINS"), (handing, "SECONDS"), (reuse, "_SECONDS"))
    for module, name in seconds if "not nightly" in request.config.option.markexpr else ():
        monkeypatch.setattr(module, name, getattr(module, name) / 4)


def subject(task: JudgeTask | SearchLaw) -> str:
    """Return the family or the law that a task of a campaign is about."""
    return task.law if isinstance(task, SearchLaw) else task.family


class InThisProcess(Executor):
    """Takes the place of an isolating pool: runs each task at once, where no process has to begin and import.

    ``calls`` counts them.
    """

    def __init__(self, workers: int = 1, limit_s: float = 1.0, **options: Any) -> None:
        self.calls = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> pool.Timed:
        self.calls += 1
        future = pool.Timed()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(pool.TaskError(of_error(error), type(error).__name__))
        return future


@pytest.fixture(scope="module")
def in_this_process() -> Iterator[None]:
    """The verbs' tasks run here: for tests of what is asked and told, not of processes."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (executors, pool):
            patch.setattr(module, "IsolatingPool", InThisProcess)
        yield


def _once(method: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[bytes, Any] = {}

    def shared(self: Any, problem: Any, values: Any, assumed: Any, *got: Any) -> Any:
        key = hashlib.sha256(pickle.dumps((problem, values, assumed))).digest()
        if key not in known:
            known[key] = method(self, problem, values, assumed, *got)
            for found in known[key].values():
                for array in found if isinstance(found, tuple) else (found,):
                    if isinstance(array, np.ndarray):
                        array.flags.writeable = False
        return known[key]

    return shared
