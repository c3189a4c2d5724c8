"""The table of peers: listed with their reasons, judged like their twins, and run with what a caller may choose."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from fa3_kernels.faults.table import Fault, faulty
from fa3_kernels.twin.forward import forward as run_twin
from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem
from fa3_reference.score_term import ScoreTerm
from fa3verify.campaign.profiles import PROFILES, family_cases
from fa3verify.cases.case import Case
from fa3verify.cli.main import main
from fa3verify.inputs.recipe import Recipe
from fa3verify.judging.judgement import judge, passes
from fa3verify.kernels.calls import KernelError
from fa3verify.known import libraries, peer_kernels, registry
from fa3verify.known.libraries import FOLDER_VARIABLE, Unsupported
from fa3verify.known.peers import BACKWARDS, PEERS
from fa3verify.properties import find_law, run_law
from fa3verify.properties.law import Trial, Untaken
from fa3verify.tensors import here

KERNELS = {kernel.name: kernel for kernel in peer_kernels.kernels()}
PLAIN = {"batch": 1, "nheads": 4, "nheads_kv": 2, "seqlen_q": 90, "seqlen_k": 90, "head_dim": 64}


@pytest.fixture
def listed(monkeypatch, tmp_path):
    """What ``fa3verify kernels --peers DIR`` says of the peers; the variable ends with the test."""
    monkeypatch.setenv(FOLDER_VARIABLE, "")

    def ask():
        result = CliRunner().invoke(main, ["kernels", "--peers", str(tmp_path), "--json", "-"])
        return {k["name"]: k["unavailable"] for k in json.loads(result.stdout)["kernels"]}

    return ask


def test_peers_are_listed_with_the_reason_they_cannot_run(listed, tmp_path, monkeypatch):
    monkeypatch.setattr(here, "no_device", lambda: "no such device")
    monkeypatch.setattr(libraries, "find_spec", lambda package: package if package == "torch" else None)
    found = listed()
    assert os.environ[FOLDER_VARIABLE] == str(tmp_path)  # which worker processes inherit
    assert set(KERNELS) <= set(found)
    assert found["flash3.e4m3"] == f"neither fa3_fwd_C.so nor fa3_fwd_C.so.xz is in {tmp_path}"
    for name in ("flash4.bf16", "flash4.backward.bf16"):
        assert "neither flash4/libcute_dsl_runtime.so nor" in found[name]
    (tmp_path / "fa3_fwd_C.so.xz").touch()
    (tmp_path / "flash4").mkdir()
    (tmp_path / "flash4/libcute_dsl_runtime.so.xz").touch()
    found = listed()
    assert found["flash3.e4m3"] == "no such device"
    assert found["flash4.bf16"] == "package tvm_ffi is not installed"


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda kernel: kernel.name)
def test_a_peer_declares_what_its_twin_does_and_is_sent_nothing_that_it_refuses(kernel):
    for family in ("normal", "faint"):
        assert len(family_cases(kernel, family, PROFILES["quick"], 0)) == 3
    heads = {} if "gqa" in kernel.features else {"nheads_kv": PLAIN["nheads"]}
    size = {} if kernel.head_dims is None else {"head_dim": kernel.head_dims[0]}
    problem = AttentionProblem(**{**PLAIN, **heads, **size}, dtype=kernel.dtype)
    assert kernel.order(kernel.code.configure(problem)).dtype == kernel.dtype
    if kernel.twin is not None:
        twin = kernel.twin
        assert (kernel.policy, kernel.bitwise) == (twin.policy, twin.bitwise)
        assert kernel.declared == twin.declared
        assert kernel.features <= twin.features
        assert kernel.code.configure(problem) == twin.code.configure(problem)
        assert kernel.order(kernel.code.configure(problem)) == twin.order(twin.code.configure(problem))
    with pytest.raises(ValueError, match="head_dim must be a multiple of"):
        kernel.code.configure(replace(problem, head_dim=60, head_dim_v=60))


def test_a_library_chooses_for_itself_what_a_configuration_does_not_change():
    problem = AttentionProblem(**PLAIN, dtype="bf16")
    packs = KERNELS["flash3.bf16"].code.configure(problem).pack_gqa
    for name, changes, options in (
        ("flash3.bf16", {}, {}),
        ("flash3.bf16", {"num_splits": 3}, {"num_splits": 3, "pack_gqa": packs}),
        ("cudnn.bf16", {}, {}),
    ):
        kernel = KERNELS[name]
        assert kernel.code.launchable(problem, kernel.config_for(problem, changes.items())) == options
    for name, changes in (("flash3.bf16", {"tile_n": 64}), ("cudnn.bf16", {"tile_n": 64})):
        kernel = KERNELS[name]
        with pytest.raises(ValueError, match="a caller of"):
            kernel.code.run(problem, None, kernel.config_for(problem, changes.items()))


def test_a_property_is_not_tried_in_a_configuration_that_no_caller_can_ask_for():
    """One query runs another tile than two of a causal call, whatever a caller does."""
    two = AttentionProblem(1, 1, 1, 2, 1, 128, dtype="bf16", causal=True)
    one = replace(two, seqlen_q=1, causal=False)
    kernel, twin = KERNELS["flash3.bf16"], registry.find("twin.flash3.bf16")
    config = kernel.code.configure(two)
    assert kernel.unreachable(two, config) is None
    assert kernel.unreachable(two, replace(config, num_splits=3)) is None
    assert "num_splits and pack_gqa" in kernel.unreachable(one, config)
    assert twin.unreachable(one, config) is None  # it runs whatever it is told
    assert "multiple of 8" in kernel.unreachable(replace(one, head_dim=60, head_dim_v=60), config)  # takes it in none

    def run(problem, operands, config):
        kernel.code.launchable(problem, config)
        return twin.code.run(problem, operands, config)

    outcome = run_law(find_law("causal_row_equals_truncated_problem"), kernel.altered(run=run), max_examples=4, seed=0)
    assert outcome.status != "fail", outcome


@pytest.mark.parametrize(
    ("kernel", "properties"),
    [
        ("cudnn.bf16", ("ring_of_shards_equals_one_call", "prefill_equals_its_chunks_and_decode")),  # one query alone
        ("sglang.bf16", ("appended_keys_equal_stored_ones", "prefill_equals_chunks_that_append")),  # more queries
    ],
)
def test_a_property_that_comes_to_a_call_of_no_configuration_says_nothing_of_it(kernel, properties):
    """The properties whose trials ended in the twin's refusal on an H200."""
    twin = registry.find(f"twin.{kernel}")
    right = KERNELS[kernel].altered(run=lambda *call: twin.code.run(*call))
    for name in properties:
        assert run_law(find_law(name), right, max_examples=6, seed=0).status in ("pass", "not_tried"), name


def test_chunks_are_compared_beside_one_that_is_not_taken():
    """cuDNN's twin does not take the last query alone; the chunks before it are wrong here, and are found."""
    law = find_law("prefill_equals_its_chunks_and_decode")
    kernel, twin = KERNELS["cudnn.bf16"], registry.find("twin.cudnn.bf16")
    sizes = []

    def run(problem, operands, config):
        sizes.append(problem.seqlen_q)
        out, lse = twin.code.run(problem, operands, config)[:2]
        return (out if problem.seqlen_q == sizes[0] else (out * 1.5).astype(out.dtype)), lse

    problem = AttentionProblem(1, 1, 1, 40, 40, 64, dtype="bf16", causal=True)
    trial = Trial(law.name, Case(kernel.name, problem, Recipe("normal", {}, seed=0)), {"starts": [17]})
    assert "rows [0, 17)" in law.check(kernel.altered(run=run), trial).message
    two = replace(trial.case, problem=replace(problem, seqlen_q=2, seqlen_k=2))
    with pytest.raises(Untaken, match="one query"):  # nothing is left to compare
        law.check(kernel.altered(run=run), replace(trial, case=two, parameters={"starts": [1]}))


def test_flex_is_sent_no_call_for_which_its_compiler_has_no_kernel():
    """The property whose trials of 75 queries and two heads a group ended in an InductorError on an H200."""
    kernel, twin = KERNELS["cuda.flex.bf16"], registry.find("twin.bf16")
    for queries, group, causal, refused in (
        (75, 2, True, True),
        (33, 4, True, True),
        (64, 2, True, False),
        (75, 1, True, False),
        (75, 3, True, False),
        (75, 2, False, False),
        (128, 2, True, False),
    ):
        problem = AttentionProblem(1, 2 * group, 2, queries, 300, 64, causal=causal, dtype="bf16")
        assert (kernel.refusal(problem) is not None) == refused, problem
    for head_dim, words in ((8, "at least 16 channels"), (16, "None")):
        assert words in str(kernel.refusal(replace(problem, head_dim=head_dim, head_dim_v=head_dim)))

    def run(problem, operands, config):
        kernel.code.configure(problem)  # which raises what the compiler would
        return twin.code.run(problem, operands, twin.code.configure(problem))

    outcome = run_law(find_law("special_values_follow_policy"), kernel.altered(run=run), max_examples=6, seed=0)
    assert outcome.status == "pass", outcome


def test_an_empty_tensor_has_the_strides_of_its_shape():
    pytest.importorskip("torch", reason="needs torch")
    from fa3verify.tensors.convert import to_torch

    for name in ("fp16", "bf16", "e4m3"):
        x = to_torch(np.zeros((1, 0, 2, 64), FORMATS[name].dtype))
        assert x.shape == (1, 0, 2, 64)
        assert x.stride()[-1] == 1
    assert to_torch(np.zeros((0, 4), np.float32)).stride()[-1] == 1


@pytest.fixture
def on_a_cpu(monkeypatch):
    torch = pytest.importorskip("torch", reason="needs torch")
    from fa3verify.known import launches
    from fa3verify.tensors import convert as tensors

    monkeypatch.setattr(launches, "to_gpu", tensors.to_torch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return launches


@pytest.mark.parametrize("fault", [None, Fault.TRUNCATED_OUTPUT])
def test_a_library_is_compared_with_its_twin_bit_for_bit(on_a_cpu, monkeypatch, fault):
    from fa3verify.known.launches import LaunchOutput
    from fa3verify.tensors.convert import to_torch

    kernel, operands = KERNELS["flash3.bf16"], {}

    def load(name, operation):
        def prepare(problem, given, options):
            assert options == {"num_splits": 3, "pack_gqa": True}
            config = kernel.config_for(problem, options.items())
            out, lse = (faulty(fault) if fault else run_twin)(problem, operands["given"], config)
            return lambda: LaunchOutput(to_torch(out), to_torch(lse))

        return prepare

    monkeypatch.setattr(on_a_cpu, "loaded", load)
    problem = AttentionProblem(**(PLAIN | {"seqlen_k": 400}), dtype="bf16")
    changes = (("num_splits", 3), ("pack_gqa", True))
    case = Case(kernel.name, problem, Recipe("normal"), changes=changes)
    operands["given"] = case.operands()
    measures = judge(kernel, case).measures
    assert (measures["bits_differing"] == 0) == (fault is None)
    assert passes(kernel, measures) == (fault is None)


def test_a_library_that_raises_is_one_finding(on_a_cpu, monkeypatch):
    def broken(name, operation):
        raise OSError("libcudart.so.99: cannot open\nshared object file")

    monkeypatch.setattr(on_a_cpu, "loaded", broken)
    kernel = KERNELS["flash2.fp16"]
    case = Case(kernel.name, AttentionProblem(**PLAIN), Recipe("normal"))
    with pytest.raises(KernelError, match=r"OSError: libcudart\.so\.99: cannot open shared object file"):
        judge(kernel, case)


@pytest.mark.parametrize("causal", [False, True])
def test_torchs_math_is_within_its_bound_and_ignores_no_mask(on_a_cpu, causal):
    kernel = KERNELS["cuda.math.bf16"]
    case = Case(kernel.name, AttentionProblem(**PLAIN, dtype="bf16", causal=causal), Recipe("peaky"))
    assert passes(kernel, judge(kernel, case).measures)
    stated = AttentionProblem(**PLAIN, dtype="bf16", causal=not causal)
    wrong = kernel.altered(run=lambda problem, operands, config: kernel.code.run(stated, operands, config))
    assert not passes(kernel, judge(wrong, case).measures)


def test_every_module_of_the_table_loads_by_name(on_a_cpu):
    for name in ("flash2", "cudnn", "cuda.efficient", "cuda.math", "cuda.flex"):
        assert callable(on_a_cpu.loaded(name))
    for name in ("flash2", "cudnn"):
        assert callable(on_a_cpu.loaded(name, "backward"))
    with pytest.raises(Unsupported, match=r"libdew_flash_attn3\.so"):
        on_a_cpu.loaded("flash3.dew", "backward")
    with pytest.raises(Exception, match=r"fa3_fwd_C\.so"):
        on_a_cpu.loaded("flash3")


@pytest.fixture
def compiled(on_a_cpu, monkeypatch, tmp_path):
    """Every file of FlashAttention-4 that the adapter asks for; says which are loaded, and what is called."""
    from fa3verify.known import flash4

    calls = []

    def load_module(path):
        return SimpleNamespace(func=lambda *given: calls.append((Path(path).stem, given)))

    flash4._load.cache_clear()
    monkeypatch.setitem(sys.modules, "tvm_ffi", SimpleNamespace(load_module=load_module))
    monkeypatch.setattr(flash4, "library", lambda name: tmp_path / name)
    monkeypatch.setattr(flash4.ctypes, "CDLL", lambda path, mode: calls.append((Path(path).name, ())))
    yield calls
    flash4._load.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "head_dim", "causal"), [("fp16", 64, False), ("bf16", 128, True), ("bf16", 256, False)]
)
def test_flash4_runs_the_kernels_of_the_problem_on_tensors_of_its_shapes(compiled, dtype, head_dim, causal):
    import torch

    from fa3verify.known import flash4
    from fa3verify.known.launches import Given, GivenBackward

    problem = AttentionProblem(2, 3, 3, 90, 90, head_dim, dtype=dtype, causal=causal)
    kind = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    q, k, v, dout, out = (torch.zeros(2, 90, 3, head_dim, dtype=kind) for _ in range(5))
    names = f"{'float16' if dtype == 'fp16' else 'bfloat16'}_{head_dim}_{'causal' if causal else 'dense'}"
    for wants_lse, first in ((True, "fwd"), (False, "plain")):
        found = flash4.load("flash4")(problem, Given(q, k, v), {"lse": wants_lse})()
        name, given = compiled[-1]
        assert name == f"{first}_{names}"
        assert [x is y for x, y in zip(given, (q, k, v, found.out, found.lse))] == [True] * 5
        assert given[5] == problem.softmax_scale
        assert (found.out.shape, found.out.dtype) == (q.shape, kind)
        assert (found.lse is not None) == wants_lse
        assert found.lse is None or (tuple(found.lse.shape), found.lse.dtype) == (problem.lse_shape, torch.float32)
    x = GivenBackward(q, k, v, dout, out, torch.zeros(problem.lse_shape))
    dq, dk, dv = flash4.load_backward("flash4")(problem, x, {})()
    last = dict(compiled[-3:])
    assert list(last) == [f"{part}_{names}" for part in ("pre", "bwd", "post")]
    assert last[f"bwd_{names}"][7:9] == (dk, dv)
    assert last[f"post_{names}"][1] is dq
    assert compiled[0] == ("libcute_dsl_runtime.so", ())  # which every kernel needs


def test_flash4_refuses_what_no_kernel_was_compiled_for(compiled):
    from fa3verify.known import flash4
    from fa3verify.known.launches import Given

    prepare, plain = flash4.load("flash4"), AttentionProblem(**PLAIN | {"nheads_kv": 4})
    for problem, options, rule in (
        (AttentionProblem(**PLAIN), {}, "grouped heads"),
        (replace(plain, softcap=9.0), {}, "softcap"),
        (replace(plain, head_dim=96, head_dim_v=96), {}, "got 96"),
        (plain, {"num_splits": 2}, "options"),
    ):
        with pytest.raises(ValueError, match=rule):
            prepare(problem, Given(None, None, None), options)
    assert not compiled


def test_an_atlas_needs_a_kernel_that_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(here, "no_device", lambda: "no such device")
    result = CliRunner().invoke(main, ["atlas", "cuda.*", "cudnn.fp16", "--out", str(tmp_path / "out")])
    assert result.exit_code == 3
    assert "none of these kernels runs here: " in result.stderr
    assert CliRunner().invoke(main, ["atlas", "cudn.*", "--out", str(tmp_path / "out")]).exit_code == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "rows"), [("flash2", (90,)), ("cudnn", (90, 1)), ("cuda.efficient", (96,))])
def test_torchs_operators_give_an_lse_of_the_rows_of_the_problem_where_it_is_asked_for(
    on_a_cpu, monkeypatch, name, rows
):
    import torch

    from fa3verify.known import torch_sdpa

    def operator(*given, **options):
        """Return what torch 2.13's schemas say: out, lse, starts, longest, seed and offset."""
        return torch.zeros(1, 4, 90, 64), torch.zeros(1, 4, *rows), "starts q", "starts k", 90, 90, "seed", "offset"

    def backward(dout, q, k, v, out, lse, *rest, scale):
        assert (lse.shape, scale) == ((1, 4, *rows), 0.125)
        starts = ["starts q", "starts k", 90, 90]
        places = {
            "flash2": [*starts, 0.0, False, "seed", "offset"],
            "cudnn": ["seed", "offset", None, *starts, 0.0, False],
        }
        assert list(rest) == places[name]
        return q, k, v

    operators = {"flash2": "flash", "cudnn": "cudnn", "cuda.efficient": "efficient"}
    called = f"_scaled_dot_product_{operators[name]}_attention"
    monkeypatch.setattr(torch_sdpa, "_ATEN", SimpleNamespace(**{called: operator, f"{called}_backward": backward}))
    problem = AttentionProblem(**PLAIN)
    q, dout, out = (torch.zeros(problem.q_shape) for _ in range(3))
    k, v = (torch.zeros(problem.k_shape) for _ in range(2))
    for options, shape in (({}, problem.lse_shape), ({"lse": False}, None)):
        found = torch_sdpa.load(name)(problem, on_a_cpu.Given(q, k, v), options)()
        assert tuple(found.out.shape) == problem.out_shape
        assert (found.lse is None and shape is None) or tuple(found.lse.shape) == shape
    if name in BACKWARDS:
        given = on_a_cpu.GivenBackward(q, k, v, dout, out, torch.zeros(problem.lse_shape))
        gradients = torch_sdpa.load_backward(name)(problem, given, {})()
        assert [tuple(x.shape) for x in gradients] == [problem.q_shape, problem.k_shape, problem.v_shape]


def test_a_peer_without_a_family_is_configured_for_a_problem_with_slopes():
    problem = AttentionProblem(**PLAIN, term=ScoreTerm("alibi"))
    assert PEERS["flash2.vllm"].configure(problem) == PEERS["flash2.vllm"].configure(AttentionProblem(**PLAIN))


def test_only_rivals_are_timed():
    assert [name for name, peer in PEERS.items() if not peer.is_timed] == [
        "flash2.vllm",
        "cuda.efficient",
        "cuda.math",
    ]
    assert {name for name, peer in PEERS.items() if peer.gradients} == set(BACKWARDS)
