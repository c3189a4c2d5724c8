"""Released GPU kernels as functions of a problem and numpy operands, as the twins are.

What a library chooses for itself, the number of splits and whether heads are packed, can be set by options; a problem
it does not take raises whatever the library raises.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fa3_reference.problem import AttentionProblem, Operands
from fa3verify.adapters import flash3_dew
from fa3verify.adapters.libraries import library
from fa3verify.adapters.tensors import to_gpu, to_numpy

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Forward = Callable[[AttentionProblem, Operands, Mapping[str, Any]], tuple[np.ndarray, np.ndarray]]


class Released(NamedTuple):
    """A library: its dtypes, how its forward is loaded from the peers' folder, and what identifies its binary."""

    dtypes: tuple[str, ...]
    load: Callable[[Path | None], Forward]
    identity: Callable[[Path | None], dict[str, Any]]


def _tensors(operands: Operands) -> Tensors:
    return to_gpu(operands.q), to_gpu(operands.k), to_gpu(operands.v)


def _starts(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device="cuda")


def load_flash3_fwd(folder: Path | None) -> Forward:
    """The operators of wheel fa3-fwd: bf16 and e4m3."""
    torch.ops.load_library(str(library(folder, "fa3_fwd_C.so")))

    def forward(problem: AttentionProblem, operands: Operands, options: Mapping[str, Any]):
        packed: dict[str, Any] = {}
        if problem.seqlens_q is not None and problem.seqlens_k is not None:
            packed = {"cu_seqlens_q": _starts(problem.seqlens_q), "cu_seqlens_k": _starts(problem.seqlens_k)}
            packed |= {"max_seqlen_q": problem.seqlen_q, "max_seqlen_k": problem.seqlen_k}
        given = {name: getattr(operands, name) for name in ("q_descale", "k_descale", "v_descale")}
        descales = {name: to_gpu(x.by_kv_head(problem.nheads_kv)) for name, x in given.items() if x is not None}
        found = torch.ops.fa3_fwd.fwd(
            *_tensors(operands),
            **packed,
            **descales,
            softmax_scale=problem.softmax_scale,
            is_causal=problem.causal,
            window_size_left=problem.window[0],
            window_size_right=problem.window[1],
            softcap=problem.softcap,
            num_splits=options.get("num_splits", 1),
            pack_gqa=options.get("pack_gqa"),
        )
        return to_numpy(found[0]), to_numpy(found[1])

    return forward


def load_flash3_dew(folder: Path | None) -> Forward:
    """The XLA custom calls of wheel dew-flash-attn-cu13: fp16 and bf16, without options."""
    function = flash3_dew.forward_of(folder)

    def forward(problem: AttentionProblem, operands: Operands, options: Mapping[str, Any]):
        if options or problem.is_varlen or problem.softcap or problem.head_dim_v != problem.head_dim:
            raise ValueError("this build is called for batches of one head_dim, without softcap and options")
        call, out, lse = flash3_dew.call_of(function, problem, _tensors(operands), flash3_dew.runtime())
        call()
        torch.cuda.synchronize()
        return to_numpy(out), to_numpy(lse)

    return forward


def load_flash2(folder: Path | None) -> Forward:
    """FlashAttention-2 as torch ships it; its causal mask is aligned bottom-right, which torch's own functions hide."""

    def forward(problem: AttentionProblem, operands: Operands, options: Mapping[str, Any]):
        _check_plain(problem)
        q, k, v = _tensors(operands)
        scale = problem.softmax_scale
        if problem.seqlens_q is not None and problem.seqlens_k is not None:
            starts = _starts(problem.seqlens_q), _starts(problem.seqlens_k)
            longest = problem.seqlen_q, problem.seqlen_k
            found = torch.ops.aten._flash_attention_forward(
                q, k, v, *starts, *longest, 0.0, problem.causal, False, scale=scale
            )
            return to_numpy(found[0]), to_numpy(found[1])
        views = (x.transpose(1, 2) for x in (q, k, v))
        found = torch.ops.aten._scaled_dot_product_flash_attention(*views, 0.0, problem.causal, False, scale=scale)
        return to_numpy(found[0].transpose(1, 2)), to_numpy(found[1])

    return forward


def load_cudnn(folder: Path | None) -> Forward:
    """cuDNN's attention as torch calls it; its causal mask is aligned top-left."""

    def forward(problem: AttentionProblem, operands: Operands, options: Mapping[str, Any]):
        _check_plain(problem)
        views = (x.transpose(1, 2) for x in _tensors(operands))
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *views, None, True, 0.0, problem.causal, False, scale=problem.softmax_scale
        )
        return to_numpy(found[0].transpose(1, 2)), to_numpy(found[1].reshape(problem.lse_shape))

    return forward


def _check_plain(problem: AttentionProblem) -> None:
    if problem.softcap or problem.window != (-1, -1):
        raise ValueError("torch's attention has neither windows nor softcap")


def _binary(name: str, version: str) -> Callable[[Path | None], dict[str, Any]]:
    def identity(folder: Path | None) -> dict[str, Any]:
        path = library(folder, name)
        return {"version": version, "file": name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}

    return identity


def _of_torch(folder: Path | None) -> dict[str, Any]:
    return {"version": f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"}


_SIXTEEN = ("fp16", "bf16")
RELEASED: dict[str, Released] = {
    "flash3": Released(("bf16", "e4m3"), load_flash3_fwd, _binary("fa3_fwd_C.so", "fa3-fwd 0.0.3")),
    "flash3.dew": Released(_SIXTEEN, load_flash3_dew, _binary("libdew_flash_attn3.so", "dew-flash-attn-cu13 0.3.6")),
    "flash2": Released(_SIXTEEN, load_flash2, _of_torch),
    "cudnn": Released(_SIXTEEN, load_cudnn, _of_torch),
}
