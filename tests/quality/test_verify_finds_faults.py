"""``verify --quick`` fails every planted fault, by properties, bound or baseline, never by comparing with a sound twin.

Each fault is run through the one task of the quick plan that is named here, with that plan's arguments, and through the
same summary and gate; of one fault the findings of a campaign are run again.
"""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from fa3_kernels.faults.table import BackwardFault, Fault, QuantizerFault
from fa3verify.campaign.introduction import introduce
from fa3verify.campaign.plan import plan
from fa3verify.campaign.run import Run
from fa3verify.campaign.summary import summarize
from fa3verify.campaign.tasks import Outcome
from fa3verify.cli.main import main
from fa3verify.judging import gate
from fa3verify.kernels import twins
from tests.sampling import sampled

pytestmark = pytest.mark.usefixtures("shared_references")

# fault -> (dtype, task of the quick plan that finds it, layer that says so)
FOUND_BY: dict[Fault, tuple[str, str, str]] = {
    Fault.DROPPED_LAST_TILE: ("bf16", "normal", "L1"),
    Fault.MISSED_RESCALE: ("bf16", "normal", "L1"),
    Fault.WRONG_SOFTMAX_SCALE: ("fp16", "normal", "L1"),
    Fault.STALE_V: ("e4m3", "normal", "L1"),
    Fault.SWAPPED_V_ROWS: ("e4m3", "normal", "L1"),
    Fault.NEIGHBOUR_Q_DESCALE: ("e4m3", "block_scaled", "L1"),
    Fault.NEIGHBOUR_K_DESCALE: ("e4m3", "block_scaled", "L1"),
    Fault.NEIGHBOUR_V_DESCALE: ("e4m3", "block_scaled", "L1"),
    Fault.FROZEN_V_RATIO: ("e4m3", "block_scaled", "L1"),
    Fault.DESCALES_IGNORED: ("e4m3", "normal", "L1"),
    Fault.NO_P_OFFSET: ("e4m3", "peaky", "L1"),
    Fault.NO_PROMOTION: ("e4m3", "offset_v", "L2"),
    Fault.TRUNCATED_P: ("e4m3", "offset_v", "L1"),
    Fault.BF16_P: ("fp16", "offset_v", "L1"),
    Fault.TRUNCATED_OUTPUT: ("bf16", "offset_v", "L1"),
    Fault.FP16_ROW_SUM: ("fp16", "offset_v", "L1"),
    Fault.FP16_ACCUMULATOR: ("fp16", "normal", "L1"),
    Fault.MISSING_COLUMN: ("fp16", "normal", "L1"),
    Fault.COARSE_EXP2: ("fp16", "normal", "L1"),
    Fault.UNMASKED_TAIL: ("fp16", "normal", "L1"),
    Fault.UNCLEARED_V_TAIL: ("fp16", "normal", "L1"),
    Fault.UNGUARDED_INF: ("fp16", "normal", "L1"),
    Fault.FINITE_SENTINEL: ("fp16", "softmax_shift_invariance", "laws"),
    Fault.CAUSAL_TOP_LEFT: ("fp16", "normal", "L1"),
    Fault.WINDOW_OFF_BY_ONE: ("fp16", "normal", "L1"),
    Fault.KV_HEAD_MODULO: ("fp16", "normal", "L1"),
    Fault.LSE_BASE_2: ("fp16", "normal", "L1"),
    Fault.LSE_KEEPS_OFFSET: ("e4m3", "normal", "L1"),
    Fault.UNGUARDED_COMBINE: ("e4m3", "empty_rows_are_zero", "laws"),
    Fault.SOFTCAP_AFTER_MASK: ("fp16", "normal", "L1"),
    Fault.UNCLAMPED_SCALE: ("e4m3", "faint", "L1"),
}
# One of every dtype, task and layer; the others are planted at night.
QUICK = (
    Fault.DROPPED_LAST_TILE,
    Fault.STALE_V,
    Fault.NEIGHBOUR_K_DESCALE,
    Fault.NO_PROMOTION,
    Fault.NO_P_OFFSET,
    Fault.TRUNCATED_P,
    Fault.BF16_P,
    Fault.TRUNCATED_OUTPUT,
    Fault.FINITE_SENTINEL,
    Fault.CAUSAL_TOP_LEFT,
    Fault.KV_HEAD_MODULO,
    Fault.LSE_BASE_2,
    Fault.LSE_KEEPS_OFFSET,
    Fault.UNGUARDED_COMBINE,
)
# faults of the quantiser, all shown by the bound in any family: its shapes have rotations, means, groups and several
# lengths
QUANTIZER_FOUND_BY: dict[QuantizerFault, tuple[str, str]] = dict.fromkeys(QuantizerFault, ("normal", "L1"))
QUANTIZER_FOUND_BY[QuantizerFault.TRUNCATED_CODES] = ("normal", "L2")  # the values come out too small as well
# faults of the backward, in fp16; rounding of weights shows where weights are known exactly
BACKWARD = "twin.flash3.dew.backward.fp16"
BACKWARD_FOUND_BY: dict[BackwardFault, tuple[str, str]] = dict.fromkeys(BackwardFault, ("normal", "L1"))
OF_A_SOFTCAP = {BackwardFault.NO_SOFTCAP_SLOPE, BackwardFault.SLOPE_OF_UNCAPPED}  # which that build does not take
BACKWARD_FOUND_BY[BackwardFault.EMPTY_ROW_LSE] = ("rows_without_a_key_have_zero_dq", "laws")


def summary_of(kernel: str, task_name: str) -> Run:
    introduced = [introduce(kernel, "quick")]
    task = next(t for t in plan(introduced, "quick", 0) if t.label == f"{kernel}: {task_name}")
    outcomes = [Outcome(task, task.run())]
    return summarize(introduced, outcomes, gate.shipped_baseline("quick", 0), profile="quick", seed=0)


def test_every_fault_has_a_finder():
    assert set(FOUND_BY) == set(Fault)
    assert set(QUANTIZER_FOUND_BY) == set(QuantizerFault)
    assert set(BACKWARD_FOUND_BY) == set(BackwardFault)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("fault", sampled(FOUND_BY, QUICK), ids=str)
def test_the_quick_plan_finds_the_fault(fault):
    dtype, task, layer = FOUND_BY[fault]
    summary = summary_of(f"twin.{dtype}+{fault}", task)
    assert summary.verdict == "fail"
    assert summary.layers[layer] == "fail", summary.layers
    assert all(f.message and f.content for f in summary.failures)


@pytest.mark.parametrize("fault", QUANTIZER_FOUND_BY, ids=str)
def test_the_quick_plan_finds_the_quantisers_fault(fault):
    task, layer = QUANTIZER_FOUND_BY[fault]
    summary = summary_of(f"twin.quantize+{fault}", task)
    assert summary.layers["L1"] == "fail", summary.layers
    assert summary.layers[layer] == "fail", summary.layers
    assert all(f.message and f.content for f in summary.failures)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("fault", BACKWARD_FOUND_BY, ids=str)
def test_the_quick_plan_finds_the_backwards_fault(fault):
    task, layer = BACKWARD_FOUND_BY[fault]
    kernel = "twin.backward.fp16" if fault in OF_A_SOFTCAP else BACKWARD
    summary = summary_of(f"{kernel}+{fault}", task)
    assert summary.layers[layer] == "fail", summary.layers
    if layer == "L1":
        assert summary.layers["L2"] == "fail", summary.layers
    assert all(f.message and f.content for f in summary.failures)


@pytest.mark.parametrize("task", sorted({task for task, _ in BACKWARD_FOUND_BY.values()}))
def test_the_same_tasks_pass_the_sound_backward(task):
    summary = summary_of(BACKWARD, task)
    assert summary.failures == ()
    assert task != "normal" or summary.layers["L2"] == "pass"


def test_the_same_task_passes_the_sound_quantiser():
    summary = summary_of("twin.quantize", "normal")
    assert summary.failures == ()
    assert (summary.layers["L1"], summary.layers["L2"]) == ("pass", "pass")


TASKS = sorted({(dtype, task) for dtype, task, _ in FOUND_BY.values()})


@pytest.mark.parametrize(
    ("dtype", "task"), sampled(TASKS, [("bf16", "normal"), ("e4m3", "offset_v"), ("fp16", "softmax_shift_invariance")])
)
def test_the_same_tasks_pass_the_unmutated_twin(dtype, task):
    assert summary_of(f"twin.{dtype}", task).failures == ()


@pytest.mark.usefixtures("in_this_process")
def test_a_campaign_fails_a_faulty_twin_and_its_findings_replay(tmp_path):
    name = f"twin.bf16+{Fault.DROPPED_LAST_TILE}"
    options = ["--quick", "--workers", "1", "--family", "normal", "--property", "error_within_bound"]
    run = CliRunner().invoke(main, ["verify", name, *options, "--out", str(tmp_path), "--json", "-"])
    assert run.exit_code == 1, run.output
    failures = json.loads(run.stdout)["failures"]
    law = next(f for f in failures if f["what"].startswith("law "))
    family = next(f for f in failures if f["what"].startswith("L1"))
    for failure in (law, family):
        replayed = CliRunner().invoke(main, ["replay", str(tmp_path / failure["replay"])])
        assert replayed.exit_code == 1, replayed.output
        assert json.loads((tmp_path / failure["replay"]).read_text())["is_finding"]
        cured = CliRunner().invoke(main, ["replay", str(tmp_path / failure["replay"]), "--kernel", "twin.bf16"])
        assert cured.exit_code == 0, cured.output


def test_no_twin_shares_its_name_with_a_faulty_one():
    assert all("+" not in candidate.name for candidate in twins.BUILT_IN)
