"""A user's function of arrays: it gets what it declares, in its layout, and is found by its name."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import fa3verify
from fa3_reference.attention import attention
from fa3_reference.problem import AttentionProblem
from fa3_reference.quantize import QuantScheme
from fa3verify.campaign.introduction import introduce, introduce_all
from fa3verify.campaign.pool import processes
from fa3verify.cases.case import Case
from fa3verify.cases.coverage import adapted
from fa3verify.inputs.recipe import Recipe
from fa3verify.judging.judgement import judge, passes
from fa3verify.kernels.functions import array_kernel
from fa3verify.kernels.policy import Policy
from fa3verify.known import registry
from fa3verify.known.cpu_kernels import CLAIMED, cpu
from fa3verify.properties import check_claims, find_law, run_law


def exact(q, k, v, *, softmax_scale, causal=False, layout="bhsd", **descales):
    """Float64 attention of arrays, rounded once."""
    arrays = [x.swapaxes(1, 2) if layout == "bhsd" else x for x in (q, k, v)]
    batch, rows, heads, width = arrays[0].shape
    problem = AttentionProblem(
        batch, heads, arrays[1].shape[2], rows, arrays[1].shape[1], width, causal=causal, softmax_scale=softmax_scale
    )
    values = [x.astype(np.float64) for x in arrays]
    for i, name in enumerate(("q_descale", "k_descale", "v_descale")):
        if name in descales:
            values[i] *= np.repeat(descales[name], values[i].shape[2] // descales[name].shape[1], 1)[:, None, :, None]
    found = attention(problem, *values)
    out = found.out.astype(np.float16)
    return (out.swapaxes(1, 2) if layout == "bhsd" else out), found.lse.astype(np.float32)


@fa3verify.kernel(dtypes=("fp16", "bf16"), features=("causal",))
def declared(q, k, v, *, softmax_scale, causal):
    out, lse = exact(q, k, v, softmax_scale=softmax_scale, causal=causal)
    return out.astype(q.dtype), lse


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_function_is_judged_in_its_own_layout(layout):
    def mine(q, k, v, **options):
        return exact(q, k, v, layout=layout, **options)

    (kernel,) = array_kernel(mine, layout=layout)
    case = Case(kernel.name, AttentionProblem(2, 4, 2, 9, 33, 64, causal=True), Recipe("normal"))
    assert passes(kernel, judge(kernel, case).measures)
    (other,) = array_kernel(mine, layout={"bhsd": "bshd", "bshd": "bhsd"}[layout])
    with pytest.raises(Exception, match=r"nheads|shape|matmul|causal"):
        judge(other, case)


def test_an_fp8_function_gets_its_descales_by_kv_head():
    (kernel,) = array_kernel(exact, dtypes=("e4m3",), out_dtype="fp16")
    problem = AttentionProblem(2, 4, 2, 40, 70, 64, dtype="e4m3", causal=True)
    case = Case(kernel.name, problem, Recipe("outlier_channels"), QuantScheme("head"))
    assert passes(kernel, judge(kernel, case).measures)


def test_an_output_format_is_that_of_fp8_functions_and_a_wrong_one_is_a_finding_not_a_refusal():
    """ "The kernel refuses: a fp16 kernel writes fp16" was said of what the harness had refused before it called."""
    problem = AttentionProblem(2, 4, 2, 40, 70, 64, causal=True)
    fp16, e4m3 = array_kernel(exact, dtypes=("fp16", "e4m3"), out_dtype="bf16")
    assert passes(fp16, judge(fp16, Case(fp16.name, problem, Recipe("normal"))).measures)
    case = Case(e4m3.name, replace(problem, dtype="e4m3"), Recipe("normal"), QuantScheme("head"))
    with pytest.raises(Exception, match="returned out of dtype float16, expected bfloat16"):
        judge(e4m3, case)


def test_an_fp8_function_gets_a_descale_for_each_query_head_where_it_claims_so_and_is_not_judged_by_them_elsewhere():
    problem = AttentionProblem(2, 4, 2, 40, 70, 64, dtype="e4m3", causal=True)
    for scheme in (QuantScheme("query_head"), QuantScheme("tensor"), QuantScheme("head")):
        case = Case("exact.e4m3", problem, Recipe("outlier_channels"), scheme)
        (claims,) = array_kernel(
            exact, dtypes=("e4m3",), out_dtype="fp16", features=("causal", "gqa", "query_head_descale")
        )
        assert passes(claims, judge(claims, case).measures)
        (other,) = array_kernel(exact, dtypes=("e4m3",), out_dtype="fp16")
        if scheme.granularity == "query_head":
            with pytest.raises(ValueError, match=r"exact\.e4m3 does not claim query_head_descale"):
                judge(other, case)
        else:
            assert passes(other, judge(other, case).measures)


def test_a_misspelt_fact_is_refused_with_the_list():
    for facts, match in (
        ({"dtypes": ("fp8",)}, "dtype must be among fp16, bf16, e4m3"),
        (
            {"features": ("causl",)},
            "feature must be among alibi, append, attention_chunk, attn_mask, batch_idx, bias, bias_fp32, causal",
        ),
        ({"layout": "sbhd"}, "layout must be among bhsd, bshd"),
        ({"out_dtype": "fp32"}, "out_dtype must be among , fp16, bf16, got 'fp32'"),
    ):
        with pytest.raises(ValueError, match=match):
            array_kernel(exact, **facts)


def test_a_claim_of_no_property_is_refused_where_it_is_made_and_where_a_kernel_is_judged(monkeypatch):
    with pytest.raises(ValueError, match="bitwise must be among appended_key"):
        fa3verify.kernel(library="numpy", bitwise=("repeats",))(exact)
    (kernel,) = array_kernel(exact, bitwise=("repeats",))
    monkeypatch.setattr(registry, "find", lambda name: kernel)
    with pytest.raises(ValueError, match=r"bitwise must be among appended_key.*got 'repeats'"):
        introduce("exact.fp16", "quick")


def test_what_libraries_on_a_cpu_claim_are_properties_that_can_be_claimed():
    check_claims(CLAIMED)
    assert all(kernel.bitwise == CLAIMED for kernel in cpu())


def test_properties_that_are_not_claimed_are_not_run():
    (kernel,) = array_kernel(exact, bitwise=("repeated_run_is_identical",))
    for name, status in (("repeated_run_is_identical", "pass"), ("each_head_alone_gives_the_same_bits", "not_claimed")):
        assert run_law(find_law(name), kernel, max_examples=2, seed=0).status == status


def test_what_a_policy_leaves_out_is_told(monkeypatch):
    policy = Policy(empty_out="undefined", special_values="undefined")
    (kernel,) = array_kernel(exact, policy=policy)
    monkeypatch.setattr(registry, "find", lambda name: kernel)
    told = introduce("exact.fp16", "quick").not_claimed
    assert {"policy empty_out undefined", "policy special_values undefined"} <= set(told)
    assert not any("empty_lse" in words for words in told)


def test_a_top_left_mask_is_judged_by_its_own_diagonal_with_any_lengths():
    (kernel,) = array_kernel(exact, policy=Policy(causal="top_left"))
    other = AttentionProblem(1, 1, 1, 8, 9, 64, causal=True)
    assert "aligned top-left needs as many queries as keys, got 8 and 9" in str(kernel.refusal(other))
    assert kernel.supports(replace(other, top_left=True))
    assert kernel.supports(replace(other, seqlen_k=8))
    assert kernel.supports(replace(other, causal=False))
    assert adapted(kernel, other) == replace(other, top_left=True)


def test_a_problem_of_the_other_diagonal_is_refused_and_one_of_its_own_is_judged_by_it():
    problem = AttentionProblem(1, 1, 1, 8, 19, 64, causal=True)
    top_left = replace(problem, top_left=True)
    (sound,) = array_kernel(exact)
    words = "aligned bottom-right, of a problem aligned top-left, needs as many queries as keys, got 8 and 19"
    assert words in str(sound.refusal(top_left))
    assert sound.supports(replace(top_left, seqlen_k=8))
    (wrong,) = array_kernel(exact, policy=Policy(causal="top_left"))  # its mask is aligned bottom-right
    assert not passes(wrong, judge(wrong, Case(wrong.name, top_left, Recipe("peaky"))).measures)
    twin = registry.find("twin.cudnn.fp16")  # whose mask is
    assert passes(twin, judge(twin, Case(twin.name, top_left, Recipe("peaky"))).measures)


@pytest.fixture
def beside_this_file(monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_a_declared_function_stays_a_function_and_is_found_by_dtype(beside_this_file):
    kernel = registry.find("test_functions:declared.bf16")
    assert (kernel.dtype, kernel.name) == ("bf16", "test_functions:declared.bf16")
    case = Case(kernel.name, AttentionProblem(1, 2, 2, 20, 20, 64, dtype="bf16", causal=True), Recipe("peaky"))
    assert passes(kernel, judge(kernel, case).measures)
    with pytest.raises(ValueError, match=r"must name one of test_functions:declared\.fp16, test_functions:declared"):
        registry.find("test_functions:declared")


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_packed_sequences_come_as_tokens_by_heads_whatever_the_layout_of_batches(layout):
    """Each sequence alone is a batch of one; a function of packed sequences gets their starts and longest ones."""
    seen = []

    def mine(q, k, v, *, softmax_scale, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        seen.append((q.shape, k.shape, cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), max_seqlen_q, max_seqlen_k))
        parts = [
            exact(*(x[None] for x in (q[a:b], k[c:d], v[c:d])), softmax_scale=softmax_scale, layout="bshd")
            for (a, b), (c, d) in zip(pairwise(cu_seqlens_q), pairwise(cu_seqlens_k), strict=True)
        ]
        return np.concatenate([out[0] for out, _ in parts]), np.concatenate([lse[0] for _, lse in parts], axis=1)

    (kernel,) = array_kernel(mine, layout=layout, features=("varlen", "gqa"))
    problem = AttentionProblem.varlen((5, 9), (7, 20), nheads=4, nheads_kv=2, head_dim=64)
    judged = judge(kernel, Case(kernel.name, problem, Recipe("normal")))
    assert passes(kernel, judged.measures)
    assert judged.measures["outputs"] == 14 * 4 * 64
    assert seen == [((14, 4, 64), (27, 2, 64), [0, 5, 14], [0, 7, 27], 9, 20)]


def test_a_reference_to_kernels_of_several_dtypes_introduces_each(tmp_path):
    file = tmp_path / "of_two_dtypes.py"
    facts = 'dtypes=("fp16", "bf16"), features=(), head_dims=(64, 128)'
    file.write_text(f"import fa3verify\n@fa3verify.kernel({facts})\ndef f(q, k, v, *, softmax_scale): return q\n")
    with processes(1) as executor:
        told = introduce_all((f"{file}:f@64", f"{file}:f.bf16"), "quick", executor)
    assert [each.name for each in told] == [f"{file}:f.fp16@64", f"{file}:f.bf16@64", f"{file}:f.bf16"]
    assert [each.head_dims for each in told] == [(64,), (64,), (64, 128)]
