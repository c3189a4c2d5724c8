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
from fa3verify.cases import coverage, space
from fa3verify.cases.dimensions import DIMENSIONS, ONE_ROTATED
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
    for c in own.get("cache", ()):
        points += [{"cache": c, "behind": "nan", "layout": "packed", "mask": mask} for mask in ("causal", "none")]
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
    cases = [case for point, case in rows if case and (point["cache"], point["mask"]) == ("rotated", "causal")]
    assert all(min(n[0] for n in (case.problem.seqlens_q, case.problem.seqlens_k)) > 1 for case in cases)
    assert any(point["cache"] == ONE_ROTATED and point["mask"] == "causal" for point, case in rows if case)
    assert any(judge(wrong, case, unrounded=False).measures["ratio_max"] > 1 for case in cases)


def test_rotated_keys_below_the_normal_numbers_may_be_flushed():
    kernel = _kernel(kernels.cached, features=IN_PAGES)
    case = space.case_of(kernel, {"cache": "rotated", "mask": "causal"})
    case = replace(case, recipe=Recipe("subnormals", {"fraction": 1.0}))
    assert judge(kernel, case, unrounded=False).measures["ratio_max"] <= 1


@pytest.mark.parametrize("features", [IN_ROWS, IN_PAGES])
@pytest.mark.parametrize("stored", ["appended", "rotated"])
def test_a_kernel_that_leaves_its_cache_as_it_was_or_writes_elsewhere_fails(features, stored):
    for mistake, words in (("unwritten", "did not write the keys"), ("overwritten", "keys of v_cache, of which")):
        wrong = (
            functools.partial(_writing, mistake)
            if mistake == "overwritten"
            else functools.partial(kernels.cached, mistake=mistake)
        )
        kernel = _kernel(wrong, name="wrong", features=features)
        case = space.case_of(kernel, {"cache": stored, "batch": "2", "keys": "several tiles"})
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
    assert space.claimed(kernel)["cache"] == ("none", "pages")
    problem = AttentionProblem.varlen((1,), (40,), nheads=1, nheads_kv=1, head_dim=64, dtype="bf16", cache=Cache(32))
    assert kernel.refusal(problem) == "page_size must be one of 16, got 32"
    plain = _kernel(kernels.plain, features=("causal",))
    assert plain.refusal(problem) == "it does not claim paged"
    assert not space.claimed(plain).keys() & {"cache", "behind", "sinks", "chunk", "qv"}


def test_a_case_with_a_cache_survives_json_and_says_what_it_is():
    kernel = _kernel(kernels.cached, features=IN_PAGES)
    case = space.case_of(kernel, {"cache": "appended", "behind": "nan", "sinks": "on", "batch": "2"}, 2)
    assert type(case).from_json(case.to_json()) == case
    assert "sinks cache(page_size=1, new=(5, 5), behind=nan, seed=2)" in case.describe()
    first, second = (case.operands().sinks for _ in range(2))
    assert first is not None
    np.testing.assert_array_equal(first, second)
