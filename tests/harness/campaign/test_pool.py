"""The isolating pool: a task that raises, dies or hangs fails alone; the others finish."""

from __future__ import annotations

import os
import time

import pytest

from fa3verify.campaign.pool import IsolatingPool, TaskError


@pytest.fixture(scope="module")
def pool():
    with IsolatingPool(1, limit_s=20.0) as executor:
        yield executor


def test_results_come_back(pool):
    assert pool.submit(pow, 2, 10).result(timeout=60) == 1024


def test_an_exception_is_one_line_with_its_type(pool):
    with pytest.raises(TaskError, match="ZeroDivisionError"):
        pool.submit(divmod, 1, 0).result(timeout=60)


def test_a_worker_that_dies_loses_only_its_task(pool):
    dead, alive = pool.submit(os._exit, 7), pool.submit(abs, -3)
    with pytest.raises(TaskError, match="died with exit code 7"):
        dead.result(timeout=60)
    assert alive.result(timeout=60) == 3


def test_a_worker_that_hangs_is_stopped():
    with IsolatingPool(1, limit_s=4.0) as executor:
        hung, after = executor.submit(time.sleep, 600), executor.submit(abs, -4)
        with pytest.raises(TaskError, match="no answer within 4 s"):
            hung.result(timeout=60)
        assert after.result(timeout=60) == 4


def test_nothing_is_accepted_after_shutdown():
    executor = IsolatingPool(1, limit_s=5.0)
    executor.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        executor.submit(abs, 1)
