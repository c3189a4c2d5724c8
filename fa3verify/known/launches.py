"""One launch of a peer, by tensors on a GPU for the bench, by numpy operands for verify and record.

A module of this package that holds peers has ``load(name)``, which returns a :data:`Forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from fa3_kernels.plan.config import Setting
from fa3_reference.problem import AttentionProblem, Operands
from fa3verify.tensors.convert import to_gpu


class Given(NamedTuple):
    """Tensors of one call: q, k and v in the shapes of the problem; descales float32 (batch, nheads_kv), None of 16
    bits; where packed sequences start, int32, None of batches."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_descale: torch.Tensor | None = None
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None


class LaunchOutput(NamedTuple):
    """``out`` in the shape of the problem's, times ``scale``: the result; ``lse`` likewise, or None."""

    out: torch.Tensor
    lse: torch.Tensor | None = None
    scale: float = 1.0


# A forward is prepared for a problem, tensors and options, such as num_splits, and returns what launches it; options
# that a library does not have raise ValueError. ``lse=False`` leaves out an LSE that costs time.
Launch = Callable[[], LaunchOutput]
Options = Mapping[str, Setting]
Forward = Callable[[AttentionProblem, Given, Options], Launch]


def given(problem: AttentionProblem, operands: Operands) -> Given:
    """Copy operands to the GPU."""
    found = Given(to_gpu(operands.q), to_gpu(operands.k), to_gpu(operands.v))
    for name in ("q_descale", "k_descale", "v_descale"):
        if (descale := getattr(operands, name)) is not None:
            found = found._replace(**{name: to_gpu(descale.by_kv_head(problem.nheads_kv))})
    if problem.is_varlen:
        starts = {name: to_gpu(getattr(problem, name)) for name in ("cu_seqlens_q", "cu_seqlens_k")}
        found = found._replace(**starts)
    return found
