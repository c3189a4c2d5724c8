"""Laws of the backward's schedule: every key tile once, and turns that end whatever the CTAs' speeds."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from fa3_kernels.plan import key_tiles
from fa3_kernels.plan.backward import backward_config
from fa3_kernels.plan.choose import without_lengths
from fa3_kernels.plan.config import WARPGROUP_ROWS
from fa3_kernels.plan.key_tiles import Walk, key_tile_schedule, visited_rows, walk_of
from fa3_kernels.plan.tile_order import END, HEAD_SHIFT
from fa3_kernels.plan.tiles import Mask, mask_of
from fa3_reference.problem import AttentionProblem

Masks = st.sampled_from(
    [
        {},
        {"causal": True},
        {"window": (100, 0)},
        {"window": (-1, 70)},
        {"window": (150, 60)},
        {"window": (90, -1)},
    ]
)


@st.composite
def problems(draw: st.DrawFn) -> AttentionProblem:
    """Of few heads and up to nine key blocks, so that all of a head, or of several, fits few CTAs or does not."""
    kv, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (3, 2)]))
    rest = {"nheads": kv * group, "nheads_kv": kv, "head_dim": draw(st.sampled_from([64, 128, 256])), **draw(Masks)}
    lengths = st.integers(1, 1100)
    if draw(st.booleans()):
        return AttentionProblem(draw(st.integers(1, 2)), seqlen_q=draw(lengths), seqlen_k=draw(lengths), **rest)
    batch = draw(st.integers(1, 3))
    q, k = ([draw(st.integers(0, 700)) for _ in range(batch)] for _ in "qk")
    return AttentionProblem.varlen((q[0] + 1, *q[1:]), (k[0] + 1, *k[1:]), **rest)


CTAS = st.sampled_from([1, 2, 3, 5, 8, 13, 132])
MANY_HEADS = AttentionProblem(2, 6, 3, 1000, 1100, 64)
PACKED = AttentionProblem.varlen((700, 400, 100), (700, 500, 300), nheads=2, nheads_kv=2, head_dim=64)
FOLDED = AttentionProblem(2, 2, 2, 1100, 1100, 128, causal=True)
SPACED = AttentionProblem(2, 3, 3, 1100, 1100, 256)
SPACED_FOLDED = AttentionProblem(2, 3, 3, 1100, 1100, 256, causal=True)


class Launch(NamedTuple):
    """A schedule with what it was made for."""

    problem: AttentionProblem
    tile_m: int
    tile_n: int
    num_ctas: int
    table: np.ndarray


def launch(problem: AttentionProblem, num_ctas: int, *, is_deterministic: bool = True) -> Launch:
    """As a launch plans it: of packed sequences the longest lengths alone are known."""
    known = without_lengths(problem)
    config = backward_config(known, family="gluon")
    tile_m, tile_n = config.tile_m, config.tile_n
    walk = walk_of(known, tile_m, tile_n, num_ctas, known.seqlen_q, known.seqlen_k)
    table = key_tile_schedule(
        known, num_ctas, tile_m=tile_m, tile_n=tile_n, walk=walk, is_deterministic=is_deterministic
    )
    return Launch(problem, tile_m, tile_n, num_ctas, table)


class Addition(NamedTuple):
    """A key tile's part of the dQ of a row block of a query head of a sequence."""

    key_block: int
    target: tuple[int, int, int]  # sequence, query head, row block
    is_last: bool  # of its tile and query head


def additions(x: Launch, entry: int) -> Iterator[Addition]:
    """What a tile adds, in its order."""
    problem = x.problem
    index, kv_head = divmod(entry >> HEAD_SHIFT, problem.nheads_kv)
    block = entry & ((1 << HEAD_SHIFT) - 1)
    seq = list(problem.sequences())[index]
    if block * x.tile_n >= seq.seqlen_k:
        return
    mask = mask_of(problem, seq.seqlen_q, seq.seqlen_k)
    walk = walk_of(problem, x.tile_m, x.tile_n, x.num_ctas, seq.seqlen_q, seq.seqlen_k)
    rows = walk.rows(visited_rows(mask, seq.seqlen_q, block, x.tile_m, x.tile_n), block)
    for member in range(problem.group):
        for row_block in rows:
            target = (index, kv_head * problem.group + member, row_block)
            yield Addition(block, target, row_block == rows[-1])


def turns(x: Launch) -> dict[tuple[int, int, int], list[int]]:
    """The key blocks that add to every row block, in the order in which it takes them."""
    adders: dict[tuple[int, int, int], set[int]] = defaultdict(set)
    for entry in x.table[x.table != END]:
        for addition in additions(x, int(entry)):
            adders[addition.target].add(addition.key_block)
    found = {}
    for seq in x.problem.sequences():
        walk = walk_of(x.problem, x.tile_m, x.tile_n, x.num_ctas, seq.seqlen_q, seq.seqlen_k)
        blocks = -(-seq.seqlen_k // x.tile_n)
        for target in (t for t in adders if t[0] == seq.index):
            found[target] = [n for n in walk.parts(blocks, target[2]) if n in adders[target]]
    return found


def left_over(x: Launch, order: dict[tuple[int, int, int], list[int]], speeds: random.Random) -> int:
    """Run all CTAs side by side, each a step at a random time, and return the additions that never get their turn.

    Tiles of 64 keys pass a turn when the addition behind its own was started, or was the last one of a head.
    """
    ctas = [[a for entry in row[row != END] for a in additions(x, int(entry))][::-1] for row in x.table]
    held: list[list[Addition]] = [[] for _ in ctas]  # of each CTA: started, and the turn not passed yet
    taken: Counter = Counter()
    while True:
        ready = [i for i, c in enumerate(ctas) if c and order[c[-1].target][taken[c[-1].target]] == c[-1].key_block]
        if not ready:
            return sum(map(len, ctas))
        for i in speeds.sample(ready, speeds.randint(1, len(ready))):
            held[i].append(ctas[i].pop())
            later = x.tile_n == WARPGROUP_ROWS and not held[i][-1].is_last
            for addition in held[i][: len(held[i]) - later]:
                taken[addition.target] += 1
            held[i] = held[i][len(held[i]) - later :]


@given(problems(), CTAS, st.booleans())
@example(MANY_HEADS, 8, True)
@example(FOLDED, 5, True)
def test_every_key_block_of_every_head_is_one_tile(problem, num_ctas, is_deterministic):
    x = launch(problem, num_ctas, is_deterministic=is_deterministic)
    known = without_lengths(problem)
    blocks = range(-(-known.seqlen_k // x.tile_n))
    want = [(head << HEAD_SHIFT) + n for head in range(known.batch * known.nheads_kv) for n in blocks]
    assert sorted(x.table[x.table != END]) == want
    assert len(x.table) <= num_ctas
    for row in x.table:  # entries, then ends, of which there is one at least
        count = int((row != END).sum())
        assert 0 < count < len(row)
        assert (row[:count] != END).all()


def heads_side_by_side(problem: AttentionProblem, num_ctas: int) -> int:
    """Of how many heads of K and V there are tiles among the first one of every CTA, in any order."""
    table = launch(problem, num_ctas, is_deterministic=False).table
    return len({int(entry) >> HEAD_SHIFT for entry in table[:, 0]})


def test_dense_tiles_that_run_side_by_side_are_of_as_few_heads_as_there_can_be():
    """Of 512 keys a head has 4 tiles: 132 CTAs work on 33 heads, however many fit L2."""
    assert heads_side_by_side(AttentionProblem(32, 16, 16, 512, 512, 128), 132) == 33
    assert heads_side_by_side(AttentionProblem(4, 16, 4, 512, 512, 128), 12) == 3


def test_masked_tiles_that_run_side_by_side_are_of_at_most_sixteen_heads_until_those_have_no_more():
    """64 heads of 512 causal keys would fit L2: the first 16 have 64 tiles, so that 132 CTAs begin a third lot."""
    problem = AttentionProblem(32, 16, 16, 512, 512, 128, causal=True)
    assert heads_side_by_side(problem, 64) == 16
    assert heads_side_by_side(problem, 132) == 2 * 16 + 4


@given(problems(), CTAS, st.randoms(use_true_random=False))
@example(MANY_HEADS, 8, random.Random(0))
@example(PACKED, 4, random.Random(0))
@example(FOLDED, 5, random.Random(0))
@example(FOLDED, 132, random.Random(0))
@example(SPACED, 132, random.Random(0))
@example(SPACED_FOLDED, 132, random.Random(0))
@example(SPACED_FOLDED, 5, random.Random(0))
def test_every_part_of_dq_gets_its_turn_whatever_the_speeds(problem, num_ctas, speeds):
    x = launch(problem, num_ctas)
    assert left_over(x, turns(x), speeds) == 0


@pytest.mark.parametrize(
    ("problem", "num_ctas"),
    [(MANY_HEADS, 8), (FOLDED, 5), (SPACED, 20), (SPACED_FOLDED, 20)],
    ids=["gangs", "folded", "gangs of 64 keys", "folded with 64 keys"],
)
def test_an_order_or_a_schedule_that_is_wrong_does_not_end(problem, num_ctas):
    x = launch(problem, num_ctas)
    order = turns(x)
    assert left_over(x, {t: n[::-1] for t, n in order.items()}, random.Random(0)) > 0
    ends = [row[row != END] for row in x.table]
    backwards = np.array([np.pad(row[::-1], (0, x.table.shape[1] - len(row)), constant_values=END) for row in ends])
    assert left_over(x._replace(table=backwards), order, random.Random(0)) > 0


def test_a_turn_that_is_passed_a_row_block_later_needs_tiles_two_row_blocks_apart(monkeypatch):
    """A gang that fills its ring, one row block apart, would wait for itself."""
    spaced = launch(SPACED, 132)
    assert left_over(spaced, turns(spaced), random.Random(0)) == 0
    monkeypatch.setattr(key_tiles, "SPACING_OF_WIDE", 1)
    adjacent = launch(SPACED, 132)
    assert left_over(adjacent, turns(adjacent), random.Random(0)) > 0


@given(problems(), CTAS)
def test_a_row_block_takes_its_parts_in_an_order_of_its_sequence_alone(problem, num_ctas):
    """The bits of dQ do not depend on the batch: a sequence alone has the order that it has among others."""
    x = launch(problem, num_ctas)
    order = turns(x)
    for seq in problem.sequences():
        if not seq.seqlen_q or not seq.seqlen_k:
            continue
        rest = {n: getattr(problem, n) for n in ("nheads", "nheads_kv", "head_dim", "causal", "window")}
        if problem.is_varlen:
            alone = AttentionProblem.varlen((seq.seqlen_q,), (seq.seqlen_k,), **rest)
        else:
            alone = AttentionProblem(1, seqlen_q=seq.seqlen_q, seqlen_k=seq.seqlen_k, **rest)
        of_one = turns(launch(alone, num_ctas))
        assert of_one == {(0, *t[1:]): n for t, n in order.items() if t[0] == seq.index}


@given(st.integers(1, 700), st.integers(1, 700), st.integers(-1, 300), st.integers(-1, 300), st.sampled_from([64, 128]))
def test_visited_rows_are_from_the_first_block_that_sees_a_key_to_the_last(seqlen_q, seqlen_k, left, right, tile_m):
    mask = Mask(seqlen_k, seqlen_k - seqlen_q, left, right)
    problem = AttentionProblem(1, 1, 1, seqlen_q, seqlen_k, 64, window=(left, right))
    first, stop = problem.visible_keys(np.arange(seqlen_q), seqlen_q, seqlen_k)
    for block in range(-(-seqlen_k // 128)):
        sees = (np.maximum(first, block * 128) < np.minimum(stop, (block + 1) * 128)).nonzero()[0] // tile_m
        got = visited_rows(mask, seqlen_q, block, tile_m, 128)
        assert list(got) == (list(range(sees[0], sees[-1] + 1)) if len(sees) else []), block


WALKS = st.one_of(
    st.builds(Walk, st.sampled_from([1, 2]), gang=st.integers(0, 9)),
    st.builds(
        Walk, st.sampled_from([1, 2]), fold=st.integers(1, 9), turn=st.integers(0, 20), stride=st.sampled_from([1, 2])
    ),
)


@given(WALKS, st.integers(0, 9), st.integers(1, 12), st.integers(0, 12))
def test_a_walk_visits_every_row_block_once_and_a_row_block_takes_every_part_once(walk, first, count, block):
    if walk.gang:  # no more tiles go round than have rows of their own
        first, count = 0, max(count, walk.gang * walk.spacing)
    assert sorted(walk.rows(range(first, first + count), block)) == list(range(first, first + count))
    blocks = max(block, walk.fold) + 1
    assert sorted(walk.parts(blocks, first)) == list(range(blocks))
