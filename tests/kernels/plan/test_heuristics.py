"""What libraries choose by themselves, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fa3_kernels.plan.config import default_config
from fa3_kernels.plan.families.flash2 import flash2_splits
from fa3_kernels.plan.families.flash3 import flash3_packs, flash3_sequence_splits, flash3_splits
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


def test_four_blocks_of_keys_are_not_split_and_five_are():
    """Eight tiles on 132 multiprocessors: of five blocks the fewest parts that fill at least 85 % of the best."""
    found = {n: flash3_splits(AttentionProblem(1, 8, 1, 1, n * 176, 128), 128, 176) for n in (1, 3, 4, 5, 6)}
    assert found == {1: 1, 3: 1, 4: 1, 5: 5, 6: 6}
    assert flash3_splits(AttentionProblem(1, 8, 1, 1, 4 * 176 + 1, 128), 128, 176) == 5


def test_a_full_machine_splits_keys_that_exceed_its_cache_alone():
    """50 MiB are 102,400 keys of 128 + 128 sixteen-bit elements; rows are two waves of tiles of one head."""
    rows = 2 * 132 * 128

    def splits(seqlen_k, seqlen_q=rows, **more):
        return flash3_splits(AttentionProblem(1, 1, 1, seqlen_q, seqlen_k, 128, **more), 128, 176)

    assert (splits(102_400), splits(102_401), splits(204_801)) == (1, 2, 3)
    assert splits(102_401, rows - 128) == splits(102_401, causal=True) == splits(102_401, window=(9, 9)) == 1
    assert (splits(204_800, dtype="e4m3"), splits(204_801, dtype="e4m3")) == (1, 2)


def test_torchs_flash_attention_2_splits_where_tiles_are_few():
    """Blocks of 256, 128 or 64 keys; from 0.8 times two tiles a multiprocessor on nothing is split."""
    one = AttentionProblem(1, 1, 1, 64, 1024, 64)
    assert [flash2_splits(replace(one, head_dim=d, head_dim_v=d)) for d in (64, 128, 192)] == [4, 8, 16]
    many = replace(one, seqlen_k=1280)
    assert [flash2_splits(replace(many, nheads=n, nheads_kv=n)) for n in (132, 211, 212)] == [2, 5, 1]
    packed = AttentionProblem.varlen((1, 1), (1024, 1024), nheads=4, nheads_kv=1, head_dim=64)
    assert flash2_splits(packed) == 4
    assert flash2_splits(AttentionProblem.varlen((2, 1), (1024, 1024), nheads=4, nheads_kv=1, head_dim=64)) == 1


def test_flash_attention_3_packs_heads_where_plain_tiles_are_a_tenth_emptier():
    def packs(seqlen_q, num_splits=1, nheads_kv=2):
        return flash3_packs(AttentionProblem(1, 8, nheads_kv, seqlen_q, 40, 64), 128, num_splits)

    fills = {1: True, 96: True, 97: False, 128: False, 129: True, 224: True, 352: False}  # 7 of 8 and 11 of 12 tiles
    assert {n: packs(n) for n in fills} == fills
    assert (packs(128, num_splits=2), packs(1, nheads_kv=8), packs(1, 2, nheads_kv=8)) == (True, False, False)
