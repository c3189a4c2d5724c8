"""Enumerated classes: thresholds by hand, the reduction refuted where it is wrong, and invariance of our kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fa3_kernels.plan.config import default_config
from fa3_reference.cache import Cache
from fa3_reference.problem import AttentionProblem
from fa3verify.compare.proof.classes import ANY, BatchLimits, enumerate_calls, stretches, with_batches
from fa3verify.compare.proof.plans import Batch, planner

LIMITS = BatchLimits(16, 128, 6000)
MHA = {"nheads": 32, "nheads_kv": 32, "head_dim": 128, "causal": True}
GQA = MHA | {"nheads_kv": 8}
PAGED = " over pages"


def found_of(kernel, sizes, own, change="neighbours", limits=LIMITS):
    """A kernel's name has PAGED behind it where its keys lie in pages."""
    pages = {"cache": Cache(16)} if kernel.endswith(PAGED) else {}
    found = enumerate_calls(planner(kernel.removesuffix(PAGED), sizes | pages, change), own, limits)
    return with_batches(found, own, limits) if change == "neighbours" else found


def ranges(found, name):
    """Return the ranges of a statistic of every class."""
    index = found.names.index(name)
    return [sorted({case[index] for case in cases} - {ANY}) for cases in found.classes.values()]


def parts(found):
    return [len(next(iter(rows[-1])).parts) for rows in found.classes]


def test_splits_of_packed_sequences_follow_the_blocks_of_the_call():
    """FlashAttention issue 2450, 23 blocks of 176 keys: a part is of ceil(blocks x 1.1 x 32 / 132) blocks.

    7 of them up to 26 blocks, so that there are 4 parts; 8 to 11 up to 41, 3 parts; 12 to 22 up to 82, 2 parts.
    """
    found = found_of("twin.flash3.bf16[num_splits=4]", MHA, (1, 4000))
    own = parts(found).index(4), parts(found).index(3), parts(found).index(2), parts(found).index(1)
    blocks = [ranges(found, "blocks")[i] for i in own]
    assert [(each[0].first, each[-1].last) for each in blocks[:3]] == [(23, 26), (27, 41), (42, 82)]
    assert blocks[3][0].first == 83
    asked = found.planner
    beside = [asked.bits(Batch(((1, 4000), *((1, 3000),) * n))) for n in (0, 1, 8)]
    assert [list(found.classes).index(bits) for bits in beside] == [own[0], own[1], own[3]]
    assert found.leaves == Batch(((1, 4000), (1, 529)))  # three blocks of it are not enough
    assert not found.against


@pytest.mark.parametrize(("heads", "last"), [(8, 16), (4, 8), (32, 64)])
def test_the_longest_queries_of_the_whole_batch_choose_the_tile(heads, last):
    """Issue 51902 of vLLM: a decode row shares its tile as long as 64 rows hold all queries of any sequence."""
    sizes = {"nheads": 32, "nheads_kv": heads, "head_dim": 128, "causal": True}
    found = found_of("vllm.e4m3[num_splits=1]" + PAGED, sizes, (1, 2000))
    few, many = ranges(found, "max_seqlen_q")
    assert (few[0].first, few[-1].last, many[0].first) == (1, last, last + 1)
    assert found.leaves == Batch(((1, 2000), (last + 1, last + 1)))
    assert found.is_complete
    assert not found.against


def test_seven_heads_a_group_differ_beside_ten_queries():
    """As the report of issue 51902 says: 9 or 10."""
    sizes = {"nheads": 28, "nheads_kv": 4, "head_dim": 128, "causal": True}
    assert found_of("vllm.e4m3" + PAGED, sizes, (1, 2000)).leaves == Batch(((1, 2000), (10, 10)))


@pytest.mark.parametrize(
    "kernel",
    [
        *("gluon.fp16", "gluon.bf16", "gluon.e4m3", "gluon.bf16" + PAGED, "gluon.e4m3" + PAGED),
        *("vllm.bf16" + PAGED, "sglang.bf16" + PAGED),
    ],
)
@pytest.mark.parametrize("change", ["neighbours", "batch", "chunk"])
@pytest.mark.parametrize("own", [(1, 700), (50, 700)])
def test_one_part_and_one_tile_of_keys_are_invariant(kernel, change, own):
    found = found_of(kernel, GQA, own, change)
    assert len(found.classes) == 1
    assert found.is_complete
    assert found.leaves is None
    assert not found.against


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
def test_our_default_is_invariant_at_every_head_dim(head_dim, dtype):
    found = found_of(f"gluon.{dtype}", GQA | {"head_dim": head_dim}, (9, 300))
    assert (len(found.classes), found.is_complete, found.against) == (1, True, ())


def test_our_splits_of_a_prefill_follow_packing_and_that_the_longest_queries_of_the_batch():
    """40 queries of four heads are two packed tiles or four others; beside 97, so 112, packing saves nothing."""
    kernel = "gluon.fp16[num_splits=4]"
    found = found_of(kernel, GQA, (40, 2052))
    assert len(found.classes) == 2
    assert found.leaves == Batch(((40, 2052), (97, 97)))
    for pack in ("true", "false"):
        assert len(found_of(f"{kernel[:-1]},pack_gqa={pack}]", GQA, (40, 2052)).classes) == 1
    assert len(found_of(kernel, GQA, (1, 2052)).classes) == 1


def test_a_chunk_behind_a_row_moves_its_parts_and_without_parts_nothing():
    found = found_of("twin.fp16[num_splits=4]", GQA, (1, 2000), "chunk")
    assert found.leaves == Batch(((50, 2049),), 49)  # 16 blocks, and a 17th with the last query of the tile
    assert len(found_of("twin.fp16", GQA, (1, 2000), "chunk").classes) == 1


def test_a_plan_that_follows_something_else_is_refuted():
    """Tiles by the sum of the queries: a decode row differs beside 3 x 40 queries, but not beside 1 x 40."""
    plain = planner("twin.flash3.bf16", GQA)

    def by_sum(problem):
        few = sum(problem.seqlens_q or (problem.seqlen_q,)) <= 80
        return replace(default_config(problem, family="flash3"), tile_n=128 if few else 96)

    asked = replace(plain, configure=by_sum, known={})
    found = with_batches(enumerate_calls(asked, (1, 700), LIMITS), (1, 700), LIMITS)
    assert found.against


def test_a_batch_is_planned_with_all_its_lengths():
    """Tiles by the queries of the last sequence, which no statistic tells."""
    plain = planner("twin.flash3.bf16", GQA)

    def by_last(problem):
        return replace(default_config(problem, family="flash3"), tile_n=128 if problem.seqlens_q[-1] == 1 else 96)

    asked = replace(plain, configure=by_last, known={})
    a, b = (Batch(((1, 700), *rest)) for rest in (((5, 9), (1, 9)), ((1, 9), (5, 9))))
    assert asked.bits(a) != asked.bits(b)


def test_parts_that_grow_with_the_call_are_refuted():
    plain = planner("twin.flash3.bf16[num_splits=4]", GQA)

    def grown(problem):
        config = plain.configure(problem)
        return replace(config, num_splits=2 if problem.seqlen_k > 5000 and problem.batch % 2 else 4)

    asked = replace(plain, configure=grown, known={})
    found = with_batches(enumerate_calls(asked, (1, 4000), LIMITS), (1, 4000), LIMITS)
    assert len(found.classes) > 4
    assert found.leaves is not None


def test_a_window_is_local_only_while_it_hides_keys_of_the_longest_sequence():
    """300 keys to the left are all that 301 have: FlashAttention-3 then runs another kernel, with another tile."""
    sizes = GQA | {"causal": False, "window": (300, -1)}
    found = found_of("twin.flash3.bf16", sizes, (1, 250))
    dense, local = ranges(found, "max_seqlen_k")
    assert (dense[-1].last, local[0].first) == (301, 302)


def test_numbers_are_cut_where_their_signature_changes():
    assert stretches(3, 3, lambda n: n) == [(3, 3)]
    assert stretches(1, 6, lambda n: n % 3 == 0) == [(1, 2), (3, 3), (4, 5), (6, 6)]


def test_lengths_that_the_caller_declares_count_as_the_longest():
    asked = planner("vllm.e4m3", GQA | {"cache": Cache(16)})
    plain, declared = (replace(asked, declared=(n, 0), known={}).bits(Batch(((1, 2000),))) for n in (0, 17))
    assert plain != declared == asked.bits(Batch(((1, 2000), (17, 17))))


def test_a_problem_has_the_lengths_of_its_batch():
    asked = planner("twin.bf16", GQA)
    assert asked.problem(((1, 9), (2, 5))).seqlens_k == (9, 5)
    assert replace(asked, change="batch").problem(((2, 9),) * 3) == AttentionProblem(
        3, seqlen_q=2, seqlen_k=9, **GQA, dtype="bf16"
    )


def test_a_proof_may_be_of_two_sequences_alone():
    """The fewest that a row can have as a neighbour; batches of more are not within the limits."""
    found = found_of("twin.flash3.bf16[num_splits=4]", GQA, (1, 300), limits=BatchLimits(2, 4, 400))
    assert {len(batch.lengths) for batch in found.batches} == {1, 2}
    assert not found.against
