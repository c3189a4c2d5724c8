"""Every kind of problem that a line can describe reaches the loop that times: what is launched on which tensors, and
how outputs are checked. Tensors are on a CPU, and kernels stand-ins."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import torch

from fa3_kernels import api
from fa3_kernels.gluon.arguments import Packed
from fa3_kernels.plan.plan import plan_of
from fa3_kernels.plan.request import Choices, request_for
from fa3_kernels.twin.forward import forward as twin
from fa3_reference.attention import attention
from fa3_reference.attention_bwd import attention_bwd
from fa3_reference.cache import gathered
from fa3_reference.problem import AttentionProblem, BackwardOperands, Descale, Operands
from fa3verify.bench import check, graphs, kernels
from fa3verify.bench.planned import TIMED, planned, refusal
from fa3verify.cases.lines import read_line
from fa3verify.known import device, flash3_serving, launches
from fa3verify.known.launches import Given, LaunchOutput
from fa3verify.known.peers import PEERS
from fa3verify.tensors.convert import to_numpy, to_torch
from fa3verify.timed import timing
from tests.harness.bench.test_kernels import FakeTimed
from tests.kernels.no_gpu import Started, no_gpu

pytestmark = pytest.mark.optional
FORWARDS = (
    "4/2 2 x 200 x 300 causal d64",
    "6/2 2 x 130 x 300 chunk 64 causal d64",
    "6/2 2 x 130 x 300 chunk 64 d64",
    "4/4 2 x 100 x 90 d96/64 fp16",
    "6/2 3 x 70,1,130 packed causal d64",
    "6/2 3 x 70,0,130 x 200,50,130 window 40 d64",
    "4/2 3 x 1-150 e4m3",
    "14/2 3 x 1 x 40-700 page 16 d64",
    "14/2 3 x 1 x 900 page 1 chunk 256 causal d64",
    "8/2 2 x 1 x 40,301 page 64 e4m3",
    "8/2 2 x 20,1 x 300,77 page 16 causal d64",
    "8/2 2 x 3 x 300,77 rows softcap 20 causal d64",
)
BACKWARDS = ("4/2 2 x 150 x 170 causal backward d64", "4/2 3 x 70,33,130 window 50 backward d64 fp16")


def packed_of(problem: AttentionProblem) -> Packed | None:
    if not problem.is_varlen:
        return None
    starts = (torch.from_numpy(x) for x in (problem.cu_seqlens_q, problem.cu_seqlens_k))
    of_q, of_k = starts
    return Packed(of_q, of_k, problem.seqlen_q, problem.seqlen_k)


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Started]]:
    """What would be started on a GPU, of tensors that are on a CPU."""
    randn, generator = torch.randn, torch.Generator
    monkeypatch.setattr(torch, "randn", lambda *shape, device, **rest: randn(*shape, **rest))
    monkeypatch.setattr(torch, "Generator", lambda device: generator())
    monkeypatch.setattr(launches, "to_gpu", to_torch)
    for module in (kernels, device):
        monkeypatch.setattr(module, "packed_of", packed_of)
    properties = SimpleNamespace(multi_processor_count=132, L2_cache_size=50 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    with no_gpu() as started:
        yield started


def drawn(line: str) -> tuple[AttentionProblem, Given]:
    problem, _ = read_line(line)
    (given,) = kernels.draw(problem, 1, 0)
    return problem, given


def operands_of(problem: AttentionProblem, x: Given) -> Operands:
    heads = (problem.nheads, problem.nheads_kv, problem.nheads_kv)
    of_q, of_k, of_v = (
        None if y is None else Descale(to_numpy(y).repeat(n // problem.nheads_kv, 1)[..., None].astype(np.float32))
        for n, y in zip(heads, (x.q_descale, x.k_descale, x.v_descale), strict=True)
    )
    return Operands(to_numpy(x.q), to_numpy(x.k), to_numpy(x.v), of_q, of_k, of_v)


@pytest.mark.parametrize("line", FORWARDS)
def test_a_launch_is_the_planned_one_on_the_tensors_that_were_drawn(line: str, on_a_cpu: list[Started]) -> None:
    problem, given = drawn(line)
    launch, _ = kernels.ours(Choices(num_splits=0), problem, [given])
    made = [x.kernel for x in on_a_cpu]
    assert made == (["packed_order"] if problem.cache else [])  # the schedule of a step is made in front
    on_a_cpu.clear()
    output = launch(0)
    assert output.out.shape == problem.out_shape
    plan = plan_of(request_for(problem, Choices(num_splits=0)), 132)
    assert made + [x.kernel for x in on_a_cpu] == [call.kernel for call in plan.kernels]
    main = next(x for x in on_a_cpu if x.kernel.startswith("forward"))
    tensors = given.served if given.served is not None else given._asdict()
    addresses = {x for x in main.arguments if isinstance(x, int)} | {x.address for x in main.descriptors}
    names = ("q", "k_cache", "v_cache", "page_table") if given.served else ("q", "k", "v")
    assert {name for name in names if name in tensors and tensors[name].data_ptr() not in addresses} == set()
    words = planned((problem, "forward"), ["gluon"])["launch"]
    assert words.endswith(": " + ", ".join(call.kernel for call in plan.kernels))


@pytest.mark.parametrize("line", FORWARDS)
def test_an_output_is_right_by_the_bits_of_the_twin_and_wrong_by_one(line: str) -> None:
    problem, given = drawn(line)
    _, judge = kernels.ours(Choices(num_splits=0), problem, [given])
    config = plan_of(request_for(problem, Choices(num_splits=0)), 132).config
    found = twin(problem, operands_of(problem, given), config)
    out = to_torch(found.out)
    lse = None if problem.cache else to_torch(found.lse)
    assert judge(LaunchOutput(out, lse)) == ""
    flat = out.view(torch.int16).flatten()
    flat[-1] ^= 1  # the last channel of the last head and row
    assert judge(LaunchOutput(out, lse)) == "1 bits differ from the twin"


@pytest.mark.parametrize("line", FORWARDS)
def test_a_peer_is_held_to_the_bound_in_the_edges_of_a_sequence(line: str) -> None:
    problem, given = drawn(line)
    model = kernels.model_of(PEERS["flash3" if problem.dtype != "fp16" else "flash2"], problem, {})
    exact = attention(problem, *operands_of(problem, given).dequantized(problem)).out
    out = torch.from_numpy(exact).to(torch.float16 if problem.dtype == "fp16" else torch.bfloat16)
    assert check.outside_bound(problem, given, model, LaunchOutput(out)) == ""
    for wrong in (out * (8 if problem.dtype == "e4m3" else 1.1), out + 1):
        assert "computes something else" in check.outside_bound(problem, given, model, LaunchOutput(wrong))


@pytest.mark.parametrize("line", [line for line in FORWARDS if "page" in line or "rows" in line])
def test_rows_of_a_cache_are_those_that_were_drawn(line: str) -> None:
    problem, given = drawn(line)
    assert given.served is not None
    k, v = gathered(problem, {name: to_numpy(x) for name, x in given.served.items()})
    np.testing.assert_array_equal(k.view(np.uint8), to_numpy(given.k).view(np.uint8))
    np.testing.assert_array_equal(v.view(np.uint8), to_numpy(given.v).view(np.uint8))
    np.testing.assert_array_equal(to_numpy(given.served["q"].view(given.q.shape).float()), to_numpy(given.q.float()))
    if problem.cache and problem.cache.page_size and problem.seqlen_k > 5 * problem.cache.page_size:
        assert (np.diff(to_numpy(given.served["page_table"])[0, :5]) != 1).any()  # pages are not in order


class Build:
    """Stands for the operators of a serving build: keeps how they were called, and what launches return."""

    namespace = "a_build"

    def __init__(self, *lacking: str, schedules: bool = True) -> None:
        names = [
            *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table"),
            *("q_descale", "k_descale", "v_descale", "softmax_scale", "is_causal", "window_size_left"),
            *("window_size_right", "softcap", "attention_chunk", "num_splits", "is_rotary_interleaved"),
            *("scheduler_metadata", "sm_margin"),
        ]
        self._schema = SimpleNamespace(arguments=[SimpleNamespace(name=x) for x in names if x not in lacking])
        self.calls: list[dict[str, Any]] = []
        self.asked: list[dict[str, Any]] = []
        if schedules:
            self.get_scheduler_metadata = SimpleNamespace(default=self.Scheduler(self))

    class Scheduler:
        names = ("batch_size", "max_seqlen_k", "num_heads_k", "headdim_v", "seqused_k", "page_size", "num_splits")
        _schema = SimpleNamespace(arguments=[SimpleNamespace(name=name) for name in names])

        def __init__(self, build: Build) -> None:
            self.build = build

        def __call__(self, *given: Any) -> torch.Tensor:
            self.build.asked.append(dict(zip(self.names, given, strict=True)))
            return torch.tensor([7])

    def __call__(self, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append({x.name: y for x, y in zip(self._schema.arguments, given, strict=True)})
        rows, heads, _ = self.calls[-1]["q"].shape
        return torch.zeros(rows, heads, self.calls[-1]["v"].shape[-1]), torch.zeros(heads, rows)


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Build:
    found = Build()
    monkeypatch.setattr(torch.ops, found.namespace, found, raising=False)
    prepare = lambda *given: flash3_serving.prepare(found, *given)  # noqa: E731
    monkeypatch.setattr(launches, "loaded", lambda name, operation="forward": prepare)
    return found


@pytest.mark.parametrize("line", FORWARDS)
def test_a_serving_build_gets_the_tensors_of_ours_and_a_schedule_that_is_not_timed(line: str, build: Build) -> None:
    problem, given = drawn(line)
    launch = kernels.peer_launch("vllm", problem, [given], {"num_splits": 0})
    assert len(build.asked) == (problem.cache is not None)
    assert launch(0).out.shape == problem.out_shape
    assert len(build.asked) == (problem.cache is not None)
    (call,) = build.calls
    ours = given.served if given.served is not None else given._asdict()
    for name, own in {"q": "q", "k": "k_cache", "v": "v_cache", "page_table": "page_table"}.items():
        x = ours.get(own, ours.get(name))
        assert (None if x is None else x.data_ptr()) == (None if call[name] is None else call[name].data_ptr()), name
    assert call["cu_seqlens_q"].tolist()[-1] == call["q"].shape[0]
    facts = (call["is_causal"], call["window_size_left"], call["softcap"], call["attention_chunk"], call["num_splits"])
    assert facts == (problem.causal, problem.window[0], problem.softcap, problem.attention_chunk, 0)
    if problem.cache is not None:
        assert call["scheduler_metadata"].tolist() == [7]
        (asked,) = build.asked
        assert (asked["batch_size"], asked["max_seqlen_k"]) == (problem.batch, problem.seqlen_k)
        assert asked["seqused_k"] is call["seqused_k"]
        assert asked["page_size"] == (problem.cache.page_size or None)


def test_a_build_without_an_argument_that_a_problem_needs_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = Build("attention_chunk", "softcap", schedules=False)
    monkeypatch.setattr(torch.ops, lacking.namespace, lacking, raising=False)
    problem, given = drawn("14/2 3 x 1 x 900 page 16 d64")
    flash3_serving.prepare(lacking, problem, given.served or {}, {"is_scheduled": True})()
    assert lacking.calls[0]["scheduler_metadata"] is None
    for words, name in (("chunk 256 causal", "attention_chunk"), ("softcap 9", "softcap")):
        problem, given = drawn(f"14/2 3 x 1 x 900 page 16 d64 {words}")
        with pytest.raises(ValueError, match=f"takes no {name}"):
            flash3_serving.prepare(lacking, problem, given.served or {}, {})


@pytest.mark.parametrize("name", ["gluon", "gluon.deterministic"])
@pytest.mark.parametrize("line", BACKWARDS)
def test_gradients_are_launched_and_judged_by_rows(line: str, name: str, on_a_cpu: list[Started]) -> None:
    problem, given = drawn(line)
    x = kernels.differentiated(problem, given, 0)
    on_a_cpu.clear()
    launch, _ = kernels.peer(name, "backward", problem, [x])
    found: Any = launch(0)
    assert [y.shape for y in found] == [y.shape for y in (given.q, given.k, given.v)]
    words = planned((problem, "backward"), ["gluon"])["launch"]
    assert words.endswith(": " + ", ".join(y.kernel for y in on_a_cpu))
    assert len(on_a_cpu) == 3
    operands = operands_of(problem, given)
    exact: Any = attention(problem, *operands.dequantized(problem))
    out = torch.from_numpy(exact.out).to(x.q.dtype)
    dout = torch.randn(out.shape, device="cuda").to(x.q.dtype)
    x = x._replace(out=out, lse=torch.from_numpy(exact.lse).float(), dout=dout)
    kept = BackwardOperands(
        operands.q, operands.k, operands.v, dout=to_numpy(x.dout), out=to_numpy(x.out), lse=to_numpy(x.lse)
    )
    numbers = [y.astype(np.float64) for y in (kept.q, kept.k, kept.v, kept.dout)]
    q, k, v, of_out = numbers
    truth = attention_bwd(problem, q, k, v, of_out, exact._replace(out=kept.out.astype(np.float64)))
    found = [torch.from_numpy(y).to(x.q.dtype) for y in (truth.dq, truth.dk, truth.dv)]
    assert check.outside_gradients(problem, x, tuple(found)) == ""
    for i in range(3):
        wrong = [y * 1.2 if i == j else y for j, y in enumerate(found)]
        assert "computes something else" in check.outside_gradients(problem, x, tuple(wrong))


@pytest.mark.parametrize("line", [*FORWARDS, *BACKWARDS])
def test_every_kind_is_timed_or_says_why_not(
    line: str, on_a_cpu: list[Started], build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("wrong_bits", "outside_bound", "outside_gradients"):
        monkeypatch.setattr(check, name, lambda *given: "")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a stand-in")
    monkeypatch.setattr(graphs, "GraphTimed", FakeTimed)
    burst = timing.LaunchTime(0.5, 1500.0)
    monkeypatch.setattr(timing, "measure", lambda runs, *_: {name: [burst] for name in runs})
    if "backward" in line:
        monkeypatch.setattr(launches, "loaded", lambda name, operation: device.load_backward(name))
    asked = read_line(line)
    names = [name for name in TIMED[asked[1]] if name.startswith("gluon") or name in ("vllm", "flash4")]
    rows = {row["kernel"]: row for row in kernels.speeds(asked, names)["kernels"]}
    assert rows["gluon"]["status"] == "timed", rows["gluon"]["reason"]
    assert rows["gluon"]["tflops"] > 0
    for name in rows.keys() & PEERS.keys():
        reason = planned(asked, [name])["kernels"][name]
        is_taken = not reason or "is looked for" in reason  # whether a library is there is asked when it is loaded
        assert (rows[name]["status"] == "timed") == is_taken, (name, rows[name], reason)
        assert is_taken or rows[name]["reason"] == reason


@pytest.mark.parametrize(
    ("line", "said"), [("4 2 x 64 d100 backward", "head_dim"), ("4 2 x 64 causal", "out of memory")]
)
def test_a_problem_whose_tensors_cannot_be_made_is_refused_and_the_next_one_goes_on(
    line: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a stand-in")
    if "memory" in said:
        monkeypatch.setattr(torch, "randn", full)
    asked = read_line(line)
    rows = kernels.speeds(asked, TIMED[asked[1]])["kernels"]
    assert {row["status"] for row in rows} == {"refused"}
    assert said in rows[0]["reason"]


@pytest.mark.parametrize(
    ("name", "words", "reason"),
    [
        ("vllm", "bf16 d64 page 16 softcap 20", None),  # which verify does not judge, as no bits are known
        ("vllm", "e4m3 d128/64 packed window 40", None),
        ("vllm", "fp16 d128 page 16", "its dtype must be bf16 or e4m3"),
        ("flash3", "bf16 d128 page 16", "it does not claim paged"),
        ("flash3.dew", "bf16 d128 softcap 20", "it does not claim softcap"),
        ("flash3.dew", "bf16 d128 packed backward", "it does not claim varlen"),
    ],
)
def test_builds_that_serve_are_timed_on_what_they_take_and_others_on_what_they_claim(
    name: str, words: str, reason: str | None
) -> None:
    assert refusal(name, read_line(f"8/2 2 x 300 {words}")) == reason


def through_the_api(problem: AttentionProblem, given: Given, *leaves: torch.Tensor) -> Any:
    """Call the function of FlashAttention-3 that a user would call for a problem without a cache."""
    q, k, v = leaves or given[:3]
    options: dict[str, Any] = {
        "softmax_scale": problem.softmax_scale,
        "causal": problem.causal,
        "window_size": problem.window,
        "attention_chunk": problem.attention_chunk,
        "softcap": problem.softcap,
        "num_splits": 1 if leaves else 0,
    }
    options |= {name: getattr(given, name) for name in ("q_descale", "k_descale", "v_descale")}
    if not problem.is_varlen:
        return api.flash_attn_func(q, k, v, **options)
    assert given.cu_seqlens_q is not None
    assert given.cu_seqlens_k is not None
    starts = (given.cu_seqlens_q, given.cu_seqlens_k)
    return api.flash_attn_varlen_func(q, k, v, *starts, problem.seqlen_q, problem.seqlen_k, **options)


def outline(started: list[Started], *tensors: Any) -> list[tuple[Any, ...]]:
    """Kernels, grids, and which arguments are which of the tensors, where the rest are addresses of a call's own."""
    at = {x.data_ptr(): i for i, x in enumerate(tensors)}
    return [
        (x.kernel, x.grid, *(at.get(getattr(y, "address", y)) for y in x.arguments), len(x.arguments)) for x in started
    ]


@pytest.mark.parametrize("line", [line for line in FORWARDS if "page" not in line and "rows" not in line])
def test_what_is_timed_is_what_the_functions_of_the_api_start(line: str, on_a_cpu: list[Started]) -> None:
    problem, given = drawn(line)
    launch, _ = kernels.ours(Choices(num_splits=0), problem, [given])
    on_a_cpu.clear()
    launch(0)
    timed = outline(on_a_cpu, *given[:3])
    on_a_cpu.clear()
    assert through_the_api(problem, given).shape == problem.out_shape
    assert outline(on_a_cpu, *given[:3]) == timed
    assert {x for call in timed for x in call} >= {0, 1, 2}  # q, k and v are among the arguments


@pytest.mark.parametrize("line", BACKWARDS)
def test_gradients_that_are_timed_are_those_of_the_api(line: str, on_a_cpu: list[Started]) -> None:
    problem, given = drawn(line)
    launch, _ = kernels.peer("gluon", "backward", problem, [kernels.differentiated(problem, given, 0)])
    on_a_cpu.clear()
    launch(0)
    timed = outline(on_a_cpu, *given[:3])
    leaves = [x.clone().requires_grad_() for x in given[:3]]
    out = through_the_api(problem, given, *leaves)
    on_a_cpu.clear()
    out.backward(torch.zeros_like(out))
    assert outline(on_a_cpu, *leaves) == timed


@pytest.mark.parametrize("line", [line for line in FORWARDS if "page" in line or "rows" in line])
def test_calls_over_a_cache_are_those_of_the_api(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    called = device.flash_attn_with_kvcache
    monkeypatch.setattr(device, "flash_attn_with_kvcache", lambda **given: asked.append(given) or called(**given))
    problem, given = drawn(line)
    launch, _ = kernels.ours(Choices(num_splits=0), problem, [given])
    launch(0)
    (call,) = asked
    assert given.served is not None
    assert all(call[name] is given.served[name] for name in ("q", "k_cache", "v_cache", "cache_seqlens"))
    facts = (call["causal"], call["window_size"], call["softcap"], call["attention_chunk"], call["num_splits"])
    assert facts == (problem.causal, problem.window, problem.softcap, problem.attention_chunk, 0)
    assert call["scheduler_metadata"] is not None
