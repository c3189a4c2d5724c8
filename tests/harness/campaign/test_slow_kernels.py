"""A slow kernel gets a first word; a slow call is not a wrong one, and a call that hangs is."""

from __future__ import annotations

import math
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fa3_reference.problem import AttentionProblem
from fa3verify import Case, Recipe
from fa3verify.campaign import introduction, plan
from fa3verify.campaign.introduction import paced, timed
from fa3verify.campaign.lapses import answered
from fa3verify.campaign.pool import IsolatingPool, TaskError
from fa3verify.campaign.run import Introduction
from fa3verify.campaign.tasks import CallTask, Outcome, execute
from fa3verify.commands import verify
from fa3verify.kernels import watch

KERNELS = Path(__file__).with_name("contracts.py")
MINE = Introduction("mine.py:attention", families=("normal", "peaky"), laws=("sign_symmetry",))
FEW = ("normal", "peaky", "error_within_bound", "sign_symmetry")


def asked(kernel: Introduction, pace: tuple[float, float] | TaskError, **terms: Any) -> Introduction:
    future: Future = Future()
    future.set_exception(pace) if isinstance(pace, TaskError) else future.set_result(pace)
    executor: Any = SimpleNamespace(submit=lambda *_: future)
    return paced(kernel, executor, **{"workers": 2} | terms)


@pytest.mark.parametrize(
    ("pace", "limit"),
    [
        ((0.001, 0.01), None),
        ((0.3, 0.1), None),  # t5x, which ended in six minutes
        ((14.0, 0.1), 1),  # compiles
        ((3.0, 0.1), 3),
        ((0.0, 3.0), 7),  # loops: 36 times as many tiles take longer than a call may
        ((0.0, 100.0), 1),
    ],
)
def test_a_kernel_that_would_take_longer_than_a_first_word_may_is_judged_in_part(pace, limit):
    kernel = asked(MINE, pace)
    assert (kernel.limit, kernel.pace) == (limit, pace)
    assert (kernel.narrowed is None) == (limit is None)
    assert asked(MINE, pace, workers=math.inf).limit is None  # the user decides


def test_more_processes_afford_more_cases():
    assert [asked(MINE, (14.0, 0.1), workers=n).limit for n in (2, 8, 100)] == [1, 3, None]


def test_a_kernel_that_could_not_be_timed_is_as_it_was():
    assert asked(MINE, TaskError("its process died")) == MINE


def test_the_plan_of_a_slow_kernel_has_few_shapes_first_and_that_of_a_fast_one_is_as_it_was():
    whole = plan.plan([MINE], "quick", 0)
    assert plan.plan([asked(MINE, (0.1, 0.1))], "quick", 0) == whole
    part = plan.plan([asked(MINE, (14.0, 0.1))], "quick", 0)
    labels = [task.label.removeprefix("mine.py:attention: ") for task in part]
    assert labels == ["cover", "normal", "peaky", "sign_symmetry"]
    assert {getattr(task, "limit", 1) for task in part} == {1}
    assert {getattr(task, "max_examples", 1) for task in part} == {1}


def content(heads: int, keys: int) -> dict:
    return Case("mine", AttentionProblem(1, heads, heads, 2, keys, 64), Recipe("normal")).to_json()


def lost(waited_s: float, heads: int, keys: int, kernel: str = MINE.name) -> Outcome:
    task = CallTask("", dict, {}, kernel=kernel)
    return Outcome(task, error="lost", at={"content": content(heads, keys)}, lost_worker=True, waited_s=waited_s)


@pytest.mark.parametrize(
    ("pace", "outcome", "is_slow"),
    [
        ((0.0, 0.01), lost(60.0, 71, 8192), False),  # hangs at one size: 36 times as long is no second
        ((0.0, 0.01), lost(300.0, 1, 64), False),
        ((0.0, 3.0), lost(60.0, 71, 4096), True),
        ((14.0, 0.01), lost(60.0, 1, 64), True),  # may compile
        ((14.0, 0.01), lost(900.0, 1, 64), False),
        ((0.0, 3.0), lost(0.0, 71, 4096), False),  # died
        ((0.0, 0.0), lost(60.0, 71, 4096), False),  # nothing is known
        ((0.0, 3.0), lost(60.0, 71, 4096, "another"), False),
    ],
)
def test_a_call_hangs_if_it_takes_ten_times_as_long_as_its_size_lets_expect(pace, outcome, is_slow):
    kernel = asked(MINE, pace, workers=math.inf)
    again, (left,) = answered(kernel, [outcome])
    assert (left.skipped, bool(left.error)) == (is_slow, not is_slow)
    assert (again.narrowed is not None) == is_slow
    if is_slow:
        assert again.narrowed == "1 of its tasks did not end, a call was not answered in 60 s"


def calls(seconds: float, count: int) -> str:
    for _ in range(count):
        with watch.warming("a kernel"):
            time.sleep(seconds)
    return "done"


def test_every_call_has_the_time_of_one_and_one_that_never_ends_is_told_with_its_time():
    given = [(0.5, 5), (60.0, 1)]
    with IsolatingPool(2, limit_s=2.0) as pool:
        many, endless = execute([CallTask("", calls, {"seconds": s, "count": n}) for s, n in given], pool)
    assert (many.value, many.waited_s) == ("done", 0.0)
    assert (endless.lost_worker, endless.waited_s) == (True, 10.0)


def test_tasks_that_have_not_ended_in_time_are_skipped():
    with IsolatingPool(1, limit_s=60.0) as pool:
        until = time.monotonic() + 0.2
        (outcome,) = execute([CallTask("", calls, {"seconds": 30.0, "count": 1})], pool, until=until)
    assert outcome.skipped


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("name", "verdict", "code"),
    [("flash_attention_3", "inconclusive", 5), ("mean_and_doubled", "fail", 1), ("aligned_top_left", "question", 6)],
)
def test_a_slow_kernel_is_failed_and_asked_and_never_passed(tmp_path, monkeypatch, name, verdict, code):
    planned = plan.plan
    monkeypatch.setattr(introduction, "timed", lambda kernel: (14.0, 0.1))
    monkeypatch.setattr(
        plan, "plan", lambda *given: [t for t in planned(*given) if (getattr(t, "law", "") or t.family) in FEW]
    )
    settings = verify.Settings((f"{KERNELS}:{name}",), "quick", 1, tmp_path, workers=2)
    found = verify.run(settings, lambda total, outcome: None)
    assert (found.verdict, found.exit_code) == (verdict, code)
    assert str(found.kernels[0].inconclusive).startswith("a new shape takes 14 s to compile")


def test_calls_are_timed_apart_from_what_a_new_shape_takes(monkeypatch):
    now = [0.0]
    known: set[AttentionProblem] = set()

    def runs_slowly(kernel, problem):
        now[0] += 0.5 + 3 * (problem not in known) + 100 * (not known)
        known.add(problem)

    monkeypatch.setattr(introduction, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(introduction.probing, "raised", runs_slowly)
    assert timed("twin.fp16") == (3.0, 0.5)
