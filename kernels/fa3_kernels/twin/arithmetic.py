"""The device operations a forward kernel is composed of, with switches that idealise one of them at a time.

Every operation is bit-exact to the device unless its name is in ``ideal``: then it is done in float64 and rounded once
to fp32. Switching a source of error off and looking at what remains is how the error budget is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fa3_kernels.plan.order import OUR_ORDER, Order
from fa3_kernels.twin import convert, float32, mufu
from fa3_kernels.twin.faults import Fault
from fa3_kernels.twin.wgmma import Operand, OperandB, operand, wgmma

Source = Literal["scores", "exp2", "p_rounding", "pv", "output"]
# Of the error budget; without "output" the result stays binary32.
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
    fault : Fault, optional
        A planted mistake; only those of single operations are handled here.
    order : Order
        Of the kernel's family.
    """

    dtype: str
    ideal: frozenset[Source] = frozenset()
    fault: Fault | None = None
    order: Order = OUR_ORDER

    def flushed(self, x: np.ndarray) -> np.ndarray:
        """Operands or results of additions, multiplications and fma as the build takes them."""
        return x if self.order.keeps_subnormals else float32.flushed(x)

    def scores(self, q: Operand, k: OperandB) -> np.ndarray:
        """Raw scores Q K^T of one tile, float32 (rows, keys)."""
        if "scores" in self.ideal:
            return (q.value.astype(np.float64) @ k.value.astype(np.float64)).astype(np.float32)
        return wgmma(q, k)

    def exp2_scaled(self, s: np.ndarray, c: np.ndarray, minus: np.ndarray) -> np.ndarray:
        """ex2(fma(s, c, -minus)), or ex2(fp32(s * c) - minus), with c and minus per row, float32 (rows, keys)."""
        if "exp2" in self.ideal:
            with np.errstate(invalid="ignore", over="ignore"):
                exact = s.astype(np.float64) * c[:, None] - minus[:, None]
                return np.exp2(exact).astype(np.float32)
        if self.fault is Fault.COARSE_EXP2:
            return _coarse_exp2(float32.fma(s, c[:, None], -minus[:, None]))
        if self.order.contracts_exponent and not self.order.gradual_exp2:
            return float32.exp2_scaled(s, c, minus)
        scale = c[:, None]
        minus = minus[:, None]
        return self.ex2(float32.fma(s, scale, -minus) if self.order.contracts_exponent else s * scale - minus)

    def ex2(self, x: np.ndarray) -> np.ndarray:
        if "exp2" in self.ideal:
            with np.errstate(over="ignore"):
                return np.exp2(x.astype(np.float64)).astype(np.float32)
        return mufu.ex2_gradual(x) if self.order.gradual_exp2 else mufu.ex2(x)

    def encode_p(self, p: np.ndarray) -> np.ndarray:
        """Round unnormalised probabilities to the operand format of the second GEMM."""
        if self.fault is Fault.BF16_P and self.dtype == "fp16":
            p = convert.encode_f32(p, "bf16").astype(np.float32)
        rounding = "toward_zero" if self.fault is Fault.TRUNCATED_P else "nearest_even"
        return convert.encode_f32(p, self.dtype, rounding=rounding)

    def encode_output(self, x: np.ndarray, fmt: str) -> np.ndarray:
        if "output" in self.ideal:
            return x
        rounding = "toward_zero" if self.fault is Fault.TRUNCATED_OUTPUT else "nearest_even"
        return convert.encode_f32(x, fmt, rounding=rounding)

    def accumulate(self, p: np.ndarray, p_encoded: np.ndarray, v: OperandB, c: np.ndarray | None) -> np.ndarray:
        """C + P V for one chain of keys, float32 (rows, channels); ``p`` is P before rounding."""
        exact_pv = "pv" in self.ideal
        exact_p = "p_rounding" in self.ideal
        if not exact_pv:
            out = wgmma(operand(p_encoded, self.dtype), v, c)
            if not exact_p:
                return out
            lost = p.astype(np.float64) - p_encoded.astype(np.float64)
            return (out + lost @ v.value.astype(np.float64)).astype(np.float32)
        weights = p if exact_p else p_encoded
        out = weights.astype(np.float64) @ v.value.astype(np.float64)
        return (out if c is None else out + c).astype(np.float32)


def _coarse_exp2(x: np.ndarray) -> np.ndarray:
    """2^x by a quadratic on the fraction, relative error up to 2e-3."""
    with np.errstate(invalid="ignore", over="ignore"):
        whole = np.floor(x)
        fraction = np.where(np.isfinite(x), x - whole, np.float32(0))
        poly = np.float32(1) + fraction * (np.float32(0.6565) + fraction * np.float32(0.3435))
        whole = np.where(np.isnan(x), np.float32(0), np.clip(whole, -200, 200))
        scaled = np.ldexp(poly, whole.astype(np.int32)).astype(np.float32)
    return np.where(np.isnan(x), x, scaled).astype(np.float32)
