"""Gradients of other libraries on a CPU: no false alarm under the order that each states, and mistakes are found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fa3_kernels.twin.backward import Gradients
from fa3verify.campaign.profiles import PROFILES, family_cases
from fa3verify.judging.judgement import judge, passes
from fa3verify.known.cpu_kernels import cpu
from fa3verify.properties import LAWS, run_law

pytest.importorskip("torch", reason="needs torch (extra 'adapters')")
KERNELS = [kernel for kernel in cpu() if kernel.unavailable is None and kernel.operation == "backward"]
QUICK = PROFILES["quick"]
# Where rows are one-hot, sums cancel, and formats end. All of quick ran once by hand.
TELLING = ("very_peaky", "cancelling_v", "subnormals")
pytestmark = pytest.mark.optional


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_gradients_of_a_library_break_no_bound_of_its_order(kernel):
    wrong = []
    for family in TELLING:
        case = family_cases(kernel, family, QUICK, seed=0)[0]  # grouped heads under a causal mask
        measures = judge(kernel, case, unrounded=False).measures
        wrong += [] if passes(kernel, measures) else [(case.describe(), measures["ratio_max"])]
    assert wrong == []


@pytest.mark.usefixtures("short_walks")
@pytest.mark.parametrize(
    "kernel",
    [  # XLA compiles for every shape
        pytest.param(kernel, marks=[pytest.mark.nightly] if kernel.name.startswith("jax") else [], id=kernel.name)
        for kernel in KERNELS
        if kernel.dtype == "bf16"
    ],
)
def test_gradients_of_a_library_break_no_property(kernel):
    # The operator of torch.flash takes channels for neighbours, as in its forward.
    is_known = kernel.name.startswith("torch.flash")
    mine = [law for law in LAWS if law.applies(kernel) and not (is_known and law.name.startswith("views_are"))]
    outcomes = {law.name: run_law(law, kernel, max_examples=1, seed=0, shrink_seconds=0).status for law in mine}
    assert "fail" not in outcomes.values(), outcomes
    assert outcomes["gradients_within_bound"] == "pass"


def _dropped_tile(problem, operands, run):
    keys = problem.seqlen_k - 64
    cut = replace(operands, k=operands.k[:, :keys], v=operands.v[:, :keys])
    dq, dk, dv = run(replace(problem, seqlen_k=keys, causal=False), cut)
    none = np.zeros_like(operands.k[:, keys:])
    return Gradients(dq, np.concatenate([dk, none], 1), np.concatenate([dv, none], 1))


def _wrong_scale(problem, operands, run):
    return run(replace(problem, softmax_scale=problem.softmax_scale * 1.02), operands)


def _shifted_keys(problem, operands, run):
    moved = {name: np.roll(getattr(operands, name), -1, axis=1) for name in "kv"}
    dq, dk, dv = run(problem, replace(operands, **moved))
    return Gradients(dq, np.roll(dk, 1, axis=1), np.roll(dv, 1, axis=1))


def _ignored_mask(problem, operands, run):
    return run(replace(problem, causal=False), operands)


def _last_head_only(problem, operands, run):
    group = np.arange(problem.nheads) % problem.group == problem.group - 1
    silent = operands.dout * group[:, None].astype(operands.dout.dtype)
    return Gradients(run(problem, operands)[0], *run(problem, replace(operands, dout=silent))[1:])


MISTAKES = (_dropped_tile, _wrong_scale, _shifted_keys, _ignored_mask, _last_head_only)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__.strip("_"))
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_mistake_around_the_gradients_of_a_library_is_found(kernel, mistake):
    def run(problem, operands, config):
        return mistake(problem, operands, lambda p, o: tuple(kernel.code.run(p, o, config).values()))

    broken = kernel.altered(run=run)
    case = family_cases(broken, "normal", QUICK, seed=0)[0]
    assert not passes(broken, judge(broken, case, unrounded=False).measures)
