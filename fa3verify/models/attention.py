"""Attention of a language model of Transformers in the hands of a kernel that is known by name, or computed exactly.

Transformers calls a function of its AttentionInterface once a layer. The functions here are objects, which remember
their calls where that is asked for.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask

from fa3_reference import prepare
from fa3_reference.bounds.model import BackwardModel, KernelModel
from fa3_reference.layout import Cache
from fa3_reference.problem import AttentionProblem, Operands
from fa3_reference.quantize import QuantScheme
from fa3_reference.rules import require
from fa3verify.kernels import calls
from fa3verify.kernels.record import Kernel
from fa3verify.operations import FORWARD
from fa3verify.tensors.convert import to_numpy, to_torch

NAME = "fa3verify"  # in Transformers' interface, which looks for a package where a name holds "flash"


class KernelCall(NamedTuple):
    """One call of a kernel: its layer, what it was given, what it returned, (1, seqlen_q, nheads, head_dim_v), and its
    order of operations where that is known."""

    layer: int
    problem: AttentionProblem
    operands: Operands
    out: np.ndarray
    order: KernelModel | BackwardModel | None


class LayerCall(NamedTuple):
    """What a layer asks of attention: q, k and v are (batch, heads, seqlen, head_dim), sinks (heads,) or None."""

    layer: int
    problem: AttentionProblem
    qkv: Sequence[torch.Tensor]
    sinks: torch.Tensor | None


class Attention(ABC):
    """A function of Transformers' AttentionInterface."""

    def __call__(  # noqa: PLR0913 (Transformers')
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        require(
            attention_mask is None,
            "the model hands attention a mask: padding, or one that is neither causal nor a window",
        )
        problem = AttentionProblem(
            batch=len(query),
            nheads=query.shape[1],
            nheads_kv=key.shape[1],
            seqlen_q=query.shape[2],
            seqlen_k=key.shape[2],
            head_dim=query.shape[3],
            head_dim_v=value.shape[-1],
            causal=True,
            softmax_scale=scaling,
            window=(sliding_window - 1, 0) if sliding_window else (-1, -1),
            softcap=softcap or 0.0,
            sinks=s_aux is not None,
        )
        asked = LayerCall(int(module.layer_idx), problem, (query, key, value), s_aux)  # type: ignore[arg-type]
        with torch._C.DisableTorchFunction():  # type: ignore[attr-defined] # recorders see a call of attention as one
            return self.attend(asked).transpose(1, 2), None

    @abstractmethod
    def attend(self, asked: LayerCall) -> torch.Tensor:
        """Return out, (batch, heads, seqlen_q, head_dim_v), in the format of q."""


def seen_keys(problem: AttentionProblem, device: torch.device) -> torch.Tensor:
    """Return where a query sees a key, bool (seqlen_q, seqlen_k)."""
    keys = torch.arange(problem.seqlen_k, device=device)
    ends = problem.visible_keys(np.arange(problem.seqlen_q), problem.seqlen_q, problem.seqlen_k)
    first, stop = (torch.as_tensor(x, device=device)[:, None] for x in ends)
    return (keys >= first) & (keys < stop)


class ExactAttention(Attention):
    """Attention in ``dtype``, by torch's operators: differentiable, and of the heads that share a kv head at a time."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self._dtype = dtype

    def site(self, layer: int, first: int, name: str, x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        """Stand behind numbers that a kernel rounds, (batch, heads, ...): q, k, v, P (with its row maxima) or out.

        Heads begin with ``first``; those of k and v are kv heads.
        """
        return x

    def attend(self, asked: LayerCall) -> torch.Tensor:
        hidden = ~seen_keys(asked.problem, asked.qkv[0].device)
        outs = [self.of_kv_head(kv, asked, hidden) for kv in range(asked.problem.nheads_kv)]
        return torch.cat(outs, dim=1).to(asked.qkv[0].dtype)

    def of_kv_head(self, kv: int, asked: LayerCall, hidden: torch.Tensor) -> torch.Tensor:
        """Return out of the query heads of a kv head, where no query sees the ``hidden`` keys."""
        layer, problem, (q, k, v), sinks = asked
        first = kv * problem.group
        heads = slice(first, first + problem.group)
        query = self.site(layer, first, "q", q[:, heads].to(self._dtype), None)
        key, value = (self.site(layer, kv, name, x[:, [kv]].to(self._dtype), None) for name, x in (("k", k), ("v", v)))
        scores = query @ key.mT * problem.softmax_scale
        if problem.softcap:
            scores = problem.softcap * torch.tanh(scores / problem.softcap)
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            sink = sinks[heads].to(self._dtype)[:, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sink], dim=-1)
        p = torch.softmax(scores, dim=-1)[..., : problem.seqlen_k]
        p = self.site(layer, first, "P", p, p.detach().amax(-1, keepdim=True))
        return self.site(layer, first, "out", p @ value, None)


class KernelAttention(Attention):
    """A kernel as the attention of some layers, and of others ``kept`` ones; e4m3 operands are scaled by ``scheme``.

    Heads that the kernel does not take are padded with zeros to the next width that it does. With a
    ``page_size`` K and V are in a cache with such pages. ``calls`` is what was called, if it ``keeps`` that.
    """

    def __init__(
        self,
        kernel: Kernel,
        scheme: QuantScheme | None = None,
        kept: Mapping[int, Attention] | None = None,
        *,
        page_size: int = 0,
        keeps: bool = False,
    ) -> None:
        require(kernel.operation == FORWARD, f"{kernel.name} computes {kernel.operation}, not attention")
        self.kernel = kernel
        self.scheme = scheme if kernel.dtype == "e4m3" else None
        self.kept = kept or {}
        self.page_size = page_size
        self.keeps = keeps
        self.calls: list[KernelCall] = []

    def attend(self, asked: LayerCall) -> torch.Tensor:
        if asked.layer in self.kept:
            return self.kept[asked.layer].attend(asked)
        arrays = [to_numpy(x.detach().transpose(1, 2).float()) for x in asked.qkv]
        out = self.computed(asked.layer, asked.problem, arrays, asked.sinks)
        return to_torch(out).to(asked.qkv[0]).transpose(1, 2)

    def computed(
        self,
        layer: int,
        problem: AttentionProblem,
        arrays: Sequence[np.ndarray],
        sinks: torch.Tensor | None,
    ) -> np.ndarray:
        """Return out of one call, (batch, seqlen_q, heads, head_dim_v), of q, k and v of float32 in the same layout."""
        problem, (q, k, v) = self._widened(replace(problem, dtype=self.kernel.dtype), arrays)
        operands = prepare(problem, q, k, v, self.scheme).operands
        if sinks is not None:
            operands = replace(operands, sinks=to_numpy(sinks.detach().float()))
        config = self.kernel.code.configure(problem)
        out = calls.run(self.kernel, problem, operands, config)["out"]
        if self.keeps:
            order = None if self.kernel.order is None else self.kernel.order(config)
            self.calls.append(KernelCall(layer, problem, operands, out, order))
        return out.reshape(*arrays[0].shape[:-1], -1)[..., : arrays[2].shape[-1]]

    def _widened(
        self, problem: AttentionProblem, arrays: Sequence[np.ndarray]
    ) -> tuple[AttentionProblem, Sequence[np.ndarray]]:
        """Return a problem, and its arrays, at a head_dim that the kernel takes; over pages as packed sequences."""
        known = [width for width in self.kernel.head_dims or () if width >= problem.head_dim]
        if known and problem.head_dim not in known:
            ends = [(0, 0)] * 3 + [(0, min(known) - problem.head_dim)]
            arrays = [np.pad(x, ends) for x in arrays]
            problem = replace(problem, head_dim=min(known), head_dim_v=min(known))
        if not self.page_size:
            return problem, arrays
        packed = replace(
            problem,
            seqlens_q=(problem.seqlen_q,) * problem.batch,
            seqlens_k=(problem.seqlen_k,) * problem.batch,
            cache=Cache(page_size=self.page_size),
        )
        return packed, [x.reshape(-1, *x.shape[2:]) for x in arrays]


class DecodingAttention(KernelAttention):
    """A kernel that is called once for each query, with the keys up to it, as a server decodes."""

    def computed(
        self,
        layer: int,
        problem: AttentionProblem,
        arrays: Sequence[np.ndarray],
        sinks: torch.Tensor | None,
    ) -> np.ndarray:
        q, k, v = arrays
        outs = []
        for row in range(problem.seqlen_q):
            seen = problem.seqlen_k - problem.seqlen_q + row + 1
            one = replace(problem, seqlen_q=1, seqlen_k=seen)
            outs.append(super().computed(layer, one, (q[:, row : row + 1], k[:, :seen], v[:, :seen]), sinks))
        return np.concatenate(outs, axis=1)


@contextlib.contextmanager
def attending(model: PreTrainedModel, attention: Attention | str) -> Iterator[None]:
    """Have a model's attention computed by an object, or by a function of Transformers that is named."""
    if not isinstance(attention, str):
        AttentionInterface.register(NAME, attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, flash_attention_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(attention if isinstance(attention, str) else NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before or "eager")
