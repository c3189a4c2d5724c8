"""Kernels in other orders of operations: correct ones break no bound of theirs or of any order, mistakes are found."""

from __future__ import annotations

import pytest

from fa3_reference.problem import AttentionProblem
from fa3verify.cases.case import Case
from fa3verify.inputs.recipe import FAMILIES
from fa3verify.judging.judgement import judge, passes
from tests.harness.known import ideals

pytestmark = pytest.mark.usefixtures("shared_references")
TELLING = ("normal", "very_peaky", "outlier_channels_1000", "positive", "cancelling_v", "subnormals", "huge")
SHAPES = ({"seqlen_q": 129, "seqlen_k": 321, "causal": True, "nheads": 4, "nheads_kv": 2, "head_dim": 64},)
SHAPES += ({"seqlen_q": 40, "seqlen_k": 509, "nheads": 1, "nheads_kv": 1, "head_dim": 128},)


def cases(dtype: str, names: tuple[str, ...] = TELLING):
    for family in (f for f in FAMILIES if f.name in names):
        for shape in SHAPES:
            yield Case("ideal", AttentionProblem(1, dtype=dtype, **shape), family.recipe(seed=0))


# S in 16 bits is outside what the bound of any order allows: such a kernel must say so.
STATED = [(order, True) for order in ideals.ORDERS]
UNSTATED = [(order, False) for order in ideals.ORDERS if order != "rounded_scores"]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(("order", "states_order"), STATED + UNSTATED)
def test_a_correct_kernel_of_another_order_is_never_accused(order, dtype, states_order):
    kernel = ideals.ideal(order, dtype, states_order=states_order)
    for case in cases(dtype):
        measures = judge(kernel, case, unrounded=False).measures
        assert passes(kernel, measures), (case.describe(), measures["ratio_max"], measures["ratio_lse_max"])


@pytest.mark.parametrize("mistake", ideals.Mistake)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("order", ideals.ORDERS)
def test_a_mistake_in_a_kernel_of_another_order_is_found(order, dtype, mistake):
    kernel = ideals.ideal(order, dtype, mistake)
    assert not all(passes(kernel, judge(kernel, case, unrounded=False).measures) for case in cases(dtype))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_scores_in_16_bits_must_be_stated(dtype):
    kernel = ideals.ideal("rounded_scores", dtype, states_order=False)
    assert not all(passes(kernel, judge(kernel, case, unrounded=False).measures) for case in cases(dtype))
