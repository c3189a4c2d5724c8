"""Why two launches may differ, compared as a whole sentence: families, tiles, parts of the keys, formats."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fa3_kernels.plan.config import Config
from fa3_reference.problem import AttentionProblem
from fa3verify.compare.run import reason

PROBLEM = AttentionProblem(1, 1, 1, 64, 300, 128)
NOTHING = "nothing that is known of the two launches differs"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, NOTHING),
        ({"tile_n": 64}, "a tile has 128 keys against 64, so 300 keys are 3 tiles against 5"),
        ({"out_dtype": "bf16"}, "the output format is fp16 against bf16"),
        ({"promotion_interval": 64}, "keys of a promoted sum are 0 against 64"),
        ({"num_splits": 2}, "keys are cut into 1 part against 2"),
        ({"pingpong": False}, NOTHING),
    ],
)
def test_what_differs_of_two_launches_is_said_and_nothing_else(changes, words):
    plain = Config("e4m3", out_dtype="fp16")
    assert reason(plain, replace(plain, **changes), (PROBLEM, PROBLEM)) == words


def test_a_launch_that_is_not_known_has_no_reason():
    assert reason(Config(), None, (PROBLEM, PROBLEM)) == "the kernels do not say how they are launched"


def test_parts_of_a_causal_launch_are_of_its_lengths():
    """Of equal lengths, or without a mask, the same number of parts cuts the keys at the same places."""
    split = Config(num_splits=3)
    causal, shorter = replace(PROBLEM, causal=True), replace(PROBLEM, causal=True, seqlen_q=63)
    cut = "either cuts the keys that a row's tile sees into 3 parts, and the tile is another"
    assert reason(split, split, (causal, shorter)) == cut
    assert reason(split, split, (causal, causal)) == NOTHING
    assert reason(split, split, (PROBLEM, replace(PROBLEM, seqlen_q=63))) == NOTHING
    assert reason(Config(), Config(), (causal, shorter)) == NOTHING
