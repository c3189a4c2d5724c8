"""Operands from numpy to the GPU, one launch of ours, and its results back, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fa3_kernels.gluon.launch import forward
from fa3_kernels.gluon.quantize import QuantizedQKV, quantize_qkv
from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem, Operands

TORCH_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
_BY_NUMPY = {np.dtype(FORMATS[name].dtype): dtype for name, dtype in TORCH_DTYPES.items()}
_FORMATS = {dtype: FORMATS[name].dtype for name, dtype in TORCH_DTYPES.items()}


def to_gpu(x: np.ndarray) -> torch.Tensor:
    """Copy an array to the GPU; small formats go by way of their bits, since numpy's and torch's do not know each other."""
    x = np.ascontiguousarray(x)
    if x.dtype not in _BY_NUMPY:
        return torch.from_numpy(x).cuda()
    return torch.from_numpy(x.view(np.int16 if x.itemsize == 2 else np.uint8)).cuda().view(_BY_NUMPY[x.dtype])


def to_numpy(x: torch.Tensor) -> np.ndarray:
    """Copy a tensor to numpy in its own format (bfloat16 and float8_e4m3fn by way of their bits)."""
    x = x.detach().contiguous()
    if x.dtype not in _FORMATS:
        return x.cpu().numpy()
    return x.view(torch.uint8 if x.dtype.itemsize == 1 else torch.int16).cpu().numpy().view(_FORMATS[x.dtype])


def run_forward(
    problem: AttentionProblem, operands: Operands, options: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Run our forward kernel on a problem.

    Parameters
    ----------
    problem : AttentionProblem
    operands : Operands
    options : mapping
        Choices of :func:`fa3_kernels.gluon.launch.forward`; ``out_dtype`` by its name.

    Returns
    -------
    out, lse : ndarray
        As the twin returns them.
    """
    given: dict[str, Any] = {"softmax_scale": problem.softmax_scale, "softcap": problem.softcap}
    given |= {"causal": problem.causal, "window": problem.window, **options}
    if problem.is_varlen:
        given |= {name: torch.from_numpy(getattr(problem, name)) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    if problem.dtype == "e4m3":
        descales = {name: getattr(operands, f"{name}_descale") for name in "qkv"}
        given |= {f"{name}_descale": to_gpu(x.values) for name, x in descales.items() if x}
        given["descale_blocks"] = tuple(x.block_rows if x else 0 for x in descales.values())
        given["out_dtype"] = TORCH_DTYPES[given["out_dtype"]]
    out, lse = forward(*map(to_gpu, (operands.q, operands.k, operands.v)), **given)
    return to_numpy(out), to_numpy(lse)


def run_quantiser(given: Mapping[str, np.ndarray], options: Mapping[str, Any]) -> QuantizedQKV:
    """Quantise on the GPU: q, k and v, and for packed sequences ``cu_seqlens_q`` and ``cu_seqlens_k``."""
    tensors: dict[str, Any] = {name: to_gpu(x) for name, x in given.items()}
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if name in given:
            tensors[f"max_seqlen_{name[-1]}"] = int(np.diff(given[name]).max())
    return quantize_qkv(**tensors, **options)
