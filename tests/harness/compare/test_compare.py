"""Comparisons: equal over what ran, or the first value, row and bit with the reason."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from fa3_reference.problem import AttentionProblem
from fa3verify import records
from fa3verify.cli.main import main
from fa3verify.compare import compare_kernels, compare_over, tasks
from fa3verify.compare.axes import AXES
from fa3verify.compare.run import RECIPES, Compared, first_difference
from fa3verify.inputs.recipe import Recipe
from fa3verify.kernels.functions import array_kernel
from fa3verify.kernels.record import Kernel
from fa3verify.known import registry
from fa3verify.known.registry import find
from fa3verify.operations.forward import Result
from tests.harness.kernels import serving_kernels

pytestmark = pytest.mark.usefixtures("in_this_process")
FEW = (Recipe("cancelling_v"),)


def problems(keys):
    return [(n, AttentionProblem(1, 2, 1, 4, n, 128, dtype="e4m3")) for n in keys]


@pytest.mark.parametrize(("kernel", "promoted"), [("twin.e4m3", ",promotion_interval=96"), ("twin.flash3.e4m3", "")])
def test_fp8_tiles_of_96_and_192_keys_differ_from_97_keys_on(kernel, promoted):
    """As a serving stack reported of its decode and its prefill: with 96 keys both have one tile."""
    decode, prefill = (find(f"{kernel}[tile_n={n}{promoted}]") for n in (96, 192))
    found = compare_kernels(decode, prefill, problems((1, 31, 95, 96, 97, 128)), FEW)
    assert found.value == 97
    assert found.because == "a tile has 96 keys against 192, so 97 keys are 2 tiles against 1"
    assert found.first is not None
    assert found.first.output == "out"
    assert 0 < found.first.differing < found.first.compared


def test_a_kernel_equals_itself_and_not_a_mutant():
    twin = find("twin.fp16")
    case = [(65, AttentionProblem(1, 1, 1, 4, 65, 64))]
    assert compare_kernels(twin, twin, case, RECIPES[:2]).is_equal
    wrong = compare_kernels(twin, find("twin.fp16+missing_column"), case, RECIPES[:1])
    assert wrong.first is not None
    assert wrong.first.output == "out"


def test_every_axis_sees_a_kernel_that_breaks_it():
    """Outputs that depend on the call's shape, as of a kernel that chooses its order by it, differ on every axis."""
    twin = find("twin.fp16")

    def run(problem, operands, config):
        out, lse = twin.code.run(problem, operands, config)
        lengths = problem.seqlens_k or (problem.seqlen_k,)
        order = (problem.batch, *lengths, config.tile_m, config.tile_n, config.num_splits, config.pack_gqa)
        first = operands.q.astype(np.float64).ravel()[:8].sum()  # tells orders of one batch
        return Result(out, lse + np.float32(hash((order, first)) % 4093))

    fickle = twin.altered(run=run)
    for axis in AXES:
        value = {"batch": 2, "position": 1, "neighbours": 9, "seqlen_k": 64, "chunk": 177, "decode": 65}.get(axis.name)
        values = {"num_splits": 2, "pack_gqa": True, "tile_m": 64, "tile_n": 64} | ({axis.name: value} if value else {})
        found = compare_over(fickle, axis, (values[axis.name],), FEW)
        assert found.is_equal is False, axis.name


def test_zeros_of_either_sign_differ_and_nans_do_not():
    a = {"out": np.array([0.0, np.nan, 1.0], np.float32)}
    assert first_difference(a, a) is None
    b = {"out": np.array([-0.0, np.nan, 1.5], np.float32)}
    found = first_difference(a, b)
    assert found is not None
    assert (found.index, found.bits, found.differing, found.largest) == ((0,), ("0x00000000", "0x80000000"), 2, 0.5)
    lost = first_difference(a, {"out": np.array([0.0, 2.0, 1.0], np.float32)})
    assert lost is not None
    assert lost.largest == np.inf


def test_the_verb_tells_the_first_length_and_leaves_with_a_finding():
    kernels = ["twin.e4m3[tile_n=96,promotion_interval=96]", "twin.e4m3[tile_n=192,promotion_interval=96]"]
    result = CliRunner().invoke(main, ["compare", *kernels, "--over", "seqlen_k=95:99", "--workers", "1"])
    assert result.exit_code == 1, result.output
    assert "differs first at seqlen_k 97, out[0, 0, " in result.output
    assert "because a tile has 96 keys against 192" in result.output


def test_the_verb_compares_one_kernel_over_an_axis(tmp_path):
    target = tmp_path / "found.json"
    command = ["compare", "twin.fp16", "--over", "position=1", "--over", "num_splits=2", "--workers", "1"]
    result = CliRunner().invoke(main, [*command, "--json", str(target)])
    assert result.exit_code == 1, result.output
    assert "place in the batch: equal over everything it ran" in result.output
    equal, other = (
        records.read(Compared, row["found"], "found") for row in json.loads(target.read_text())["comparisons"]
    )
    assert equal.is_equal
    assert other.value == 2


def _dense(q, k, v, *, causal=False, **given):
    return serving_kernels.plain(q, k, v, **given)


def _kernel(function, *features, head_dims=(64,)) -> Kernel:
    facts = {"dtypes": ("fp16",), "layout": "bshd", "head_dims": head_dims}
    return array_kernel(function, name=function.__name__, features=features, **facts)[0]


KERNELS_OF_ONE_HEAD_DIM = {
    "plain": _kernel(serving_kernels.plain, "causal", "gqa", "sinks"),
    "dense": _kernel(_dense, "causal", "sinks"),
    "paged": _kernel(serving_kernels.cached, "causal", "gqa", "paged", "sinks"),
    "narrow": _kernel(_dense, head_dims=(32,)),
}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["plain", "dense"], 1, "plain.fp16 and _dense.fp16: differs first at plain.fp16 b"),
        (["plain", "dense", "--head-dim", "64"], 1, " causal"),
        (["plain", "dense", "--causal"], 1, "differs first at seqlen_k 300, out"),
        (
            ["plain", "plain", "--seqlen-k", "40"],
            0,
            "head_dim 64, nheads_kv 1, batch 1, nheads 2, seqlen_q 4, seqlen_k [40]",
        ),
        (["plain", "dense", "--over", "seqlen_q=1:3"], 0, "_dense.fp16, head_dim 64, nheads_kv 2, batch 1, nheads 2, "),
        (["plain", "narrow"], 5, "two kernels must take a common head_dim, got (64,) and (32,)"),
    ],
)
def test_two_kernels_are_compared_on_what_both_claim_and_are_told_what_that_was(monkeypatch, arguments, code, words):
    """Of one head_dim nothing ran; kernels that differ under a mask alone were equal over one dense problem."""
    for module in (tasks, registry):
        monkeypatch.setattr(module, "find", KERNELS_OF_ONE_HEAD_DIM.__getitem__)
    result = CliRunner().invoke(main, ["compare", *arguments, "--workers", "1"])
    assert result.exit_code == code, result.output
    assert words in result.output


def test_kernels_that_are_equal_say_on_which_classes(monkeypatch):
    monkeypatch.setattr(tasks, "find", KERNELS_OF_ONE_HEAD_DIM.__getitem__)
    monkeypatch.setattr(tasks, "compare_kernels", lambda a, b, problems: compare_kernels(a, b, problems[::9], FEW))
    told = tasks.compare_pair("plain", "paged", {}, "", []).told()
    assert told.startswith("plain.fp16 and cached.fp16, batch 1, 2, 3 or more; ")
    for words in ("mask none, causal;", "group 1, 2 to 4, 5 or more;", "sinks off, on:", "head_dim 64;", "equal over"):
        assert words in told
    assert not [words for words in ("; cache", "inputs", "splits one;") if words in told]
    assert "layout packed" not in told


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "Missing argument 'KERNEL'"),
        (["twin.fp16", "--over", "moon"], 2, "axis must be one of batch"),
        (["twin.fp16", "--over", "batch=x"], 2, "values must be FIRST:STOP"),
        (["twin.fp16[tile_n]"], 2, "a configuration is KERNEL[FIELD=VALUE,...]"),
        (["twin.fp16", "twin.bf16"], 5, "kernels must have one dtype"),
        (["twin.fp16", "twin.fp16", "--over", "decode=3"], 2, "two kernels are compared over a size"),
        (["twin.quantize", "--over", "batch"], 5, "only forward kernels are compared"),
        (["twin.fp16", "--max-batch", "8", "--plan-only"], 2, "--max-batch, --plan-only go with --prove"),
        (["twin.fp16", "twin.fp16", "--seqlen-k", "9", "--over", "seqlen_k=3"], 2, "seqlen_k is given by --over or as"),
    ],
)
def test_what_cannot_be_compared_is_told(arguments, code, words):
    result = CliRunner().invoke(main, ["compare", *arguments, "--workers", "1"])
    assert result.exit_code == code, result.output
    assert words in result.output
