"""Sections of heads of a backward are joined where their CTAs would end at very different times."""

from __future__ import annotations

import pytest

from fa3_kernels.plan.key_tiles import CTAS_PER_HEAD, key_tile_schedule, sections_to_join, walk_of
from fa3_kernels.plan.tile_order import END, HEAD_SHIFT
from fa3_reference.problem import AttentionProblem

SMS = 132


def loads(problem: AttentionProblem, tile_m: int = 64, tile_n: int = 128) -> list[int]:
    """Row blocks that each CTA visits, of a causal problem of one length."""
    n = problem.seqlen_q
    walk = walk_of(problem, tile_m, tile_n, SMS, n, n)
    table = key_tile_schedule(problem, SMS, tile_m=tile_m, tile_n=tile_n, walk=walk, is_deterministic=False)
    rows = -(-n // tile_m)
    entries = [[int(entry) % (1 << HEAD_SHIFT) for entry in row if entry != END] for row in table]
    return [sum(rows - block * tile_n // tile_m for block in row) * problem.group for row in entries]


@pytest.mark.parametrize("sizes", [(6, 32, 2, 2554), (1, 32, 8, 8192), (2, 28, 4, 4096), (1, 64, 8, 4096)])
def test_the_longest_cta_of_a_large_group_is_near_the_mean(sizes):
    batch, nheads, nheads_kv, n = sizes
    problem = AttentionProblem(batch, nheads, nheads_kv, n, n, 128, causal=True)
    found = loads(problem)
    least = max(sum(found) / SMS, -(-n // 64) * problem.group)  # no CTA ends before the longest tile does
    assert max(found) <= 1.04 * least


def test_every_key_block_of_every_head_goes_out_once():
    problem = AttentionProblem(6, 32, 2, 2554, 2554, 128, causal=True)
    walk = walk_of(problem, 64, 128, SMS, 2554, 2554)
    table = key_tile_schedule(problem, SMS, tile_m=64, tile_n=128, walk=walk, is_deterministic=False)
    entries = sorted(int(entry) for row in table for entry in row if entry != END)
    assert entries == [(head << HEAD_SHIFT) + block for head in range(12) for block in range(20)]


def test_sections_stay_apart_where_that_is_balanced_or_too_many_heads_would_share_the_ctas():
    alike = [[(head, 40)] * 20 for head in range(16)]
    assert sections_to_join(alike, SMS) == 1
    many = [[(16 * some + head, blocks) for head in range(16) for blocks in (400, 1)] for some in range(8)]
    most = sections_to_join(many, SMS)
    assert CTAS_PER_HEAD * 16 * most <= SMS
    assert sections_to_join([], SMS) == 1
