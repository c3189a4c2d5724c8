"""What a fork said before it crashed or hung counts, and the parent goes on."""

from __future__ import annotations

import os
import signal
import time

from fa3_reports.mutation import apart as apart_module
from fa3_reports.mutation.apart import apart


def test_steps_come_back_in_order():
    assert apart(lambda: iter([1, {"a": None}]), 10) == ([1, {"a": None}], "finished", "")


def test_an_exception_is_told_with_the_steps_before_it():
    def work():
        yield 1
        raise SystemExit("gone")

    said = apart(work, 10)
    assert (said.values, said.end) == ([1], "raised")
    assert "gone" in said.words


def test_a_crash_is_told_with_the_steps_before_it():
    def work():
        yield 1
        os.kill(os.getpid(), signal.SIGKILL)

    assert apart(work, 10)[:2] == ([1], "died")


def test_a_step_that_waits_without_end_is_stopped(monkeypatch):
    monkeypatch.setattr(apart_module, "PATIENCE", 1)

    def work():
        yield 1
        time.sleep(600)

    assert apart(work, 0.5)[:2] == ([1], "hung")


def test_a_step_that_computes_without_end_is_stopped_by_its_own_time():
    def work():
        yield 1
        while True:
            pass

    said = apart(work, 1)
    assert said[:2] == ([1], "hung")
    assert "CPU" in said.words
