"""What libraries choose by themselves, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fa3_kernels.plan.config import default_config
from fa3_kernels.plan.heuristics import flash3_sequence_splits
from fa3_reference.problem import AttentionProblem


@pytest.mark.parametrize(
    ("lengths_k", "nheads", "splits"),
    [
        ((8000, 100), (8, 2), (46, 1)),  # 47 blocks: 1.1 * 47 * 2 heads / 132 is a block each
        ((8000,) * 6, (8, 2), (10,) * 6),  # 1.1 * 276 * 2 / 132 = 4.6: five blocks each
        ((8000,) * 5 + (500,), (8, 2), (12,) * 5 + (1,)),  # 1.1 * 233 * 2 / 132 = 3.9: four blocks each
        ((8000,) * 30, (8, 8), (1,) * 30),  # 92 blocks each: more than a sequence has
    ],
)
def test_packed_sequences_share_the_multiprocessors_by_their_blocks(lengths_k, nheads, splits):
    sizes = {"nheads": nheads[0], "nheads_kv": nheads[1], "head_dim": 128, "dtype": "bf16"}
    problem = AttentionProblem.varlen((1,) * len(lengths_k), lengths_k, **sizes)
    config = default_config(problem, family="flash3", num_splits=46)
    assert config.tile_n == 176
    assert flash3_sequence_splits(problem, config) == splits
    assert flash3_sequence_splits(problem, replace(config, num_splits=3)) == tuple(min(3, n) for n in splits)


def test_batches_are_split_alike():
    problem = AttentionProblem(3, 8, 2, 1, 8000, 128, dtype="bf16")
    config = default_config(problem, family="flash3", num_splits=7)
    assert flash3_sequence_splits(problem, config) == (7, 7, 7)
