"""Calls of our own GPU kernels: numpy operands are copied to the GPU, and results back, bit for bit.

Gradients are prepared as those of peers are, for :mod:`fa3verify.known.launches`. :mod:`fa3verify.known.gluon` declares
our kernels and calls the functions here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from fa3_kernels.api import flash_attn_with_kvcache
from fa3_kernels.gluon import launch_backward
from fa3_kernels.gluon.arguments import Descales, packed_of
from fa3_kernels.gluon.launch import forward
from fa3_kernels.gluon.quantize import QuantizedTensors, quantize_qkv
from fa3_kernels.plan.request import Choices, Semantics
from fa3_reference.cache import Cache, check_written, in_cache, serve
from fa3_reference.problem import Array, AttentionProblem, Operands
from fa3_reference.rules import require
from fa3verify.kernels.handed import unchanged
from fa3verify.known.launches import Backward, GivenBackward, Gradients, Keywords, Options
from fa3verify.tensors.convert import to_gpu, to_numpy


def run_forward(problem: AttentionProblem, operands: Operands, options: Keywords) -> tuple[np.ndarray, np.ndarray]:
    """Run our forward kernel on a problem.

    Parameters
    ----------
    problem : AttentionProblem
    operands : Operands
    options : dict
        Fields of :class:`fa3_kernels.plan.request.Choices`.

    Returns
    -------
    out, lse : ndarray
        As the twin returns them.
    """
    q, k, v = map(to_gpu, (operands.q, operands.k, operands.v))
    semantics = Semantics.of(problem)
    choices = Choices(**options)
    with unchanged({"q": q, "k": k, "v": v}):
        out, lse = forward(q, k, v, semantics, choices, descales=descales_of(operands), packed=packed_of(problem))
    return to_numpy(out), to_numpy(lse)


def run_served(
    problem: AttentionProblem, operands: Operands, options: Keywords, arrays: Mapping[str, Array] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Call :func:`fa3_kernels.api.flash_attn_with_kvcache` for a problem.

    Parameters
    ----------
    problem : AttentionProblem
        If it has no cache, its keys are put into the rows of one.
    operands : Operands
        Descales, if any, are one for each sequence and head.
    options : dict
        num_splits, pack_gqa and, for e4m3, promotion_interval.
    arrays : mapping of str to array, optional
        Arguments by name; by default those of :func:`fa3_reference.cache.serve`.

    Returns
    -------
    out, lse : ndarray
        As the twin returns them.

    Raises
    ------
    ValueError
        For what the kernels do not take.
    RuntimeError
        If the call left another cache than it should (:func:`fa3_reference.cache.check_written`).
    """
    original = problem
    problem, operands = in_cache(problem, operands, Cache())
    arrays = serve(problem, operands) if arrays is None else arrays
    call: Keywords = {name: to_gpu(x) for name, x in arrays.items()} | _factors_of(operands)
    with unchanged(call):
        out, lse, *_ = prepare_served(problem, call, return_softmax_lse=True, **options)()
    check_written(problem, operands, arrays, (to_numpy(call["k_cache"]), to_numpy(call["v_cache"])))
    # Packed sequences of equal length are called as a batch: heads come to the front, as packed lse has them.
    lse = lse.transpose(0, 1) if original.is_varlen and lse.ndim == 3 else lse
    return to_numpy(out.reshape(original.out_shape)), to_numpy(lse.reshape(original.lse_shape))


def prepare_served(problem: AttentionProblem, given: Mapping[str, torch.Tensor], **options: Any) -> Callable[[], Any]:
    """Return a launch of :func:`fa3_kernels.api.flash_attn_with_kvcache` on tensors by the names of
    :func:`fa3_reference.cache.serve`.
    """
    named: Keywords = {name[0] if name in ("k_new", "v_new") else name: x for name, x in given.items()}
    return partial(
        flash_attn_with_kvcache,
        softmax_scale=problem.softmax_scale,
        causal=problem.causal,
        window_size=problem.window,
        softcap=problem.softcap,
        attention_chunk=problem.attention_chunk,
        max_seqlen_q=problem.seqlen_q,  # which counts for packed queries alone
        rotary_interleaved=problem.cache is not None and problem.cache.interleaved,
        **named,
        **options,
    )


def _factors_of(operands: Operands) -> Keywords:
    """Return the descales of a call over a cache by name; ValueError for descales of blocks."""
    descales = {f"{name}_descale": getattr(operands, f"{name}_descale") for name in "qkv"}
    descales = {name: x for name, x in descales.items() if x is not None}
    if blocks := max((x.block_rows for x in descales.values()), default=0):
        raise ValueError(f"descales of a call over a cache are one for each sequence and head, got blocks of {blocks}")
    return {name: to_gpu(x.values) for name, x in descales.items()}


def descales_of(operands: Operands) -> Descales:
    """Return the descales of operands on the GPU, with the rows of a block for each; None and 0 without descales."""
    descales = (operands.q_descale, operands.k_descale, operands.v_descale)
    q, k, v = (None if x is None else to_gpu(x.values) for x in descales)
    of_q, of_k, of_v = (x.block_rows if x else 0 for x in descales)
    return Descales(q, k, v, (of_q, of_k, of_v))


def run_quantiser(given: Mapping[str, np.ndarray], options: Keywords) -> QuantizedTensors:
    """Quantise on the GPU: q, k and v, and for packed sequences ``cu_seqlens_q`` and ``cu_seqlens_k``."""
    tensors: Keywords = {name: to_gpu(x) for name, x in given.items()}
    starts = {name[-1]: x for name, x in given.items() if name.startswith("cu_seqlens")}
    tensors |= {f"max_seqlen_{name}": int(np.diff(x).max()) for name, x in starts.items()}
    with unchanged(tensors):
        return quantize_qkv(**tensors, **options)


def load_backward(name: str) -> Backward:
    """Return our backward, "gluon.deterministic" or "gluon", which adds the parts of dQ in any order."""

    def prepare(problem: AttentionProblem, x: GivenBackward, options: Options) -> Callable[[], Gradients]:
        require(not options, f"{name} has no options, got {', '.join(options)}")
        return partial(
            launch_backward.backward,
            x.dout,
            x.q,
            x.k,
            x.v,
            x.out,
            x.lse,
            Semantics.of(problem),
            dlse=x.dlse,
            packed=packed_of(problem),
            is_deterministic=name == "gluon.deterministic",
        )

    return prepare
