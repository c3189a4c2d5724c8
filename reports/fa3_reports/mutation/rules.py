"""Rules by which attention kernels are accepted elsewhere, written anew from what the projects say they do, and ours.

Each is a function of what one case gave that tells whether the rule accepts it. A rule that compares with a kernel in
low precision is given :func:`fa3_reports.emulated.standard_attention_fp16`; one that compares with a reference in
higher precision is given the truth, rounded to the output's format where the project does so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from fa3_reference.formats import FORMATS, encode
from fa3_reference.problem import AttentionProblem
from fa3_reports.emulated import standard_attention_fp16


@dataclass(frozen=True, slots=True)
class Compared:
    """What a rule sees of one case, float64 arrays of the output's shape.

    Parameters
    ----------
    got : array
        What the kernel returned.
    exact, rounded : array
        The truth of the operands that it saw, and the same rounded to the output's format.
    eager : array
        Unfused attention in fp16 on the same operands; of e4m3 with P rounded to e4m3.
    is_fp8 : bool
        Whether the operands are e4m3: most rules have other tolerances then.
    """

    got: np.ndarray
    exact: np.ndarray
    rounded: np.ndarray
    eager: np.ndarray
    is_fp8: bool


def compared(
    problem: AttentionProblem, arrays: tuple[np.ndarray, ...], exact: np.ndarray, got: np.ndarray, fmt: str
) -> Compared:
    """Return what rules see; ``arrays`` are q, k and v as the kernel saw them, float64."""
    is_fp8 = problem.dtype == "e4m3"
    eager = _eager_fp8(problem, *arrays) if is_fp8 else standard_attention_fp16(problem, *arrays).out
    rounded = encode(exact, FORMATS[fmt], "ieee").astype(np.float64)
    return Compared(got.astype(np.float64), exact, rounded, eager, is_fp8)


def _eager_fp8(problem: AttentionProblem, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Dense attention whose normalised P is rounded to e4m3, for batched heads that share nothing."""
    out = np.empty(problem.out_shape)
    for b in range(problem.batch):
        for h in range(problem.nheads):
            s = q[b, :, h] @ k[b, :, h].T * problem.softmax_scale
            p = np.exp(s - s.max(-1, keepdims=True))
            p = encode(p / p.sum(-1, keepdims=True), FORMATS["e4m3"], "ieee").astype(np.float64)
            out[b, :, h] = p @ v[b, :, h]
    return out.astype(np.float16).astype(np.float64)


def _is_close(got: np.ndarray, expected: np.ndarray, relative: float, absolute: float) -> bool:
    return bool(np.all(np.abs(got - expected) <= absolute + relative * np.abs(expected)))  # false for NaN


def kernelbench(c: Compared) -> bool:
    """KernelBench and BackendBench: within 1e-2, absolute plus relative, of the eager kernel in the same precision."""
    return _is_close(c.got, c.eager, 1e-2, 1e-2)


def _flashinfer_share(c: Compared) -> float:
    error = np.abs(c.got - c.exact)
    wrong = ~((error <= 1e-2) | (error <= 1e-2 * (np.abs(c.exact) + 1e-8)))
    return float(np.mean(wrong))


def flashinfer_bench(c: Compared) -> bool:
    """FlashInfer-Bench: no element is off by 1e-2 both absolutely and relatively."""
    return _flashinfer_share(c) == 0


def flashinfer_bench_share(c: Compared) -> bool:
    """FlashInfer-Bench's rule of low precision: at most 5 % of the elements are so."""
    return _flashinfer_share(c) <= 0.05


def flash_attention(c: Compared) -> bool:
    """flash-attention: no more than twice the largest error of the eager kernel, plus noise of the format."""
    noise = 2 * np.abs((c.rounded + 0.3).astype(np.float16) - np.float16(0.3) - c.rounded).max()
    return bool(np.abs(c.got - c.rounded).max() <= 2 * np.abs(c.eager - c.rounded).max() + noise)


def transformer_engine(c: Compared) -> bool:
    """TransformerEngine: 1e-3 from another kernel in 16 bits; in FP8 absolute 0.5, else RMSE below 0.11 of the
    range.
    """
    if not c.is_fp8:
        return _is_close(c.got, c.eager, 1e-3, 1e-3)
    rmse = np.sqrt(np.mean(np.square(c.got - c.eager)))
    width = max(c.got.max(), c.eager.max()) - min(c.got.min(), c.eager.min())
    return _is_close(c.got, c.eager, 0.0, 0.5) or bool(rmse < 0.11 * width)


def pytorch(c: Compared) -> bool:
    """torch.testing.assert_close with the defaults of fp16, of bf16 where operands are e4m3."""
    return _is_close(c.got, c.rounded, *((1.6e-2, 1e-5) if c.is_fp8 else (1e-3, 1e-5)))


def linear_attention(c: Compared) -> bool:
    """flash-linear-attention: RMSE below 0.005 of the RMS of the reference."""
    return bool(np.sqrt(np.mean(np.square(c.got - c.exact))) < 0.005 * np.sqrt(np.mean(np.square(c.exact))))


RULES: Mapping[str, Callable[[Compared], bool]] = {
    "KernelBench": kernelbench,
    "FlashInfer-Bench": flashinfer_bench,
    "FlashInfer-Bench, 95 %": flashinfer_bench_share,
    "flash-attention, 2x": flash_attention,
    "TransformerEngine": transformer_engine,
    "PyTorch assert_close": pytorch,
    "flash-linear-attention": linear_attention,
}
OURS = ("bound", "bound and baseline", "bits")
