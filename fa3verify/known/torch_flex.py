"""FlexAttention of torch, compiled for a GPU, with its causal mask aligned bottom-right (the peer "cuda.flex").

Without compilation, on a CPU, it stands in :mod:`fa3verify.known.cpu`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from fa3_reference.problem import AttentionProblem
from fa3verify.kernels import loading
from fa3verify.known.launches import Forward, Given, Launch, LaunchOutput, Options


@cache
def _compiled(dynamic: bool | None) -> Any:
    loading.compile_for_many_shapes()
    return torch.compile(flex_attention, dynamic=dynamic, fullgraph=True)


def load(name: str) -> Forward:
    """Return the forward."""
    return prepare


def prepare(problem: AttentionProblem, given: Given, options: Options) -> Launch:
    """Prepare a call; the blocks of a causal mask are made once.

    With an LSE it is compiled as torch does by default: a second shape makes it compile for any shape. Without an LSE,
    which is what bench times, it is compiled for each shape, as its users do for speed.
    """
    offset = problem.seqlen_k - problem.seqlen_q
    mask = (
        create_block_mask(
            lambda b, h, i, j: j <= i + offset, None, None, problem.seqlen_q, problem.seqlen_k, device=given.q.device
        )
        if problem.causal
        else None
    )
    q, k, v = (x.transpose(1, 2) for x in given[:3])
    named = {"block_mask": mask, "enable_gqa": problem.group > 1, "scale": problem.softmax_scale}
    if not options.get("lse", True):
        return lambda: LaunchOutput(_compiled(False)(q, k, v, **named).transpose(1, 2))

    def launch() -> LaunchOutput:
        out, aux = _compiled(None)(q, k, v, **named, return_aux=AuxRequest(lse=True))
        return LaunchOutput(out.transpose(1, 2), aux.lse)

    return launch
