"""Terms of the bound of gradients that an execution attains: every rounding goes one way, and half would not hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fa3_reference.bounds.backward import backward_bound
from fa3_reference.bounds.device import TENSOR_CORE
from fa3_reference.bounds.model import BackwardModel
from fa3_reference.bounds.tensor_core import multiply
from fa3_reference.formats import FORMATS, encode
from fa3_reference.problem import AttentionProblem, BackwardOperands

U = 2.0**-24
MODEL: dict[str, Any] = {"out_dtype": "fp32", "weights": "fp32"}


def operands(problem: AttentionProblem, **values: Any) -> BackwardOperands:
    """Zeros but for what is given, broadcast to its shape: P is 1 where scores are 0, as lse is."""
    fmt = FORMATS[problem.dtype]
    shapes = {"q": problem.q_shape, "k": problem.k_shape, "v": problem.v_shape}
    shapes |= {"dout": problem.out_shape, "out": problem.out_shape}
    arrays = {name: np.broadcast_to(values.get(name, 0.0), shape) for name, shape in shapes.items()}
    stored = {name: encode(np.array(x, np.float64), fmt, "ieee") for name, x in arrays.items()}
    lse = np.broadcast_to(np.float32(values.get("lse", 0.0)), problem.lse_shape).copy()
    return BackwardOperands(**stored, lse=lse)


def one_by_one(values: np.ndarray) -> float:
    total = np.float32(0)
    for x in values.astype(np.float32):
        total = total + x
    return float(total)


def rising(count: int, fraction_bits: int) -> np.ndarray:
    """1, and numbers just above 2^-24: added one by one in binary32 each lifts the sum by 2^-23."""
    return np.array([1.0] + [U * (1 + 2.0**-fraction_bits)] * (count - 1))


@pytest.mark.parametrize("depth", [64, 256])
def test_the_additions_of_d_are_attained(depth: int) -> None:
    """B3: dP is 0, P and K are 1, so that dQ is -D, and the error is that of its sum."""
    problem = AttentionProblem(1, 1, 1, 1, 1, depth, dtype="bf16", softmax_scale=1.0)
    products = rising(depth, 7)
    half = np.full(depth, 2.0**-12)
    half[0] = 1
    x = operands(problem, k=1.0, dout=products / half, out=half)
    bound = backward_bound(problem, x, BackwardModel("bf16", **MODEL)).dq.max()
    error = abs(one_by_one(products) - products.sum())
    assert bound - depth * U / 2 < error <= bound


def test_the_additions_of_parts_of_dq_are_attained() -> None:
    """B7: 64 blocks of one key, whose parts are 1 and numbers just above 2^-24."""
    problem = AttentionProblem(1, 1, 1, 1, 64, 1, dtype="bf16", softmax_scale=1.0)
    parts = rising(64, 7)
    x = operands(problem, k=1.0, dout=1.0, v=parts[:, None, None])
    x = BackwardOperands(np.zeros_like(x.q), x.k, x.v, dout=x.dout, out=x.out, lse=x.lse)
    bound = backward_bound(problem, x, BackwardModel("bf16", tile_n=1, **MODEL)).dq.item()
    error = abs(one_by_one(parts) - parts.sum())
    assert bound - 64 * U / 2 < error <= bound


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_the_cuts_of_a_chain_are_attained(dtype: str) -> None:
    """B6: beside a product of 1 all others lie just below 2^-25, and the tensor core cuts each of them to nothing."""
    rows = 256
    problem = AttentionProblem(1, 1, 1, rows, 1, 1, dtype=dtype, softmax_scale=1.0)  # type: ignore[arg-type]
    core = TENSOR_CORE[dtype]
    small = 2.0**-12 * (1 - core.operand.epsilon / 2)
    dout = np.full(rows, small)
    weights = np.full(rows, 2.0**-13)
    dout[0] = weights[0] = 1
    lse = -np.log(weights).astype(np.float32)[None, None]
    exact = np.exp(-lse.astype(np.float64))[0, 0]
    x = operands(problem, dout=dout[:, None, None], lse=lse)
    bound = backward_bound(problem, x, BackwardModel(dtype, out_dtype="fp32")).dv.item()  # type: ignore[arg-type]
    got = multiply(weights[None], dout[:, None], core).item()
    error = abs(got - float(exact @ dout))
    cuts = rows / core.k_step * (core.k_step + 1) * core.align
    assert bound - cuts / 2 < error <= bound


def test_the_roundings_of_exponents_are_attained() -> None:
    """B2: scores and lse of a thousand, whose rounded factor and products move an exponent by half of dx and more."""
    keys = 4096
    problem = AttentionProblem(1, 1, 1, 1, keys, 2, dtype="fp16", softmax_scale=0.7071)
    rng = np.random.default_rng(0)
    k = np.zeros((keys, 1, 2))
    k[:, 0, 0] = 1400 + rng.integers(0, 16, keys)
    k[:, 0, 1] = rng.integers(0, 1024, keys) / 1024
    lse = np.float32(0.7071 * 1408)
    x = operands(problem, q=1.0, k=k, dout=1.0, lse=lse)
    bound = backward_bound(problem, x, BackwardModel("fp16", **MODEL)).dv[0, :, 0, 0]
    s = x.k.astype(np.float64)[0, :, 0].sum(1)
    exact = np.exp(0.7071 * s - float(lse))
    factors = [np.float32(0.7071) * np.float32(np.log2(np.e))]  # and its neighbours, which other orders make
    factors += [np.nextafter(factors[0], np.float32(x)) for x in (0, 9)]
    largest = 0.0
    for factor in factors:
        moved = np.float32(lse * np.float32(np.log2(np.e)))
        exponent = np.float32(s * float(factor) - float(moved)).astype(np.float64)
        ratio = np.abs(2.0**exponent - exact) / bound
        assert (ratio <= 1).all()
        largest = max(largest, ratio.max())
    assert largest > 0.5
