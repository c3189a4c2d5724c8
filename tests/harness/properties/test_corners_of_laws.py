"""Laws accept sound kernels in corners of what they promise, and released ones in the orders that these have."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings

from fa3_reference.problem import AttentionProblem
from fa3verify.cases.case import Case
from fa3verify.inputs.edits import Edit
from fa3verify.inputs.recipe import Recipe
from fa3verify.kernels.policy import DEFAULT
from fa3verify.kernels.record import Kernel
from fa3verify.known.registry import find
from fa3verify.properties import LAWS, Trial, replay_trial
from fa3verify.properties.draws import independent
from fa3verify.properties.law import Violation, set_up
from fa3verify.properties.transforms import masked_part

ONE: dict[str, Any] = {"batch": 1, "nheads": 1, "nheads_kv": 1, "head_dim": 64}
QUANTISER = (
    ("block_rows", 128),
    ("input_dtype", "fp16"),
    ("rotate", False),
    ("scale", "amax"),
    ("scope", "query_head"),
    ("seed", 0),
    ("subtract_k_mean", False),
)
CORNERS = {
    "dO V^T of a row without a key overflows": (
        "rows_without_a_key_have_zero_dq",
        "twin.backward.bf16",
        ONE | {"seqlen_q": 2, "seqlen_k": 1, "causal": True},
        Recipe("huge", (("fraction", 1.0),), 0),
        (),
        {},
    ),
    "half of a subnormal gradient is rounded up to the least normal number": (
        "gradients_follow_scaled_scores",
        "twin.backward.fp16",
        {"batch": 2, "nheads": 2, "nheads_kv": 1, "seqlen_q": 1, "seqlen_k": 126, "head_dim": 64, "head_dim_v": 32},
        Recipe("peaky", (("gain", 0.1),), 622988753106576503),
        (),
        {},
    ),
    "a query head of zeros beside one that is not": (
        "descales_take_a_common_factor",
        "twin.quantize",
        {"batch": 1, "nheads": 2, "nheads_kv": 1, "seqlen_q": 1, "seqlen_k": 1, "head_dim": 128},
        Recipe("normal", (("std", 1.0),), 0, (Edit("constant_row", "q", 0, 0, 0, 0, 0, 0.0),)),
        QUANTISER,
        {"exponent": 1},
    ),
    "FlashAttention-2 weighs splits by a rounded lse of thousands": (
        "error_within_bound",
        "twin.flash2.fp16",
        ONE | {"seqlen_q": 1, "seqlen_k": 209, "head_dim": 128},
        Recipe("positive", (("low", 38.0), ("width", 1.0)), 0),
        (),
        {},
    ),
    "unscaled maxima rescale where none moved": (
        "error_within_bound_on_long_rows",
        "twin.triton_unscaled.fp16",
        ONE | {"seqlen_q": 64, "seqlen_k": 2048},
        Recipe("normal", (("std", 8.0),), 0),
        (),
        {},
    ),
    "FlashAttention-2 drops a split that is NaN from lse": (
        "special_values_follow_policy",
        "twin.flash2.fp16",
        ONE | {"seqlen_q": 1, "seqlen_k": 129, "head_dim": 128},
        Recipe("normal", (("std", 1.0),), 0),
        (),
        {"rule": "nan_in_key", "sequence": 0, "head": 0, "row": 0, "channel": 0},
    ),
}


def _judged(corner: str, **declared: object) -> Violation | None:
    law, kernel, shape, recipe, changes, parameters = CORNERS[corner]
    asked: Kernel = replace(find(kernel), twin=None, **declared)  # type: ignore[arg-type]
    problem = AttentionProblem(dtype=asked.dtype, **shape)  # type: ignore[arg-type]
    trial = Trial(law, Case(kernel, problem, recipe, changes=changes, operation=asked.operation), parameters)
    return replay_trial(law, asked, trial)


@pytest.mark.parametrize("corner", CORNERS)
def test_sound_kernels_pass_in_corners_of_a_law(corner):
    assert _judged(corner) is None


@pytest.mark.parametrize(
    ("corner", "other"),
    [
        ("FlashAttention-2 weighs splits by a rounded lse of thousands", {"combine": "sum"}),
        ("unscaled maxima rescale where none moved", {"rescale": "always"}),
    ],
)
def test_bound_needs_the_order_that_the_kernel_has(corner, other):
    """What a family's order adds to the bound is needed: without it the sound kernel is outside."""
    order = find(CORNERS[corner][1]).order or (lambda config: config.kernel_model())

    def misread(config):
        model = order(config)
        return replace(model, order=replace(model.order, **other))

    violation = _judged(corner, order=misread)
    assert violation is not None
    assert "against float64" in violation.message


def test_a_nan_in_a_split_reaches_the_lse_of_kernels_that_declare_nothing():
    violation = _judged("FlashAttention-2 drops a split that is NaN from lse", policy=DEFAULT)
    assert violation is not None
    assert "lse" in violation.message


DRAWN = [law for law in LAWS if law.draw and law.applies(find("twin.fp16"))]
OVERFLOWS = Recipe(
    "cancelling_v", (("magnitude", 16445.0), ("residue", 1.0)), 0, (Edit("scale_channel", "v", 0, 0, 0, 0, 0, 4.0),)
)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of sums with infinities
@pytest.mark.parametrize(
    "law", [law for law in LAWS if law.draw and law.applies(find("twin.fp16"))], ids=lambda law: law.name
)
def test_no_law_asks_anything_of_values_that_overflowed_behind_a_mask(law):
    """0 times Inf is NaN in every row of a visited tile, as the table of special values says."""
    kernel = find("twin.fp16")
    asked = []

    def check(trial: Trial) -> None:
        overflowed = replace(trial, case=replace(trial.case, recipe=OVERFLOWS))
        with suppress(ValueError):  # it does not take the trial
            assert replay_trial(law.name, kernel, overflowed) is None
            asked.append(overflowed)

    with independent(f"overflow {law.name}") as backend:
        quick = settings(
            backend=backend, max_examples=4, deadline=None, database=None, suppress_health_check=HealthCheck
        )
        seed(0)(quick(given(law.draw(kernel))(check)))()
    assert asked


def test_a_part_of_a_windowed_call_has_the_mask_under_which_its_rows_see_what_they_saw():
    problem = AttentionProblem(1, 1, 1, 10, 14, 64, window=(5, 3))
    setup = set_up(find("twin.fp16"), Case("twin.fp16", problem, Recipe("normal")))
    (seq,) = problem.sequences()
    cut = masked_part(setup, seq, rows=slice(2, 6), keys=slice(0, 12)).problem
    assert (cut.seqlen_q, cut.seqlen_k) == (4, 12)
    assert cut.window == (7, 1)  # row 5 saw the keys 4 to 12; as row 3 of 4 beside 12 keys its diagonal is at 11
