"""No correct kernel loses every hypothesis about it: many legal orders, and a search that tries to break this."""

from __future__ import annotations

from typing import get_args

import pytest

from fa3_reference.bounds.model import KernelModel
from fa3_reference.problem import Dtype
from tests.quality.legal_orders import orders_of
from tests.quality.order_survey import searched, table

DTYPES = get_args(Dtype)
INPUTS = 14  # of 60; both sizes in full by python -m tests.quality.order_survey
PROBLEMS = 150  # of 10,000


def test_the_survey_has_thirty_orders_of_every_dtype():
    for dtype in DTYPES:
        assert len(orders_of(dtype)) >= 30


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_legal_order_keeps_one_hypothesis_on_all_inputs_and_every_hypothesis_is_needed(dtype: Dtype):
    surveys = table(dtype, INPUTS)
    for name, survey in surveys.items():
        best = survey.best
        assert survey.worst[best] <= 1, f"{dtype}, {name}: {survey.worst[best]:.3g} of {best} at {survey.where[best]}"
    for hypothesis in KernelModel.hypotheses(dtype, "fp32") if dtype != "fp32" else ():  # where P is not rounded
        others = [{k: x for k, x in survey.worst.items() if k != hypothesis} for survey in surveys.values()]
        assert max(min(worst.values()) for worst in others) > 2, f"{hypothesis} saves no order"


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_legal_order_with_sinks_keeps_one_hypothesis_on_all_inputs(dtype: Dtype):
    for name, survey in table(dtype, INPUTS, sinks=True).items():
        best = survey.best
        assert survey.worst[best] <= 1, f"{dtype}, {name}: {survey.worst[best]:.3g} of {best} at {survey.where[best]}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_problem_with_sinks_that_is_bred_takes_a_legal_order_beyond_its_best_hypothesis(dtype: Dtype):
    worst = searched(dtype, PROBLEMS, sinks=True)[0]
    assert worst.ratio <= 1, f"{dtype}, {worst.order}: {worst.ratio:.3g} at {worst.problem}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_problem_that_is_bred_takes_a_legal_order_beyond_its_best_hypothesis(dtype: Dtype):
    worst = searched(dtype, PROBLEMS)[0]
    assert worst.ratio <= 1, f"{dtype}, {worst.order}: {worst.ratio:.3g} at {worst.problem}"
