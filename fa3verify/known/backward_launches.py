"""One launch of a backward on a GPU, ours or a peer's, by tensors for the bench, by numpy operands for verify."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fa3_kernels.gluon import launch_backward
from fa3_kernels.gluon.launch import packed_of
from fa3_kernels.plan.request import Semantics
from fa3_reference.problem import AttentionProblem, BackwardOperands
from fa3verify.known import flash3_dew, flash4
from fa3verify.known.libraries import library
from fa3verify.known.peers import BACKWARDS, PEERS
from fa3verify.known.xla_call import Call, handler
from fa3verify.tensors.convert import to_gpu, to_numpy

_ATEN = torch.ops.aten


class GivenBackward(NamedTuple):
    """Tensors of one call, in the shapes of the problem; out and lse are those of a forward, dlse is taken by ours."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dlse: torch.Tensor | None = None


# A backward is prepared for a problem and tensors and returns what launches it; ValueError for what it does not take.
# A launch returns dq, dk and dv in the shapes of q, k and v.
Gradients = tuple[torch.Tensor, ...]
Launch = Callable[[], Gradients]
Backward = Callable[[AttentionProblem, GivenBackward], Launch]


def given(problem: AttentionProblem, operands: BackwardOperands) -> GivenBackward:
    """Copy operands to the GPU."""
    o = operands
    tensors = GivenBackward(*(to_gpu(x) for x in (o.q, o.k, o.v, o.dout, o.out, o.lse)))
    return tensors if o.dlse is None else tensors._replace(dlse=to_gpu(o.dlse))


def _ours(is_deterministic: bool) -> Backward:
    def prepare(problem: AttentionProblem, x: GivenBackward) -> Launch:
        semantics = Semantics.of(problem)
        packed = packed_of(problem)

        def launch() -> Gradients:
            return launch_backward.backward(
                x.dout,
                x.q,
                x.k,
                x.v,
                x.out,
                x.lse,
                semantics,
                dlse=x.dlse,
                packed=packed,
                is_deterministic=is_deterministic,
            )

        return launch

    return prepare


def _check_torch(problem: AttentionProblem, name: str) -> None:
    if problem.softcap or problem.window != (-1, -1) or problem.is_varlen or problem.head_dim_v != problem.head_dim:
        raise ValueError(f"{name} is called for batches of one head_dim, without windows and softcap")


def _cudnn(problem: AttentionProblem, x: GivenBackward) -> Launch:
    _check_torch(problem, "cudnn")
    q, k, v, dout, out = (y.transpose(1, 2) for y in x[:5])
    scale = problem.softmax_scale
    causal = problem.causal
    returned = _ATEN._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    starts = returned[2:4]
    longest = returned[4:6]
    seeds = returned[6:8]
    lse = x.lse.reshape(returned[1].shape)

    def launch() -> Gradients:
        found = _ATEN._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse, *seeds, None, *starts, *longest, 0.0, causal, scale=scale
        )
        return tuple(y.transpose(1, 2) for y in found)

    return launch


def _flash2(problem: AttentionProblem, x: GivenBackward) -> Launch:
    _check_torch(problem, "flash2")
    q, k, v, dout, out = (y.transpose(1, 2) for y in x[:5])
    scale = problem.softmax_scale
    causal = problem.causal
    returned = _ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)

    def launch() -> Gradients:
        found = _ATEN._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, x.lse, *returned[2:6], 0.0, causal, *returned[6:8], scale=scale
        )
        return tuple(y.transpose(1, 2) for y in found)

    return launch


def _flash3_dew(problem: AttentionProblem, x: GivenBackward) -> Launch:
    if problem.is_varlen or problem.softcap or problem.head_dim_v != problem.head_dim:
        raise ValueError("this build is called for batches of one head_dim, without softcap")
    function = handler(library(PEERS["flash3.dew"].binary), "dew_flash3_mha_bwd")
    tokens = problem.batch * problem.seqlen_q
    found = [torch.empty_like(y) for y in x[:3]]
    rows = problem.nheads * (tokens + 128 * (problem.batch + 1))  # of D and of the lse in log2 units, padded
    scratch = [torch.zeros(rows, dtype=torch.float32, device=x.q.device) for _ in range(2)]
    attributes = {"softmax_scale": problem.softmax_scale, "is_causal": problem.causal}
    attributes |= {"window_size_left": problem.window[0], "window_size_right": problem.window[1]}
    operands = (x.dout, x.q, x.k, x.v, x.out, x.lse)
    call = Call(function, operands, (*found, *scratch), attributes, flash3_dew.runtime())

    def launch() -> Gradients:
        call()
        return tuple(found)

    return launch


_BACKWARDS: dict[str, Backward] = {
    "gluon": _ours(False),
    "gluon.deterministic": _ours(True),
    "flash3.dew": _flash3_dew,
    "flash4": flash4.prepare_backward,
    "cudnn": _cudnn,
    "flash2": _flash2,
}
NAMES = tuple(_BACKWARDS)


def loaded(name: str) -> Backward:
    """Return a backward by name; ValueError where what it needs is missing."""
    if name in BACKWARDS and (reason := BACKWARDS[name].missing()):
        raise ValueError(reason)
    return _BACKWARDS[name]


def run(name: str, problem: AttentionProblem, operands: BackwardOperands) -> tuple[Any, ...]:
    """Run a backward once; returns dq, dk and dv as numpy arrays."""
    found = loaded(name)(problem, given(problem, operands))()
    torch.cuda.synchronize()
    return tuple(map(to_numpy, found))
