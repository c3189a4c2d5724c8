"""The quantiser twin: its laws, its special values, and its distance from the float64 reference."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy.linalg import hadamard

from fa3_kernels.plan.quantizer import MAX_DESCALE, MIN_DESCALE, QuantizeOptions, tile_form, tile_rows
from fa3_kernels.twin.quantize import butterflies, descale_of, quantize_qkv
from fa3_reference import quantize as reference
from fa3_reference.attention import attention
from fa3_reference.formats import FORMATS, encode
from fa3_reference.problem import AttentionProblem

DTYPES = (np.float16, ml_dtypes.bfloat16)
HEAD_DIMS = (32, 64, 128, 256)


def draw(problem: AttentionProblem, seed: int = 0, dtype=np.float16) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Normal operands; K has a channel offset, so that its mean matters."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(shape) for shape in (problem.q_shape, problem.k_shape, problem.v_shape))
    k += 3 * rng.standard_normal(problem.head_dim)
    return q.astype(dtype), k.astype(dtype), v.astype(dtype)


def single(x: list[float] | np.ndarray, **options):
    """Quantise one block that holds ``x`` in its first row, as V: no rotation, no mean."""
    v = np.zeros((1, 32, 1, 16), np.float32)
    v[0, 0, 0, : len(x)] = x
    v = v.astype(ml_dtypes.bfloat16)
    result = quantize_qkv(np.ones_like(v), np.ones_like(v), v, block_rows=32, **options)
    return result.v[0, 0, 0, : len(x)].view(np.uint8), result.v_descale[0, 0, 0]


def test_scales_of_each_query_head_are_those_of_as_many_kv_heads():
    q, k, v = draw(AttentionProblem(2, 6, 2, 40, 70, 64, dtype="e4m3"))
    each = quantize_qkv(q, k, v, scope="query_head", rotate=True)
    wide = quantize_qkv(q, *(np.repeat(x, 3, axis=2) for x in (k, v)), scope="head", rotate=True)
    grouped = quantize_qkv(q, k, v, scope="head", rotate=True)
    assert np.array_equal(each.q.view(np.uint8), wide.q.view(np.uint8))
    assert np.array_equal(each.q_descale, wide.q_descale)
    assert not np.array_equal(each.q_descale, grouped.q_descale)
    for name in ("k", "v"):
        assert np.array_equal(getattr(each, name).view(np.uint8), getattr(grouped, name).view(np.uint8))
        assert np.array_equal(getattr(each, f"{name}_descale"), getattr(grouped, f"{name}_descale"))


@pytest.mark.parametrize("subtract_k_mean", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("scale", ["amax", "power_of_two"])
@pytest.mark.parametrize("scope", ["block", "head"])
def test_it_is_the_reference_up_to_rounding_of_binary32(scope, scale, rotated, subtract_k_mean):
    problem = AttentionProblem(2, 4, 2, 70, 133, 64, 128, dtype="e4m3")
    q, k, v = draw(problem)
    got = quantize_qkv(
        q,
        k,
        v,
        block_rows=(32, 64, 128),
        scope=scope,
        scale=scale,
        rotate=rotated,
        subtract_k_mean=subtract_k_mean,
        seed=5,
    )
    scheme = reference.QuantScheme(scope, 32, 64, 128, scale == "power_of_two", 5 if rotated else None, subtract_k_mean)
    want = reference.quantize_qkv(problem, q, k, v, scheme)
    operands = got.operands()
    operands.check(problem)
    for name in "qkv":
        a, b = getattr(operands, name), getattr(want.operands, name)
        assert np.mean(a.view(np.uint8) != b.view(np.uint8)) < 1e-3, name  # only near ties
        a, b = getattr(operands, f"{name}_descale"), getattr(want.operands, f"{name}_descale")
        np.testing.assert_allclose(a.values, b.values, rtol=2e-6)
    if subtract_k_mean:
        np.testing.assert_allclose(got.lse_correction, want.lse_shift, atol=2e-6)
    assert (got.lse_correction is None) == (not subtract_k_mean)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_descale_is_the_correctly_rounded_maximum_over_448(dtype):
    problem = AttentionProblem(1, 2, 2, 64, 64, 64, dtype="e4m3")
    q, k, v = draw(problem, dtype=dtype)
    got = quantize_qkv(q, k, v, block_rows=32)
    amax = np.abs(v.astype(np.float64)).reshape(1, 2, 32, 2, 64).max((2, 4)).transpose(0, 2, 1)
    np.testing.assert_array_equal(got.v_descale, (amax / 448).astype(np.float32))


@given(st.integers(0, 0x7F7FFFFF), st.sampled_from([1.0, 2**-3, float(np.float32(2**-3.5))]))
def test_a_power_of_two_descale_is_the_smallest_that_fits(bits: int, norm: float):
    amax = np.array([bits], np.int32).view(np.float32)
    plain, rounded = (float(descale_of(amax, norm, scale)[0]) for scale in ("amax", "power_of_two"))
    assert np.frexp(rounded)[0] == 0.5
    assert rounded / 2 < plain <= rounded or (rounded == 1.0 and amax[0] == 0)
    assert float(amax[0]) * norm / rounded <= 448 * (1 + 2**-23)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_butterflies_are_sylvesters_matrix(head_dim: int):
    rng = np.random.default_rng(head_dim)
    x = rng.integers(-1000, 1000, (7, head_dim)).astype(np.float32)  # all sums exact
    np.testing.assert_array_equal(butterflies(x), x @ hadamard(head_dim))


def test_rounds_of_butterflies_go_from_near_to_far():
    big, one = np.float32(2**24), np.float32(1)
    # near pairs first: (2^24 + 1) rounds to 2^24 and the 1 is lost; far pairs first would keep it
    assert butterflies(np.array([big, one, -big, 0], np.float32))[0] == 0
    assert butterflies(np.array([big, -big, one, 0], np.float32))[0] == 1


def test_zero_blocks_have_descale_1_and_keep_their_signs():
    codes, descale = single([0.0, -0.0])
    assert codes.tolist() == [0x00, 0x80]
    assert descale == 1.0


def test_nan_stays_nan_and_does_not_touch_the_scale():
    codes, descale = single([np.nan, 7.0, -3.5])
    assert codes.tolist() == [0x7F, 0x7E, 0xFE - 8]
    assert descale == np.float32(7 / 448)


def test_a_block_of_nan_only_has_descale_1():
    v = np.full((1, 32, 1, 16), np.nan, np.float16)
    result = quantize_qkv(v, v, v, block_rows=32, rotate=False)
    assert (result.v_descale == 1).all()
    assert (result.v.view(np.uint8) == 0x7F).all()


def test_inf_is_inf_again_in_binary32_and_the_rest_of_its_block_is_zero():
    codes, descale = single([np.inf, -np.inf, 3.0, -3.0])
    assert codes.tolist() == [0x7E, 0xFE, 0x00, 0x80]
    assert descale == MAX_DESCALE
    with np.errstate(over="ignore"):
        assert np.isinf(np.float32(448) * descale)


def test_maxima_too_small_for_a_normal_descale_keep_the_smallest_one():
    codes, descale = single([2.0**-126, -(2.0**-133)])
    assert descale == MIN_DESCALE
    want = encode(np.array([1.0, -(2.0**-7)]), FORMATS["e4m3"], "saturate")
    assert codes.tolist() == want.view(np.uint8).tolist()


@given(st.integers(0, 2**32 - 1), st.sampled_from(["amax", "power_of_two"]), st.booleans())
def test_the_largest_element_never_leaves_the_format(seed: int, scale, rotated: bool):
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((1, 64, 1, 64)) * 2.0 ** rng.integers(-20, 14)).astype(ml_dtypes.bfloat16)
    result = quantize_qkv(x, x, x, block_rows=64, scale=scale, rotate=rotated)
    largest = np.abs(result.q.astype(np.float32)).max()
    assert largest == 448 if scale == "amax" else 224 <= largest <= 448
    assert not np.isnan(result.q.astype(np.float32)).any()


def test_heads_blocks_and_sequences_do_not_touch_each_other():
    problem = AttentionProblem(2, 2, 2, 128, 128, 64, dtype="e4m3")
    q, k, v = draw(problem)
    before = quantize_qkv(q, k, v, block_rows=64, rotate=True)
    changed = q.copy()
    changed[1, 64:, 1] *= 4
    after = quantize_qkv(changed, k, v, block_rows=64, rotate=True)
    same = before.q.view(np.uint8) == after.q.view(np.uint8)
    same_descale = before.q_descale == after.q_descale
    assert same.all()  # a power of two: only the descale follows
    assert np.argwhere(~same_descale).tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("rotated", [False, True])
def test_packed_sequences_have_the_bits_of_separate_ones(rotated: bool):
    lengths_q, lengths_k = (5, 70, 0, 33), (64, 1, 40, 0)
    problem = AttentionProblem.varlen(lengths_q, lengths_k, nheads=4, nheads_kv=2, head_dim=64, dtype="e4m3")
    q, k, v = draw(problem)
    options = {"block_rows": (32, 64, 64), "rotate": rotated, "subtract_k_mean": True}
    packed = quantize_qkv(q, k, v, cu_seqlens_q=problem.cu_seqlens_q, cu_seqlens_k=problem.cu_seqlens_k, **options)
    packed.operands().check(problem)
    for seq in problem.sequences():
        if seq.seqlen_q == 0 or seq.seqlen_k == 0:
            continue
        rows_q, rows_k = (problem.rows_q(q, seq)[None], problem.rows_k(k, seq)[None])
        alone = quantize_qkv(rows_q, rows_k, problem.rows_k(v, seq)[None], **options)
        np.testing.assert_array_equal(problem.rows_q(packed.q, seq).view(np.uint8), alone.q[0].view(np.uint8))
        np.testing.assert_array_equal(problem.rows_k(packed.k, seq).view(np.uint8), alone.k[0].view(np.uint8))
        np.testing.assert_array_equal(packed.k_descale[seq.index, :, : alone.k_descale.shape[2]], alone.k_descale[0])
        np.testing.assert_array_equal(problem.rows_lse(packed.lse_correction, seq), alone.lse_correction[0])
    assert (packed.q_descale[2] == 1).all()


def test_the_correction_restores_the_lse():
    problem = AttentionProblem(1, 4, 2, 40, 90, 64, dtype="e4m3", causal=True)
    q, k, v = draw(problem)
    exact = attention(problem, q, k, v)
    got = quantize_qkv(q, k, v, block_rows=32, subtract_k_mean=True, softmax_scale=problem.softmax_scale)
    kernel = attention(problem, *got.operands().dequantized(problem))
    error = kernel.lse + got.lse_correction - exact.lse
    assert np.abs(error).max() < 0.5
    assert np.abs(kernel.lse - exact.lse).max() > 2  # without it: the mean is worth several units


def test_the_k_mean_is_the_mean_to_binary32_accuracy():
    problem = AttentionProblem(1, 1, 1, 1, 1700, 64, dtype="e4m3")
    q, k, v = draw(problem)
    got = quantize_qkv(q, k, v, subtract_k_mean=True, rotate=True)
    assert got.k_mean is not None
    np.testing.assert_allclose(got.k_mean[0, 0], k[0, :, 0].astype(np.float64).mean(0), rtol=1e-5, atol=1e-6)


def test_the_sum_of_the_k_mean_takes_slices_first_and_then_the_tree():
    k = np.zeros((1, 600, 1, 16), np.float16)
    k[0, 1], k[0, 33], k[0, 17] = 40000, 2.0**-14, -40000  # rows 1 and 17 meet in the tree only
    got = quantize_qkv(k[:, :1], k, k, subtract_k_mean=True)
    assert got.k_mean is not None
    assert got.k_mean[0, 0, 0] == 0  # row 33 joined row 1 first and was lost; adding it last would keep it
    k[0, [1, 17, 33]] = 0
    k[0, 0], k[0, 16], k[0, 1] = 40000, -40000, 2.0**-14
    got = quantize_qkv(k[:, :1], k, k, subtract_k_mean=True)
    assert got.k_mean is not None
    assert got.k_mean[0, 0, 0] == np.float32(2.0**-14) / np.float32(600)  # halves meet first, neighbours last


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_rows": 100}, "positive multiples of 32, got 100"),
        ({"block_rows": (64, 64)}, "one or three positive multiples"),
        ({"scope": "row"}, "scope must be one of block, head, query_head, got 'row'"),
        ({"scale": "max"}, "scale must be 'amax' or 'power_of_two', got 'max'"),
        ({"rotate": 1}, "rotate must be True or False, got 1"),
        ({"subtract_k_mean": None}, "subtract_k_mean must be True or False, got None"),
        ({"seed": -1}, "seed must be an integer >= 0, got -1"),
    ],
)
def test_illegal_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        QuantizeOptions(**options)


def test_illegal_operands_are_refused():
    def zeros(*shape: int, dtype=np.float16) -> np.ndarray:
        return np.zeros(shape, dtype)

    good = zeros(1, 8, 2, 64)
    with pytest.raises(ValueError, match="multiple of 16 and at most 256, got 72"):
        quantize_qkv(*[zeros(1, 8, 2, 72)] * 3)
    with pytest.raises(ValueError, match=r"a rotation needs head_dim in \(32, 64, 128, 256\), got 96"):
        quantize_qkv(*[zeros(1, 8, 2, 96)] * 3, rotate=True)
    with pytest.raises(ValueError, match="multiple of nheads_kv, got 3 and 2"):
        quantize_qkv(zeros(1, 8, 3, 64), good, good)
    with pytest.raises(ValueError, match="k must fit q"):
        quantize_qkv(zeros(2, 8, 2, 64), good, good)
    with pytest.raises(ValueError, match="softmax_scale must be finite and > 0, got 0"):
        quantize_qkv(good, good, good, softmax_scale=0)
    with pytest.raises(ValueError, match="must all be fp16 or all bf16"):
        quantize_qkv(*[zeros(1, 8, 2, 64, dtype=np.float32)] * 3)
    with pytest.raises(ValueError, match="cu_seqlens_q and cu_seqlens_k must be given"):
        quantize_qkv(*[zeros(8, 2, 64)] * 3)


@pytest.mark.parametrize(("rows", "want"), [(32, 32), (64, 64), (128, 128), (96, 32), (192, 64), (384, 128)])
def test_tiles_divide_blocks(rows: int, want: int):
    assert tile_rows(rows, 128) == want
    assert rows % want == 0


def test_wide_heads_have_tiles_of_half_as_many_rows_where_a_descale_has_more():
    """A tile of 128 rows and 128 channels and one of 64 rows and 256 fit one program; two parts fit two of them."""
    assert [tile_rows(rows, 128) for rows in (0, 384)] == [128, 128]
    assert [tile_rows(rows, 256) for rows in (0, 384)] == [64, 64]
    assert [tile_form(*shape, True).parts for shape in ((128, 128), (64, 256), (128, 256))] == [1, 1, 2]
