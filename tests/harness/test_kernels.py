"""Kernels: found by name, by fault, by module:function; third parties are judged like the twins."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from fa3_kernels.faults.table import Fault
from fa3_kernels.plan.config import default_config
from fa3_kernels.plan.families import FAMILIES
from fa3_reference.problem import AttentionProblem
from fa3verify import operations
from fa3verify.campaign import plan as planned
from fa3verify.campaign.profiles import PROFILES, family_cases
from fa3verify.cases import coverage, space
from fa3verify.cli.main import main
from fa3verify.judging.judgement import judge
from fa3verify.judging.verdict import What
from fa3verify.kernels import loading, record, twins
from fa3verify.known import registry
from fa3verify.known.gluon import gpu
from fa3verify.known.registry import find
from fa3verify.operations.operation import SERVING
from fa3verify.properties import runner
from fa3verify.properties.serving import SERVING_LAWS
from fa3verify.properties.structure import STRUCTURE_LAWS
from fa3verify.tensors import here as gpu_room
from tests.conftest import subject


@pytest.fixture
def beside_third_party(monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_every_twin_takes_every_fault():
    for fault in Fault:
        assert registry.find(f"twin.e4m3+{fault}").fault is fault


def test_a_kernel_is_never_sent_what_it_does_not_support():
    kernel = record.Kernel("k", "fp16", record.Functions(lambda *a: None, default_config), frozenset({"causal"}))
    plain = {"batch": 1, "nheads": 2, "nheads_kv": 2, "seqlen_q": 8, "seqlen_k": 8, "head_dim": 64}
    assert kernel.supports(AttentionProblem(**plain, causal=True))
    assert not kernel.supports(AttentionProblem(**plain, softcap=1.0))
    assert not kernel.supports(AttentionProblem(**(plain | {"nheads_kv": 1})))
    assert not kernel.supports(AttentionProblem(**plain, dtype="bf16"))


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("twin.flash3.dew.fp16", {"softcap": 1.0}),
        ("twin.flash3.e4m3", {"window": (3, 3)}),
        ("twin.cudnn.bf16", {"causal": True, "seqlen_k": 16}),  # their causal masks start at the top left
        ("twin.cudnn.fp16", {"causal": True, "seqlen_k": 16}),
        ("twin.triton_unscaled.fp16", {"seqlen_k": 72}),
    ],
)
def test_a_twin_of_a_released_kernel_runs_its_familys_order_and_refuses_what_it_does_not_know(name, refused):
    kernel = registry.find(name)
    plain = {"batch": 1, "nheads": 2, "nheads_kv": 2, "seqlen_q": 64, "seqlen_k": 64, "head_dim": 64}
    problem = AttentionProblem(**plain, dtype=kernel.dtype)
    assert kernel.supports(problem)
    assert not kernel.supports(replace(problem, **refused))
    config = kernel.code.configure(problem)
    assert kernel.order is not None
    assert kernel.order(config).order == FAMILIES[config.family].order.softmax
    assert FAMILIES[config.family].version in kernel.description


def verify(tmp_path, name: str, *more: str):
    arguments = ["verify", name, "--quick", "--workers", "2", "--out", str(tmp_path), "--json", "-"]
    return CliRunner().invoke(main, [*arguments, *more])


FEW = ("normal", "offset_v", "repeated_run_is_identical")


@pytest.fixture
def few_tasks(in_this_process, monkeypatch):
    """Some families and properties, in this process, of which a verdict is given all the same."""
    plan = planned.plan
    monkeypatch.setattr(planned, "plan", lambda *given: [t for t in plan(*given) if subject(t) in FEW])
    monkeypatch.setattr(coverage, "REQUIRED", 0.0)


@pytest.mark.parametrize(("name", "code"), [("sound", 0), ("only_64", 0), ("only_64_broken", 1)])
def test_a_third_party_kernel_gets_its_verdict_on_shapes_that_it_takes(
    beside_third_party, few_tasks, tmp_path, name, code
):
    result = verify(tmp_path, f"third_party:{name}")
    assert result.exit_code == code, result.output[-2000:]
    (kernel,) = json.loads(result.stdout)["kernels"]
    assert kernel["name"] == f"third_party:{name}"
    assert {family["family"] for family in kernel["families"]} == {*FEW[:2]}
    assert name == "sound" or kernel["tried"]["head_dim"] == [64]
    assert (kernel["worst_ratio"] <= 1) == (code == 0)
    replay = CliRunner().invoke(main, ["replay", str(tmp_path / kernel["worst"]["replay"])])
    assert replay.exit_code == code, replay.output


@pytest.mark.usefixtures("in_this_process")
def test_a_kernel_that_refuses_everything_is_inconclusive(beside_third_party, tmp_path):
    result = verify(tmp_path, "third_party:picky", "--family", "normal")
    assert result.exit_code == 5, result.output[-2000:]
    (kernel,) = json.loads(result.stdout)["kernels"]
    assert "the kernel refuses: nothing is supported" in kernel["inconclusive"]
    assert "nothing is supported" in (tmp_path / "report.html").read_text()


@pytest.mark.nightly
def test_a_sound_third_party_kernel_passes_and_its_worst_case_replays(beside_third_party, tmp_path):
    result = verify(tmp_path, "third_party:sound")
    assert result.exit_code == 0, result.stderr
    kernel = json.loads(result.stdout)["kernels"][0]
    assert kernel["name"] == "third_party:sound"
    assert kernel["worst_ratio"] <= 1
    replay = CliRunner().invoke(main, ["replay", str(tmp_path / kernel["worst"]["replay"])])
    assert replay.exit_code == 0, replay.output


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["picky", "evasive"])
def test_a_kernel_that_refuses_is_inconclusive_and_the_constraint_is_named(beside_third_party, tmp_path, name):
    result = verify(tmp_path, f"third_party:{name}")
    assert result.exit_code == 5, result.output
    (kernel,) = json.loads(result.stdout)["kernels"]
    assert kernel["verdict"] == "inconclusive"
    constraint = "nothing is supported" if name == "picky" else "at most 64 keys, got"
    assert f"the kernel refuses: {constraint}" in kernel["inconclusive"]
    assert "INCONCLUSIVE" in (tmp_path / "report.md").read_text()
    assert constraint in (tmp_path / "report.html").read_text()


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "code"), [("only_64", 0), ("only_64_broken", 1), ("in_whole_tiles", 0)])
def test_a_narrow_kernel_is_judged_on_shapes_adapted_to_it(beside_third_party, tmp_path, name, code):
    result = verify(tmp_path, f"third_party:{name}")
    assert result.exit_code == code, result.output[-2000:]
    summary = json.loads(result.stdout)
    (kernel,) = summary["kernels"]
    assert len(kernel["families"]) >= 25
    assert not any("misaligned" in f["message"] or "Unsatisfiable" in f["message"] for f in summary["failures"])
    tried = {kind: (n["tried"], n["claimed"]) for kind, n in kernel["coverage"]["kinds"].items()}
    assert tried.get("head_dim") == ((1, 1) if name == "in_whole_tiles" else None)  # the others declare none
    assert kernel["tried"]["head_dim"] == [64]
    assert tried["property"][0] >= 0.75 * tried["property"][1]


def test_a_kernel_with_a_twin_is_compared_bit_for_bit():
    from fa3verify.cases.case import Case
    from fa3verify.inputs.recipe import Recipe
    from fa3verify.judging.family import FamilyRow, Figured
    from fa3verify.judging.gate import bit_rows
    from fa3verify.judging.judgement import judge

    case = Case("twin.fp16", AttentionProblem(1, 1, 1, 8, 40, 64), Recipe("normal"))
    for fault, differs in ((None, False), (Fault.TRUNCATED_OUTPUT, True)):
        kernel = replace(twins.twin("fp16", fault=fault), twin=find("twin.fp16"))
        count = judge(kernel, case).measures["bits_differing"]
        assert (count > 0) == differs
        body = Figured("k", (FamilyRow("normal", {"bits_differing": count}),))
        assert [row.status for row in bit_rows(body)] == ["fail" if differs else "pass"]


GPU_KERNELS = {
    "gluon.fp16",
    "gluon.bf16",
    "gluon.e4m3",
    "gluon.e4m3_chained",
    "gluon.quantize",
    "gluon.backward.fp16",
    "gluon.backward.bf16",
}
GPU_FORWARDS = [kernel for kernel in gpu() if kernel.operation == "forward"]


def test_gpu_kernels_are_listed_with_the_reason_they_cannot_run():
    listed = {c.name: c for c in registry.discover().values() if c.name.startswith("gluon.")}
    assert set(listed) == GPU_KERNELS
    for kernel in listed.values():
        assert kernel.twin is not None
        assert kernel.twin.dtype == kernel.dtype
        assert kernel.unavailable == gpu_room.unavailable()


def test_gpu_kernels_take_what_their_launch_takes():
    for kernel in GPU_FORWARDS:
        sizes = {"nheads": 4, "nheads_kv": 2, "dtype": kernel.dtype}
        plain = AttentionProblem(1, seqlen_q=100, seqlen_k=300, head_dim=64, **sizes)
        packed = AttentionProblem.varlen((100, 200), (300, 200), head_dim=64, causal=True, **sizes)
        for problem in (plain, replace(plain, window=(10, 3), softcap=5.0), replace(plain, head_dim_v=32), packed):
            assert kernel.supports(problem), problem
        odd = replace(plain, head_dim=60, head_dim_v=60)
        assert not kernel.supports(odd)
        with pytest.raises(ValueError, match="head_dim must be a multiple of"):
            kernel.code.configure(odd)


def test_a_gpu_kernel_and_its_twin_have_one_configuration():
    for kernel in GPU_FORWARDS:
        problem = AttentionProblem(1, 4, 4, 256, 512, 128, dtype=kernel.dtype, causal=True)
        assert kernel.code.configure(problem) == kernel.twin.code.configure(problem)


def test_a_gpu_kernel_refuses_a_configuration_that_no_launch_has():
    kernel = gpu()[0]
    problem = AttentionProblem(1, 4, 4, 256, 512, 128)
    for change, match in (({"num_stages": 3}, "only tile, num_splits"), ({"tile_n": 96}, "tile_n must be a power")):
        with pytest.raises(ValueError, match=match):
            kernel.code.run(problem, None, replace(kernel.code.configure(problem), **change))


OF_GPU = tuple(law for law in (*STRUCTURE_LAWS, *SERVING_LAWS) if law.applies(gpu()[0]))


@pytest.mark.parametrize("law", OF_GPU, ids=lambda law: law.name)
@pytest.mark.parametrize("name", ["gluon.fp16", "gluon.e4m3"])
def test_no_law_asks_a_gpu_kernel_for_a_configuration_that_no_launch_has(name, law):
    kernel = next(c for c in gpu() if c.name == name)
    twin = kernel.twin

    def run(problem, operands, config):
        kernel.code.launchable(problem, config)
        blocks = [x.block_rows for x in (operands.q_descale, operands.k_descale, operands.v_descale) if x]
        serves = problem.serving - {"attention_chunk"}
        assert not serves or not any(blocks), "no function for caches takes descales of blocks"
        return twin.code.run(problem, operands, config)

    def launchable(problem, config):
        return problem.serving and kernel.code.launchable(problem, config)

    asked = kernel.altered(run=run, launchable=launchable)
    judged = runner.run_law(law, asked, max_examples=6, seed=0, shrink_seconds=0)
    assert judged.status == ("pass" if law.applies(kernel) else "not_applicable"), judged.violation


# Dimensions of what operands hold: no launch chooses by them, and without them an array is made in a third of the time.
OF_OPERANDS = {"inputs", "scale", "descales", "rotation", "centring", "scaling"}


@pytest.mark.parametrize("name", ["gluon.fp16", "gluon.e4m3"])
def test_no_case_of_the_covering_array_asks_a_gpu_kernel_for_a_configuration_that_no_launch_has(name, monkeypatch):
    from fa3verify.campaign.cover import cover

    kernel = next(c for c in gpu() if c.name == name)
    of_launches = {name: of for name, of in space.claimed(kernel).items() if name not in OF_OPERANDS}
    monkeypatch.setattr(space, "claimed", lambda kernel: of_launches)
    cases = [case for _, case in cover(kernel, 2, 0) if case]
    assert any(dict(case.changes).get("pack_gqa") for case in cases)
    needed = frozenset().union(*(case.problem.serving for case in cases))
    assert needed == kernel.features & SERVING
    for case in cases:
        config = replace(kernel.code.configure(case.problem), **dict(case.changes))
        kernel.code.launchable(case.problem, config)


def test_a_kernel_without_block_descales_is_never_sent_any():
    from fa3verify.campaign.profiles import PROFILES, family_cases

    per_head = replace(twins.twin("e4m3"), features=operations.FEATURES - {"block_descale"})
    schemes = {case.scheme.granularity for case in family_cases(per_head, "normal", PROFILES["quick"], 0)}
    assert schemes == {"head"}


def test_a_replay_fails_while_a_bit_differs_from_the_twin(monkeypatch):
    from fa3verify.campaign.replay_files import ReplayFile
    from fa3verify.cases.case import Case
    from fa3verify.commands import replay
    from fa3verify.inputs.recipe import Recipe

    case = Case("k", AttentionProblem(1, 1, 1, 8, 500, 64), Recipe("normal"))
    body = ReplayFile("k", What.from_json("L0 bits that differ from the twin"), case.to_json())
    twin, find = twins.twin("fp16"), registry.find
    for num_splits, holds in ((1, True), (3, False)):

        def run(problem, operands, config, num_splits=num_splits):
            return twin.code.run(problem, operands, replace(config, num_splits=num_splits))

        kernel = replace(twin.altered(run=run), name="k", twin=twin)
        monkeypatch.setattr(registry, "find", lambda name, kernel=kernel: kernel if name == "k" else find(name))
        passes, _, measures = replay.run(body)
        assert measures["ratio_max"] <= 1
        assert passes is holds


def test_a_known_defect_of_a_released_kernel_comes_out_by_itself():
    """Finding 0003: NaN where the product of the descales underflows, which the bound does not excuse."""
    (case, *_) = family_cases(find("twin.flash3.e4m3"), "faint", PROFILES["quick"], 0)
    measures = judge(find("twin.flash3.e4m3"), case).measures
    assert measures["ratio_max"] == math.inf
    assert measures["nonfinite"] > 0
    assert judge(find("twin.e4m3"), replace(case, kernel="twin.e4m3")).measures["ratio_max"] <= 1


def test_a_file_that_is_not_there_is_named_with_the_folder_that_it_was_sought_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"no file absent\.py in {tmp_path}"):
        loading.load("absent.py:kernel")


KNOWN = registry.discover()
PAIRS = sorted(
    (name, twin)
    for name, kernel in KNOWN.items()
    for twin in [kernel.twin.name if kernel.twin else f"twin.{name}"]
    if not name.startswith("twin.") and twin in KNOWN
)


@pytest.mark.parametrize(("name", "twin"), PAIRS)
def test_a_twin_and_its_kernel_are_judged_under_the_same_declarations(name, twin):
    """flash3.dew declared that it takes no sequence without keys, its twin did not: one passed and the other failed."""
    assert KNOWN[name].declared == KNOWN[twin].declared
    assert KNOWN[name].policy == KNOWN[twin].policy


def test_every_kernel_with_a_twin_has_been_compared_with_it():
    assert {"flash2.fp16", "flash3.dew.bf16", "flash3.dew.backward.fp16", "cudnn.fp16", "gluon.e4m3"} <= {
        x for x, _ in PAIRS
    }


MODULES = {  # what is wrong with a user's file, and what is said of it
    "undecorated:attention": (
        "def attention(q, k, v, *, softmax_scale, causal=False):\n    return q\n",
        "attention takes q, k, v, softmax_scale; write @fa3verify.kernel(...) above it",
    ),
    "bare:attention": (
        "def attention(q=None, k=None, v=None):\n    return q\n",
        "must be declared by @fa3verify.kernel(...), or return a fa3verify Kernel, got NoneType",
    ),
    "unclosed:attention": (
        "def attention(q,\n    return q\n",
        "SyntaxError: '(' was never closed (unclosed.py, line 1)",
    ),
    "divides:attention": (
        "def half(n):\n    return n / 0\n\n\nhalf(1)\n",
        "ZeroDivisionError: division by zero (divides.py:2 in half: return n / 0)",
    ),
    "imports:attention": ("import nowhere_to_be_found\n", "(imports.py:1 in <module>: import nowhere_to_be_found)"),
    "misspelt:atention": (
        "def attention(q):\n    return q\n",
        "misspelt.py has no function atention; did you mean attention?",
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_file_that_gives_no_kernel_is_a_mistake_of_usage_that_says_what_to_write(name, tmp_path, monkeypatch):
    text, words = MODULES[name]
    module, _, function = name.partition(":")
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ValueError, match="kernel '") as caught:
        loading.load(f"{module}.py:{function}")
    assert type(caught.value) is ValueError  # and no finding of the kernel
    assert words in str(caught.value)


def test_an_undecorated_function_is_no_finding_of_verify(tmp_path, monkeypatch):
    (tmp_path / "plain_function.py").write_text(MODULES["undecorated:attention"][0])
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["verify", "plain_function.py:attention", "--quick", "--workers", "1"])
    assert result.exit_code == 2
    assert "@fa3verify.kernel(...)" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("twin.fp61", "unknown kernel 'twin.fp61'; did you mean twin.fp16?"),
        ("twn.quantise", "did you mean twin.quantize?"),
        ("twin.fp61+truncated_p", "did you mean twin.fp16?"),
        ("something else", "unknown kernel 'something else'; 'fa3verify kernels' lists them all"),
    ],
)
def test_an_unknown_kernel_is_answered_by_the_name_that_was_meant_and_no_list(name, words):
    with pytest.raises(ValueError, match=r"FILE\.py:FUNCTION") as caught:
        find(name)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("twin.fp16@77", "twin.fp16 does not take head_dim 77: head_dim must be a multiple of 8 in"),
        ("twin.e4m3@64,40", "twin.e4m3 does not take head_dim 40: head_dim must be a multiple of 16 in"),
        ("twin.quantize@24", "must be a multiple of 16"),
        ("twin.backward.bf16@20", "head_dim must be a multiple of 8"),
        ("twin.triton_unscaled.fp16@128", "takes head_dim 64, not 128"),
        ("third_party:only_64@128", "head_dim must be 64, got 128"),
        ("third_party:sound@300", "head_dim must be at most 256, got 300"),
        ("twin.fp16@64@64", "head dims stand once behind a kernel's name"),
        ("twin.fp16@64,128@64", "head dims stand once"),
    ],
)
def test_a_head_dim_that_a_kernel_does_not_take_is_refused_with_the_rule(beside_third_party, name, rule):
    with pytest.raises(ValueError, match="head") as caught:
        find(name)
    assert rule in str(caught.value)


@pytest.mark.parametrize("name", ["twin.fp16@8,40,256", "twin.e4m3@16", "twin.cudnn.bf16@64", "third_party:sound@77"])
def test_a_head_dim_that_a_kernel_takes_is_part_of_its_name(beside_third_party, name):
    kernel = find(name)
    assert kernel.name == name
    assert kernel.head_dims == tuple(map(int, name.partition("@")[2].split(",")))
