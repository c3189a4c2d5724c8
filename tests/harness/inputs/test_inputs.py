"""Recipes: the same data everywhere, the distributions they claim, values that fit every format, strict JSON."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

from fa3_reference.problem import DTYPES, AttentionProblem, Dtype
from fa3verify.inputs.draws import MIN_NORMAL
from fa3verify.inputs.recipe import (
    DISTRIBUTIONS,
    FAMILIES,
    MAX_EDITS,
    UNCOMMON,
    Edit,
    Recipe,
)
from fa3verify.inputs.strategies import recipes
from fa3verify.inputs.terms import SINKS_OVER_LSE, draw_served
from tests.harness.inputs.drawn import Limits, cases

FEW = settings(derandomize=True, database=None, deadline=None, max_examples=30)
PROBLEM = AttentionProblem(batch=2, nheads=4, nheads_kv=2, seqlen_q=70, seqlen_k=130, head_dim=64)
VARLEN = AttentionProblem.varlen((3, 0, 65), (70, 5, 0), nheads=4, nheads_kv=2, head_dim=32, causal=True)
DRAWN = [family for family in FAMILIES if family.distribution != "activations"]
STABLE = [family for family in DRAWN if DISTRIBUTIONS[family.distribution].prefix_stable]
PINS = {  # sha256 of q, k, v of VARLEN, seed 2^63 + 1; a change here changes every stored case and baseline
    "normal": "c394e8c2211f8d47",
    "fa3_outliers": "41e6e1c3e424a119",
    "block_scaled_smooth": "0bd3416fcb909d3d",
    "antialigned_outliers": "d5897fbe47974852",
    "needle": "1d586eb77c7b477d",
    "sink": "6311a39c3ccb218d",
    "cancelling_v": "593c3966be068643",
}


def by_name(name: str):
    return next(family for family in FAMILIES if family.name == name)


def digest(arrays) -> str:
    return hashlib.sha256(b"".join(x.astype("<f8").tobytes() for x in arrays)).hexdigest()[:16]


def scores(problem: AttentionProblem, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Scaled scores of the first sequence, (nheads, seqlen_q, seqlen_k)."""
    return problem.softmax_scale * np.einsum("ihd,jhd->hij", q[0], np.repeat(k[0], problem.group, axis=1))


def rounded(x: np.ndarray, dtype: Dtype) -> np.ndarray:
    """Round as the kernel's input would be; e4m3 with one scale for the tensor."""
    if dtype == "fp16":
        return x.astype(np.float16)
    if dtype == "bf16":
        return x.astype(ml_dtypes.bfloat16)
    return (x / (np.abs(x).max(initial=0.0) / 448 or 1.0)).astype(ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize("name", PINS)
def test_draws_are_pinned(name: str):
    assert digest(by_name(name).recipe(seed=2**63 + 1).draw(VARLEN)) == PINS[name]


@pytest.mark.parametrize("family", DRAWN, ids=lambda family: family.name)
def test_draw_depends_on_the_seed_alone(family):
    first = digest(family.recipe(seed=1).draw(PROBLEM))
    assert digest(family.recipe(seed=1).draw(PROBLEM)) == first
    assert digest(family.recipe(seed=2).draw(PROBLEM)) != first


def test_a_recipe_draws_the_same_bits_in_another_process():
    code = "from test_inputs import digest, by_name, VARLEN; print(digest(by_name('peaky').recipe().draw(VARLEN)))"
    path = [str(p) for p in sys.path if p]
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {[__file__.rsplit('/', 1)[0], *path]!r}; {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == digest(by_name("peaky").recipe().draw(VARLEN))


@pytest.mark.parametrize("family", STABLE, ids=lambda family: family.name)
def test_a_smaller_problem_draws_the_leading_part(family):
    small = replace(PROBLEM, batch=1, nheads=2, nheads_kv=1, seqlen_q=33, seqlen_k=65, causal=True)
    recipe = family.recipe(seed=9)
    for whole, part in zip(recipe.draw(PROBLEM), recipe.draw(small), strict=True):
        assert np.array_equal(whole[:1, : part.shape[1], : part.shape[2]], part)


def test_packed_sequences_draw_what_batched_ones_do():
    batched = AttentionProblem(batch=2, nheads=4, nheads_kv=2, seqlen_q=7, seqlen_k=9, head_dim=16)
    packed = AttentionProblem.varlen((7, 7), (9, 9), nheads=4, nheads_kv=2, head_dim=16)
    for a, b in zip(Recipe("normal").draw(batched), Recipe("normal").draw(packed), strict=True):
        assert np.array_equal(a.reshape(b.shape), b)


def test_streams_of_tensors_heads_and_sequences_differ():
    q, k, v = Recipe("normal").draw(AttentionProblem(2, 2, 2, 8, 8, 16))
    rows = np.concatenate([x.reshape(-1, 16) for x in (q, k, v)])
    assert len(np.unique(rows[:, 0])) == len(rows)


def test_values_are_not_rounded_to_the_format():
    for x in Recipe("normal").draw(PROBLEM):
        assert not np.array_equal(x, x.astype(np.float16))


def test_normal_has_mean_0_and_variance_1():
    for x in Recipe("normal").draw(replace(PROBLEM, seqlen_q=512, seqlen_k=512)):
        assert abs(x.mean()) < 5 / np.sqrt(x.size)
        assert abs(x.var() - 1) < 5 * np.sqrt(2 / x.size)


def test_fa3_outliers_have_variance_100_not_standard_deviation_100():
    problem = replace(PROBLEM, seqlen_q=2048, seqlen_k=2048)
    plain, recipe = Recipe("normal").draw(problem), Recipe("fa3_outliers")
    for x, base in zip(recipe.draw(problem), plain, strict=True):
        extra = (x - base)[x != base]
        rate = extra.size / x.size
        assert abs(rate - 0.001) < 5 * np.sqrt(0.001 / x.size)
        assert abs(extra.var() / 100 - 1) < 5 * np.sqrt(2 / extra.size)


def test_outlier_channels_are_steady_over_tokens():
    _, k, v = Recipe("outlier_channels", {"ratio": 30, "mean_share": 0.64}).draw(replace(PROBLEM, seqlen_k=2000))
    energy = np.square(k[0, :, 0]).mean(axis=0)
    large = energy > 100
    assert large.sum() == 2
    assert np.square(k[0, :, 0].mean(axis=0))[large] / energy[large] == pytest.approx(0.64, abs=0.05)
    assert np.abs(v).max() < 7


@pytest.mark.parametrize(("name", "meet"), [("aligned_outliers", 4), ("antialigned_outliers", 0)])
def test_large_channels_of_q_and_k_coincide_or_not(name: str, meet: int):
    q, k, _ = Recipe(name).draw(PROBLEM)
    large_q = np.sqrt(np.square(q[0, :, 0]).mean(axis=0)) > 4
    large_k = np.sqrt(np.square(k[0, :, 0]).mean(axis=0)) > 4
    assert (large_q.sum(), large_k.sum(), (large_q & large_k).sum()) == (4, 4, meet)


def test_ramp_doubles_from_block_to_block():
    _, k, _ = Recipe("ramp", {"tile": 32}).draw(PROBLEM)
    rms = [np.sqrt(np.square(k[:, i : i + 32]).mean()) for i in range(0, 128, 32)]
    assert np.round(np.log2(rms)).tolist() == [-2, -1, 0, 1]


def test_block_scaled_tiles_differ_by_powers_of_two():
    plain, k = Recipe("normal").draw(PROBLEM)[1], Recipe("block_scaled").draw(PROBLEM)[1]
    factors = (k / plain)[:, ::64]
    assert np.all(k / plain == np.repeat(factors, 64, axis=1)[:, :130])
    assert set(np.unique(factors)) <= {0.25, 0.5, 1.0, 2.0, 4.0}
    assert len(np.unique(factors)) > 1


@pytest.mark.parametrize("causal", [False, True])
def test_needle_gives_every_row_one_visible_key(causal: bool):
    problem = replace(PROBLEM, causal=causal)
    q, k, _ = Recipe("needle").draw(problem)
    s = scores(problem, q, k)
    first, stop = problem.visible_keys(np.arange(70), 70, 130)
    keys = np.arange(130)
    s[:, (keys < first[:, None]) | (keys >= stop[:, None])] = -np.inf
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    assert np.median((p / p.sum(axis=-1, keepdims=True)).max(axis=-1)) > 0.99


def test_ties_give_equal_scores():
    _, k, _ = Recipe("ties", {"distinct": 4}).draw(PROBLEM)
    assert np.array_equal(k[:, :-4], k[:, 4:])
    assert len(np.unique(k[0, :, 0, 0])) == 4


def test_sink_draws_most_weight_to_key_0():
    problem = replace(PROBLEM, seqlen_k=512)
    q, k, v = Recipe("sink").draw(problem)
    s = scores(problem, q, k)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    mass = (p / p.sum(axis=-1, keepdims=True))[..., 0].mean()
    assert 0.25 < mass < 0.75  # 0.30 in the median head of SmolLM2, 0.64 in the 90th percentile
    assert np.abs(v[:, 0]).max() < 0.3


def test_cancelling_v_sums_to_almost_nothing():
    _, k, v = Recipe("cancelling_v", {"residue": 0}).draw(PROBLEM)
    assert np.array_equal(v[:, 0::2], -v[:, 1::2])
    assert np.array_equal(k[:, 0::2], k[:, 1::2])
    assert np.abs(v).min() >= 512


def test_constant_rows_are_constant():
    for x in Recipe("constant_rows").draw(PROBLEM):
        assert np.all(x == x[..., :1])
        assert len(np.unique(x[..., 0])) > x[..., 0].size * 0.99


@pytest.mark.parametrize("dtype", DTYPES)
def test_subnormals_are_subnormal(dtype: Dtype):
    for x in Recipe("subnormals").draw(replace(PROBLEM, dtype=dtype)):
        small = np.abs(x[np.abs(x) != 448])
        assert small.max() < MIN_NORMAL[dtype]
        assert small.size >= x.size * 63 / 64
        if dtype == "e4m3":
            assert np.abs(x).max() == 448


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiny_values_are_the_least_normal_numbers(dtype: Dtype):
    least = MIN_NORMAL["fp16" if dtype == "e4m3" else dtype]
    for x in Recipe("tiny").draw(replace(PROBLEM, dtype=dtype)):
        assert least <= np.abs(x).min() <= np.abs(x).max() < 2 * least


@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_scores_and_sums_stay_finite_in_fp32(dtype: Dtype):
    problem = replace(PROBLEM, dtype=dtype, head_dim=256)
    q, k, v = Recipe("huge").draw(problem)
    with np.errstate(over="raise"):
        largest = np.float32(np.abs(q).max() * np.abs(k).max() * 256 * 2)
        total = np.float32(np.abs(v).max() * 2.0**20 * 256)
    assert np.isfinite(largest)
    assert np.isfinite(total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_is_finite_after_rounding(family, dtype: Dtype):
    problem = replace(PROBLEM, dtype=dtype)
    if family.distribution == "activations":
        problem = AttentionProblem(1, 3, 1, 129, 129, 64, dtype=dtype)
    for x in family.recipe(seed=4).draw(problem):
        with np.errstate(over="raise"):
            y = rounded(x, dtype)
        assert np.all(np.isfinite(y.astype(np.float64)))
        below_range = family.name == "faint" and dtype == "fp16"  # on purpose: all-zero operands
        assert np.any(y.astype(np.float64) != 0) != below_range


@given(cases(Limits(max_seqlen=70, max_batch=2, head_dims=(16, 64)), max_edits=2, schemes=False))
@FEW
def test_any_parameters_and_edits_are_finite_after_rounding(case):
    for x in case.recipe.draw(case.problem):
        with np.errstate(over="raise"):
            y = rounded(x, case.problem.dtype)
        assert np.all(np.isfinite(y.astype(np.float64))), case.recipe.describe()


@given(recipes(problem=VARLEN, max_edits=MAX_EDITS))
@FEW
def test_recipes_survive_json(recipe: Recipe):
    text = json.dumps(recipe.to_json(), allow_nan=False)
    again = Recipe.from_json(json.loads(text))
    assert again == recipe
    assert hash(again) == hash(recipe)
    assert digest(again.draw(VARLEN)) == digest(recipe.draw(VARLEN))
    assert "\n" not in recipe.describe()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_edits_to_nan_and_infinity_survive_json(value: float):
    edit = Edit("set", "v", pos=3, value=value)
    again = Edit.from_json(json.loads(json.dumps(edit.to_json(), allow_nan=False)))
    assert repr(again) == repr(edit)


GOOD = Recipe("peaky", seed=1, edits=(Edit("set", "q", value=2.0),)).to_json()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": 1}, "unknown key 'colour'"),
        ({"distribution": "odd"}, "distribution must be one of .*, got 'odd'"),
        ({"distribution": ["peaky"]}, "distribution must be one of"),
        ({"params": {"gain": "3"}}, r"peaky: gain must be a number in \[0.1, 32\], got '3'"),
        ({"params": {"gain": True}}, "got True"),
        ({"params": {"gain": 99}}, "got 99"),
        ({"params": {"gain": float("nan")}}, "got nan"),
        ({"params": {"pain": 1}}, r"unknown parameter 'pain' \(legal: gain\)"),
        ({"params": [1]}, "params must be an object"),
        ({"seed": -1}, "seed must be an integer >= 0, got -1"),
        ({"seed": 1.0}, "seed must be an integer >= 0, got 1.0"),
        ({"seed": 2**64}, "seed must be below 2"),
        ({"edits": {}}, "edits a list"),
        ({"edits": [{"kind": "explode"}]}, "kind is one of"),
        ({"edits": [GOOD["edits"][0] | {"source": 1}]}, "unknown key 'source'"),
        ({"edits": [GOOD["edits"][0] | {"value": "2"}]}, "value must be a number, got '2'"),
        ({"edits": [GOOD["edits"][0] | {"value": 10**400}]}, "value must fit float64"),
        ({"edits": [GOOD["edits"][0] | {"pos": -1}]}, "pos must be an integer >= 0, got -1"),
        ({"edits": [GOOD["edits"][0] | {"tensor": "o"}]}, "tensor must be in q, k, v, got 'o'"),
        ({"edits": GOOD["edits"] * 9}, "at most 8"),
        ({"distribution": "ties", "params": {"distinct": 2.0}}, "distinct must be an integer"),
        ({"distribution": "activations", "params": {"name": "../x"}}, "name must be one of .*, got '../x'"),
    ],
)
def test_damaged_json_is_refused_in_one_line(change: dict, message: str):
    with pytest.raises(ValueError, match=message) as caught:
        Recipe.from_json(GOOD | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("record", [None, [], "peaky", {}, {"distribution": "peaky"}])
def test_json_of_another_shape_is_refused(record):
    with pytest.raises(ValueError, match=r"^recipe"):
        Recipe.from_json(record)


def edited(edit: Edit, problem: AttentionProblem = PROBLEM):
    """Arrays before and after one edit."""
    return Recipe("normal").draw(problem), Recipe("normal", edits=(edit,)).draw(problem)


@pytest.mark.parametrize(
    ("edit", "where", "expected"),
    [
        (Edit("set", "k", 1, 5, 1, 7, value=9.0), np.s_[1, 5, 1, 7], lambda x: 9.0),
        (Edit("scale_row", "q", 1, 5, 3, value=-4.0), np.s_[1, 5, 3], lambda x: -4.0 * x),
        (Edit("scale_channel", "v", 0, channel=3, head=1, value=2.0), np.s_[0, :, 1, 3], lambda x: 2.0 * x),
        (Edit("constant_row", "k", 0, 129, 0, value=np.inf), np.s_[0, 129, 0], lambda x: np.inf),
    ],
    ids=lambda value: value.kind if isinstance(value, Edit) else "",
)
def test_edit_changes_its_place_and_nothing_else(edit: Edit, where, expected):
    before, after = edited(edit)
    index = "qkv".index(edit.tensor)
    want = [x.copy() for x in before]
    want[index][where] = expected(want[index][where])
    assert all(np.array_equal(a, b) for a, b in zip(want, after, strict=True))


def test_copied_row_ties_its_source():
    before, after = edited(Edit("copy_row", "k", 1, pos=9, head=1, source=128))
    assert np.array_equal(after[1][1, 9, 1], before[1][1, 128, 1])


def test_needle_edit_sets_the_scaled_score():
    problem = replace(PROBLEM, softmax_scale=0.3)
    _, (q, k, _) = edited(Edit("needle", "q", 0, pos=3, head=3, source=77, value=20.0), problem)
    s = scores(problem, q, k)[3, 3]
    assert s[77] == pytest.approx(20.0, rel=1e-12)
    assert s.argmax() == 77


def test_edits_apply_in_order_inside_a_packed_sequence():
    edits = (Edit("constant_row", "k", 1, pos=4, value=3.0), Edit("scale_row", "k", 1, pos=4, value=2.0))
    _, k, _ = Recipe("normal", edits=edits).draw(VARLEN)
    assert np.all(k[74, 0] == 6.0)
    assert not np.any(k[73, 0] == 6.0)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (Edit("set", "q", batch=2), "batch must be below 2"),
        (Edit("set", "k", head=2), "head must be below 2"),
        (Edit("set", "q", pos=70), "pos must be below 70"),
        (Edit("set", "q", channel=64), "channel must be below 64"),
        (Edit("copy_row", "v", source=130), "source must be below 130"),
        (Edit("needle", "q", source=130), "source must be below 130"),
    ],
)
def test_edit_outside_the_problem_is_refused(edit: Edit, message: str):
    with pytest.raises(ValueError, match=message):
        edited(edit)


def test_edit_fields_that_a_kind_ignores_must_be_0():
    with pytest.raises(ValueError, match="scale_channel: pos is not used and must be 0, got 3"):
        Edit("scale_channel", "k", pos=3)
    with pytest.raises(ValueError, match="needle: tensor must be in q, got 'k'"):
        Edit("needle", "k")


def test_importing_inputs_stays_light():
    heavy = {"hypothesis", "scipy", "numba", "ml_dtypes", "torch"}
    code = f"import sys, fa3verify.inputs.recipe; print(sorted({heavy} & set(sys.modules)))"
    path = [str(p) for p in sys.path if p]
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "[]"


def test_every_distribution_says_what_it_is_and_has_a_family():
    for name, distribution in DISTRIBUTIONS.items():
        assert distribution.name == name
        assert distribution.formula
        assert distribution.why
        assert distribution.parameters, "one at least, or failures of any kind would shrink to it"
    own = {"captured"}  # whose families are the user's files
    assert {family.distribution for family in (*FAMILIES, *UNCOMMON)} == set(DISTRIBUTIONS) - own
    assert FAMILIES[0].name == "normal"
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


def test_a_sink_lies_within_one_nat_on_either_side_of_where_its_head_has_it():
    """A single key has one score a head, so that a sink less its lse and its place is what was drawn around 0."""
    problem = AttentionProblem(1, 48, 48, 1, 1, 64, sinks=True)
    q, k, _, sinks = draw_served(problem, Recipe("normal"))
    lse = np.einsum("hd,hd->h", q[0, 0], k[0, 0]) * problem.softmax_scale
    places = np.resize(SINKS_OVER_LSE, problem.nheads)
    around = (sinks - lse - np.where(np.isfinite(places), places, 0.0))[np.isfinite(places)]
    assert np.isneginf(sinks).sum() == problem.nheads // len(SINKS_OVER_LSE)
    assert np.abs(around).max() <= 1 + 1e-5
    assert around.min() < -0.5 < 0.5 < around.max()
