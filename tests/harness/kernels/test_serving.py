"""Functions of calls that serve: right ones keep the bound in every case of their space, mistakes do not."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from fa3_reference.bounds import KernelModel, SoftmaxOrder
from fa3_reference.cache import Cache
from fa3_reference.problem import AttentionProblem
from fa3verify.campaign.cover import cover
from fa3verify.campaign.plan import judge_cases
from fa3verify.campaign.results import CaseResult
from fa3verify.cases import coverage, space
from fa3verify.cases.case import Case
from fa3verify.cases.dimensions import DIMENSIONS, OF_CACHES
from fa3verify.cases.practice import practice
from fa3verify.inputs.recipe import Recipe
from fa3verify.judging.judgement import judge
from fa3verify.kernels.calls import KernelError
from fa3verify.kernels.functions import array_kernel
from fa3verify.kernels.record import Kernel
from fa3verify.properties import run_law
from fa3verify.properties.serving import SERVING_LAWS
from tests.harness.kernels import serving_kernels as kernels

pytestmark = pytest.mark.usefixtures("shared_references")  # a mistaken kernel is given what the right one was
IN_ROWS = ("causal", "gqa", "varlen", "seqused_k", "append", "leftpad", "batch_idx", "rotary")
IN_PAGES = ("causal", "gqa", "varlen", "paged", "append", "sinks", "rotary")
FP8 = ("causal", "gqa", "varlen", "paged", "seqused_k", "fp8_cache", "fp8_rows")
DROPPED = {"sinks": None, "attention_chunk": 0}


def _kernel(function, dtype="bf16", layout="bshd", **facts) -> Kernel:
    return array_kernel(function, dtypes=(dtype,), layout=layout, **({"head_dims": (64,)} | facts))[0]


def _worst(kernel: Kernel, **chosen: str) -> float:
    """Largest error / bound over small cases of the classes of serving, with every mask and layout."""
    own = {d.name: d.classes for d in DIMENSIONS if d.features and d.concerns(kernel)}
    points = [{name: c} | chosen for name, classes in own.items() for c in classes]
    points += [
        point | {"behind": "nan", "layout": "packed", "mask": ("causal", "none")[i % 2]}
        for i, point in enumerate(points)
        if "cache" in own
    ]
    points += [{"sinks": "on", "keys": "none"}, {"sinks": "on", "mask": "causal"}, {"chunk": "on", "mask": "causal"}]
    found = []
    for seed, point in enumerate(points):
        try:
            case = space.case_of(kernel, {"batch": "3 or more", "group": "2 to 4"} | point, seed)
        except ValueError:
            continue  # no such case
        try:
            found.append(judge(kernel, case, unrounded=False).measures["ratio_max"])
        except KernelError:  # its cache is not as it should be
            found.append(math.inf)
    assert len(found) >= 6
    return max(found)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_right_functions_of_caches_keep_the_bound(dtype):
    assert 0.1 < _worst(_kernel(kernels.cached, dtype, features=IN_ROWS)) <= 1
    assert 0.1 < _worst(_kernel(kernels.cached, dtype, features=IN_PAGES, page_sizes=(16, 1, 48))) <= 1
    assert 0.1 < _worst(_kernel(kernels.cached, dtype, features=FP8)) <= 1


@pytest.mark.parametrize(
    ("mistake", "features"),
    [
        ("one key more", IN_ROWS),
        ("one key more", IN_PAGES),
        ("stale page", IN_PAGES),
        ("leftpad", IN_ROWS),
        ("append", IN_PAGES),
        ("rotary", IN_ROWS),
        ("descale", FP8),
    ],
)
def test_a_mistake_with_a_cache_breaks_the_bound(mistake, features):
    wrong = functools.partial(kernels.cached, mistake=mistake)
    assert not _worst(_kernel(wrong, name="wrong", features=features)) <= 1


def test_the_cover_of_a_kernel_of_caches_meets_every_pair_and_finds_one_position_for_all_queries():
    """Rows without a case had hidden it until November 2026: a batch of one over a cache is never packed."""
    wrong = _kernel(functools.partial(kernels.cached, mistake="one position"), name="wrong", features=IN_PAGES)
    rows = cover(wrong, 2, 0)
    planned = coverage.pairs(point for point, _ in rows)
    assert coverage.pairs(point for point, case in rows if case) == planned
    cases = [case for point, case in rows if case and point["rotary"] != "off" and point["mask"] == "causal"]
    assert any(min(n[0] for n in (case.problem.seqlens_q, case.problem.seqlens_k)) > 1 for case in cases)
    assert any(judge(wrong, case, unrounded=False).measures["ratio_max"] > 1 for case in cases)


ALL = (*IN_ROWS, "paged", "sinks", "window", "softcap", "attention_chunk", "fp8_cache", "fp8_rows")
# What a case has that shows a mistake: others need not be judged.
SHOWN = {
    "leftpad in pages": lambda p: p.cache.leftpad and p.cache.page_size,
    "row of a table": lambda p: p.cache.indexed and p.cache.page_size,
    "32 channels": lambda p: p.cache.rotary_dim > 32,
    "2,048 positions": lambda p: p.cache.rotary_dim and max(p.cache.seqlens(p)) > 2048,
    "positions without leftpad": lambda p: p.cache.rotary_dim and p.cache.leftpad,
    "sink of long rows": lambda p: p.sinks and p.seqlen_k > 2048,
    "wide windows": lambda p: p.window[0] > 4096,
    "long chunks": lambda p: p.attention_chunk >= 1024,
    "as many as queries": lambda p: any(n > q for n, q in zip(p.cache.new, p.seqlens_q, strict=False)),
    "descale of a packed sequence": lambda p: p.cache.fp8 in ("tensor", "head") and not p.has_equal_queries,
}


@pytest.fixture(scope="module")
def asked() -> list[Case]:
    """Return the cases with a cache of the covering array and of practice of a kernel that has all features."""
    kernel = _kernel(kernels.cached, features=ALL, name="k")
    cases = [*(case for _, case in cover(kernel, 2, 0)), *practice(kernel, "quick", 0)]
    small = [case for case in cases if case and case.problem.cache and case.problem.nheads <= 12]
    return sorted(small, key=lambda case: math.prod(case.problem.q_shape) * case.problem.seqlen_k)


@pytest.mark.parametrize("mistake", SHOWN)
def test_a_quick_campaign_has_a_case_that_finds_a_mistake_of_serving(asked, mistake):
    """Of 41 wrong kernels of this kind 17 had passed: no case had two of these at once, or their sizes."""
    right = _kernel(kernels.cached, features=ALL, name="k")
    wrong = _kernel(functools.partial(kernels.cached, mistake=mistake), features=ALL, name="k")
    showing = [case for case in asked if SHOWN[mistake](case.problem)]
    for case in showing:
        if _is_found(judge_cases(wrong, "cover", [case])[0]):
            break
    else:
        pytest.fail(f"{len(showing)} cases did not find it")
    assert not _is_found(judge_cases(right, "cover", [case])[0])


def _is_found(record: CaseResult) -> bool:
    figures = (record.measures[name] for name in ("ratio_max", "ratio_lse_max") if not record.error)
    return bool(record.error) or not max(figures) <= 1


def test_a_kernel_that_takes_leftpad_in_rows_alone_says_so_and_is_asked_no_other_call():
    rule = "leftpad without paged"
    features = ("causal", "gqa", "seqused_k", "paged", "leftpad")
    kernel = _kernel(kernels.cached, features=features, name="k", combinations=(rule,))
    padded = [case.problem for _, case in cover(kernel, 2, 0) if case and case.problem.cache]
    assert not any(p.cache.leftpad and p.cache.page_size for p in padded)
    assert any(p.cache.leftpad for p in padded)
    assert {"up to 32", "over 32"} <= set(space.claimed(kernel)["leftpad"])
    case = space.case_of(_kernel(kernels.cached, features=features), {"cache": "pages of 16", "leftpad": "over 32"})
    assert kernel.refusal(case.problem) == f"every call must have {rule}"
    assert not kernel.fitted(case.problem).cache.leftpad


@pytest.mark.parametrize("seed", range(3))
def test_practice_of_a_kernel_of_caches_is_in_pages_and_in_rows_at_the_sizes_of_practice(seed):
    problems = [case.problem for case in practice(_kernel(kernels.cached, features=ALL), "quick", seed)]
    cached = [p for p in problems if p.cache]
    assert {p.cache.page_size > 0 for p in cached} == {True, False}
    assert len({p.cache.page_size for p in cached}) >= 4
    for name, shows in SHOWN.items():
        if name not in ("leftpad in pages", "row of a table", "positions without leftpad"):  # of the covering array
            assert any(shows(p) for p in cached), name


def test_rotated_keys_below_the_normal_numbers_may_be_flushed():
    kernel = _kernel(kernels.cached, features=IN_PAGES)
    case = space.case_of(kernel, {"rotary": "part", "mask": "causal"})
    case = replace(case, recipe=Recipe("subnormals", {"fraction": 1.0}))
    assert judge(kernel, case, unrounded=False).measures["ratio_max"] <= 1


@pytest.mark.parametrize("features", [IN_ROWS, IN_PAGES])
@pytest.mark.parametrize("stored", [{"appended": "one per query"}, {"rotary": "whole"}], ids=["appended", "rotated"])
def test_a_kernel_that_leaves_its_cache_as_it_was_or_writes_elsewhere_fails(features, stored):
    for mistake, words in (("unwritten", "did not write the keys"), ("overwritten", "keys of v_cache, of which")):
        wrong = (
            functools.partial(_writing, mistake)
            if mistake == "overwritten"
            else functools.partial(kernels.cached, mistake=mistake)
        )
        kernel = _kernel(wrong, name="wrong", features=features)
        case = space.case_of(kernel, {**stored, "batch": "2", "keys": "several tiles"})
        with pytest.raises(KernelError, match=words):
            judge(kernel, case, unrounded=False)


def _writing(mistake, q, k_cache, v_cache, **given):
    found = kernels.cached(q, k_cache, v_cache, **given)
    v_cache[:] = 0
    return found


def test_sinks_and_chunks_are_judged_and_a_kernel_that_drops_them_fails():
    features = ("causal", "gqa", "sinks", "attention_chunk")
    assert 0.1 < _worst(_kernel(kernels.plain, features=features)) <= 1

    for name in ("sinks", "attention_chunk"):
        wrong = functools.partial(_without, name)
        assert not _worst(_kernel(wrong, name="wrong", features=features)) <= 1, name


def _rounding(dtype, *arrays, sinks=None, **given):
    """Attention whose sinks are of 16 bits, as those of vLLM's build and of models in bf16 are."""
    return kernels.plain(*arrays, sinks=None if sinks is None else sinks.astype(dtype).astype(np.float32), **given)


def _in_bf16(config) -> KernelModel:
    order = SoftmaxOrder("unscaled", "always", "any", "normalised")
    return KernelModel(config.dtype, config.out_dtype, order=order, scores="bf16", accumulator="fp32")


@pytest.mark.parametrize(
    ("dtype", "order", "is_right"),
    [
        (np.float32, None, True),
        (ml_dtypes.bfloat16, None, False),
        (np.float16, None, False),
        (ml_dtypes.bfloat16, _in_bf16, True),
    ],
)
def test_sinks_are_of_binary32_and_rounded_ones_are_right_where_scores_are_kept_in_their_format(dtype, order, is_right):
    """Sinks were drawn in bf16, so that a kernel that rounds them was right, 1.9 % off in its users' calls."""
    facts = {"features": ("causal", "gqa", "sinks"), "order": order, "name": "k"}
    kernel = _kernel(functools.partial(_rounding, dtype), **facts)
    points = [{"sinks": "on", "mask": mask, "group": "2 to 4"} for mask in ("causal", "none", "causal")]
    cases = [space.case_of(kernel, point, seed) for seed, point in enumerate(points)]
    found = [judge(kernel, case, unrounded=False).measures for case in cases]
    worst = max(max(x["ratio_max"], x["ratio_lse_max"]) for x in found)
    assert (worst <= 1) == is_right, worst


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sinks_of_the_operands_format_are_handed_over_in_it_and_judged_as_they_are(dtype):
    """A model in bf16 has sinks in bf16: a kernel that takes no others is no wrong one, and one that rounds more is."""
    seen = set()

    def narrow(step, *arrays, sinks=None, **given):
        seen.add(None if sinks is None else sinks.dtype.name)
        return kernels.plain(*arrays, sinks=None if sinks is None else step(sinks.astype(np.float32)), **given)

    def worst(step, *features):
        kernel = _kernel(functools.partial(narrow, step), dtype, features=("causal", "gqa", *features), name="k")
        assert {"sinks", *features} <= kernel.features
        cases = [space.case_of(kernel, {"sinks": "on", "group": "2 to 4", "mask": "causal"}, seed) for seed in range(3)]
        found = [judge(kernel, case, unrounded=False).measures for case in cases]
        laws = [law for law in SERVING_LAWS if "sink" in law.name and law.applies(kernel)]
        assert [law.name for law in laws][:1] == ["a_sink_of_minus_infinity_is_none"]
        broken = [run_law(law, kernel, max_examples=3, seed=0, shrink_seconds=0).violation for law in laws]
        return max([math.inf] * any(broken) + [max(x["ratio_max"], x["ratio_lse_max"]) for x in found])

    assert worst(lambda sinks: sinks, "narrow_sinks") <= 1
    assert seen == {None, {"bf16": "bfloat16", "fp16": "float16"}[dtype]}
    assert worst(lambda sinks: (sinks.view(np.uint32) & np.uint32(0xFFF00000)).view(np.float32), "narrow_sinks") > 1
    assert worst(lambda sinks: np.float32(1.01) * sinks, "narrow_sinks") > 1
    assert worst(lambda sinks: sinks.astype(np.float16).astype(np.float32), "sinks") > 1


def test_sinks_in_16_bits_are_not_known_of_gradients_and_other_formats():
    with pytest.raises(ValueError, match="got 'narrow_sinks'"):
        _kernel(kernels.plain, features=("narrow_sinks",), gradients="own", name="k")
    with pytest.raises(ValueError, match="narrow_sinks are of fp16 or bf16, got dtypes e4m3"):
        _kernel(kernels.plain, "e4m3", features=("narrow_sinks",), name="k")


def _without(name, *arrays, **given):
    return kernels.plain(*arrays, **given | {name: DROPPED[name]})


def test_absorbed_heads_are_given_qv_and_keys_that_hold_values():
    kernel = _kernel(kernels.plain, features=("causal", "gqa", "qv"), head_dims=(576,))
    for mask in ("none", "causal"):
        case = space.case_of(kernel, {"qv": "on", "mask": mask, "group": "5 or more"})
        assert (case.problem.head_dim, case.problem.head_dim_v) == (576, 512)
        assert judge(kernel, case, unrounded=False).measures["ratio_max"] <= 1


def test_qv_is_handed_in_the_layout_that_is_declared():
    def in_bhsd(q, k, v, *, softmax_scale, causal, qv):
        swapped = (x.swapaxes(1, 2) for x in (q, k, v))
        out = kernels.plain(*swapped, softmax_scale=softmax_scale, causal=causal, qv=qv.swapaxes(1, 2))
        return (out[0] if isinstance(out, tuple) else out).swapaxes(1, 2)

    kernel = _kernel(in_bhsd, features=("causal", "gqa", "qv"), head_dims=(576,), layout="bhsd")
    case = space.case_of(kernel, {"qv": "on", "mask": "causal", "group": "2 to 4"})
    assert judge(kernel, case, unrounded=False).measures["ratio_max"] <= 1


def test_every_case_of_a_function_of_caches_goes_through_its_cache():
    seen = []

    def watching(q, k_cache, v_cache, **given):
        seen.append((q.shape, k_cache.shape[1:], given["page_table"].shape))
        return kernels.cached(q, k_cache, v_cache, **given)

    kernel = _kernel(watching, features=("causal", "gqa", "paged"), page_sizes=(48,))
    judge(kernel, space.case_of(kernel, {"batch": "2", "queries": "part of a tile"}))
    assert seen == [((2, 5, 1, 64), (48, 1, 64), (2, 2))]


def test_a_feature_or_a_page_size_that_is_not_claimed_is_not_asked():
    kernel = _kernel(kernels.cached, features=("causal", "paged"), page_sizes=(16,))
    assert space.claimed(kernel)["cache"] == ("none", "pages of 16")
    for sizes, others in (
        ((16, 48), ("pages of 16", "pages of another size")),
        ((64, 1), ("pages of 64", "pages of 1")),
    ):
        assert space.claimed(replace(kernel, page_sizes=sizes))["cache"] == ("none", *others)
    problem = AttentionProblem.varlen((1,), (40,), nheads=1, nheads_kv=1, head_dim=64, dtype="bf16", cache=Cache(32))
    assert kernel.refusal(problem) == "page_size must be one of 16, got 32"
    plain = _kernel(kernels.plain, features=("causal",))
    assert plain.refusal(problem) == "it does not claim paged"
    assert not space.claimed(plain).keys() & {"cache", *OF_CACHES, "sinks", "chunk", "qv"}


def test_a_case_with_a_cache_survives_json_and_says_what_it_is():
    kernel = _kernel(kernels.cached, features=IN_PAGES)
    case = space.case_of(kernel, {"appended": "one per query", "behind": "nan", "sinks": "on", "batch": "2"}, 2)
    assert type(case).from_json(case.to_json()) == case
    assert "sinks cache(page_size=64, new=(5, 5), behind=nan, seed=2)" in case.describe()
    first, second = (case.operands().sinks for _ in range(2))
    assert first is not None
    np.testing.assert_array_equal(first, second)
