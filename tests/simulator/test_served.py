"""What servers call, simulated as it is launched: pages, chunks, packed sequences and windows."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import fa3verify
from fa3_kernels.plan.plan import Plan, plan_of
from fa3_kernels.plan.request import DTYPES, ONE_PAGE, Choices, Semantics, TensorLayout, request_of
from fa3_kernels.plan.tiles import mask_of, power_of_two, row_tiles, split_ranges
from fa3_reference.layout import Cache
from fa3_reference.problem import AttentionProblem
from fa3_simulator.cta import kernel_of
from fa3_simulator.forward_choice import schedule_for
from fa3_simulator.launch import Launch
from fa3_simulator.machine import load
from fa3_simulator.run import estimate
from fa3_simulator.splits import schedule_cycles
from fa3_simulator.tune import candidates, misfit, tune

H200 = load("h200")
SIZES: dict[str, Any] = {"nheads": 8, "nheads_kv": 2, "head_dim": 128, "dtype": "bf16"}
MASKS = [{}, {"causal": True}, {"window": (200, 0)}, {"window": (150, 60)}, {"window": (-1, 90)}]


def packed(queries: Any, keys: Any, page_size: int | None = None, **more: Any) -> AttentionProblem:
    cache = None if page_size is None else Cache(page_size=page_size)
    return AttentionProblem.varlen(queries, keys, cache=cache, **SIZES | more)


def launch_of(problem: AttentionProblem, **choices: Any) -> Launch:
    config = schedule_for(problem, **choices)
    return kernel_of(config).compiled(problem).launch(problem, H200, 1980.0)


def lone(launch: Launch) -> int:
    """CTAs with a single tile: one that has none of its own repeats the tile of another."""
    return sum(len(each) == 1 for each in launch.mine)


lengths = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 900)), min_size=1, max_size=4)


@given(lengths, st.sampled_from(MASKS), st.sampled_from([None, True, False]), st.sampled_from([1, 3]))
@settings(max_examples=60)
def test_tiles_are_the_pairs_of_row_and_key_tiles_in_which_a_dense_mask_leaves_a_score(
    drawn: list[tuple[int, int]], mask: dict, pack_gqa: bool | None, num_splits: int
) -> None:
    queries, keys = zip(*drawn, strict=True)
    if not any(queries) or not any(keys):
        return
    problem = packed(queries, keys, **mask)
    choices = {"pack_gqa": pack_gqa, "num_splits": num_splits}
    config = schedule_for(problem, **choices)
    rows = config.tile_m // (power_of_two(problem.group) if config.pack_gqa else 1)
    left, right = problem.window
    wanted: Counter[tuple[int, int]] = Counter()
    for nq, nk in drawn:
        i, j = np.ogrid[:nq, :nk]
        diagonal = i + nk - nq
        right_most = 0 if problem.causal else right
        sees = np.ones((nq, nk), bool)
        sees &= (j <= diagonal + right_most) | (right_most < 0)
        sees &= (j >= diagonal - left) | (left < 0)
        for first in range(0, nq, rows):
            blocks = [sees[first : first + rows, n : n + config.tile_n] for n in range(0, nk, config.tile_n)]
            visited = [n for n, block in enumerate(blocks) if block.any()]
            size = -(-len(visited) // num_splits)
            for part in (visited[n : n + size] for n in range(0, len(visited), max(size, 1))):
                whole = sum(blocks[n].all() and blocks[n].shape[1] == config.tile_n for n in part)
                heads = problem.nheads_kv if config.pack_gqa else problem.nheads
                wanted[len(part), max(len(part) - whole, 1)] += heads
    launch = launch_of(problem, **choices)
    found = Counter((tile.blocks, tile.masked) for tile in launch.tiles)
    assert not wanted - found
    assert found.total() - wanted.total() <= lone(launch)
    assert len(launch.mine) <= 132


@given(lengths, st.sampled_from(MASKS), st.sampled_from([16, 64, 256, 0]), st.sampled_from([1, 2, 5]))
@settings(max_examples=60)
def test_over_a_cache_the_blocks_are_those_of_the_twin_and_a_block_more_for_each_part_without_a_key(
    drawn: list[tuple[int, int]], mask: dict, page_size: int, num_splits: int
) -> None:
    queries, keys = zip(*drawn, strict=True)
    if not any(queries) or not any(keys):
        return
    problem = packed(queries, keys, page_size, **mask)
    config = schedule_for(problem, num_splits=num_splits)
    wanted: Counter[int] = Counter()
    for sequence in problem.sequences():
        of_mask = mask_of(problem, sequence.seqlen_q, sequence.seqlen_k)
        for tile in row_tiles(sequence.seqlen_q, problem.group, tile_m=config.tile_m, pack_gqa=config.pack_gqa):
            for part in split_ranges(of_mask.blocks(tile.positions, config.tile_n), num_splits):
                wanted[max(1, len(part))] += problem.nheads_kv
    launch = launch_of(problem, num_splits=num_splits)
    found = Counter(tile.blocks for tile in launch.tiles)
    assert not wanted - found
    assert found.total() - wanted.total() <= lone(launch)


@pytest.mark.parametrize("mask", [{}, {"causal": True}], ids=str)
@pytest.mark.parametrize(
    ("batch", "queries", "keys"), [(16, 1024, 1024), (4, 2048, 2048), (3, 500, 3000), (8, 1, 4000)]
)
def test_packed_sequences_of_one_length_take_the_time_of_a_batch_and_of_the_kernel_in_front(
    mask: dict, batch: int, queries: int, keys: int
) -> None:
    """Within 4 %: the order differs, and the first block of a packed tile is masked."""
    problem = packed((queries,) * batch, (keys,) * batch, **mask)
    plain = AttentionProblem(batch, seqlen_q=queries, seqlen_k=keys, **SIZES | mask)
    config = schedule_for(problem)
    apart, together = (estimate(x, config, H200) for x in (plain, problem))
    front = schedule_cycles(problem, H200, 1980.0)
    assert 1840 < front < 8000
    assert apart.cycles * 0.995 < together.cycles - front < apart.cycles * 1.04
    blocks = [sum(tile.blocks for tile in kernel_of(config).launch(x, H200, 1980.0).tiles) for x in (plain, problem)]
    assert blocks[0] == blocks[1]
    assert together.hbm_cycles == apart.hbm_cycles


@pytest.mark.parametrize("shape", [(1, 700, 700), (2, 300, 2000), (4, 1, 900)])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_window_as_long_as_the_keys_is_none(shape: tuple[int, int, int], is_packed: bool) -> None:
    batch, queries, keys = shape
    for window, mask in (((keys - 1, -1), {}), ((keys - 1, 0), {"causal": True}), ((keys, queries), {})):
        problem = AttentionProblem(batch, seqlen_q=queries, seqlen_k=keys, **SIZES)
        if is_packed:
            problem = packed((queries,) * batch, (keys,) * batch)
        config = schedule_for(problem)
        found, wanted = (estimate(replace(problem, **x), config, H200) for x in ({"window": window}, mask))
        assert found == wanted


@given(
    st.sampled_from([(1, 1), (1, 300), (8, 1), (8, 4), (3, 700)]),
    st.integers(1, 40),
    st.sampled_from([None, 0, 16, 64]),
    st.sampled_from(MASKS),
    st.sampled_from([1, 2, 4]),
)
@settings(max_examples=40, deadline=None)
def test_time_hardly_falls_when_every_sequence_gets_another_block_of_keys(
    shape: tuple[int, int], blocks: int, page_size: int | None, mask: dict, num_splits: int
) -> None:
    """Tiles are dealt out in turn, so that the CTA with the most keys may have less to do after all."""
    batch, queries = shape
    problems = [packed((queries,) * batch, (128 * n,) * batch, page_size, **mask) for n in (blocks, blocks + 1)]
    config = schedule_for(problems[1], num_splits=num_splits)
    short, long = (estimate(problem, config, H200).cycles for problem in problems)
    assert short <= 1.06 * long


def operand(shape: tuple[int, ...], dtype: str) -> TensorLayout:
    return TensorLayout(shape, tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape))), dtype, "cuda:0")


def called(problem: AttentionProblem, choices: Choices) -> Plan:
    """The plan of a call of our functions, of tensors as they would lie in memory."""
    dtype = next(name for name, short in DTYPES.items() if short == problem.dtype)
    k_shape = problem.k_shape
    page = 0
    if problem.cache:
        page = problem.cache.page_size or ONE_PAGE
        rows = problem.cache.page_size or problem.seqlen_k
        k_shape = (problem.batch * -(-problem.seqlen_k // rows), rows, problem.nheads_kv, problem.head_dim)
    lengths = (problem.batch, problem.seqlen_q, problem.seqlen_k) if problem.is_varlen else None
    operands = (operand(problem.q_shape, dtype), operand(k_shape, dtype), operand(k_shape, dtype))
    asked = request_of(
        operands, Semantics.of(problem), choices, packed=lengths, page_size=page, has_sinks=problem.sinks
    )
    return plan_of(asked, 132)


def drawn_call(rng: random.Random) -> tuple[AttentionProblem, bool | None, int | None]:
    group = rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 66])
    kv = rng.choice([1, 2, 4])
    sizes = {
        "nheads": kv * group,
        "nheads_kv": kv,
        "head_dim": rng.choice([64, 96, 128, 128, 160, 192, 256, 40, 76]),
        "dtype": rng.choice(["fp16", "bf16", "e4m3"]),
        "causal": rng.random() < 0.5,
        "window": rng.choice([(-1, -1), (-1, -1), (500, 0), (100, 100), (4000, -1)]),
    }
    batch = rng.choice([1, 2, 5, 64])
    queries = rng.choice([1, 1, 4, 130, 700])
    keys = rng.choice([128, 300, 2000, 9000])
    pack = rng.choice([None, None, True, False])
    parts = rng.choice([None, None, 0, 1, 3])
    kind = rng.choice(["batch", "packed", "rows", "pages", "pages"])
    if kind == "batch":
        return AttentionProblem(batch, seqlen_q=queries, seqlen_k=keys, **sizes), pack, parts
    cache = None if kind == "packed" else Cache(page_size=rng.choice([8, 16, 64, 256, 12, 48]) * (kind == "pages"))
    of_q, of_k = ([rng.randint(n > 1, n) for _ in range(batch - 1)] + [n] for n in (queries, keys))
    sinks = rng.random() < 0.3
    return AttentionProblem.varlen(of_q, of_k, **sizes, cache=cache, sinks=sinks), pack, parts


def test_what_is_simulated_is_what_a_call_launches_and_is_refused_as_the_call_is_on_200_drawn_problems() -> None:
    rng = random.Random(3)
    taken = 0
    for _ in range(200):
        problem, pack, parts = drawn_call(rng)
        is_plain = not problem.is_varlen and problem.window == (-1, -1)
        choices = Choices(
            pack_gqa=False if pack is None and is_plain else pack,
            num_splits=parts if parts is not None else 0 if problem.cache else 1,
        )
        try:
            plan = called(problem, choices)
        except ValueError as error:
            with pytest.raises(ValueError, match=f"^{re.escape(str(error))}$"):
                schedule_for(problem, pack_gqa=pack, num_splits=parts)
            continue
        taken += 1
        config = schedule_for(problem, pack_gqa=pack, num_splits=parts)
        assert config == plan.config
        compiled = kernel_of(config).compiled(problem)
        hides = plan.variant.is_left_limited or plan.variant.is_right_limited
        assert compiled.config.integer_max == config.takes_integer_max(hides)
        launch = compiled.launch(problem, H200, 1980.0)
        if problem.is_varlen:
            assert len(launch.mine) == plan.launch(sum(problem.seqlens_q), 1, (problem.seqlen_q, 0))[1]["ctas"]
        else:
            assert len(launch.tiles) == (plan.tables["schedule"] >= 0).sum()
        assert (launch.front_cycles > 0) == (plan.kernels[0].kernel == "packed_order")
        assert (launch.around_cycles > 0) == (plan.kernels[-1].kernel == "combine")
        if taken % 10 == 0:
            assert estimate(problem, config, H200).cycles > 0
    assert 60 < taken < 190


@pytest.mark.parametrize("group", [3, 5, 6, 7])
def test_heads_of_any_group_share_their_keys_over_pages_unless_they_are_told_apart(group: int) -> None:
    problem = packed((1,) * 8, (4100,) * 8, 16, nheads=4 * group, nheads_kv=4)
    config = schedule_for(problem)
    assert config.pack_gqa
    assert config.tile_m == 64
    assert sum(tile.blocks for tile in launch_of(problem, num_splits=1).tiles) == 8 * 4 * 33
    four = fa3verify.simulate(packed((1,) * 8, (4100,) * 8, 16, nheads=16, nheads_kv=4))
    assert fa3verify.simulate(problem).cycles < 1.05 * four.cycles
    apart = launch_of(problem, num_splits=1, pack_gqa=False)
    assert sum(tile.blocks for tile in apart.tiles) == 8 * 4 * group * 33


def test_a_window_reads_only_the_keys_that_it_leaves() -> None:
    whole, near = (packed((1,) * 64, (16384,) * 64, 64, window=window) for window in ((-1, -1), (1023, 0)))
    assert launch_of(near).hbm_bytes < launch_of(whole).hbm_bytes / 15
    assert fa3verify.simulate(near).cycles < fa3verify.simulate(whole).cycles / 8
    assert {tile.blocks for tile in launch_of(near, num_splits=1).tiles} == {8}


@pytest.mark.parametrize("page_size", [None, 0, 16])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_sequences_without_a_query_or_without_a_key_are_beside_others(page_size: int | None, num_splits: int) -> None:
    for queries, keys in (((0, 5), (7, 0)), ((5, 0), (0, 7)), ((3, 3), (0, 0))):
        assert not fa3verify.simulate(packed(queries, keys, page_size), num_splits=num_splits).tiles
    for queries, keys in (((0, 5, 2), (7, 0, 300)), ((900, 1), (0, 7))):
        assert fa3verify.simulate(packed(queries, keys, page_size, causal=True), num_splits=num_splits).tiles


def test_sinks_cost_nothing() -> None:
    plain = packed((1,) * 8, (4000,) * 8, 16)
    assert fa3verify.simulate(replace(plain, sinks=True)) == fa3verify.simulate(plain)


@pytest.mark.parametrize("cache", [Cache(new=(1, 1)), Cache(indexed=True), Cache(leftpad=(3, 4))], ids=str)
def test_what_a_call_does_beside_attention_is_not_simulated(cache: Cache) -> None:
    problem = replace(packed((1, 1), (300, 400)), cache=cache)
    with pytest.raises(ValueError, match="the simulator does not know"):
        fa3verify.simulate(problem)


def test_what_a_call_launches_by_itself_is_in_the_ranking_and_marked() -> None:
    for problem in (packed((1,) * 4, (5000,) * 4, 16), packed((300, 40), (900, 40), causal=True)):
        launched = schedule_for(problem)
        (own,) = [each for each in tune(problem, H200, pack_gqa=launched.pack_gqa) if each.config == launched]
        assert own.is_launchable
        assert own.estimate == estimate(problem, launched, H200)


@pytest.mark.parametrize("page_size", [48, 64])
def test_what_is_ranked_over_pages_has_the_tile_that_is_launched(page_size: int) -> None:
    problem = packed((700,) * 2, (3000,) * 2, page_size)
    launched = schedule_for(problem)
    assert not misfit(launched, H200)
    assert launched in candidates(problem, pack_gqa=None, sms=int(H200["sms"]))


@pytest.mark.parametrize(("queries", "keys", "chunk", "seen"), [(1, 8000, 1000, 1000), (3, 8001, 1000, 1001)])
def test_a_chunk_costs_the_bytes_of_the_keys_that_some_query_sees(queries: int, keys: int, chunk: int, seen: int):
    few, many = (AttentionProblem(1, seqlen_q=queries, seqlen_k=n, causal=True, **SIZES) for n in (seen, keys))
    assert launch_of(replace(many, attention_chunk=chunk)).hbm_bytes == launch_of(few).hbm_bytes


def test_the_operations_of_chunks_are_those_of_a_batch_of_them():
    whole = AttentionProblem(1, seqlen_q=4096, seqlen_k=4096, causal=True, attention_chunk=1024, **SIZES)
    chunks = AttentionProblem(4, seqlen_q=1024, seqlen_k=1024, causal=True, **SIZES)
    assert launch_of(whole).flops == pytest.approx(launch_of(chunks).flops, rel=1e-3)  # causal counts half of all pairs
