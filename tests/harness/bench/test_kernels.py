"""Which kernels are timed, and what is said of the others: fakes in place of libraries and of the GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

import torch

from fa3_kernels.plan.request import Choices
from fa3_reference.problem import AttentionProblem
from fa3verify.bench import check, graphs, kernels
from fa3verify.known import launches
from fa3verify.known.launches import LaunchOutput
from fa3verify.known.libraries import Unsupported
from fa3verify.timed import timing

pytestmark = pytest.mark.optional
PROBLEM = AttentionProblem(1, 4, 4, 1024, 1024, 128, dtype="bf16")
PROPERTIES = SimpleNamespace(multi_processor_count=132, L2_cache_size=50 << 20)
OUTPUT: Any = LaunchOutput("out", "lse")  # pyright: ignore[reportArgumentType]


class FakeTimed:
    """Stands for a CUDA graph; a launch that returns "odd" cannot be captured."""

    def __init__(self, launch: Callable[[int], Any]) -> None:
        self.launch = launch

    def time(self, launches: int, probe: object = None, repeats: int = 1) -> timing.LaunchTime:
        if "odd" in [self.launch(i) for i in range(launches)]:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        return timing.LaunchTime(0.5, 1500.0)


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(runs: dict[str, FakeTimed], pace: timing.Pace) -> dict[str, list[timing.LaunchTime]]:
        bursts = [timing.LaunchTime(ms, 1500.0) for ms in (0.3, 0.2, 0.1)]
        return dict.fromkeys(runs, bursts)

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: PROPERTIES)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a fake GPU")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(kernels, "draw", lambda problem, copies, seed: [f"set {i}" for i in range(copies)])
    monkeypatch.setattr(kernels, "our_launch", lambda problem, inputs, choices: lambda i: OUTPUT[:2])
    monkeypatch.setattr(check, "last_tiles", lambda problem, given, output, count: [output])
    monkeypatch.setattr(check, "bits_differing", lambda part, config: 0)
    monkeypatch.setattr(graphs, "GraphTimed", FakeTimed)
    monkeypatch.setattr(timing, "measure", measure)


def prepared(output: Any = "out", wrong: str | Exception = "", error: Exception | None = None) -> Any:
    def judge(output: Any) -> str:
        if isinstance(wrong, Exception):
            raise wrong
        return wrong

    def prepare(problem: AttentionProblem, inputs: Any) -> Any:
        if error:
            raise error
        return (lambda i: output), judge

    return prepare


@pytest.mark.parametrize(
    ("prepare", "status", "reason"),
    [
        (prepared(), "timed", ""),
        (prepared(error=ValueError("no head_dim 128")), "refused", "no head_dim 128"),
        (prepared(error=Unsupported("no library")), "missing", "no library"),
        (prepared(error=RuntimeError("two\nlines")), "failed", "RuntimeError: two lines"),
        (prepared(wrong="3 bits differ"), "wrong", "3 bits differ"),
        (prepared(wrong=ValueError("out must be bfloat16")), "wrong", "out must be bfloat16"),
        (prepared("odd"), "failed", "RuntimeError: operation not permitted when stream is capturing"),
    ],
)
def test_a_kernel_is_timed_if_it_is_right_and_the_others_go_on(prepare: Any, status: str, reason: str) -> None:
    found = kernels.measured((PROBLEM, "forward"), {"first": prepared(), "asked": prepare, "last": prepared()})
    assert list(found) == ["first", "asked", "last"]
    assert found["asked"][:2] == (status, reason)
    assert [len(each.bursts) for each in found.values()] == [3, 3 if status == "timed" else 0, 3]


def test_a_lost_context_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", gone)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        kernels.measured((PROBLEM, "forward"), {"wild": prepared(error=RuntimeError("wild")), "last": prepared()})


def speeds(problem: AttentionProblem, *names: str) -> dict[str, Any]:
    found = kernels.speeds((problem, "forward"), names)
    assert found["gpu"] == "a fake GPU"
    return {row["kernel"]: row for row in found["kernels"]}


def test_rows_have_times_at_counted_clocks_and_in_multiples_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    launched: list[str] = []

    def prepare(problem: AttentionProblem, given: str, options: dict[str, Any]) -> Callable[[], LaunchOutput]:
        asked.append((given, options))
        return lambda: launched.append(given) or OUTPUT

    monkeypatch.setattr(launches, "loaded", lambda name: prepare)
    monkeypatch.setattr(check, "outside_bound", lambda problem, given, model, output: "")
    found = speeds(PROBLEM, "gluon", "flash3", "cudnn")
    assert [row["status"] for row in found.values()] == ["timed"] * 3
    flash3 = found["flash3"]
    assert flash3["milliseconds"] == pytest.approx(0.2)
    assert flash3["tflops"] == pytest.approx(4 * 4 * 1024 * 1024 * 128 / 0.2e-3 / 1e12)
    assert (flash3["times_ours"], flash3["sm_mhz"]) == (1.0, 1500.0)
    sets = [f"set {i}" for i in range(kernels.MAX_COPIES)]  # each library takes all sets in turn, and chooses splits
    assert launched[:4] == ["set 0", *sets]  # the first one is checked
    assert asked[:3] == [(each, {"lse": False, "num_splits": 0}) for each in sets]
    assert asked[3:] == [(each, {"lse": False}) for each in sets]


def test_ours_is_launched_as_it_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Choices] = []
    checked: list[Any] = []
    step = AttentionProblem(1, 32, 8, 1, 65536, 128, dtype="bf16")
    monkeypatch.setattr(
        kernels, "our_launch", lambda problem, inputs, choices: launched.append(choices) or (lambda i: OUTPUT[:2])
    )
    monkeypatch.setattr(check, "bits_differing", lambda part, config: checked.append(config) or 5)
    row = speeds(step, "gluon")["gluon"]
    assert (row["status"], row["reason"]) == ("wrong", "5 bits differ from the twin")
    assert checked == [choices.config(step, 132) for choices in launched]
    assert checked[0].num_splits > 1  # one query leaves most of a GPU idle without


@pytest.mark.parametrize(
    ("problem", "name", "status", "reason"),
    [
        (PROBLEM, "flash4", "missing", "flash4/libcute_dsl_runtime.so is looked for in the folder"),
        (AttentionProblem(1, 4, 4, 512, 512, 128, dtype="e4m3"), "cudnn", "refused", "its dtype must be fp16 or bf16"),
        (AttentionProblem(1, 4, 4, 512, 512, 96), "flash4", "refused", "compiled for head_dim 64, 128 and 256"),
        (AttentionProblem(1, 4, 4, 512, 512, 128, window=(64, 0)), "flash2", "refused", "it does not claim window"),
        (AttentionProblem(1, 4, 4, 512, 512, 128, softcap=9.0), "flash3.dew", "refused", "it does not claim softcap"),
        (AttentionProblem(1, 4, 4, 64, 512, 128, causal=True), "cudnn", "refused", "aligned top-left needs as many"),
        (AttentionProblem(1, 4, 4, 512, 512, 100), "gluon", "refused", "head_dim"),
    ],
)
def test_who_does_not_take_a_problem_says_why(
    problem: AttentionProblem, name: str, status: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FA3VERIFY_PEERS", raising=False)
    found = speeds(problem, name)[name]
    assert (found["status"], found["bursts_ms"]) == (status, [])
    assert reason in found["reason"]
