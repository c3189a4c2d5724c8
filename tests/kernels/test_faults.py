"""Planted mistakes are rewrites of the twin that stand in it, are told apart, and leave the sound twin as it is."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest

from fa3_kernels.faults import uncached
from fa3_kernels.faults.table import (
    BackwardFault,
    Fault,
    QuantizerFault,
    Rewrite,
    description,
    faulty,
    load,
    planted,
    rewrite,
)
from fa3_kernels.twin import forward as sound
from fa3_reference.problem import AttentionProblem, Operands

EVERY = (*Fault, *QuantizerFault, *BackwardFault)
PROBLEM = AttentionProblem(1, 1, 1, 8, 300, 64, dtype="fp16")


def operands() -> Operands:
    rng = np.random.default_rng(0)
    shapes = (PROBLEM.q_shape, PROBLEM.k_shape, PROBLEM.v_shape)
    return Operands(*(rng.standard_normal(shape).astype(np.float16) for shape in shapes))


@pytest.mark.parametrize("fault", EVERY, ids=lambda fault: f"{type(fault).__name__}.{fault}")
def test_every_mistake_says_what_goes_wrong_and_stands_in_the_twin(fault):
    assert description(fault)
    assert rewrite(fault).tree().body


def test_no_row_is_left_that_nothing_plants():
    from fa3_kernels.faults.table import _TABLE

    assert {(kind, name) for kind, rows in _TABLE.items() for name in rows} == {
        (type(fault).__name__, str(fault)) for fault in EVERY
    }


@pytest.mark.parametrize("before", ["no such text", "return"])
def test_a_text_that_does_not_stand_once_is_refused(before):
    with pytest.raises(ValueError, match=r"forward has \d+ times .*, expected once"):
        Rewrite("forward", (before, "pass")).tree()


def test_mistakes_of_one_name_in_two_kernels_are_two():
    assert Fault.TRUNCATED_P == BackwardFault.TRUNCATED_P  # as texts
    assert planted(Fault.TRUNCATED_P) != planted(BackwardFault.TRUNCATED_P)
    assert faulty(Fault.TRUNCATED_P).__name__ == "forward"
    assert faulty(BackwardFault.TRUNCATED_P).__name__ == "backward"


def test_a_planted_mistake_leaves_the_sound_twin_and_other_mistakes_as_they_are():
    given = operands()
    before = sound.forward(PROBLEM, given)
    dropped = faulty(Fault.DROPPED_LAST_TILE)(PROBLEM, given)
    stale = faulty(Fault.STALE_V)(PROBLEM, given)
    assert not np.array_equal(dropped.out, before.out)
    assert not np.array_equal(dropped.out, stale.out)
    assert np.array_equal(sound.forward(PROBLEM, given).out, before.out)
    assert faulty(Fault.STALE_V) is faulty(Fault.STALE_V)


def test_a_copy_shares_what_its_mistake_does_not_reach_and_compiles_the_rest_for_itself():
    package = load("fa3_twin_that_shares", rewrite(Fault.STALE_V))
    copied = import_module(f"{package}.forward")
    assert copied.forward is not sound.forward
    assert copied.float32 is sound.float32
    assert import_module(f"{package}.compiled") is uncached


def test_a_name_is_given_to_one_package_of_a_process():
    load("fa3_twin_of_this_test", rewrite(Fault.STALE_V))
    with pytest.raises(RuntimeError, match="has a package fa3_twin_of_this_test already"):
        load("fa3_twin_of_this_test", rewrite(Fault.STALE_V))
