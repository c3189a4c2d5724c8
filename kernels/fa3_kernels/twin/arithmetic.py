"""The device operations a forward kernel is composed of, with switches that idealise one of them at a time.

:mod:`fa3_kernels.twin.forward` and :mod:`fa3_kernels.twin.softmax` compute with these operations, in the order of a
kernel family. Each is bit-exact to the device unless its name is in ``ideal``: then it is done in float64 and rounded
once to fp32. The error budget is measured so: one source of error is switched off, and the remaining error compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fa3_kernels.plan.order import OUR_ORDER, Order
from fa3_kernels.twin import convert, float32, mufu
from fa3_kernels.twin.wgmma import Operand, OperandB, operand, wgmma

Source = Literal["scores", "exp2", "p_rounding", "pv", "output"]
# The sources of the error budget. "output" is not one of them: as ideal it leaves the result in binary32.
SOURCES: tuple[Source, ...] = ("scores", "exp2", "p_rounding", "pv")


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Operations of one kernel run.

    Parameters
    ----------
    dtype : str
        Operand format of both GEMMs.
    ideal : frozenset of Source
        Operations replaced by float64 rounded once to fp32.
    order : Order
        Of the kernel's family.
    """

    dtype: str
    ideal: frozenset[Source] = frozenset()
    order: Order = OUR_ORDER

    def flushed(self, x: np.ndarray) -> np.ndarray:
        """Return operands or results of arithmetic as the build takes them: subnormal numbers kept, or as zeros."""
        return x if self.order.keeps_subnormals else float32.flushed(x)

    def scores(self, q: Operand, k: OperandB) -> np.ndarray:
        """Return the raw scores Q K^T of one tile, float32 (rows, keys)."""
        if "scores" in self.ideal:
            return (q.value.astype(np.float64) @ k.value.astype(np.float64)).astype(np.float32)
        if self.order.accumulator == "fp32":
            return float32.product(q.value, k.value)
        return wgmma(q, k)

    def exp2_scaled(self, s: np.ndarray, c: np.ndarray, minus: np.ndarray) -> np.ndarray:
        """Return ex2(fma(s, c, -minus)), or ex2(fp32(s * c) - minus) as the order says; float32 (rows, keys).

        c and minus are per row.
        """
        if "exp2" in self.ideal:
            with np.errstate(invalid="ignore", over="ignore"):
                exact = s.astype(np.float64) * c[:, None] - minus[:, None]
                return np.exp2(exact).astype(np.float32)
        if self.order.contracts_exponent and not self.order.gradual_exp2:
            return float32.exp2_scaled(s, c, minus)
        scale = c[:, None]
        minus = minus[:, None]
        return self.ex2(float32.fma(s, scale, -minus) if self.order.contracts_exponent else s * scale - minus)

    def ex2(self, x: np.ndarray) -> np.ndarray:
        """Return 2^x as the build computes it, float32 like ``x``."""
        if "exp2" in self.ideal:
            with np.errstate(over="ignore"):
                return np.exp2(x.astype(np.float64)).astype(np.float32)
        return mufu.ex2_gradual(x) if self.order.gradual_exp2 else mufu.ex2(x)

    def encode_p(self, p: np.ndarray) -> np.ndarray:
        """Round unnormalised probabilities to the operand format of the second GEMM."""
        if self.order.p_rounding == "toward_zero":
            return convert.encode_f32(p, self.dtype, rounding="toward_zero")
        if self.order.probabilities == "fp32":
            return p
        if self.order.probabilities:
            p = convert.encode_f32(p, self.order.probabilities).astype(np.float32)
        return convert.encode_f32(p, self.dtype)

    def summed(self, p: np.ndarray) -> np.ndarray:
        """Return the probabilities as the row sum adds them, float32: unrounded, or rounded to their format."""
        return self.encode_p(p).astype(np.float32) if self.order.row_sum_of == "rounded" else p

    def encode_output(self, x: np.ndarray, fmt: str) -> np.ndarray:
        """Round float32 O to the output format; unrounded where the output is ideal."""
        if "output" in self.ideal:
            return x
        return convert.encode_f32(x, fmt)

    def accumulate(self, p: np.ndarray, p_encoded: np.ndarray, v: OperandB, c: np.ndarray | None) -> np.ndarray:
        """Return C + P V for one chain of keys, float32 (rows, channels); C is zero where it is None.

        ``p`` is P before it is rounded, ``p_encoded`` afterwards.
        """
        exact_pv = "pv" in self.ideal
        exact_p = "p_rounding" in self.ideal
        if self.order.accumulator == "fp32" and not (exact_pv or exact_p):
            return float32.product(p_encoded.astype(np.float32), v.value, c)
        if not exact_pv:
            out = wgmma(operand(p_encoded, self.dtype), v, c)
            if not exact_p:
                return out
            lost = p.astype(np.float64) - p_encoded.astype(np.float64)
            return (out + lost @ v.value.astype(np.float64)).astype(np.float32)
        weights = p if exact_p else p_encoded
        out = weights.astype(np.float64) @ v.value.astype(np.float64)
        return (out if c is None else out + c).astype(np.float32)
