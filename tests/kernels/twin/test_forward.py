"""Forward twin: its order of operations, its switches, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fa3_kernels.plan.config import Config, default_config
from fa3_kernels.plan.families import OURS, traits_of
from fa3_kernels.twin.arithmetic import SOURCES, Arithmetic
from fa3_kernels.twin.combine import combine
from fa3_kernels.twin.forward import forward
from fa3_kernels.twin.wgmma_exact import wgmma_exact
from fa3_reference.attention import attention
from fa3_reference.bounds.forward import KernelModel, forward_bound
from fa3_reference.formats import FORMATS
from fa3_reference.problem import DTYPES, AttentionProblem, Descale, Operands
from tests.kernels.twin.mufu_exact import ex2_exact, lg2_exact, rcp_exact

F32 = np.float32


def operands(problem: AttentionProblem, seed: int = 0, gain: float = 1.0, blocks: bool = False) -> Operands:
    """Normal operands, for e4m3 with a random descale per block of 128 rows."""
    rng = np.random.default_rng(seed)
    dtype = FORMATS[problem.dtype].dtype
    shapes = (problem.q_shape, problem.k_shape, problem.v_shape)
    q, k, v = ((rng.standard_normal(shape) * gain).astype(dtype) for shape in shapes)
    if not blocks:
        return Operands(q, k, v)

    def descale(heads: int, seqlen: int) -> Descale:
        size = (problem.batch, heads, max(1, -(-seqlen // 128)))
        return Descale(np.exp(rng.standard_normal(size)).astype(F32), 128)

    h, h_kv, n = problem.nheads, problem.nheads_kv, problem.seqlen_k
    return Operands(q, k, v, descale(h, problem.seqlen_q), descale(h_kv, n), descale(h_kv, n))


def bits_equal(a, b) -> bool:
    out = np.array_equal(a.out.view(np.uint16), b.out.view(np.uint16))
    return out and np.array_equal(a.lse.view(np.uint32), b.lse.view(np.uint32))


problems = st.builds(
    AttentionProblem,
    batch=st.integers(1, 2),
    nheads=st.sampled_from([2, 4]),
    nheads_kv=st.sampled_from([1, 2]),
    seqlen_q=st.sampled_from([1, 63, 65, 130]),
    seqlen_k=st.sampled_from([1, 31, 129, 260]),
    head_dim=st.sampled_from([32, 64]),
    dtype=st.sampled_from(DTYPES),
    causal=st.booleans(),
    window=st.sampled_from([(-1, -1), (20, 3), (0, 0)]),
    softcap=st.sampled_from([0.0, 10.0]),
)


def fma(a: F32, b: F32, c: F32) -> F32:
    """Round a * b + c once: the product of two binary32 numbers and the sum fit a long double's 64 bits here."""
    return F32(np.longdouble(a) * np.longdouble(b) + np.longdouble(c))


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def by_bits(function, x: F32) -> F32:
    return np.array([function(int(F32(x).view(np.uint32)))], np.uint32).view(F32)[0]


def slow_row(
    q, k, v, *, scale_log2: F32, tile_n: int, dtype: str, offset: int, promotion: int
) -> tuple[np.ndarray, F32]:
    """One query row, scalar by scalar, as the module docstrings of forward and softmax write it."""
    seqlen, head_dim_v = v.shape
    row_max, lanes, o = F32(-np.inf), [F32(0)] * 4, np.zeros(head_dim_v, F32)
    blocks = -(-seqlen // tile_n)
    for n in reversed(range(blocks)):
        k_tile, v_tile = np.zeros((tile_n, k.shape[1]), k.dtype), np.zeros((tile_n, head_dim_v), v.dtype)
        rows = slice(n * tile_n, min(seqlen, (n + 1) * tile_n))
        count = rows.stop - rows.start
        k_tile[:count], v_tile[:count] = k[rows], v[rows]
        zero = np.zeros((1, tile_n), np.uint32)
        s = wgmma_exact(bits(q[None]), bits(k_tile), zero, dtype).view(F32)[0].copy()
        s[count:] = -np.inf
        new_max = max(row_max, fma(s.max(), scale_log2, F32(-offset)))
        alpha = by_bits(ex2_exact, row_max - new_max)
        p = np.array([by_bits(ex2_exact, fma(x, scale_log2, -new_max)) for x in s], F32)
        for lane in range(4):
            total = None
            for i in range(tile_n // 8):
                pair = p[8 * i + 2 * lane] + p[8 * i + 2 * lane + 1]
                total = pair if total is None else total + pair
            lanes[lane] = fma(lanes[lane], alpha, total)
        rounded = p.astype(FORMATS[dtype].dtype)
        if not promotion:
            o = wgmma_exact(bits(rounded[None]), bits(v_tile.T), (o * alpha).view(np.uint32)[None], dtype).view(F32)[0]
        for start in range(0, tile_n if promotion else 0, promotion or 1):
            keys = slice(start, start + promotion)
            zero = np.zeros((1, head_dim_v), np.uint32)
            part = wgmma_exact(bits(rounded[None, keys]), bits(v_tile[keys].T), zero, dtype).view(F32)[0]
            o = np.array([fma(x, alpha, y) for x, y in zip(o, part)], F32) if start == 0 else o + part
        row_max = new_max
    row_sum = (lanes[0] + lanes[2]) + (lanes[1] + lanes[3])
    return o * by_bits(rcp_exact, row_sum), (row_max + by_bits(lg2_exact, row_sum)) * F32(np.log(2.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "changes", [{}, {"tile_n": 64}, {"tile_n": 64, "promotion": True}], ids=["128", "64", "promoted"]
)
def test_a_row_follows_the_written_order_bit_for_bit(dtype, changes):
    promotion = 32 if changes.get("promotion") and dtype == "e4m3" else 0
    problem = AttentionProblem(1, 1, 1, 2, 150, 64, dtype=dtype)
    x = operands(problem, seed=3, gain=2.0)
    config = replace(default_config(problem), tile_n=changes.get("tile_n", 128), promotion_interval=promotion)
    got = forward(problem, x, config)
    scale = F32(problem.softmax_scale * 1.4426950408889634)
    for row in range(2):
        out, lse = slow_row(
            x.q[0, row, 0],
            x.k[0, :, 0],
            x.v[0, :, 0],
            scale_log2=scale,
            tile_n=config.tile_n,
            dtype=dtype,
            offset=config.p_offset_log2,
            promotion=promotion,
        )
        assert np.array_equal(got.out[0, row, 0], out.astype(got.out.dtype))
        assert got.lse[0, 0, row] == lse


@st.composite
def config_changes(draw, problem: AttentionProblem) -> dict[str, object]:
    """Draw fields that may change a bit and differ from the default, legal together."""
    fp8 = problem.dtype == "e4m3"
    options: dict[str, tuple] = {
        "tile_n": (64, 32, 96),
        "num_splits": (2, 3, 5),
    }
    if fp8:
        options |= {"promotion_interval": (0, 32), "out_dtype": ("fp16",)}
    chosen = draw(st.lists(st.sampled_from(sorted(options)), unique=True, max_size=4))
    changes = {name: draw(st.sampled_from(options[name])) for name in chosen}
    if fp8 and "tile_n" in changes and changes.get("promotion_interval", 128):
        changes["promotion_interval"] = 32  # must divide the tile
    return changes


switches = st.fixed_dictionaries(
    {"intra_wg_overlap": st.booleans(), "pack_gqa": st.booleans(), "pingpong": st.booleans(), "num_stages": st.just(3)}
)


@settings(max_examples=25)
@given(problems, st.integers(0, 9), st.data(), switches)
def test_the_switches_of_the_schedule_change_no_bit(problem, seed, data, switched):
    x = operands(problem, seed, gain=3.0)
    plain = default_config(problem, **data.draw(config_changes(problem)), intra_wg_overlap=False, pack_gqa=False)
    assert bits_equal(forward(problem, x, plain), forward(problem, x, replace(plain, **switched)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_splits", [2, 4, 9])
def test_a_split_differs_from_the_whole_by_no_more_than_both_bounds(dtype, num_splits):
    problem = AttentionProblem(1, 1, 1, 64, 700, 64, dtype=dtype, causal=True)
    x = operands(problem)
    runs = []
    for splits in (1, num_splits):
        config = default_config(problem, num_splits=splits)
        model = KernelModel(dtype, config.out_dtype, config.tile_m, config.tile_n, config.promotion_interval, splits)
        runs.append((forward(problem, x, config), forward_bound(problem, x, model)))
    (whole, bound), (split, bound_split) = runs
    assert (np.abs(whole.lse - split.lse) <= bound.lse + bound_split.lse).all()
    assert (np.abs(whole.out.astype(float) - split.out.astype(float)) <= bound.out + bound_split.out).all()
    assert not np.array_equal(whole.out, split.out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_keys_are_zero_with_lse_minus_infinity(dtype):
    problem = AttentionProblem.varlen((5, 3), (2, 0), nheads=1, nheads_kv=1, head_dim=64, dtype=dtype, causal=True)
    for num_splits in (1, 3):
        out, lse = forward(problem, operands(problem), default_config(problem, num_splits=num_splits))
        empty = np.array([True] * 3 + [False] * 2 + [True] * 3)
        assert np.array_equal(np.isneginf(lse[0]), empty)
        assert not out[empty].any()
        assert np.isfinite(out.astype(float)).all()


@pytest.mark.parametrize("source", SOURCES)
def test_idealising_a_source_moves_the_output_and_idealising_all_leaves_rounding_alone(source):
    problem = AttentionProblem(1, 1, 1, 64, 512, 64, dtype="e4m3")
    x = operands(problem, gain=2.0)
    real, ideal = forward(problem, x), forward(problem, x, ideal=frozenset({source}))
    assert not bits_equal(real, ideal)
    truth = attention(problem, *x.dequantized(problem)).out
    best = forward(problem, x, default_config(problem, out_dtype="fp16"), ideal=frozenset(SOURCES)).out.astype(float)
    assert np.abs(best - truth).max() <= 2.0**-10 * np.abs(truth).max()


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"tile_n": 40}, "tile_n must be a multiple of 16"),
        ({"tile_m": 100}, "tile_m must be 64, 128 or 192"),
        ({"num_consumer_warpgroups": 1}, "num_consumer_warpgroups must be 2 for tile_m 128, got 1"),
        ({"promotion_interval": 64}, "promotion_interval must be 0, or for e4m3"),
        ({"out_dtype": "bf16"}, "a fp16 kernel writes fp16"),
        ({"head_dim": 100}, "head_dim must be a multiple of 8"),
        ({"num_splits": 0}, "num_splits must lie in"),
        ({"num_stages": 0}, "num_stages must lie in"),
        ({"family": "flash5"}, "kernel family must be one of gluon, .*, flash3, flash3.dew, .*, got 'flash5'"),
    ],
)
def test_an_impossible_configuration_is_refused_with_its_rule(change, rule):
    config = default_config(AttentionProblem(1, 1, 1, 8, 8, 64))
    with pytest.raises(ValueError, match=rule):
        replace(config, **change)


def test_a_head_dim_that_no_kernel_holds_is_refused():
    with pytest.raises(ValueError, match="at most 256"):
        traits_of(OURS).compiled_head_dim(320)


def test_a_problem_the_configuration_cannot_run_is_refused():
    problem = AttentionProblem(1, 1, 1, 8, 300, 128, dtype="e4m3")
    x = operands(problem)
    with pytest.raises(ValueError, match="config head_dim 64 is smaller"):
        forward(problem, x, Config("e4m3", 64, 128, 128, "bf16"))
    other = replace(problem, dtype="fp16")
    with pytest.raises(ValueError, match="cannot run this: no bits of this family are known"):
        forward(other, operands(other), Config(family="flash4"))
    with pytest.raises(ValueError, match="config is for fp16"):
        forward(problem, x, Config("fp16", 128, 128, 128, "fp16"))
    narrow = replace(x, k_descale=Descale(np.ones((1, 1, 5), F32), 64))
    with pytest.raises(ValueError, match="whole key tiles of 128 rows, got 64"):
        forward(problem, narrow)


@pytest.mark.parametrize("interval", [0, 128])
def test_only_promotion_keeps_long_sums_of_a_positive_v(interval):
    problem = AttentionProblem(1, 1, 1, 16, 8192, 64, dtype="e4m3")
    rng = np.random.default_rng(1)
    q, k = (rng.standard_normal(s).astype(ml_dtypes.float8_e4m3fn) for s in (problem.q_shape, problem.k_shape))
    v = (rng.standard_normal(problem.v_shape) + 1).astype(ml_dtypes.float8_e4m3fn)
    x = Operands(q, k, v)
    truth = attention(problem, *x.dequantized(problem)).out
    out = forward(problem, x, default_config(problem, promotion_interval=interval)).out.astype(float)
    gain = float((out * truth).sum() / (truth**2).sum()) - 1
    # official FlashAttention-3 on an H200, same experiment: -0.101 chained
    assert gain == pytest.approx(-0.10, abs=0.005) if interval == 0 else abs(gain) < 0.002


def test_a_split_with_nan_makes_the_combined_row_the_devices_nan():
    # first found on an H200: numpy's maximum keeps the NaN of its first operand, the device's passes over it
    lse = np.array([[np.nan], [1.0], [np.inf]], F32)
    lse.view(np.uint32)[0] = 0x7FFFFFFF
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        o, merged = combine(np.ones((3, 1, 2), F32), lse[order], Arithmetic("fp16"))
        assert merged.view(np.uint32).tolist() == [0x7FFFFFFF]
        assert np.isnan(o).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_rows_with_sinks_lie_within_the_bound_and_without_keys_have_the_lse_of_their_sink(dtype, num_splits):
    """A sink that takes nearly all, one that takes little, and one that is none; the second sequence has no keys."""
    problem = AttentionProblem.varlen((70, 3), (300, 0), nheads=3, nheads_kv=1, head_dim=64, dtype=dtype, sinks=True)
    given_operands = replace(operands(problem), sinks=np.array([9.0, 1.5, -np.inf], F32))
    config = default_config(problem, num_splits=num_splits)
    out, lse = forward(problem, given_operands, config)
    truth = attention(problem, *given_operands.dequantized(problem))
    bound = forward_bound(problem, given_operands, config.kernel_model())
    assert np.all(np.abs(out.astype(np.float64) - truth.out) <= bound.out)
    seen = np.isfinite(truth.lse)
    assert np.all(np.abs(lse[seen] - truth.lse[seen]) <= bound.lse[seen])
    assert np.array_equal(lse[~seen], truth.lse[~seen])
    assert np.array_equal(~seen, [[False] * 73, [False] * 73, [False] * 70 + [True] * 3])


@pytest.mark.parametrize("dtype", ["fp16", "e4m3"])
def test_a_sink_that_is_none_changes_no_bit(dtype):
    problem = AttentionProblem(1, 2, 1, 40, 200, 64, dtype=dtype, causal=True)
    plain = forward(problem, operands(problem))
    none = replace(operands(problem), sinks=np.full(2, -np.inf, F32))
    found = forward(replace(problem, sinks=True), none)
    assert np.array_equal(plain.out.view(np.uint16), found.out.view(np.uint16))
    assert np.array_equal(plain.lse, found.lse)
