"""Operands from numpy to the GPU, one launch of ours, and its results back, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fa3_kernels.gluon.launch import Descales, forward, packed_of
from fa3_kernels.gluon.quantize import QuantizedTensors, quantize_qkv
from fa3_kernels.plan.request import Choices, Semantics
from fa3_reference.problem import AttentionProblem, Operands
from fa3verify.known.loaded import device_name as device_name
from fa3verify.tensors.convert import to_gpu
from fa3verify.tensors.convert import to_numpy as to_numpy


def run_forward(
    problem: AttentionProblem, operands: Operands, options: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Run our forward kernel on a problem.

    Parameters
    ----------
    problem : AttentionProblem
    operands : Operands
    options : mapping
        Fields of :class:`fa3_kernels.plan.request.Choices`.

    Returns
    -------
    out, lse : ndarray
        As the twin returns them.
    """
    q, k, v = map(to_gpu, (operands.q, operands.k, operands.v))
    semantics = Semantics.of(problem)
    choices = Choices(**options)
    out, lse = forward(q, k, v, semantics, choices, descales=descales_of(operands), packed=packed_of(problem))
    return to_numpy(out), to_numpy(lse)


def descales_of(operands: Operands) -> Descales:
    """The descales of operands on the GPU."""
    given = (operands.q_descale, operands.k_descale, operands.v_descale)
    q, k, v = (None if x is None else to_gpu(x.values) for x in given)
    of_q, of_k, of_v = (x.block_rows if x else 0 for x in given)
    return Descales(q, k, v, (of_q, of_k, of_v))


def run_quantiser(given: Mapping[str, np.ndarray], options: Mapping[str, Any]) -> QuantizedTensors:
    """Quantise on the GPU: q, k and v, and for packed sequences ``cu_seqlens_q`` and ``cu_seqlens_k``."""
    tensors: dict[str, Any] = {name: to_gpu(x) for name, x in given.items()}
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if name in given:
            tensors[f"max_seqlen_{name[-1]}"] = int(np.diff(given[name]).max())
    return quantize_qkv(**tensors, **options)
