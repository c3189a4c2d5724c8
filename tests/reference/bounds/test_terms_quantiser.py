"""Every term of the bounds of quantising: what a quantiser stores, and what that costs in the output, by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fa3_reference.attention import attention
from fa3_reference.bounds.quantisation import predict_error, quantization_bound
from fa3_reference.bounds.quantizer import distance_to_codes, stored_values
from fa3_reference.problem import AttentionProblem
from fa3_reference.quantize import QuantScheme, condition

U = 2.0**-24 * (1 + 2.0**-10)  # a rounding of binary32, with room for float64
TINY = 2.0**-148


def one_head(keys: int, seed: int = 0, **rest: Any) -> tuple[AttentionProblem, np.ndarray, np.ndarray, np.ndarray]:
    """Two queries of four channels, and so many keys."""
    problem = AttentionProblem(1, 1, 1, 2, keys, 4, 3, dtype="e4m3", softmax_scale=0.7, **rest)
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(shape) for shape in (problem.q_shape, problem.k_shape, problem.v_shape))
    return problem, q, k + 1.0, v


def descales(*values: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    q, k, v = (np.full((1, 1, 1), value) for value in values)
    return q, k, v


def after(error: float, size: float, steps: int) -> float:
    """Error of a value of this size after more roundings."""
    return error + steps * U * (size + error)


def moved_keys(k: np.ndarray, additions: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The mean over keys, its error: additions and the division; and what centring does to each key: one rounding."""
    mean = k.mean(axis=0)
    off = np.array([(additions + 1) * U * sum(abs(x) for x in column) / len(k) + TINY for column in k.T])
    moved = np.array([[after(o, abs(x - m), 1) for x, m, o in zip(row, mean, off, strict=True)] for row in k])
    return mean, off, moved


def rotated(x: np.ndarray, moved: np.ndarray) -> np.ndarray:
    """log2(4) = 2 levels of additions over a row, each channel of which holds all of them over sqrt(4)."""
    return np.array(
        [[sum(after(m, abs(a), 2) for a, m in zip(row, off, strict=True)) / 2] * 4 for row, off in zip(x, moved)]
    )


@pytest.mark.parametrize("size", [1.0, 2.0**-120])
@pytest.mark.parametrize("k_mean", [False, True])
@pytest.mark.parametrize("seed", [None, 3])
def test_what_a_quantiser_stores_is_off_by_what_its_formulas_make_by_hand(seed, k_mean, size) -> None:
    problem, q, k, v = (x * size if isinstance(x, np.ndarray) else x for x in one_head(3))
    scheme = QuantScheme("head", hadamard_seed=seed, k_mean=k_mean)
    given = descales(0.3 * size, 0.5 * size, 0.7 * size)
    value, bound = stored_values(problem, (q, k, v), scheme, given, 5)
    rows = {"q": q[0, :, 0], "k": k[0, :, 0], "v": v[0, :, 0]}
    turned = condition(problem, q, k, scheme)
    exact = {"q": turned.q[0, :, 0], "k": turned.k[0, :, 0], "v": rows["v"]}
    off = {name: np.zeros(x.shape) for name, x in rows.items()}
    mean_off = np.zeros(4)
    if k_mean:
        mean, mean_off, off["k"] = moved_keys(rows["k"], 5)
        rows["k"] = rows["k"] - mean
        shift = [
            0.7 * sum(abs(x) * after(o, abs(m), 5) for x, m, o in zip(row, mean, mean_off, strict=True)) + 4 * TINY
            for row in rows["q"]
        ]
        np.testing.assert_allclose(bound["lse_correction"][0, 0], shift, rtol=1e-13, atol=0)
        np.testing.assert_allclose(value["lse_correction"][0, 0], 0.7 * rows["q"] @ mean, rtol=1e-13, atol=0)
    assert k_mean == bool(bound["lse_correction"].any()) == bool(value["lse_correction"].any())
    np.testing.assert_allclose(bound["k_mean"][0, 0], mean_off, rtol=1e-13, atol=0)
    if seed is not None:
        off |= {name: rotated(rows[name], off[name]) for name in "qk"}
    for i, name in enumerate("qkv"):
        is_turned = seed is not None and name != "v"
        scaled = np.abs(exact[name]) / given[i].item()
        moved = off[name] / given[i].item()
        expected = [[after(m, x, 4 if is_turned else 2) for x, m in zip(a, b)] for a, b in zip(scaled, moved)]
        np.testing.assert_allclose(bound[name][0, :, 0], expected, rtol=1e-12, atol=0)
        # The largest of each: its error and one rounding, with a rotation's norm three.
        steps = 3 if is_turned else 1
        largest = np.abs(exact[name]).max()
        most = (largest + off[name].max()) * (1 + steps * U)
        least = (largest - off[name].max()) * (1 - steps * U)
        error = max(most - largest, largest - least) / 448
        floored = max(most / 448, 2.0**-126) - max(largest / 448, 2.0**-126)
        expected = error if largest / 448 * (1 - 1e-3) > 2.0**-126 else max(floored, 0.0)
        np.testing.assert_allclose(bound[f"{name}_descale"].item(), expected, rtol=1e-7, atol=0)


def test_descales_end_at_the_normal_numbers_whose_reciprocals_are_normal() -> None:
    """Maxima of 448 times 2^-127 and 2^127: the descales are 2^-126 and 2^126, whatever rounds."""
    problem, *_ = one_head(1)
    for size, exact in ((2.0**-127, 2.0**-126), (2.0**127, 2.0**126)):
        arrays = tuple(np.full(shape, 448 * size) for shape in (problem.q_shape, problem.k_shape, problem.v_shape))
        value, bound = stored_values(problem, arrays, QuantScheme("head"), descales(1, 1, 1), 1)
        assert [value[f"{name}_descale"].item() for name in "qkv"] == [exact] * 3
        assert [bound[f"{name}_descale"].item() for name in "qkv"] == [0.0] * 3


def test_a_power_of_two_lies_where_the_least_and_the_largest_maximum_lead() -> None:
    """Beside 448 one rounding of the maximum doubles the descale or halves it; elsewhere it does not."""
    problem, *_ = one_head(1)
    scheme = QuantScheme("head", power_of_two=True)
    above = 1 + 0.75 * 2.0**-24
    below = 1 - 0.75 * 2.0**-24
    cases = ((448.0, 1.0, 1.0), (447.0, 1.0, 0.0), (448 * 8.0, 8.0, 8.0), (450.0, 2.0, 0.0))
    for largest, exact, error in (*cases, (448 * above, 2.0, 1.0), (448 * below, 1.0, 1.0)):
        arrays = tuple(np.full(shape, largest) for shape in (problem.q_shape, problem.k_shape, problem.v_shape))
        value, bound = stored_values(problem, arrays, scheme, descales(1, 1, 1), 1)
        assert [value[f"{name}_descale"].item() for name in "qkv"] == [exact] * 3
        assert [bound[f"{name}_descale"].item() for name in "qkv"] == [error] * 3


def two_keys(first: float, second: float) -> tuple[AttentionProblem, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    problem, q, _, v = one_head(2)
    k = np.empty(problem.k_shape)
    k[0, 0], k[0, 1] = first, second
    return problem, (q, k, v)


def test_what_centring_moves_takes_part_in_the_least_and_the_largest_maximum() -> None:
    """Two keys whose mean is 0: each is off by 7 roundings once centred, and the descale's own is the eighth."""
    scheme = QuantScheme("head", power_of_two=True, k_mean=True)
    for roundings, exact, error in ((7.5, 2.0, 1.0), (8.5, 2.0, 0.0), (-7.5, 1.0, 1.0), (-8.5, 1.0, 0.0)):
        size = 448 * (1 + roundings * 2.0**-24)
        problem, arrays = two_keys(size, -size)
        value, bound = stored_values(problem, arrays, scheme, descales(1, 1, 1), 5)
        assert value["k_descale"].item() == exact
        assert bound["k_descale"].item() == error


def test_a_maximum_that_may_be_computed_as_nothing_may_have_descale_1() -> None:
    """Keys of 1 and 1 + 2^-24: each is 2^-25 from the mean, of which 7 roundings may leave nothing."""
    problem, arrays = two_keys(1.0, 1 + 2.0**-24)
    value, bound = stored_values(problem, arrays, QuantScheme("head", k_mean=True), descales(1, 1, 1), 5)
    assert value["k_descale"].item() == 2.0**-25 / 448
    np.testing.assert_allclose(bound["k_descale"].item(), 1 - 2.0**-25 / 448, rtol=1e-14)


def test_each_block_of_rows_is_scaled_by_its_own_descale() -> None:
    problem, q, k, v = one_head(5)
    scheme = QuantScheme("block", 1, 2, 3)
    given = tuple(np.array([[x]]) for x in ([1.0, 3.0], [1.0, 5.0, 7.0], [2.0, 9.0]))
    value, _ = stored_values(problem, (q, k, v), scheme, given, 5)  # type: ignore[arg-type]
    for name, x, factors in (("q", q, [1, 3]), ("k", k, [1, 1, 5, 5, 7]), ("v", v, [2, 2, 2, 9, 9])):
        np.testing.assert_allclose(value[name][0, :, 0], x[0, :, 0] / np.array(factors)[:, None], rtol=1e-14)


def test_each_sequence_is_scaled_by_its_own_descales_in_rows_of_its_own() -> None:
    problem = AttentionProblem.varlen((3, 1), (2, 5), nheads=1, nheads_kv=1, head_dim=4, dtype="e4m3")
    rng = np.random.default_rng(0)
    arrays = tuple(rng.standard_normal(shape) for shape in (problem.q_shape, problem.k_shape, problem.v_shape))
    given = tuple(np.array([[[x]], [[2 * x]]]) for x in (1.0, 4.0, 16.0))
    value, _ = stored_values(problem, arrays, QuantScheme("head"), given, 5)  # type: ignore[arg-type]
    lengths = ((3, 1), (2, 5), (2, 5))
    for name, x, first, rows in zip("qkv", arrays, (1.0, 4.0, 16.0), lengths, strict=True):
        factors = np.repeat([first, 2 * first], rows)[:, None, None]
        np.testing.assert_array_equal(value[name], x / factors)


def test_a_code_that_is_nan_is_a_rounding_of_nothing() -> None:
    codes, exact = np.array([np.nan, np.nan, 1.0]), np.array([0.0, 448.0, 1.0])
    np.testing.assert_array_equal(distance_to_codes(codes, exact), [np.nan, np.nan, 0.0])


def test_a_maximum_that_may_be_nothing_may_have_descale_1_and_one_that_is_nothing_has() -> None:
    """One key is its own mean: what is left of it is rounding, and a descale of nothing is 1."""
    problem, q, k, v = one_head(1)
    scheme = QuantScheme("head", k_mean=True)
    value, bound = stored_values(problem, (q, k, 0 * v), scheme, descales(1, 1, 1), 5)
    assert value["k_descale"].item() == 1
    np.testing.assert_allclose(bound["k_descale"].item(), 1 - 2.0**-126, rtol=1e-12)
    assert (value["v_descale"].item(), bound["v_descale"].item()) == (1, 0)


def by_hand(problem: AttentionProblem, arrays: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """What attention may move by, from the notes of the bound, and the float64 of the bound and of the truth."""
    u = 2.0**-53
    forward = attention(problem, *arrays[:3])
    q, k, v, dq, dk, dv = (x[0, :, 0] for x in arrays)
    out = np.zeros((len(q), v.shape[1]))
    lses = np.zeros(len(q))
    scale = problem.softmax_scale
    every = (k, v, dk, dv)
    for i in range(len(q)):
        stop = i + 1 + len(every[0]) - len(q) if problem.causal else len(every[0])
        k, v, dk, dv = (x[:stop] for x in every)
        sizes = [scale * sum(abs(a * b) for a, b in zip(q[i], key, strict=True)) for key in k]
        s = [scale * sum(a * b for a, b in zip(q[i], key, strict=True)) for key in k]
        s = [problem.softcap * math.tanh(x / problem.softcap) for x in s] if problem.softcap else s
        lse = forward.lse[0, 0, i]
        logs = [x - lse for x in s]
        slack = u * ((len(q[i]) + 8) * max(sizes) - min(logs) + len(every[0]) + 8)
        deltas = []
        for key, dkey in zip(k, dk, strict=True):
            moved = sum((abs(a) + da) * db + da * abs(b) for a, da, b, db in zip(q[i], dq[i], key, dkey, strict=True))
            deltas.append(scale * moved * (1 + 2.0**-40) + 2 * slack)
        p = [math.exp(x) for x in logs]
        low = sum(math.exp(x - d) for x, d in zip(logs, deltas, strict=True))
        high = sum(math.exp(x + d) for x, d in zip(logs, deltas, strict=True))
        growth = [a * math.expm1(d) if d < 1 else a * math.exp(d) for a, d in zip(p, deltas, strict=True)]
        for c in range(v.shape[1]):
            gaps = [abs(x - forward.out[0, i, 0, c]) for x in v[:, c]]
            terms = [
                g * x + a * math.exp(d) * y for g, x, a, d, y in zip(growth, gaps, p, deltas, dv[:, c], strict=True)
            ]
            bound = min(sum(terms) / low, max(x + y for x, y in zip(gaps, dv[:, c], strict=True)))
            size = sum(a * abs(x) for a, x in zip(p, v[:, c], strict=True))
            out[i, c] = bound * (1 + 2.0**-40) + 4 * slack * size
        bound = min(max(math.log(high), -math.log(low)), max(deltas))
        lses[i] = bound * (1 + 2.0**-40) + 4 * slack + 2.0**-50 * abs(lse)
    return out, lses


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("sizes", [(1e-3, 2e-3, 3e-3), (0.3, 0.4, 0.5), (3, 4, 0.1), (0, 0, 0), (1e-13, 1e-13, 1e-13)])
def test_what_quantising_costs_is_what_its_formulas_make_by_hand(sizes, softcap) -> None:
    """Perturbations by which each term is in turn the largest: also none, where float64 alone is left."""
    for large, causal in ((1.0, True), (30.0, False)):  # of scores
        problem, q, k, v = one_head(3, 1, softcap=softcap, causal=causal)
        rng = np.random.default_rng(2)
        moves = [size * rng.random(x.shape) for size, x in zip(sizes, (q, k, v), strict=True)]
        arrays = [large * q, k, v, *moves]
        bound = quantization_bound(problem, *arrays)
        out, lse = by_hand(problem, arrays)
        rtol = 3e-3 if sizes[0] < 1e-10 else 4e-13  # logarithms of 1 err by 2^-53
        np.testing.assert_allclose(bound.out[0, :, 0], out, rtol=rtol, atol=0)
        np.testing.assert_allclose(bound.lse[0, 0], lse, rtol=rtol, atol=0)


def test_a_light_key_that_may_gain_much_counts_with_all_of_its_weight() -> None:
    """The first key has e^-12 of the weight, and its score may move by 2, far from what is linear."""
    problem = AttentionProblem(1, 1, 1, 1, 2, 1, dtype="e4m3", softmax_scale=1.0)
    k, v = (np.array(x).reshape(problem.k_shape) for x in ([0.0, 12.0], [1.0, -1.0]))
    dk = np.array([2.0, 1e-3]).reshape(problem.k_shape)
    one = np.ones(problem.q_shape)
    bound = quantization_bound(problem, one, k, v, 0 * one, dk, 0 * v)
    out, lse = by_hand(problem, [one, k, v, 0 * one, dk, 0 * v])
    np.testing.assert_allclose(bound.out.item(), out.item(), rtol=1e-12, atol=0)
    np.testing.assert_allclose(bound.lse.item(), lse.item(), rtol=1e-12, atol=0)


def test_a_hidden_key_takes_no_part_in_what_quantising_costs() -> None:
    """The first query sees one key: neither the size nor the perturbation of the other counts, even beyond exp."""
    problem = AttentionProblem(1, 1, 1, 2, 2, 1, dtype="e4m3", softmax_scale=1.0, causal=True)
    one, zero = np.ones(problem.q_shape), np.zeros(problem.k_shape)
    k, dk = (np.array(x).reshape(problem.k_shape) for x in ([1.0, 1e6], [1000.0, 3000.0]))
    slack = ((1 + 8) * 1 + 2 + 8) * 2.0**-53
    exact = quantization_bound(problem, one, k, zero, 0 * one, zero, zero).lse[0, 0, 0]
    np.testing.assert_allclose(exact, 6 * slack + 2.0**-50, rtol=0.03)
    moved = quantization_bound(problem, one, k, zero, 0 * one, dk, zero).lse[0, 0, 0]
    np.testing.assert_allclose(moved, 1000, rtol=1e-9)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_the_prediction_is_the_first_derivative_of_each_operand(softcap: float) -> None:
    """Each element times 1 + EPS, one after the other, by central differences of attention itself."""
    problem, q, k, v = one_head(3, 4, softcap=softcap, causal=softcap > 0)
    predicted = predict_error(problem, q, k, v, QuantScheme("head"))
    step = 2.0**-12
    eps = 2**-3 / math.sqrt(12) * math.sqrt(3 / (8 * math.log(2)))
    for i, name in enumerate(("from_q", "from_k", "from_v")):
        squares = 0.0
        for index in np.ndindex((q, k, v)[i].shape):
            ends = []
            for sign in (1, -1):
                arrays = [x.copy() for x in (q, k, v)]
                arrays[i][index] *= 1 + sign * step
                ends.append(attention(problem, *arrays).out)
            squares += float(np.sum(((ends[0] - ends[1]) / (2 * step)) ** 2))
        found = getattr(predicted, name).item()
        np.testing.assert_allclose(found, eps * math.sqrt(squares / (2 * 3)), rtol=1e-5)
    total = predicted.from_q**2 + predicted.from_k**2 + predicted.from_v**2
    np.testing.assert_allclose(predicted.total, np.sqrt(total), rtol=1e-13)


def test_one_key_is_predicted_no_error_of_its_weight() -> None:
    """O is V: the square of their distance is 0, which float64 sums may take for -1e-16."""
    problem = AttentionProblem(1, 1, 1, 2, 1, 4, 64, dtype="e4m3")
    rng = np.random.default_rng(0)
    for _ in range(30):
        q, k, v = (rng.standard_normal(shape) for shape in (problem.q_shape, problem.k_shape, problem.v_shape))
        predicted = predict_error(problem, q, k, v, QuantScheme("head"))
        assert 0 <= predicted.from_k.item() < 1e-8
        assert 0 <= predicted.from_q.item() < 1e-8
        assert predicted.from_v.item() > 0


def test_a_sequence_without_queries_is_predicted_no_error() -> None:
    problem = AttentionProblem.varlen((0, 2), (3, 3), nheads=1, nheads_kv=1, head_dim=4, dtype="e4m3")
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape) for shape in (problem.q_shape, problem.k_shape, problem.v_shape))
    total = predict_error(problem, q, k, v, QuantScheme("head")).total
    assert total[0, 0] == 0
    assert total[1, 0] > 0
