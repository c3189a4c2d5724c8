"""The gate: what was not compared never passes, margins are exact, damaged baselines are refused by name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fa3verify import operations
from fa3verify.campaign.plan import JudgeFamily
from fa3verify.campaign.profiles import PROFILES, families
from fa3verify.judging.family import FamilyRow, Figured, family_row
from fa3verify.judging.gate import (
    POLICY,
    Baseline,
    baseline_rows,
    bit_rows,
    bound_rows,
    failed_parts,
    layer_status,
    read_baseline,
    shipped_baseline,
)
from fa3verify.kernels import twins
from fa3verify.known import registry

FIGURES = {
    "rel_rmse_seen": 1e-3,
    "rel_rmse_unrounded": 2e-3,
    "bias": -1e-4,
    "ratio_max": 0.5,
    "ratio_lse_max": 0.2,
    "lse_max_error": 1e-5,
    "lse_rms_error": 3e-6,
    "bit_equal": 0.9,
    "nonfinite": 0,
}
HELD = (*twins.BUILT_IN, *(kernel for kernel in twins.ON_REQUEST if kernel.operation == "backward"))
KERNEL = Figured("twin.fp16", (FamilyRow("normal", FIGURES),))
BASELINE = Baseline.of("quick", 0, [KERNEL])


def worse(family: str = "normal", **changes) -> Figured:
    return Figured("twin.fp16", (FamilyRow(family, FIGURES | changes),))


def statuses(kernel: Figured, baseline: Baseline | None = BASELINE) -> dict[str, str]:
    return {row.rule: row.status for row in baseline_rows(kernel, baseline)}


def test_an_unchanged_kernel_drifts_nowhere():
    assert set(statuses(KERNEL).values()) == {"pass"}


@pytest.mark.parametrize("rule", POLICY, ids=lambda rule: rule.measure)
def test_each_rule_passes_at_its_margin_and_fails_beyond(rule):
    stored = BASELINE.kernels["twin.fp16"]["normal"][rule.measure]
    limit = stored * (1 + rule.relative) + rule.absolute
    for value, status in ((limit * (1 - 1e-6), "pass"), (limit * (1 + 1e-6) + 1e-12, "fail")):
        key, shown = {
            "abs_bias": ("bias", -value),
            "not_bit_equal": ("bit_equal", 1 - value),
        }.get(rule.measure, (rule.measure, value))
        assert statuses(worse(**{key: shown}))[rule.measure] == status


def test_twice_the_figure_fails_by_every_rule_of_figures_that_are_not_0():
    doubled = worse(**{k: 2 * x for k, x in FIGURES.items() if isinstance(x, float)} | {"bit_equal": 0.8})
    found = statuses(doubled)
    assert {found[rule.measure] for rule in POLICY if rule.measure != "nonfinite"} == {"fail"}


def test_a_share_of_few_outputs_may_grow_by_four_standard_deviations_of_its_count():
    """100 of 1,000,000 outputs: 5 more are 5 %, 40 are four deviations; 2 % and 0.01 would allow 10,002 more."""
    rare = FIGURES | {"outputs": 1_000_000}
    baseline = Baseline.of("quick", 0, [worse(**rare | {"bit_equal": 1 - 100e-6})])
    for count, status in ((100, "pass"), (144, "pass"), (146, "fail")):
        assert statuses(worse(**rare | {"bit_equal": 1 - count * 1e-6}), baseline)["not_bit_equal"] == status


def test_a_share_of_many_outputs_keeps_its_plain_margin():
    many = FIGURES | {"outputs": 1000}
    baseline = Baseline.of("quick", 0, [worse(**many | {"bit_equal": 0.5})])
    for share, status in ((0.519, "pass"), (0.521, "fail")):
        assert statuses(worse(**many | {"bit_equal": 1 - share}), baseline)["not_bit_equal"] == status


def test_a_better_kernel_passes():
    assert set(statuses(worse(rel_rmse_seen=1e-4, bias=0.0, bit_equal=1.0)).values()) == {"pass"}


def test_without_a_baseline_nothing_passes():
    rows = baseline_rows(KERNEL, None)
    assert {row.status for row in rows} == {"not compared"}
    assert layer_status(rows, "L2") == "not compared"


def test_a_family_missing_from_the_baseline_is_not_compared():
    assert set(statuses(worse(family="new")).values()) == {"not compared"}


def test_a_figure_missing_from_an_older_baseline_is_not_compared():
    new = {"rel_rmse_unrounded", "lse_rms_error"}
    figures = {m: x for m, x in BASELINE.kernels["twin.fp16"]["normal"].items() if m not in new}
    older = Baseline.parse(Baseline("quick", 0, {"twin.fp16": {"normal": figures}}).text(), "older.json")
    assert {rule for rule, status in statuses(KERNEL, older).items() if status == "not compared"} == new
    assert statuses(worse(rel_rmse_seen=2e-3), older)["rel_rmse_seen"] == "fail"


def test_an_infinite_relative_error_is_no_baseline_and_worse_than_any():
    infinite = worse(rel_rmse_unrounded=float("inf"))
    assert statuses(infinite, Baseline.of("quick", 0, [infinite]))["rel_rmse_unrounded"] == "not compared"
    assert statuses(infinite)["rel_rmse_unrounded"] == "fail"


def test_a_kernel_without_lse_is_not_compared_in_it():
    silent = worse(lse_max_error=None, lse_rms_error=None)
    assert not {"lse_max_error", "lse_rms_error"} & set(statuses(silent))


def test_quantising_stays_within_its_own_bound_where_there_is_any():
    def rows(ratio: float | None) -> list[str]:
        return [row.status for row in bound_rows(worse(quantisation_bound_ratio=ratio)) if "quantis" in row.rule]

    assert (rows(1.0), rows(1.001), rows(None)) == (["pass"], ["fail"], [])


def test_a_planted_fault_is_compared_with_the_twin_it_claims_to_be():
    faulty = replace(worse(rel_rmse_seen=2e-3), name="twin.fp16+truncated_p")
    assert statuses(faulty)["rel_rmse_seen"] == "fail"


@pytest.mark.parametrize("change", [{"ratio_max": 1.001}, {"ratio_lse_max": float("inf")}, {"nonfinite": 1}])
def test_the_bound_layer_fails_above_one(change):
    assert layer_status(bound_rows(worse(**change)), "L1") == "fail"
    assert layer_status(bound_rows(KERNEL), "L1") == "pass"


def test_a_nan_figure_never_passes():
    assert statuses(worse(rel_rmse_seen=float("nan")))["rel_rmse_seen"] == "fail"


def test_a_baseline_survives_its_file(tmp_path):
    path = tmp_path / "b.json"
    path.write_text(BASELINE.text())
    read = read_baseline(path)
    assert replace(read, sha256="", name="") == BASELINE
    assert read.name == "b.json"
    assert len(read.sha256) == 64


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"schema": "other/1"}',
        json.dumps({"schema": "fa3verify.baseline/1"}),
        BASELINE.text().replace('"ratio_max"', '"ratio"'),
        BASELINE.text().replace("0.5", '"half"'),
    ],
)
def test_a_damaged_or_foreign_baseline_is_refused_by_name(tmp_path, text):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"bad\.json is (not a|a damaged) baseline"):
        read_baseline(path)


def test_a_missing_baseline_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        read_baseline(tmp_path / "none.json")


@pytest.mark.parametrize("profile", ["quick", "release"])
@pytest.mark.parametrize("kernel", HELD, ids=lambda kernel: kernel.name)
def test_every_shipped_twin_has_a_baseline_of_every_family(kernel, profile):
    """Twins of our kernels, and of every backward."""
    stored = shipped_baseline(profile, 0)
    assert stored is not None
    assert set(families(kernel, PROFILES[profile])) <= set(stored.kernels[kernel.name])


@pytest.mark.parametrize(("fault", "status"), [("", "pass"), ("+truncated_ds", "fail")])
def test_our_backward_is_held_to_a_shipped_baseline(fault, status):
    name = f"twin.backward.bf16{fault}"
    kernel = registry.find(name)
    records = JudgeFamily(kernel=name, family="offset_v", profile="quick", seed=0).run().records
    family = family_row(records, operations.find(kernel.operation))
    rows = baseline_rows(Figured(name, (family,), "backward"), shipped_baseline("quick", 0))
    assert layer_status(rows, "L2") == status
    assert all(row.status != "not compared" for row in rows)


def test_nothing_infinite_passes_beside_an_infinite_baseline():
    """Such a baseline is no other than a damaged one; its limit is infinite too."""
    figures = dict.fromkeys(BASELINE.kernels["twin.fp16"]["normal"], float("inf"))
    infinite = Baseline("quick", 0, {"twin.fp16": {"normal": figures}})
    assert statuses(worse(rel_rmse_seen=float("inf")), infinite)["rel_rmse_seen"] == "fail"
    assert statuses(KERNEL, infinite)["rel_rmse_seen"] == "pass"


def test_every_row_of_the_bound_has_its_limit():
    """Of a kernel that states no order nothing is outside it, unless every family was compared with an order."""
    first = FamilyRow("normal", FIGURES | {"outside": 0, "quantisation_bound_ratio": 0.5})
    second = FamilyRow("peaky", FIGURES | {"outside": 3, "ratio_max": 1.0, "nonfinite": 0})
    named = Figured("k", (first, second))
    outside = "outside the stated order, assuming the tensor-core model"
    quantised = "quantisation error / its own bound"
    assert [(r.rule, r.family, r.observed, r.limit, r.status, r.telling) for r in bound_rows(named)] == [
        ("error / bound", "normal", 0.5, 1.0, "pass", "ratio_max"),
        ("lse error / bound", "normal", 0.2, 1.0, "pass", "ratio_lse_max"),
        ("non-finite outputs", "normal", 0, 0.0, "pass", "nonfinite"),
        (outside, "normal", 0, 0.0, "pass", "outside"),
        (quantised, "normal", 0.5, 1.0, "pass", "quantisation_bound_ratio"),
        ("error / bound", "peaky", 1.0, 1.0, "pass", "ratio_max"),
        ("lse error / bound", "peaky", 0.2, 1.0, "pass", "ratio_lse_max"),
        ("non-finite outputs", "peaky", 0, 0.0, "pass", "nonfinite"),
        (outside, "peaky", 3, 0.0, "fail", "outside"),
        (quantised, "peaky", None, 1.0, "not compared", "quantisation_bound_ratio"),
    ]
    del first.figures["outside"]
    assert outside not in {row.rule for row in bound_rows(named)}


def test_a_row_of_the_bits_fails_on_one_bit():
    same = FamilyRow("normal", FIGURES | {"bits_differing": 0})
    other = FamilyRow("peaky", dict(FIGURES))
    named = Figured("gpu.fp16", (same, other))
    assert [row.status for row in bit_rows(named)] == ["pass"]
    other.figures["bits_differing"] = 1
    rows = bit_rows(named)
    assert [(row.layer, row.family, row.status, row.telling) for row in rows] == [
        ("L0", "normal", "pass", "bits_differing"),
        ("L0", "peaky", "fail", "bits_differing"),
    ]
    assert failed_parts([*rows, *bound_rows(named)]) == {"L0"}
    assert [row.margin for row in (*bound_rows(named)[:1], *rows)] == [0.5, None, None]


def test_a_shipped_baseline_is_for_its_seed():
    found = shipped_baseline("quick", 0)
    assert found is not None
    assert (found.profile, found.seed) == ("quick", 0)
    assert shipped_baseline("quick", 1) is None
    assert shipped_baseline("no such profile", 0) is None


def test_kernels_of_another_baseline_are_added_and_replace_none():
    mine, other = (Baseline.of("quick", 0, [worse(rel_rmse_seen=x)]) for x in (1e-3, 5e-3))
    more = replace(other, kernels=other.kernels | {"mine": {"normal": {"bias": 1.0}}})
    assert mine.with_kernels_of(more).kernels == {**mine.kernels, "mine": {"normal": {"bias": 1.0}}}
    assert mine.with_kernels_of(None) is mine
