"""Answers: what is confirmed by bits, told, and given as JSON; and exit codes of the verb."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from fa3_kernels.plan.choose import config_of
from fa3verify.cli.main import main
from fa3verify.compare.proof import BatchLimits, prove
from fa3verify.compare.proof.confirm import WHOLE, confirm
from fa3verify.compare.proof.plans import Batch, Change, planner
from fa3verify.inputs.recipe import Recipe
from fa3verify.operations.forward import Result

SIZES: dict[str, Any] = {"nheads": 8, "nheads_kv": 2, "head_dim": 64, "causal": True}
LIMITS = BatchLimits(8, 64, 1500)
FEW = (Recipe("cancelling_v"),)
OPTIONS = ["--nheads", "8", "--nheads-kv", "2", "--head-dim", "64", "--max-seqlen-q", "64", "--max-seqlen-k", "1500"]


@pytest.mark.parametrize("kernel", ["twin.fp16[num_splits=0]", "twin.flash3.bf16[num_splits=0]", "twin.flash2.bf16"])
def test_every_class_is_confirmed_by_bits(kernel):
    found = prove(kernel, seqlen_k=700, limits=LIMITS, changes=("neighbours",), **SIZES)
    (answer,) = found.answers
    assert found.is_invariant is False
    assert answer.ran > 0
    assert not answer.against
    first, *others = answer.classes
    assert all(each.first is None for each in first.confirmed)
    for each in (each for each in others if each.batch):  # statistics of others are of no batch within the limits
        against, *within = each.confirmed
        assert against.first is not None, each
        assert all(result.first is None for result in within), each


def test_a_remedy_leaves_one_class_where_it_is_taken():
    found = prove(
        "twin.flash3.fp16[num_splits=0]", seqlen_k=700, limits=LIMITS, changes=("neighbours",), runs=False, **SIZES
    )
    assert found.answers[0].remedies == ("num_splits=1 and a max_seqlen_q of at least 2 given in every call",)
    call: Any = {"seqlen_k": 700, "limits": LIMITS, "changes": ("neighbours",), "runs": False}
    ours = prove("twin.fp16[num_splits=0]", **call, **SIZES)
    assert [answer.remedies for answer in ours.answers] == [("num_splits=1",)]
    assert prove("twin.fp16[num_splits=1]", **call, **SIZES).is_invariant


def test_a_kernel_that_looks_at_its_neighbours_is_caught_by_the_batches_that_run():
    asked = planner("twin.bf16", SIZES)

    def run(problem, operands, config):
        out, lse = asked.kernel.code.run(problem, operands, config)
        return Result(out, lse + problem.batch - 1)

    fickle = replace(asked, kernel=asked.kernel.altered(run=run))
    alone, batch = Batch(((1, 300),)), Batch(((1, 300), (2, 40)))
    assert asked.bits(alone) == asked.bits(batch)
    assert confirm(asked, alone, batch, FEW, is_whole=True).first is None
    assert confirm(fickle, alone, batch, FEW, is_whole=True).first is not None


CALLS: dict[Change, tuple[Batch, Batch]] = {  # pairs of calls that share a row
    "neighbours": (Batch(((1, 300), (3, 200))), Batch(((1, 300), (2, 40), (20, 33)))),
    "batch": (Batch(((2, 300),) * 2), Batch(((2, 300),) * 3)),
    "chunk": (Batch(((1, 300),)), Batch(((40, 307),), 7)),
}


@pytest.mark.parametrize("kernel", ["twin.bf16", "twin.e4m3", "twin.flash3.bf16", "twin.flash3.bf16[num_splits=3]"])
@pytest.mark.parametrize("change", CALLS)
def test_a_kernel_on_a_gpu_runs_calls_as_they_are_and_with_one_answer(kernel, change):
    asked = planner(kernel, SIZES | {"head_dim": 128}, change)
    seen = []

    def run(problem, operands, config):
        seen.append((problem.seqlens_q, problem.seqlens_k) if problem.seqlens_q else (problem.batch, problem.seqlen_q))
        assert config == asked.kernel.config_for(problem)
        return asked.kernel.code.run(problem, operands, config)

    there = replace(asked, kernel=replace(asked.kernel.altered(run=run), name="released"))
    alone, batch = CALLS[change]
    result = confirm(there, alone, batch, FEW)
    assert result.what == WHOLE
    assert result.outputs > 0
    assert (result.first is None) is (asked.bits(alone) == asked.bits(batch))
    plain = [(len(x.lengths), x.lengths[0][0]) if change == "batch" else tuple(zip(*x.lengths)) for x in (alone, batch)]
    assert seen == plain


def test_a_kernel_that_cannot_run_here_is_planned_as_it_would_be_launched_and_run_by_its_twin():
    for choices in ("", "[num_splits=0]"):
        there, twin = planner(f"flash3.bf16{choices}", SIZES), planner(f"twin.flash3.bf16{choices}", SIZES)
        assert there.kernel.name == twin.name
        assert there.config(5, (1, 900)) == twin.config(5, (1, 900))
    ours = planner("gluon.fp16[num_splits=3]", SIZES)
    assert ours.kernel.name == "twin.fp16[num_splits=3]"
    assert ours.config(5, (1, 900)) == config_of(ours.problem(((1, 900),) * 5), num_splits=3)
    assert ours.config(5, (1, 900)).pack_gqa


@pytest.mark.parametrize("behind", [0, 9])
def test_a_row_in_a_chunk_has_the_bits_of_its_decode(behind):
    asked = planner("twin.bf16", SIZES, "chunk")
    result = confirm(asked, Batch(((1, 200),)), Batch(((40 + behind, 200 + behind),), behind), FEW)
    assert (result.first, result.outputs) == (None, 4 * 64 + 4)
    flash3 = planner("twin.flash3.bf16", SIZES, "chunk")
    assert confirm(flash3, Batch(((1, 200),)), Batch(((40 + behind, 200 + behind),), behind), FEW).first is not None


def test_fp8_decodes_of_a_serving_stack_differ_from_97_keys_on():
    """Issue 184 of vLLM's FlashAttention: by the plan; the length is searched for, not given."""
    sizes = SIZES | {"head_dim": 128, "page_size": 16}
    found = prove("vllm.e4m3", seqlen_k=500, limits=LIMITS, runs=False, changes=("neighbours", "chunk"), **sizes)
    assert [answer.from_keys for answer in found.answers] == [97, 97]
    assert prove("vllm.e4m3", seqlen_k=96, limits=replace(LIMITS, keys=96), runs=False, **sizes).is_invariant


def test_classes_over_pages_are_confirmed_by_bits():
    sizes = SIZES | {"head_dim": 128, "page_size": 16}
    few = BatchLimits(4, 40, 600)
    found = prove("sglang.e4m3", seqlen_k=300, limits=few, changes=("neighbours", "batch"), **sizes)
    beside, batch = found.answers
    assert [each.ranges for each in beside.classes] == [{"max_seqlen_q": ((1, 16),)}, {"max_seqlen_q": ((17, 40),)}]
    assert all(result.outputs > 0 for answer in found.answers for each in answer.classes for result in each.confirmed)
    assert beside.classes[1].confirmed[0].first is not None
    assert (beside.against, batch.is_invariant) == ((), True)
    plain = prove(
        "sglang.e4m3", seqlen_k=300, limits=few, changes=("neighbours",), runs=False, **SIZES | {"head_dim": 128}
    )
    assert plain.answers[0].classes[1].bits != beside.classes[1].bits


def test_decode_and_prefill_of_16_bits_differ_from_129_keys_on():
    found = prove(
        "flash3.bf16", seqlen_k=500, limits=LIMITS, runs=False, changes=("chunk",), **SIZES | {"head_dim": 128}
    )
    assert (found.answers[0].from_keys, found.answers[0].smallest) == (129, Batch(((2, 500),)))


def test_bits_that_no_twin_has_are_told_to_be_so():
    found = prove("vllm.bf16", seqlen_k=300, limits=LIMITS, changes=("chunk",), **SIZES | {"head_dim": 64})
    results = [result for each in found.answers[0].classes for result in each.confirmed]
    assert results
    assert all(result.outputs == 0 and "alone were compared" in result.refused for result in results)
    assert found.is_invariant is False


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["twin.bf16", "--seqlen-k", "300"], 0, "twin.bf16: invariant; 1 query over 300 keys"),
        (
            ["twin.flash3.bf16", "--seqlen-k", "300", "--plan-only"],
            1,
            "the smallest call that leaves A: 1 neighbour of 2",
        ),
        (["twin.fp16[num_splits=4]", "--over", "chunk", "--seqlen-k", "150", "--plan-only"], 5, "not decided"),
        (["nosuch"], 2, "unknown kernel 'nosuch'"),
        (["torch.flash.fp16"], 2, "nobody knows how torch.flash.fp16 is launched"),
        (["twin.flash3.bf16", "--page-size", "16"], 2, "twin.flash3.bf16 is launched over pages"),
        (["twin.quantize"], 2, "only forward kernels are asked"),
        (["twin.cudnn.bf16", "--over", "neighbours"], 2, "takes no packed sequences"),
        (["twin.bf16[num_splits=0]", "--nheads", "7", "--plan-only"], 2, "nheads must be a multiple of nheads_kv"),
        (
            ["twin.bf16", "--over", "decode"],
            2,
            "--prove goes over neighbours, batch, chunk, with all",
        ),
        (["twin.bf16", "--over", "batch=2,3"], 2, "with all values, got batch"),
        (["twin.bf16", "--batch", "2", "--workers", "1"], 2, "--prove does not take --batch, --workers"),
        (["twin.bf16", "twin.fp16"], 2, "--prove is of one kernel, got twin.bf16 and twin.fp16"),
        ([], 2, "Missing argument 'KERNEL'"),
    ],
)
def test_exit_codes_are_those_of_the_answer(arguments, code, words):
    result = CliRunner().invoke(main, ["compare", "--prove", *OPTIONS, *arguments])
    assert result.exit_code == code, result.output
    assert words in result.output


def test_the_answer_is_written_as_json(tmp_path):
    target = tmp_path / "found.json"
    command = [
        "compare",
        "twin.flash3.bf16",
        "--prove",
        *OPTIONS,
        "--seqlen-k",
        "300",
        "--plan-only",
        "--json",
        str(target),
        "--quiet",
    ]
    result = CliRunner().invoke(main, command)
    assert len(result.output.splitlines()) == 1
    found = json.loads(target.read_text())
    assert (found["schema"], found["is_invariant"], found["own"]) == ("fa3verify.proof/1", False, [1, 300])
    neighbours, batch = found["answers"]
    assert neighbours["smallest"]["lengths"] == [[1, 300], [2, 2]]
    assert neighbours["classes"][0]["ranges"] == {"max_seqlen_q": [[1, 1]]}
    assert batch["is_invariant"]


def test_windows_of_builds_whose_key_tiles_begin_at_them_are_refused():
    """Where a tile begins follows from the row tile, which the value of a row's bits does not hold."""
    with pytest.raises(ValueError, match=r"key tiles of vllm.bf16 begin where the window of a row tile does"):
        prove("vllm.bf16", seqlen_k=300, limits=LIMITS, **SIZES | {"head_dim": 128, "window": (127, 0)})
