"""Calls of attention as values: what their arguments mean, one kv head of one sequence, and its gradients.

A reader returns the arguments of :class:`~fa3verify.checking.call.AttentionCall` but out and lse, as views of the
user's tensors. It raises ValueError where it cannot say what is due.

For gradients attention is handed aliases of its operands, so that the gradient of an alias is attention's own. The
gradient of out is taken where attention's node receives it, behind all hooks of the user.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fa3_reference.problem import AttentionProblem, Operands
from fa3verify.checking.call import AttentionCall, on_host

Facts = dict[str, Any]  # arguments by name: of a function, of AttentionCall, or of fa3verify.check
_HOW = {  # arguments of FlashAttention's functions that say how, not what
    *("num_splits", "pack_gqa", "deterministic", "sm_margin", "scheduler_metadata", "promotion_interval"),
    *("return_attn_probs", "return_softmax_lse", "return_aux", "enable_gqa", "rotary_interleaved"),
    *("max_seqlen_q", "max_seqlen_k", "max_q", "max_k"),
}
_DESCALES = ("q_descale", "k_descale", "v_descale")
_ALIKE = ("q", "softmax_scale", "causal", "softcap", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k")
_WHAT = {name: name for name in (*_ALIKE, *_DESCALES, "cache_seqlens", "page_table")} | {
    "query": "q",
    "key": "k",
    "value": "v",
    "attn_mask": "attn_mask",
    "is_causal": "causal",
    "scale": "softmax_scale",
    "window_size": "window",
    "learnable_sink": "sinks",
    "cu_seq_q": "cu_seqlens_q",
    "cu_seq_k": "cu_seqlens_k",
    "seqused_k": "cache_seqlens",
    "block_table": "page_table",
}
_TERMS = {"alibi": "alibi_slopes", "attn_mask": "attn_mask"}


def _plain(x: Any) -> Any:
    """Return a tensor without its graph, and other values as they are; ValueError for a tensor without memory."""
    if not isinstance(x, torch.Tensor):
        return x
    if (
        type(x) not in (torch.Tensor, torch.nn.Parameter)
        or torch._C._get_tracing_state()
        or x.is_nested
        or x.is_meta
        or torch._C._functorch.is_functorch_wrapped_tensor(x)  # type: ignore[attr-defined]
    ):
        raise ValueError(f"tensors that are nested, traced, meta, of torch.func, or a {type(x).__name__}")
    return x.detach()


def read(given: Facts, defaults: Facts, layout: str) -> Facts:
    """Read the arguments of torch's function or of one of FlashAttention's, dense, packed, or with a cache.

    An argument that is not known here must have its default. torch's causal masks are aligned at the first query.
    """
    has_cache = "k_cache" in given
    names = _WHAT | ({"k_cache": "k", "v_cache": "v", "k": "", "v": ""} if has_cache else {"k": "k", "v": "v"})
    what = ((name, x) for name, x in given.items() if name not in _HOW and x is not None)
    said = {name: _plain(x) for name, x in what if isinstance(x, torch.Tensor) or x != defaults.get(name)}
    if unknown := [name for name in said if name not in names]:
        raise ValueError(f"the argument {unknown[0]}")
    facts = {names[name]: x for name, x in said.items()} | {"layout": layout}
    appended = 0 if facts.pop("", None) is None else given["k"].shape[1]
    if has_cache and ("cache_seqlens" in facts or appended):
        facts["cache_seqlens"] = torch.as_tensor(facts["cache_seqlens"]).expand(len(given["q"])) + appended
    if "window" in facts:
        facts["window"] = tuple(-1 if x is None else int(x) for x in facts["window"])
    return facts | {"top_left": layout == "bhsd" and facts.get("causal", False)}


def read_transformers(given: Facts) -> Facts:
    """Read the arguments of a function of Transformers' AttentionInterface.

    A mask of four dimensions is all that hides; without one, causal masks and windows are those of the arguments.
    """
    mask = given["attention_mask"]
    rows = given["query"].shape[2]
    keys = given["key"].shape[2]
    said = {name: x for name, x in given["others"].items() if x is not None}
    packed = "position_ids" in said and rows > 1 and not bool((said["position_ids"].diff(dim=-1) == 1).all())
    strange = {"position_bias", "cache", "cu_seq_lens_q"} & said.keys() or packed or rows not in (1, keys)
    if (strange and mask is None) or (mask is not None and mask.ndim != 4) or "position_bias" in said:
        raise ValueError("Transformers' packed sequences, padding, pages or a bias of positions")
    says = given["is_causal"]
    causal = mask is None and rows > 1 and bool(getattr(given["module"], "is_causal", True) if says is None else says)
    left = -1 if given["sliding_window"] is None or mask is not None else given["sliding_window"] - 1
    facts = {name: given[name] for name in ("query", "key", "value", "dropout", "softcap")} | {
        "causal": causal,
        "window_size": (left, 0 if causal and left >= 0 else left),
        "scale": given["scaling"],
        "sinks": given["s_aux"],
        "attn_mask": mask if mask is None else mask[..., :keys],
    }
    return read(facts, {"dropout": 0.0, "softcap": 0.0}, "bhsd")


def facts_of(problem: AttentionProblem, operands: Operands) -> Facts:
    """Return what a problem and its operands say beside q, k and v, as arguments of :func:`fa3verify.check`."""
    said = ("causal", "top_left", "window", "softcap", "softmax_scale")
    facts: Facts = {name: getattr(problem, name) for name in said} | {"layout": "bshd", "sinks": operands.sinks}
    descales = {name: x for name in _DESCALES if (x := getattr(operands, name)) is not None}
    return facts | {name: x.by_kv_head(problem.nheads_kv) for name, x in descales.items()}


def cut(call: AttentionCall, sequence: int, heads: slice) -> Facts:
    """Return the arguments of :func:`fa3verify.check` for some query heads of one kv head of one sequence, of numpy.

    Operands of binary32 get the format of out: so autocast casts them.
    """
    part = call.part(sequence, heads, np.arange(call.lengths_q[sequence]))
    facts = facts_of(part.problem, part.operands)
    dtype = part.out.dtype if part.problem.dtype == "fp32" else part.operands.q.dtype
    facts |= {name: getattr(part.operands, name).astype(dtype) for name in "qkv"}
    if part.problem.term is not None:
        facts[_TERMS.get(part.problem.term.kind, "bias")] = part.operands.term
    return facts | {"out": part.out[None], "lse": None if part.lse is None else part.lse[None]}


def shape_of(call: AttentionCall) -> AttentionProblem:
    """Return the sizes and masks of a whole call."""
    is_ragged = call.q.ndim == 3 or call.cache_seqlens is not None
    return replace(
        call.problem(0, 1),
        batch=len(call.lengths_q),
        nheads=call.nheads,
        nheads_kv=call.nheads_kv,
        seqlen_q=max(call.lengths_q),
        seqlen_k=max(call.lengths_k),
        seqlens_q=call.lengths_q if is_ragged else None,
        seqlens_k=call.lengths_k if is_ragged else None,
    )


class HeldCall:
    """Collects the gradients of one call, and hands them on when all are there.

    ``guarded`` is entered around everything that autograd calls. With ``swaps``, the function returns heads behind
    queries although it takes them in front. ``wanted`` names gradients, ``n_bytes`` counts copies on the host.
    """

    n_bytes = 0

    def __init__(self, guarded: Callable[[], AbstractContextManager[None]], swaps: bool) -> None:
        self._guarded = guarded
        self._swaps = swaps
        self._facts: Facts = {}
        self._arrived: Facts = {}
        self.wanted = {"dout"}

    def alias(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return a view of q, k or v, by that name, whose gradient is taken; the tensor itself if it has none."""
        if x.requires_grad and torch.is_grad_enabled():
            x = x.view_as(x)
            x.register_hook(lambda gradient: self._take(f"d{name}", gradient))
            self.wanted.add(f"d{name}")
        return x

    def keep(
        self, out: torch.Tensor, call: AttentionCall, sequence: int, head_kv: int, finish: Callable[[Facts], None]
    ) -> None:
        """Copy a kv head of a sequence of a call, and wait for its gradients; ValueError if none come."""
        if out.grad_fn is None:
            raise ValueError("gradients of outputs that have none")
        heads = call.heads_of(head_kv)
        self._facts = cut(call, sequence, heads)
        self.n_bytes = 2 * sum(x.nbytes for x in self._facts.values() if isinstance(x, np.ndarray))
        self._finish = finish
        bare = copy.copy(call)  # knows lengths; without the user's tensors, which it would keep in memory
        vars(bare).update(dict.fromkeys(("q", "k", "v", "out", "lse")))
        self._part = lambda name, x: (
            bare.keys(x, sequence, head_kv)[:, None] if name in ("dk", "dv") else bare.queries(x, sequence)[:, heads]
        )
        at = out.output_nr
        out.grad_fn.register_prehook(lambda gradients: self._take("dout", gradients[at]))

    def _take(self, name: str, gradient: torch.Tensor | None) -> None:
        """Copy the part of a gradient, and hand all of them on after the last."""
        if not self._facts or gradient is None:
            return
        with self._guarded():
            if torch.is_grad_enabled():
                self._facts = {}
                raise ValueError("gradients of which gradients are taken")
            if name == "dout":
                self._arrived = {}
            x = gradient.detach().transpose(1, 2) if name == "dout" and self._swaps else gradient.detach()
            self._arrived[name] = on_host(self._part(name, x)).astype(self._facts["q"].dtype)[None]
            if self._arrived.keys() == self.wanted:
                facts = self._facts
                self._facts = {}
                self._finish(facts | self._arrived)
