"""Operations: named outputs, cases of each that survive JSON, and a quantiser that is judged element by element."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from fa3_kernels.faults.table import QuantizerFault
from fa3_reference.problem import AttentionProblem
from fa3verify import operations
from fa3verify.campaign.profiles import PROFILES, families, family_cases
from fa3verify.campaign.replay_files import ReplayFile
from fa3verify.cases.case import Case
from fa3verify.commands import replay
from fa3verify.inputs.recipe import Recipe
from fa3verify.judging.judgement import judge, passes
from fa3verify.judging.verdict import What
from fa3verify.kernels import record, twins
from fa3verify.known import registry
from fa3verify.known.gluon import gpu
from fa3verify.operations import WrongOutput
from fa3verify.operations.forward import Result

PROBLEM = AttentionProblem(1, 2, 1, 40, 70, 64, dtype="e4m3")
OPTIONS = (("input_dtype", "bf16"), ("block_rows", (32, 64, 32)), ("rotate", True), ("subtract_k_mean", True))
CASE = Case("twin.quantize", PROBLEM, Recipe("normal"), changes=tuple(sorted(OPTIONS)), operation="quantize")
FORWARD = AttentionProblem(1, 1, 1, 3, 5, 64)
CONFIG = operations.find("forward").configure(FORWARD)


def test_a_result_is_taken_from_attributes_a_mapping_or_a_tuple():
    forward = operations.find("forward")
    out, lse = np.zeros(FORWARD.out_shape, np.float16), np.zeros(FORWARD.lse_shape, np.float32)
    for returned in (Result(out, lse), {"out": out, "lse": lse}, (out, lse)):
        named = forward.named(returned, FORWARD, CONFIG)
        assert named["out"] is out
        assert named["lse"] is lse
    assert list(forward.named(Result(out, None), FORWARD, CONFIG)) == ["out"]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (Result(np.zeros((1, 3)), None), r"returned out of shape \(1, 3\), expected \(1, 3, 1, 64\)"),
        ({}, "returned no out"),
        (None, "returned no out"),
    ],
)
def test_a_wrong_result_is_named(returned, words):
    with pytest.raises(WrongOutput, match=words):
        operations.find("forward").named(returned, FORWARD, CONFIG)


def test_a_missing_lse_correction_is_an_error_only_with_a_k_mean():
    operation = operations.find("quantize")
    config = operation.configure(PROBLEM, **dict(CASE.changes))
    whole = operation.named(operation.twin(PROBLEM, CASE.operands(), config), PROBLEM, config)
    assert set(whole) == {output.name for output in operation.outputs}
    plain = replace(config, subtract_k_mean=False)
    shapes = {name: x for name, x in whole.items() if name not in ("k_mean", "lse_correction")}
    assert operation.named(shapes, PROBLEM, plain).keys() == shapes.keys()
    with pytest.raises(WrongOutput, match="returned no k_mean"):
        operation.named(shapes, PROBLEM, config)


def test_cases_of_every_operation_survive_json():
    forward = Case("twin.fp16", FORWARD, Recipe("normal"), changes=(("num_splits", 2),))
    unsorted = replace(forward, changes=(("tile_n", 64), ("num_splits", 2)))
    for case in (CASE, forward, unsorted):
        assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case
    assert "operation" not in forward.to_json()  # as replay files of the first version have it


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"operation": "transpose"}, "unknown operation 'transpose'; known are forward, quantize"),
        ({"changes": (("tile_m", 64),)}, "changes must be configuration fields, got"),
        ({"operation": "forward"}, "scheme goes with e4m3"),
    ],
)
def test_a_case_that_does_not_fit_its_operation_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        replace(CASE, **change)


def test_a_kernel_of_another_operation_does_not_replay_a_case():
    body = ReplayFile("twin.quantize", What.from_json("L1 error / bound"), CASE.to_json())
    assert replay.run(body)[0]
    with pytest.raises(ValueError, match=r"is for operation quantize, twin\.e4m3 computes forward"):
        replay.run(body, "twin.e4m3")


def test_the_quantisers_quick_cases_have_every_option():
    cases = family_cases(registry.find("twin.quantize"), "normal", PROFILES["quick"], 0)
    problems, changes = [case.problem for case in cases], [dict(case.changes) for case in cases]
    assert any(p.is_varlen for p in problems)
    assert any(p.group > 1 and c.get("scope") == "head" for p, c in zip(problems, changes))
    for option, values in {
        "rotate": {True, None},
        "subtract_k_mean": {True, None},
        "scale": {"power_of_two", None},
        "scope": {"head", None},
        "input_dtype": {"bf16", None},
    }.items():
        assert {c.get(option) for c in changes} == values, option


@pytest.mark.parametrize("name", ["twin.fp16", "twin.e4m3", "twin.e4m3_chained", "gluon.fp16", "gluon.e4m3_chained"])
@pytest.mark.parametrize("profile", ["quick", "release"])
def test_the_forwards_cases_have_every_configuration_that_its_kernel_can_take(name, profile):
    kernel = next(c for c in (*twins.BUILT_IN, *twins.ON_REQUEST, *gpu()) if c.name == name)
    values: dict[str, set] = {}
    cases = [
        c for family in families(kernel, PROFILES[profile]) for c in family_cases(kernel, family, PROFILES[profile], 0)
    ]
    for case in cases:
        config = kernel.config_for(case.problem, case.changes)
        for option, value in case.changes:
            assert getattr(config, option) == value
            values.setdefault(option, set()).add(value)
        if name.startswith("gluon"):
            kernel.code.launchable(case.problem, config)  # refuses what no launch has
    promoted = {"promotion_interval": {64, 0}} if name == "twin.e4m3" else {}
    fp8 = {"out_dtype": {"fp16"}} if kernel.dtype == "e4m3" else {}
    assert values == {"num_splits": {3}, "pack_gqa": {True}, **promoted, **fp8}


def test_a_kernel_that_names_no_fields_is_given_its_own_configuration():
    kernel = replace(registry.find("twin.e4m3"), changeable=frozenset())
    assert not any(case.changes for case in family_cases(kernel, "normal", PROFILES["release"], 0))


def test_outputs_too_small_for_fp16_stay_in_bf16():
    kernel = registry.find("twin.e4m3")
    changes = {
        family: [dict(case.changes) for case in family_cases(kernel, family, PROFILES["quick"], 0)]
        for family in ("faint", "tiny")
    }
    assert [any("out_dtype" in c for c in changes[family]) for family in changes] == [False, True]


def _with_one_code_moved(name: str, index: tuple[int, ...]) -> record.Kernel:
    """The twin but for one code that is the next number."""
    twin = registry.find("twin.quantize")

    def run(problem, operands, config):
        stored = twin.code.run(problem, operands, config)
        codes = getattr(stored, name).copy()
        codes.view(np.uint8)[index] ^= 1
        return replace(stored, **{name: codes})

    return twin.altered(run=run)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_single_wrong_code_breaks_the_bound(name):
    sound = judge(registry.find("twin.quantize"), CASE)
    assert passes(registry.find("twin.quantize"), sound.measures)
    kernel = _with_one_code_moved(name, (0, 7, 0, 5))
    judged = judge(kernel, CASE)
    assert judged.measures["ratio_max"] > 100
    assert not passes(kernel, judged.measures)


@pytest.mark.parametrize("fault", QuantizerFault)
def test_a_faulty_quantiser_differs_from_its_twin(fault):
    kernel = replace(registry.find(f"twin.quantize+{fault}"), twin=registry.find("twin.quantize"))
    cases = family_cases(registry.find("twin.quantize"), "normal", PROFILES["quick"], 0)
    assert any(judge(kernel, case).measures["bits_differing"] for case in cases)


def test_faults_belong_to_an_operation():
    with pytest.raises(ValueError, match="unknown fault 'stale_v' of quantize; known are neighbour_descale"):
        registry.find("twin.quantize+stale_v")


def test_a_default_softmax_scale_is_the_quantisers_own(monkeypatch):
    """A wrong default is found, although every problem states a number."""
    kernel = registry.find("twin.quantize")
    problem = AttentionProblem(1, 2, 1, 70, 33, 64, dtype="e4m3")
    default = Case(kernel.name, problem, Recipe("normal"), changes=(("subtract_k_mean", True),), operation="quantize")
    stated = replace(default, problem=replace(problem, softmax_scale=0.5))
    monkeypatch.setattr(
        "fa3_kernels.twin.quantize.lse_factor", lambda scale, channels: np.float32(2 if scale is None else scale)
    )
    assert passes(kernel, judge(kernel, stated).measures)
    assert not passes(kernel, judge(kernel, default).measures)
