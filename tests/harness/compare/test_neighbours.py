"""Rows beside neighbours: what is compared is cut as the plan of each call says, and the answer is the plan's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from fa3_kernels.plan.choose import config_of
from fa3verify.cli.main import main
from fa3verify.compare import compare_over
from fa3verify.compare.axes import LONG, SIZES, axis_of
from fa3verify.compare.run import splits_of
from fa3verify.inputs.recipe import Recipe
from fa3verify.kernels.record import Kernel
from fa3verify.known.registry import find
from fa3verify.operations.forward import Result

pytestmark = pytest.mark.usefixtures("in_this_process")
NEIGHBOURS = axis_of("neighbours")
FEW = (Recipe("cancelling_v"),)
FLASH3 = "twin.flash3.bf16[num_splits=4]"
OURS = "twin.fp16[num_splits=0]"
# Splits of one query beside 0, 1 and 8 neighbours of its own length, by hand: at head_dim 64 a block has 192 keys, and
# a part max(1, ceil(1.1 * blocks of all * heads / 132)) of them, where packed heads are those of K and V.
SPLITS = {
    (16, 16, 300): (2, 2, 1),  # blocks of a part: ceil(0.27), ceil(0.53), ceil(2.4)
    (16, 16, 500): (3, 3, 1),  # ceil(0.4), ceil(0.8), ceil(3.6)
    (16, 16, 700): (4, 2, 1),  # ceil(0.53), ceil(1.07), ceil(4.8)
    (16, 4, 300): (2, 2, 2),  # a quarter of each
    (16, 4, 500): (3, 3, 3),
    (16, 4, 700): (4, 4, 2),
}
REGIMES = [(*sizes, count, splits[i]) for sizes, splits in SPLITS.items() for i, count in enumerate((0, 1, 8))]


def one_query(nheads, nheads_kv, keys, head_dim=8):
    sizes = {"nheads": nheads, "nheads_kv": nheads_kv, "seqlen_q": 1, "seqlen_k": keys}
    return sizes | ({"head_dim": head_dim} if head_dim else {})


@pytest.mark.parametrize(("nheads", "nheads_kv", "keys", "count", "splits"), REGIMES)
def test_the_answer_of_a_regime_is_that_of_its_splits(nheads, nheads_kv, keys, count, splits):
    sizes = one_query(nheads, nheads_kv, keys)
    found = compare_over(find(FLASH3), NEIGHBOURS, (f"{count}x{keys}",), FEW, sizes)
    alone = SPLITS[nheads, nheads_kv, keys][0]
    assert found.splits == ((alone, splits),)
    assert found.is_equal is (alone == splits)
    assert found.because == ("" if found.is_equal else f"keys are cut into {alone} parts against {splits}")


@pytest.mark.parametrize(("heads", "splits"), [((32, 32), (4, 3, 1)), ((32, 8), (4, 4, 2))])
def test_splits_at_head_dim_128_are_those_that_upstream_would_launch(heads, splits):
    """One query over 4,000 keys beside 0, 1 and 8 neighbours of 3,000: 23 blocks of 176 keys, and 18 of each."""
    kernel = find(FLASH3)
    sizes = one_query(*heads, 4000, head_dim=128)
    problems = [NEIGHBOURS.problem_for(kernel, f"{count}x3000", sizes) for count in (0, 1, 8)]
    assert tuple(splits_of(kernel.config_for(problem), problem) for problem in problems) == splits


def test_a_decode_row_differs_beside_a_neighbour_of_3000_keys():
    """FlashAttention issue 2450: 4 parts alone, 3 beside it."""
    found = compare_over(find(FLASH3), NEIGHBOURS, ("1x3000",), FEW, one_query(32, 32, 4000))
    assert found.because == "keys are cut into 4 parts against 3"
    assert found.first is not None
    assert found.first.differing > 0


def test_the_verb_takes_counts_of_neighbours_and_sizes():
    sizes = ["--nheads", "16", "--nheads-kv", "16", "--seqlen-q", "1", "--seqlen-k", "700", "--head-dim", "8"]
    command = ["compare", FLASH3, "--over", "neighbours=0x700,1x700", *sizes, "--workers", "1"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1, result.output
    assert "differs first at 1x700, out[0, 0, 0, " in result.output
    assert "because keys are cut into 4 parts against 2 [" in result.output


def test_a_row_beside_neighbours_has_the_bits_of_a_batch_with_as_many_splits():
    kernel = find(FLASH3)
    calls = []

    def noted(problem, operands, config):
        calls.append((problem, operands, kernel.code.run(problem, operands, config)))
        return calls[-1][2]

    compare_over(kernel.altered(run=noted), NEIGHBOURS, ("1x700",), FEW, one_query(16, 16, 700))
    (alone, operands, _), (packed, _, beside) = calls
    batched = replace(alone, seqlens_q=None, seqlens_k=None)
    given = replace(operands, q=operands.q[None], k=operands.k[None], v=operands.v[None])
    for splits in (1, 2, 4):  # three parts of four blocks would be the two, and an empty one
        out, lse = kernel.code.run(batched, given, replace(kernel.config_for(batched), num_splits=splits))
        is_equal = np.array_equal(out[0], beside.out[:1]) and np.array_equal(lse[0], beside.lse[:, :1])
        assert is_equal is (splits == 2), splits
    assert packed.seqlens_k == (700, 700)


@pytest.mark.parametrize("count", [0, 1, 8])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_our_answer_is_that_of_the_launch_plan(heads, count):
    kernel = find(OURS)
    sizes = one_query(*heads, 1000)
    plans = [config_of(NEIGHBOURS.problem_for(kernel, f"{n}x1000", sizes), num_splits=0) for n in (0, count)]
    found = compare_over(kernel, NEIGHBOURS, (f"{count}x1000",), FEW, sizes)
    assert found.splits == ((plans[0].num_splits, plans[1].num_splits),)
    assert plans[0].num_splits > 1
    assert found.is_equal is (plans[0].num_splits == plans[1].num_splits)


def test_equal_says_over_which_splits():
    found = compare_over(find(FLASH3), NEIGHBOURS, ("1x300",), FEW, one_query(4, 4, 300))
    assert found.told().endswith(" pairs, splits 2 and 2")


@pytest.mark.parametrize("axis", ["batch", "position", "neighbours", "num_splits", "pack_gqa", "tile_n"])
def test_sizes_that_are_chosen_are_what_a_kernel_gets(axis):
    kernel = find("twin.flash3.bf16")
    seen = []

    def noted(problem, operands, config):
        seen.append(problem)
        return kernel.code.run(problem, operands, config)

    sizes = {"nheads": 6, "nheads_kv": 3, "seqlen_q": 2, "seqlen_k": 70, "head_dim": 16, "causal": True}
    chosen = axis_of(axis)
    values = ("1x9",) if axis == "neighbours" else chosen.values[:1]
    compare_over(kernel.altered(run=noted), chosen, values, FEW, sizes)
    assert seen
    for problem in seen:
        first = next(iter(problem.sequences()))
        got = {name: getattr(problem, name) for name in SIZES} | {
            "seqlen_q": first.seqlen_q,
            "seqlen_k": first.seqlen_k,
        }
        assert got.items() >= sizes.items()


@pytest.mark.parametrize(
    ("axis", "option", "words"),
    [
        ("decode=9", ["--seqlen-k", "300"], "has seqlen_k 9, which cannot be chosen, got 300"),
        ("decode=9", ["--seqlen-q", "2"], "has seqlen_q 9, which cannot be chosen, got 2"),
        ("chunk", ["--seqlen-q", "4"], "has seqlen_q 1000, which cannot be chosen, got 4"),
        ("seqlen_k", ["--seqlen-k", "300"], "has seqlen_k 41, which cannot be chosen, got 300"),
        ("batch", ["--batch", "3"], "has batch 2, which cannot be chosen, got 3"),
        ("neighbours=9", ["--batch", "3"], "has batch 2, which cannot be chosen, got 3"),
        ("num_splits", ["--nheads", "3"], "nheads must be a multiple of nheads_kv, got 3 and 2"),
    ],
)
def test_a_size_that_an_axis_cannot_have_is_refused(axis, option, words):
    result = CliRunner().invoke(main, ["compare", "twin.fp16", "--over", axis, *option, "--workers", "1"])
    assert result.exit_code == 2, result.output
    assert words in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["twin.fp16", "--over", "batch=2x3"], "values of batch are such as 2, 3, 24, got 2x3"),
        (["twin.fp16", "--over", "num_splits=true"], "values of num_splits are such as 2, 3, 8, got true"),
        (["twin.fp16", "--over", "batch=2", "--over", "batch=3"], "an axis is named once"),
        (["twin.fp16", "twin.fp16", "--over", "seqlen_k=1:3", "--seqlen-k", "5"], "by --over or as a size"),
        (["twin.fp16", "twin.fp16", "--over", "seqlen_k=2x3"], "values of seqlen_k must be numbers, got 2x3"),
        (["twin.fp16", "nosuch"], "unknown kernel 'nosuch'"),
        (["nosuch", "twin.fp16"], "unknown kernel 'nosuch'"),
    ],
)
def test_what_would_be_ignored_is_refused(arguments, words):
    result = CliRunner().invoke(main, ["compare", *arguments, "--workers", "1"])
    assert result.exit_code == 2, result.output
    assert words in result.output


@pytest.mark.parametrize(
    ("kernel", "axis", "values", "sizes", "words"),
    [
        ("twin.flash3.bf16", "pack_gqa", (), {"nheads": 2}, "packed heads must share kv heads, got 2 heads on 2"),
        ("twin.fp16", "position", (3,), {}, "a place must change, got 3 places of 3"),
        ("twin.triton_unscaled.fp16", "batch", (2,), {"causal": True}, "does not claim causal"),
    ],
)
def test_a_comparison_of_nothing_says_why(kernel, axis, values, sizes, words):
    found = compare_over(find(kernel), axis_of(axis), values, FEW, sizes)
    assert found.is_equal is None
    assert words in found.told()


def test_an_axis_that_a_kernel_cannot_have_is_told_where_it_was_named():
    result = CliRunner().invoke(main, ["compare", "twin.cudnn.fp16", "--over", "neighbours=9", "--workers", "1"])
    assert result.exit_code == 5, result.output
    assert "nothing ran; ValueError: twin.cudnn.fp16 cannot be compared over neighbours" in result.output


def test_a_kernel_without_a_twin_has_no_splits_to_tell():
    """Its configuration names formats alone: neither its splits nor its tiles are those that stand there."""
    twin = find("twin.fp16")
    mine = Kernel("mine.fp16", "fp16", twin.code, twin.features)
    sizes = one_query(2, 2, 40)
    assert compare_over(mine, NEIGHBOURS, (9,), FEW, sizes).told().endswith("splits unknown and unknown")

    def fickle(problem, operands, config):
        out, lse = twin.code.run(problem, operands, config)
        return Result(out, lse + problem.batch)

    found = compare_over(mine.altered(run=fickle), NEIGHBOURS, (9,), FEW, sizes)
    assert found.because == "the kernels do not say how they are launched"


def test_a_neighbour_has_no_more_queries_than_keys():
    problem = NEIGHBOURS.problem_for(find("twin.fp16"), "2x9", {})
    assert (problem.seqlens_q, problem.seqlens_k) == ((40, 9, 9), (LONG, 9, 9))
