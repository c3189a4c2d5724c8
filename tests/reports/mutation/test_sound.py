"""The campaign over sound kernels calls nothing a false alarm that is not one, and hides none."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from fa3_reports.mutation import sound, tables
from fa3_reports.mutation.sound import Tally
from fa3verify.known import registry
from fa3verify.properties import LAWS

LAW_NAMES = {law.name for law in LAWS}


@pytest.mark.parametrize("task", ["normal", "error_within_bound"])
def test_a_kernel_with_a_mistake_raises_an_alarm_and_a_sound_one_none(task, monkeypatch):
    monkeypatch.setattr(sound, "EXAMPLES", 6)
    wrong, right = (sound.examined(kernel, task, 0) for kernel in ("twin.fp16+dropped_last_tile", "twin.fp16"))
    assert wrong.alarms
    assert not right.alarms
    assert right.trials > 0
    assert right.outputs > 0


def test_every_kernel_is_there_and_has_properties_and_families():
    tasks = list(sound._tasks())
    assert {kernel for kernel, _ in tasks} == set(sound.KERNELS)
    assert all((kernel, "normal") in tasks for kernel in sound.KERNELS)
    assert all(any(registry.find(kernel).name == k and t in LAW_NAMES for k, t in tasks) for kernel in sound.KERNELS)


def _three_trials(kernel: str, task: str, seed: int) -> Tally:
    return Tally(kernel, task, seed, 3, 10, ("x",) if seed == 5 else ())


def test_seeds_follow_each_other_until_the_trials_are_made(monkeypatch):
    monkeypatch.setattr(sound, "_tasks", lambda: iter([("twin.fp16", "normal"), ("twin.bf16", "normal")]))
    monkeypatch.setattr(sound, "examined", _three_trials)
    with ThreadPoolExecutor(1) as pool:
        found = sound.run(13, 4, pool, lambda _: None)
    assert [(x.kernel, x.seed) for x in found] == [(f"twin.{d}", seed) for d in ("fp16", "bf16") for seed in (4, 5, 6)]
    assert sound.rows(found)[0] == ["twin.fp16", "normal", 3, 9, 30, 1, "x"]
    page = tables.sound(found)
    assert "| all | 1 | 18 | 60 | 2 |" in page
    assert "- twin.bf16, normal, seed 5: x" in page


def test_nothing_begins_after_the_time(monkeypatch):
    monkeypatch.setattr(sound, "_tasks", lambda: iter([("twin.fp16", "normal")]))
    monkeypatch.setattr(sound, "examined", _three_trials)
    with ThreadPoolExecutor(1) as pool:
        assert sound.run(100, 0, pool, lambda _: None, seconds=1e-9) == []


def test_a_failure_of_the_suite_itself_is_an_alarm(monkeypatch):
    def fails(*_: object) -> Tally:
        raise ValueError("q must be finite")

    monkeypatch.setattr(sound, "_examined", fails)
    assert sound.examined("twin.fp16", "normal", 0).alarms == ("ValueError: q must be finite",)
