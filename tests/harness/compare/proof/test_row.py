"""What decides the bits of a row: equal values give equal bits on the twin, and values of a class are by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fa3_kernels.plan.config import Config, default_config
from fa3_reference.problem import AttentionProblem
from fa3verify.compare.proof.plans import RowBits, bits_of_rows
from fa3verify.compare.run import call_of, first_difference
from fa3verify.inputs.recipe import Recipe
from fa3verify.known.registry import find

CAUSAL = AttentionProblem(1, 4, 2, 40, 300, 64, dtype="bf16", causal=True)


def rows(problem, config, num_splits=1):
    lengths = problem.seqlen_q, problem.seqlen_k
    return bits_of_rows(problem, config, lengths, num_splits, range(problem.seqlen_q))


@pytest.mark.parametrize(
    ("keys", "tile_n", "bits"),
    [
        (96, 96, RowBits(0, 0, ((0, 0, 1),))),
        (96, 192, RowBits(0, 0, ((0, 0, 1),))),  # as a serving stack decodes and prefills: one tile either way
        (97, 96, RowBits(96, 0, ((0, 0, 2),))),
        (97, 192, RowBits(0, 0, ((0, 0, 1),))),
    ],
)
def test_a_tile_counts_only_where_the_row_sees_more_than_one(keys, tile_n, bits):
    problem = AttentionProblem(1, 1, 1, 1, keys, 128, dtype="e4m3")
    assert rows(problem, Config("e4m3", tile_n=tile_n, family="flash3")) == (frozenset({bits}),)


def test_promotion_counts_only_where_one_sum_does_not_take_all_keys():
    problem = AttentionProblem(1, 1, 1, 1, 64, 128, dtype="e4m3")
    found = [rows(problem, Config("e4m3", promotion_interval=n)) for n in (0, 32, 64, 128)]
    assert found[0] == found[2] == found[3] != found[1]


def test_parts_are_those_of_the_row_in_the_parts_of_its_tile():
    """Positions 0 to 31 of a packed tile of four heads see 2,044 keys at most, 16 blocks; unpacked all 40 see 17."""
    problem = AttentionProblem(1, 32, 8, 40, 2052, 128, causal=True)
    config = default_config(problem, num_splits=4)
    plain, packed = (rows(problem, replace(config, pack_gqa=pack), 4) for pack in (False, True))
    assert {each.parts for each in plain[0]} == {((0, 0, 5), (1, 5, 10), (2, 10, 15), (3, 15, 16))}
    assert {each.parts for each in packed[0]} == {((0, 0, 4), (1, 4, 8), (2, 8, 12), (3, 12, 16))}
    assert plain[39] == packed[39]


def test_heads_of_a_group_that_a_tile_parts_are_told_apart():
    """Of three heads, FlashAttention-3 cuts tiles of 128 rows inside a position: its heads see parts of two tiles."""
    problem = AttentionProblem(1, 3, 1, 60, 1030, 128, dtype="bf16", causal=True)
    config = default_config(problem, family="flash3", num_splits=4)
    assert config.pack_gqa
    assert {len(row) for row in rows(problem, config, 4)} == {1, 2}


CHOICES = [{"tile_n": n, "num_splits": s, "tile_m": m} for n in (64, 128) for s in (1, 2, 3) for m in (64, 128)]


@pytest.mark.parametrize("kernel", ["twin.bf16", "twin.flash3.bf16", "twin.flash2.bf16"])
def test_rows_of_equal_value_have_equal_bits_and_others_have_not(kernel):
    """All pairs of twelve configurations, row by row; other bits are asked for where values differ in any row."""
    asked = find(kernel)
    setup = call_of(asked, CAUSAL, Recipe("cancelling_v"))
    found = []
    for choice in CHOICES:
        config = replace(setup.config, **choice)
        found.append((rows(CAUSAL, config, choice["num_splits"]), setup._replace(config=config).run()))
    told_apart = 0
    for i, (values, outputs) in enumerate(found):
        for others, other in found[:i]:
            equal = [n for n in range(CAUSAL.seqlen_q) if values[n] == others[n]]
            parts = [{"out": x["out"][:, equal], "lse": x["lse"][..., equal]} for x in (outputs, other)]
            assert first_difference(*parts) is None
            if len(equal) < CAUSAL.seqlen_q and first_difference(outputs, other):
                told_apart += 1
    differing = sum(a != b for i, (a, _) in enumerate(found) for b, _ in found[:i])
    assert told_apart >= 0.9 * differing > 0


def test_the_words_are_those_of_the_parts():
    assert RowBits(176, 0, ((0, 0, 6), (1, 6, 12), (2, 12, 17)), True).told() == "2 x 6 + 5 tiles of 176 keys"
    assert RowBits(0, 32, ((0, 0, 1),)).told() == "one tile, promoted every 32"


def test_a_row_without_keys_has_no_parts():
    problem = AttentionProblem(1, 1, 1, 3, 1, 64, causal=True)
    assert [len(next(iter(row)).parts) for row in rows(problem, default_config(problem))] == [0, 0, 1]
    assert np.isneginf(call_of(find("twin.fp16"), problem, Recipe("normal")).run()["lse"][0, 0, :2]).all()
