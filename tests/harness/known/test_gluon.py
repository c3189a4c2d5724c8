"""Our kernels over caches: a stand-in that reads what they are called with has the problem's bits, and the launch that
a call prepares has the configuration that the twin computes with.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fa3_kernels.plan.choose import config_of
from fa3_kernels.twin.append import rotated
from fa3_kernels.twin.forward import forward
from fa3_reference.cache import Cache
from fa3_reference.problem import AttentionProblem, Descale, Operands
from fa3_reference.quantize import QuantScheme
from fa3verify.cases.case import Case
from fa3verify.inputs.recipe import Recipe
from fa3verify.kernels import calls
from fa3verify.kernels.record import Kernel
from fa3verify.known.gluon import gpu
from fa3verify.operations.operation import CACHES, SERVING
from fa3verify.properties.law import Untaken, set_up

KERNELS = {kernel.name: kernel for kernel in gpu() if kernel.operation == "forward"}
RAGGED = ((1, 5, 70, 0), (17, 100, 3, 9))
STEPS = ((1,) * 4, (17, 130, 1, 0))
LONG = ((200, 1), (150, 300))
CAUSAL: dict[str, Any] = {"causal": True}
# A masked rotation gives every query a position of its own, one without a mask that of the first.
CALLS: dict[str, tuple[tuple[tuple[int, ...], tuple[int, ...]], dict[str, Any]]] = {
    "pages": (RAGGED, {"cache": Cache(16, behind="nan"), **CAUSAL}),
    "large_pages": (STEPS, {"cache": Cache(256, seed=3), "sinks": True}),
    "rows": (RAGGED, {"cache": Cache(leftpad=(3, 0, 9, 2), indexed=True, behind="nan"), "window": (20, 5)}),
    "steps_in_rows": (STEPS, {"cache": Cache(indexed=True), "head_dim_v": 32, "sinks": True}),
    "appended_to_pages": (RAGGED, {"cache": Cache(64, new=(1, 5, 3, 0), behind="nan"), **CAUSAL, "softcap": 20.0}),
    "appended_to_rows": (STEPS, {"cache": Cache(new=(1, 1, 1, 0), leftpad=(5, 0, 1, 2))}),
    "as_many_appended": (STEPS, {"cache": Cache(8, new=(0,) * 4), "nheads": 6}),
    "long": (LONG, {"cache": Cache(32, new=(100, 1)), **CAUSAL, "sinks": True}),
    "chunks_in_padded_pages": (RAGGED, {"cache": Cache(16, leftpad=(3, 0, 9, 2)), **CAUSAL, "attention_chunk": 30}),
}
ROTATED = {
    "rotated_in_pages": (RAGGED, {"cache": Cache(64, new=(1, 5, 3, 0), rotary_dim=16), **CAUSAL}),
    "rotated_in_rows": (STEPS, {"cache": Cache(new=(1, 2, 1, 0), rotary_dim=32, interleaved=True)}),
    "rotated_at_one_position": (LONG, {"cache": Cache(16, new=(7, 1), rotary_dim=32), "sinks": True}),
}
# No cache: keys lie in rows of one where there are sinks.
UNCACHED = {"batch": AttentionProblem(3, 4, 2, 17, 140, 64, causal=True), "packed": RAGGED}
NAMES = (*CALLS, *ROTATED, *UNCACHED)
CHOICES: tuple[dict[str, Any], ...] = ({}, {"num_splits": 3, "pack_gqa": False}, {"num_splits": 2, "pack_gqa": True})


def problem_of(name: str, kernel: Kernel) -> AttentionProblem:
    if name == "batch":
        return replace(UNCACHED["batch"], dtype=kernel.dtype, sinks=True)
    lengths, fields = (RAGGED, {"sinks": True}) if name == "packed" else (CALLS | ROTATED)[name]
    sizes = {"nheads": 4, "nheads_kv": 2, "head_dim": 64, "dtype": kernel.dtype}
    return AttentionProblem.varlen(*lengths, **sizes | fields)


def is_taken(name: str, kernel: Kernel) -> bool:
    return kernel.dtype != "e4m3" or name not in ROTATED


PAIRS = [(name, kernel) for kernel in KERNELS for name in NAMES if is_taken(name, KERNELS[kernel])]


def case_of(name: str, kernel: Kernel, seed: int = 1) -> Case:
    scheme = QuantScheme("query_head") if kernel.dtype == "e4m3" else None
    return Case(kernel.name, problem_of(name, kernel), Recipe("normal", {}, seed), scheme)


def configs(kernel: Kernel, problem: AttentionProblem) -> list[Any]:
    own: Any = kernel.config_for(problem)
    changed = [dict(each) for each in CHOICES]
    if kernel.name == "gluon.e4m3":
        changed[1] |= {"promotion_interval": 64}
    can_pack = problem.group in (2, 4)
    return [replace(own, **each) for each in changed if can_pack or not each.get("pack_gqa")]


def test_every_claim_of_serving_is_asked_here_and_no_other_is_claimed():
    for kernel in KERNELS.values():
        asked = [problem_of(name, kernel) for name in NAMES if is_taken(name, kernel)]
        assert frozenset().union(*(problem.serving for problem in asked)) == kernel.features & SERVING
        assert kernel.features & CACHES
        assert all(kernel.supports(problem) for problem in asked)


def numpy_of(x: Any) -> np.ndarray:
    torch = pytest.importorskip("torch", reason="needs torch (extra 'gpu')")
    small = {torch.bfloat16: ml_dtypes.bfloat16, torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn}
    if x.dtype not in small:
        return x.numpy()
    bits = torch.uint8 if x.dtype.itemsize == 1 else torch.int16
    return x.view(bits).numpy().view(small[x.dtype])  # over the same memory


def stand_in(q: Any, k_cache: Any, v_cache: Any, **call: Any) -> tuple[Any, Any]:
    """Return the twin's bits of what flash_attn_with_kvcache is called with, and write what is appended."""
    import torch

    from fa3verify.tensors.convert import to_torch

    assert call.pop("return_softmax_lse")
    given = {name: numpy_of(x) if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    rows = numpy_of(q)
    starts = given.get("cu_seqlens_q", np.arange(len(rows) + 1) * rows.shape[1])
    rows = rows.reshape(-1, *rows.shape[-2:])
    lengths = np.diff(starts).tolist()
    assert call.get("max_seqlen_q", max(lengths)) == max(lengths)
    is_masked = given["causal"] or given["attention_chunk"] > 0 or given["window_size"] != (-1, -1)
    caches = {"k": numpy_of(k_cache), "v": numpy_of(v_cache)}
    keys = {name: [own(x, name, i, given) for i in range(len(lengths))] for name, x in caches.items()}
    if "rotary_cos" in given:
        turned = []
        for i, n in enumerate(lengths):
            steps = np.arange(n) if is_masked else np.zeros(n, int)
            turned.append(turn(rows[starts[i] : starts[i + 1]], given["cache_seqlens"][i] + steps, given))
        rows = np.concatenate(turned)
    k, v = (np.concatenate(keys[name]) for name in "kv")
    problem = AttentionProblem.varlen(
        lengths,
        [len(x) for x in keys["k"]],
        nheads=rows.shape[1],
        nheads_kv=k.shape[1],
        head_dim=rows.shape[2],
        head_dim_v=v.shape[2],
        dtype={2: "fp16", 1: "e4m3"}[k.itemsize] if k.dtype != ml_dtypes.bfloat16 else "bf16",
        softmax_scale=given["softmax_scale"],
        causal=given["causal"],
        window=given["window_size"],
        softcap=given["softcap"],
        attention_chunk=given["attention_chunk"],
        sinks="sinks" in given,
    )
    factors = {f"{x}_descale": Descale(given[f"{x}_descale"]) for x in "qkv" if f"{x}_descale" in given}
    choices = {name: given[name] for name in ("num_splits", "pack_gqa", "promotion_interval") if name in given}
    found = forward(problem, Operands(rows, k, v, sinks=given.get("sinks"), **factors), config_of(problem, **choices))
    out = to_torch(found.out)
    lse = to_torch(found.lse)
    if q.ndim == 3:
        return out, lse
    batch, seqlen_q = q.shape[:2]
    return out.view(batch, seqlen_q, *out.shape[1:]), lse.view(-1, batch, seqlen_q).transpose(0, 1)


def turn(x: np.ndarray, positions: np.ndarray, given: dict[str, Any]) -> np.ndarray:
    """Rotate rows by their positions; the last row of the tables serves those behind."""
    last = len(given["rotary_cos"]) - 1
    tables = (given[name][np.minimum(positions, last)][:, None] for name in ("rotary_cos", "rotary_sin"))
    return rotated(x, *tables, is_interleaved=given["rotary_interleaved"])


def own(stored: np.ndarray, name: str, i: int, given: dict[str, Any]) -> np.ndarray:
    """Return the keys or values of a sequence, after those that are appended are written."""
    used = int(given["cache_seqlens"][i])
    new = given.get(name)
    if new is not None and (starts := given.get("cu_seqlens_k_new")) is None:
        new = new[i]
    elif new is not None:
        new = new[starts[i] : starts[i + 1]]
    if "page_table" in given:
        pages = given["page_table"][i]
        places = [(pages[n // stored.shape[1]], n % stored.shape[1]) for n in range(len(pages) * stored.shape[1])]
    else:
        row = given["cache_batch_idx"][i] if "cache_batch_idx" in given else i
        places = [(row, n) for n in range(stored.shape[1])]
    if new is not None:
        is_turned = name == "k" and "rotary_cos" in given
        new = turn(new, used + np.arange(len(new)), given) if is_turned else new
        for place, x in zip(places[used:], new, strict=False):
            stored[place] = x
        used += len(new)
    first = int(given["cache_leftpad"][i]) if "cache_leftpad" in given else 0
    return np.stack([stored[place] for place in places[first:used]]) if used > first else stored[:0, 0]


@pytest.fixture
def device(monkeypatch):
    """Our kernels' room with a CPU in place of the GPU."""
    pytest.importorskip("torch", reason="needs torch (extra 'gpu')")
    pytest.importorskip("triton", reason="needs triton: pip install triton==3.6.0")
    from fa3verify.known import device
    from fa3verify.tensors.convert import to_torch

    monkeypatch.setattr(device, "to_gpu", to_torch)
    return device


def assert_bits_of_the_twin(name: str, kernel: Kernel) -> None:
    case = case_of(name, kernel)
    operands = case.operands()
    for config in configs(kernel, case.problem):
        got = calls.run(kernel, case.problem, operands, config)
        want = calls.run(kernel.twin, case.problem, operands, config)
        for output, x in got.items():
            np.testing.assert_array_equal(x.view(f"u{x.itemsize}"), want[output].view(f"u{x.itemsize}"), output)


@pytest.mark.optional
@pytest.mark.parametrize(("name", "kernel"), PAIRS)
def test_what_a_kernel_is_called_with_is_the_problem(device, monkeypatch, name, kernel):
    monkeypatch.setattr(device, "flash_attn_with_kvcache", stand_in)
    assert_bits_of_the_twin(name, KERNELS[kernel])


@pytest.mark.optional
@pytest.mark.parametrize(("name", "kernel"), PAIRS)
def test_the_launch_over_a_cache_has_the_configuration_of_the_twin(device, monkeypatch, name, kernel):
    from fa3_kernels.gluon import launch
    from tests.kernels.no_gpu import no_gpu

    kernel = KERNELS[kernel]
    problem = problem_of(name, kernel)
    operands = case_of(name, kernel).operands()
    plans = []
    monkeypatch.setattr(launch, "plan_of", recording(launch.plan_of, plans))
    monkeypatch.setattr(device, "check_written", lambda *_: None)  # nothing is started, nor written
    for config in configs(kernel, problem):
        plans.clear()
        with no_gpu() as started:
            kernel.code.run(problem, operands, config)
        assert any(x.kernel.startswith("forward") for x in started)
        assert any(x.kernel == "combine" for x in started) == (config.num_splits > 1)
        assert {plan.config for plan in plans} == {config}
        assert all(plan.request.pages and plan.request.has_sinks == problem.sinks for plan in plans)


def recording(function: Any, results: list[Any]) -> Any:
    def recorded(*given: Any) -> Any:
        results.append(function(*given))
        return results[-1]

    return recorded


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "change", [{"tile_n": 256}, {"pingpong": False}, {"intra_wg_overlap": False}, {"out_dtype": "fp16"}], ids=str
)
def test_what_a_call_over_a_cache_does_not_choose_is_refused_and_not_tried(kernel, change):
    kernel = KERNELS[kernel]
    if "out_dtype" in change and kernel.dtype != "e4m3":
        change = {"tile_n": 32}
    problem = problem_of("long", kernel)
    config = replace(kernel.config_for(problem), **change)
    with pytest.raises(ValueError, match="over a cache only num_splits, pack_gqa"):
        kernel.code.run(problem, None, config)
    with pytest.raises(ValueError, match="over a cache only num_splits, pack_gqa"):
        kernel.config_for(problem, change.items())
    case = replace(case_of("long", kernel), changes=())
    with pytest.raises(Untaken, match="over a cache only num_splits, pack_gqa"):
        set_up(kernel, case)._replace(config=config).run()


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_no_kernel_of_ours_takes_is_refused(kernel):
    kernel = KERNELS[kernel]
    sizes: dict[str, Any] = {"nheads": 2, "nheads_kv": 1, "head_dim": 64, "dtype": kernel.dtype}
    asked: dict[str, dict[str, Any]] = {"does not know fp8_cache": {"cache": Cache(16, fp8="head")}}
    asked |= {"does not know fp8_rows": {"cache": Cache(16, fp8="row")}}
    asked |= {"does not know qv": {"head_dim": 96, "head_dim_v": 32, "qv": True}}
    for rule, fields in asked.items() if kernel.dtype != "e4m3" else ():
        problem = AttentionProblem.varlen((1,), (9,), **sizes | fields)
        assert not kernel.supports(problem)
        with pytest.raises(ValueError, match=rule):
            kernel.code.configure(problem)


@pytest.mark.parametrize("name", ["pages", "batch"])
def test_descales_of_blocks_are_of_calls_without_a_cache_and_sinks(name):
    kernel = KERNELS["gluon.e4m3"]
    served = replace(case_of(name, kernel), scheme=QuantScheme("block"))
    replace(served, problem=replace(served.problem, cache=None, sinks=False)).check_descales(kernel)
    with pytest.raises(ValueError, match="does not claim served_block_descale"):
        served.check_descales(kernel)


@pytest.mark.optional
def test_a_block_of_descales_that_reaches_a_call_over_a_cache_is_refused(device):
    kernel = KERNELS["gluon.e4m3"]
    case = replace(case_of("pages", kernel), scheme=QuantScheme("block"))
    with pytest.raises(ValueError, match="one for each sequence and head, got blocks of 128"):
        kernel.code.run(case.problem, case.operands(), kernel.config_for(case.problem))


@pytest.mark.optional
def test_a_call_that_does_not_write_what_it_appends_is_found(device, monkeypatch):
    def forgetful(q, k_cache, v_cache, **call):
        return stand_in(q, k_cache.clone(), v_cache.clone(), **call)

    monkeypatch.setattr(device, "flash_attn_with_kvcache", forgetful)
    kernel = KERNELS["gluon.fp16"]
    case = case_of("appended_to_pages", kernel)
    with pytest.raises(calls.KernelError, match="did not write the keys that it appends"):
        calls.run(kernel, case.problem, case.operands(), kernel.config_for(case.problem))
