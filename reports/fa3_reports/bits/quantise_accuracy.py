"""Error of attention with operands quantised on the GPU, on real activations, beside what the error model predicts."""

from __future__ import annotations

from typing import Any

import numpy as np

from fa3_kernels.twin.forward import forward
from fa3_kernels.twin.quantize import quantize_qkv
from fa3_reference.attention import Attention, attention
from fa3_reference.bounds.quantisation import predict_error
from fa3_reference.problem import AttentionProblem, Operands
from fa3_reference.quantize import QuantScheme, prepare
from fa3_reports.bits.quantise import FIELDS, device_bits, differing, twin_bits
from fa3_reports.bits.table import CaseTable, Wrong
from fa3verify.inputs import activations, captures

SCHEMES: tuple[dict[str, Any], ...] = tuple(
    {"scope": scope, "rotate": rotate, "subtract_k_mean": k_mean}
    for scope in ("tensor", "head", "block")
    for rotate in (False, True)
    for k_mean in (False, True)
)
COLUMNS = (
    "file",
    "model",
    "layer",
    "head",
    "tokens",
    "scope",
    "rotate",
    "subtract_k_mean",
    "quantised_by",
    "rel_rmse",
    "rel_rmse_predicted",
    "measured_over_predicted",
    "lse_rms_error",
)


def rows(name: str) -> list[list[Any]]:
    """Measured and predicted error of every scheme and query head on one file of real activations."""
    stored = activations.find(name)
    problem, q, k, v = captures.load(name, dtype="e4m3")
    truth = attention(problem, q, k, v)
    level = np.sqrt(np.mean(np.square(truth.out), axis=(0, 1, 3)))
    found = []
    predictions = {}
    for scheme in SCHEMES:
        is_rotated = scheme["rotate"]
        has_k_mean = scheme["subtract_k_mean"]
        turned = QuantScheme(scheme["scope"], hadamard_seed=0 if is_rotated else None, k_mean=has_k_mean)
        model = (is_rotated, has_k_mean)  # the model knows no scopes
        if model not in predictions:
            predictions[model] = predict_error(problem, q, k, v, turned).total[0] / level
        if scheme["scope"] == "tensor":  # the kernel has no such scope: the float64 quantiser of the reference
            source = "reference"
            (operands, lse_shift) = prepare(problem, q, k, v, turned)
        else:
            options = {**scheme, "block_rows": 128, "softmax_scale": problem.softmax_scale}
            source = "device"
            (operands, lse_shift) = quantised((q, k, v), options)
        error, lse_error = errors(problem, operands, lse_shift, truth)
        for i, head in enumerate(stored.q_heads):
            measured = error[i] / level[i]
            predicted = predictions[model][i]
            found.append(
                [
                    name,
                    stored.model,
                    stored.layer,
                    head,
                    stored.seqlen,
                    *scheme.values(),
                    source,
                    f"{measured:.6g}",
                    f"{predicted:.6g}",
                    round(float(measured / predicted), 4),
                    f"{lse_error[i]:.4g}",
                ]
            )
    return found


def quantised(exact: tuple[np.ndarray, ...], options: dict[str, Any]) -> tuple[Operands, np.ndarray | None]:
    """Operands and LSE correction as the twin gives them, which must be what the GPU gives."""
    given = {name: x.astype(np.float16) for name, x in zip("qkv", exact)}
    got = device_bits(given, options)
    want = twin_bits(given, options)
    for name in FIELDS:
        a = got[name]
        b = want[name]
        if (a is None) != (b is None) or (a is not None and b is not None and differing(name, a, b).any()):
            raise Wrong(f"{name} of the GPU has not the bits of the twin")
    twin = quantize_qkv(**given, **options)
    return twin.operands(), twin.lse_correction


def errors(
    problem: AttentionProblem, operands: Operands, lse_shift: np.ndarray | None, truth: Attention
) -> tuple[np.ndarray, np.ndarray]:
    """RMSE of the output and of the LSE of each query head, by the attention twin."""
    result = forward(problem, operands)
    lse = result.lse + (0 if lse_shift is None else lse_shift)
    out_error = np.mean(np.square(result.out.astype(np.float64) - truth.out), axis=(0, 1, 3))
    return np.sqrt(out_error), np.sqrt(np.mean(np.square(lse - truth.lse), axis=(0, 2)))


ACCURACY = CaseTable(
    "quantize_accuracy.csv",
    COLUMNS,
    lambda: [stored.name for stored in activations.list_activations()],
    lambda name: (name,),
    rows,
    rule="none",
)
