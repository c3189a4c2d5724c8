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
from tests.quality.found_by import DEW, Found, of
from tests.sampling import sampled

pytestmark = pytest.mark.usefixtures("shared_references")

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


def summary_of(kernel: str, task_name: str) -> Run:
    introduced = [introduce(kernel, "quick")]
    task = next(t for t in plan(introduced, "quick", 0) if t.label == f"{kernel}: {task_name}")
    outcomes = [Outcome(task, task.run())]
    return summarize(introduced, outcomes, gate.shipped_baseline("quick", 0), profile="quick", seed=0)


def failed(found: Found) -> Run:
    """Return what the task of a row says of its kernel, which fails the layer named there."""
    summary = summary_of(str(found), found.quick.task)
    assert summary.verdict == "fail"
    assert summary.layers[found.quick.layer] == "fail", summary.layers
    assert all(f.message and f.content for f in summary.failures)
    return summary


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("found", sampled(of(Fault), [row for row in of(Fault) if row.fault in QUICK]), ids=str)
def test_the_quick_plan_finds_the_fault(found):
    failed(found)


@pytest.mark.parametrize("found", of(QuantizerFault), ids=str)
def test_the_quick_plan_finds_the_quantisers_fault(found):
    assert failed(found).layers["L1"] == "fail"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("found", of(BackwardFault), ids=str)
def test_the_quick_plan_finds_the_backwards_fault(found):
    assert failed(found).layers["L2"] == "fail" or found.quick.layer == "laws"


@pytest.mark.parametrize("task", sorted({found.quick.task for found in of(BackwardFault)}))
def test_the_same_tasks_pass_the_sound_backward(task):
    summary = summary_of(DEW, task)
    assert summary.failures == ()
    assert task != "normal" or summary.layers["L2"] == "pass"


def test_the_same_task_passes_the_sound_quantiser():
    summary = summary_of("twin.quantize", "normal")
    assert summary.failures == ()
    assert (summary.layers["L1"], summary.layers["L2"]) == ("pass", "pass")


TASKS = sorted({found.quick[:2] for found in of(Fault)})
FEW_TASKS = [("twin.bf16", "normal"), ("twin.e4m3", "offset_v"), ("twin.fp16", "softmax_shift_invariance")]


@pytest.mark.parametrize(("kernel", "task"), sampled(TASKS, FEW_TASKS))
def test_the_same_tasks_pass_the_unmutated_twin(kernel, task):
    assert summary_of(kernel, task).failures == ()


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
    assert all("+" not in kernel.name for kernel in twins.BUILT_IN)
