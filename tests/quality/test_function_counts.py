"""A call and a verdict take the direct way."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

pytest.importorskip("torch", reason="needs torch (extra 'gpu')")
pytest.importorskip("triton", reason="needs triton: pip install triton==3.6.0")

from tests.quality.count_functions import of_a_call, of_a_verdict

pytestmark = pytest.mark.optional


def _in_a_new_process(trip: Callable[[], tuple[list[str], int]]) -> tuple[list[str], int]:
    """What other tests of this process have filled (memories of functions, modules) would change the count."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(trip).result()


def test_a_call_reaches_its_kernel_through_six_functions_and_never_turns_back():
    stack, entered = of_a_call()
    assert len(stack) == 6
    assert len(set(stack)) == len(stack)
    assert entered <= 20


def test_a_verdict_reaches_the_twin_through_fourteen_functions_and_never_turns_back():
    stack, entered = _in_a_new_process(of_a_verdict)
    assert len(stack) == 14
    assert len(set(stack)) == len(stack)
    # One runner yields outcomes to whoever listens. Truth and bound come before the kernel runs, figures after it.
    # What asks about a campaign that was interrupted is told how its tasks run, so that they run through it.
    # Twenty-two ask for sizes, terms of scores, formats, files and the interpreter, of which this kernel has nothing
    # special.
    assert entered <= 346
