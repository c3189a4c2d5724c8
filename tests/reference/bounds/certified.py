"""The error bound in ball arithmetic: its own program with balls of 200 bits instead of float64, and no allowance.

The modules of the bound take their arithmetic from numpy. Here that name is another one, :class:`Balls`, in which
arrays of Python objects hold Arb's balls, so that not one formula is written twice. What depends on the size of a
number alone (exponents, rounding to a format) is taken of the midpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import flint
import numpy as np

from fa3_reference.bounds import epilogue, forward, forward_sums, forward_weights, head, state, steps
from fa3_reference.bounds.forward import ErrorBound, forward_bound
from fa3_reference.bounds.head import VisitedTile
from fa3_reference.bounds.model import KernelModel
from fa3_reference.problem import AttentionProblem, Operands

BITS = 200
_MODULES = (forward, forward_sums, forward_weights, epilogue, state, steps, head)


def _ball(x: Any) -> flint.arb:
    return x if isinstance(x, flint.arb) else flint.arb(float(x))


def _exp2(x: flint.arb) -> flint.arb:
    """As in float64, what is below its least number is nothing."""
    if x < -1075:
        return _ball(0.0)
    is_integer = x.is_exact() and x.is_integer()
    return flint.arb(2) ** x if is_integer else (x * flint.arb.const_log2()).exp()


def _log2(x: flint.arb) -> flint.arb:
    return x.log() / flint.arb.const_log2() if x > 0 else _ball(-np.inf if x == 0 else np.nan)


def _each(function: Callable[..., Any], plain: Callable[..., Any], dtype: type = object) -> Callable[..., Any]:
    """A function of balls, for arrays of them and for single ones; what holds none remains with numpy."""

    def apply(*operands: Any) -> Any:
        arrays = [np.asarray(x) for x in operands]
        if all(x.dtype != object for x in arrays):
            return plain(*operands)
        arrays = np.broadcast_arrays(*arrays)
        result = np.empty(arrays[0].shape, dtype)
        for index in np.ndindex(result.shape):
            result[index] = function(*(_ball(x[index]) for x in arrays))
        return result if result.shape else result[()]

    return apply


def _either(choose: Callable[[flint.arb, flint.arb], flint.arb]) -> Callable[[flint.arb, flint.arb], flint.arb]:
    """Of NaN and a number NaN, as numpy has it."""
    return lambda x, y: x if x.is_nan() else y if y.is_nan() else choose(x, y)


_FUNCTIONS = {
    "exp2": _exp2,
    "exp": flint.arb.exp,
    "expm1": flint.arb.expm1,
    "log2": _log2,
    "log": lambda x: _log2(x) * flint.arb.const_log2(),
    "log1p": flint.arb.log1p,
    "tanh": flint.arb.tanh,
    "sqrt": lambda x: x.sqrt() if x > 0 else _ball(0.0),
    "maximum": _either(flint.arb.max),
    "minimum": _either(flint.arb.min),
    "fmin": lambda x, y: y if x.is_nan() else x if y.is_nan() else x.min(y),
}
_PREDICATES = {
    "isnan": flint.arb.is_nan,
    "isfinite": flint.arb.is_finite,
    "isneginf": lambda x: float(x) == -np.inf,
}


class Balls:
    """numpy, but that functions of balls are balls, and what would be float64 zeros are balls."""

    def __init__(self) -> None:
        self.functions = {name: _each(f, getattr(np, name)) for name, f in _FUNCTIONS.items()}
        self.functions |= {name: _each(f, getattr(np, name), bool) for name, f in _PREDICATES.items()}

    def __getattr__(self, name: str) -> Any:
        return self.functions.get(name) or getattr(np, name)

    def zeros(self, shape: Any, dtype: Any = object) -> np.ndarray:
        return np.full(shape, _ball(0.0) if dtype is object else 0, dtype)

    def frexp(self, x: Any) -> tuple[np.ndarray, np.ndarray]:
        return np.frexp(np.asarray(x).astype(np.float64))

    def nan_to_num(self, x: np.ndarray, **rest: float) -> np.ndarray:
        return x if x.dtype == object else np.nan_to_num(x, **rest)


def _tiles(
    problem: AttentionProblem, operands: Operands, model: KernelModel, only: np.ndarray | None = None
) -> Iterator[VisitedTile]:
    """Tiles whose operands are balls."""
    convert = np.vectorize(_ball, otypes=[object])
    for tile in head.tiles(problem, operands, model, only):
        names = ("q", "k", "v", "q_factor", "k_factor", "v_factor")
        yield tile._replace(head=replace(tile.head, **{name: convert(getattr(tile.head, name)) for name in names}))


def _gamma(count: float, unit: float = steps.U_FP32) -> Any:
    product = _ball(count) * unit
    return product / (1 - product) if product < 1 else math.inf


def _log_error(relative: float) -> flint.arb:
    return -(-_ball(relative)).log1p()


def certified_bound(problem: AttentionProblem, operands: Operands, model: KernelModel) -> ErrorBound:
    """Enclose the bound without what it allows for float64 (``OUTWARD``, ``CANCELLED``, ``FLOAT64``);
    arrays of balls.

    Parameters
    ----------
    problem, operands, model
        As of :func:`fa3_reference.bounds.forward.forward_bound`; up to some 10,000 products of scores.
    """
    with ExitStack() as stack, flint.ctx.workprec(BITS):
        log2_e = 1 / flint.arb.const_log2()
        loops = {name: getattr(steps, name).py_func for name in ("_score_error", "_grouped_score_error", "_floor_log2")}
        names = {"np": Balls(), "OUTWARD": 1.0, "CANCELLED": 0.0, "FLOAT64": 0.0}
        names |= {"LN2": flint.arb.const_log2(), "LOG2_E": log2_e}
        names |= {"gamma": _gamma, "log_error": _log_error, "tiles": _tiles} | loops
        for module in _MODULES:
            for name, value in names.items():
                if hasattr(module, name) and not (module is head and name == "tiles"):
                    stack.enter_context(patch.object(module, name, value))
        return forward_bound(problem, operands, model)
