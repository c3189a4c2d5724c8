"""Attention kernels that torch ships, called at their operators: FlashAttention-2, cuDNN, EFFICIENT and MATH on a GPU.

FlashAttention-2 and cuDNN have gradients too. The causal masks of all but FlashAttention-2 are aligned top-left.
torch's kernels for a CPU stand in :mod:`fa3verify.known.cpu`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fa3_reference.problem import AttentionProblem
from fa3_reference.rules import require
from fa3verify.known.launches import Backward, Forward, Given, GivenBackward, Gradients, Launch, LaunchOutput, Options

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # (batch, heads, seqlen, head_dim)
# Takes a problem, q, k and v, and whether lse is wanted; returns out, lse, and further values that a backward needs.
Operator = Callable[[AttentionProblem, Tensors, bool], tuple[Any, ...]]
_ATEN = torch.ops.aten


def _flash2(problem: AttentionProblem, x: Tensors, lse: bool) -> tuple[Any, ...]:
    return _ATEN._scaled_dot_product_flash_attention(*x, 0.0, problem.causal, False, scale=problem.softmax_scale)


def _cudnn(problem: AttentionProblem, x: Tensors, lse: bool) -> tuple[Any, ...]:
    return _ATEN._scaled_dot_product_cudnn_attention(
        *x, None, lse, 0.0, problem.causal, False, scale=problem.softmax_scale
    )


def _efficient(problem: AttentionProblem, x: Tensors, lse: bool) -> tuple[Any, ...]:
    """Repeat K and V, as the operator takes no grouped heads; it pads the rows of its lse."""
    k, v = (y.repeat_interleave(problem.group, 1) for y in x[1:])
    return _ATEN._scaled_dot_product_efficient_attention(
        x[0], k, v, None, lse, 0.0, problem.causal, scale=problem.softmax_scale
    )


def _math(problem: AttentionProblem, x: Tensors, lse: bool) -> tuple[Any, ...]:
    is_gqa = problem.group > 1
    with sdpa_kernel([SDPBackend.MATH]):
        return scaled_dot_product_attention(
            *x, is_causal=problem.causal, scale=problem.softmax_scale, enable_gqa=is_gqa
        ), None


_BATCHED: dict[str, Operator] = {
    "flash2": _flash2,
    "cudnn": _cudnn,
    "cuda.efficient": _efficient,
    "cuda.math": _math,
}


def _packed(problem: AttentionProblem, given: Given) -> Launch:
    """Prepare FlashAttention-2 for packed sequences."""
    starts = (given.cu_seqlens_q, given.cu_seqlens_k)
    longest = (problem.seqlen_q, problem.seqlen_k)

    def launch() -> LaunchOutput:
        results = _ATEN._flash_attention_forward(
            *given[:3], *starts, *longest, 0.0, problem.causal, False, scale=problem.softmax_scale
        )
        return LaunchOutput(results[0], results[1])

    return launch


def load(name: str) -> Forward:
    """Return the forward of one of the four."""
    operator = _BATCHED[name]

    def prepare(problem: AttentionProblem, given: Given, options: Options) -> Launch:
        require(
            not problem.softcap and problem.window == (-1, -1) and options.keys() <= {"lse"},
            "torch's attention has neither windows nor softcap nor options",
        )
        if problem.is_varlen:
            return _packed(problem, given)
        q, k, v = (x.transpose(1, 2) for x in given[:3])
        wants_lse = bool(options.get("lse", True))

        def launch() -> LaunchOutput:
            out, lse, *_ = operator(problem, (q, k, v), wants_lse)
            # Some operators pad the rows of lse, or give it a last axis of 1.
            of_rows = lse.flatten(2)[:, :, : problem.seqlen_q] if wants_lse and lse is not None else None
            return LaunchOutput(out.transpose(1, 2), of_rows)

        return launch

    return prepare


def _cudnn_backward(
    problem: AttentionProblem, x: Sequence[torch.Tensor], lse: torch.Tensor, of_forward: tuple[Any, ...]
) -> Tensors:
    # Of the forward's results 2 to 5 are lengths, 6 and 7 the seed and offset of dropout.
    lse = lse.reshape(of_forward[1].shape)
    return _ATEN._scaled_dot_product_cudnn_attention_backward(
        *x, lse, *of_forward[6:8], None, *of_forward[2:6], 0.0, problem.causal, scale=problem.softmax_scale
    )


def _flash2_backward(
    problem: AttentionProblem, x: Sequence[torch.Tensor], lse: torch.Tensor, of_forward: tuple[Any, ...]
) -> Tensors:
    return _ATEN._scaled_dot_product_flash_attention_backward(
        *x, lse, *of_forward[2:6], 0.0, problem.causal, *of_forward[6:8], scale=problem.softmax_scale
    )


def load_backward(name: str) -> Backward:
    """Return the backward of "cudnn" or "flash2".

    Preparing runs the forward once, for the seeds and lengths that the backward takes from it.
    """
    backward = {"cudnn": _cudnn_backward, "flash2": _flash2_backward}[name]

    def prepare(problem: AttentionProblem, x: GivenBackward, options: Options) -> Callable[[], Gradients]:
        is_odd = problem.softcap or problem.window != (-1, -1) or problem.is_varlen or options
        require(
            not is_odd and problem.head_dim_v == problem.head_dim,
            f"{name} is called for batches of one head_dim, without windows and softcap",
        )
        q, k, v, dout, out = (y.transpose(1, 2) for y in x[:5])
        of_forward = _BATCHED[name](problem, (q, k, v), True)
        tensors = (dout, q, k, v, out)
        return lambda: tuple(y.transpose(1, 2) for y in backward(problem, tensors, x.lse, of_forward))

    return prepare
