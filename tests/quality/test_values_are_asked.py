"""What of the quick plan finds kernels that are wrong for some values alone, and that right ones pass the same."""

from __future__ import annotations

import pytest

from fa3verify.campaign.plan import PARTS, JudgeCover, JudgePractice
from fa3verify.campaign.profiles import PROFILES
from fa3verify.known.registry import find
from fa3verify.properties import find_law, run_law
from tests.quality.value_kernels import KERNELS

pytestmark = [
    pytest.mark.usefixtures("shared_references"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
SPECIAL = "special_values_follow_policy"
FOUND_BY = {
    "flushed_q": "cover",
    "flushed_k": "cover",
    "flushed_v": "cover",
    "flushed_out": "cover",
    "floor": "cover",
    "merged": "cover",
    "narrow_sinks": "cover",
    "capped": "softcap_confines_lse",
    "slope_of_40": "gradients_of_far_scores",
    "slope_of_1": "gradients_of_far_scores",
    "added_mask": SPECIAL,
    "added_window": SPECIAL,
    "tiles_behind": "neighbours_never_leak",
    "nan_as_zero": "special_values_are_stored",
    "inf_in_descale": "special_values_are_stored",
    "zeros_of_scale_zero": "cover",
    "seeds_in_a_byte": "practice",
    "long_rows_cut": "practice",
}
"""Task of the quick plan by kernel."""


def is_found(name: str, by: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Tell whether a task of the quick plan finds a kernel."""
    kernel = KERNELS[name]() if name in KERNELS else find(name)
    if by not in ("cover", "practice"):
        law = find_law(by)
        return (
            run_law(law, kernel, max_examples=PROFILES["quick"].law_examples, seed=0, shrink_seconds=0).status == "fail"
        )
    monkeypatch.setattr("fa3verify.campaign.plan.found", lambda _: kernel)
    tasks: list[JudgeCover | JudgePractice]
    if by == "cover":
        tasks = [JudgeCover(kernel=kernel.name, profile="quick", seed=0, is_fail_fast=True)]
    else:
        tasks = [
            JudgePractice(kernel=kernel.name, profile="quick", seed=0, is_fail_fast=True, part=part)
            for part in range(PARTS)
        ]
    return any(task.is_finding(task.run()) for task in tasks)


@pytest.mark.parametrize("name", FOUND_BY)
def test_the_quick_plan_finds_a_kernel_that_is_wrong_for_some_values(name, monkeypatch):
    assert is_found(name, FOUND_BY[name], monkeypatch)


RIGHT = {
    "right": ("cover", "softcap_confines_lse", SPECIAL),
    "right_slope": ("gradients_of_far_scores",),
    "twin.bf16": ("softcap_confines_lse",),
    "twin.e4m3": ("softcap_confines_lse",),
    "twin.backward.fp16": ("gradients_of_far_scores",),
    "twin.quantize": ("special_values_are_stored", "codes_keep_the_scores", "practice"),
}


@pytest.mark.parametrize(("name", "by"), [(name, by) for name, each in RIGHT.items() for by in each])
def test_right_kernels_pass_what_finds_the_wrong_ones(name, by, monkeypatch):
    assert not is_found(name, by, monkeypatch)
