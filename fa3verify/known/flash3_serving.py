"""Calls of vLLM's and SGLang's builds of FlashAttention-3, which serve, and of vLLM's build of FlashAttention-2.

Keys lie in pages or rows of a cache, or are packed, as FlashAttention-2 gets them here, which alone takes ALiBi.

Official builds without a cache are called in :mod:`fa3verify.known.flash3_fwd` and
:mod:`fa3verify.known.flash3_dew`; :mod:`fa3verify.known.launches` loads all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from fa3_reference.problem import AttentionProblem
from fa3verify.known.launches import Keywords, Launch, LaunchOutput, Options
from fa3verify.known.libraries import library
from fa3verify.known.peers import PEERS

_OPERATORS = {  # in torch.ops
    "vllm": "_vllm_fa3_C.fwd",
    "sglang": "sgl_kernel.fwd",
    "flash2.vllm": "_vllm_fa2_C.varlen_fwd",
}
# Names in fa3_reference.cache.serve, and the names of their operators for the same array.
_NAMES = {
    "k_cache": "k",
    "v_cache": "v",
    "cache_seqlens": "seqused_k",
    "cache_batch_idx": "kv_batch_idx",
    "cache_leftpad": "leftpad_k",
    "qv": "q_v",
}
# Arguments that a build may have or lack, with the value that leaves a call as it is.
_DEFAULTS: dict[str, Any] = {
    "attention_chunk": 0,
    "softcap": 0.0,
    "is_rotary_interleaved": False,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
    "only_qv": False,
    "p_dropout": 0.0,
    "zero_tensors": False,
    "return_softmax": False,
}
Served = Mapping[str, torch.Tensor]  # what fa3verify.known.launches.served gives


def load(name: str) -> Callable[[AttentionProblem, Served, Options], Launch]:
    """Load the library's operators."""
    torch.ops.load_library(str(library(PEERS[name].binary)))
    return partial(prepare, attrgetter(_OPERATORS[name])(torch.ops).default)


def _schedule(operator: Any, problem: AttentionProblem, call: Keywords) -> torch.Tensor | None:
    """Return the schedule of a call by the build's own function; None where it has none."""
    made = getattr(getattr(torch.ops, operator.namespace), "get_scheduler_metadata", None)
    sizes = {
        "batch_size": problem.batch,
        "num_heads": problem.nheads,
        "num_heads_k": problem.nheads_kv,
        "headdim": problem.head_dim,
        "headdim_v": problem.head_dim_v,
        "qkv_dtype": call["q"].dtype,
        "page_size": problem.cache.page_size or None if problem.cache else None,
        "has_softcap": problem.softcap > 0,
        "max_seqlen_k_new": 0,
    }
    known = _DEFAULTS | {**call, **sizes}
    return made and made.default(*[known.get(x.name) for x in made.default._schema.arguments])


def prepare(operator: Any, problem: AttentionProblem, given: Served, options: Options) -> Launch:
    """Prepare a call on the tensors of :func:`fa3verify.known.launches.served`.

    Queries are packed, as both stacks call their builds, and so are keys and values outside a cache. The options are
    num_splits, 1 by default, where at 0 the library chooses; and ``is_scheduled``, with which the schedule is made
    now, where the build can, as stacks make it once for all layers of a step. ValueError for an argument that the build
    does not have.
    """
    call: dict[str, Any] = {_NAMES.get(name, name): x for name, x in given.items()}
    for name in {"q", "q_v", *(("k", "v") if problem.cache is None else ())} & call.keys():
        call[name] = call[name].flatten(0, -3)
    if problem.cache is None:
        call["max_seqlen_k"] = problem.seqlen_k
    elif "page_table" not in call:
        call["max_seqlen_k"] = call["k"].shape[1]
    else:
        call["max_seqlen_k"] = call["page_table"].shape[1] * problem.cache.page_size
    for name in {"rotary_cos", "rotary_sin"} & call.keys():  # a build wants a row for every place of the cache
        table = call[name]
        call[name] = torch.cat([table, table[-1:].expand(max(0, call["max_seqlen_k"] - len(table)), -1)])
    call |= {
        "max_seqlen_q": problem.seqlen_q,
        "softmax_scale": problem.softmax_scale,
        "is_causal": problem.causal,
        "window_size_left": problem.window[0],
        "window_size_right": problem.window[1],
        "softcap": problem.softcap,
        "attention_chunk": problem.attention_chunk,
        "is_rotary_interleaved": problem.cache is not None and problem.cache.interleaved,
        "num_splits": options.get("num_splits", 1),
    }
    names = [x.name for x in operator._schema.arguments]
    # A build that lacks an argument which leaves a call as it is, or the longest keys, does not need it.
    needless = {name for name, value in _DEFAULTS.items() if name in call and call[name] == value}
    if unknown := call.keys() - {*names, *needless, "max_seqlen_k"}:
        raise ValueError(f"this build takes no {', '.join(sorted(unknown))}")
    if options.get("is_scheduled") and "scheduler_metadata" in names and problem.cache is not None:
        call["max_seqlen_k"] = problem.seqlen_k
        call["scheduler_metadata"] = _schedule(operator, problem, call)
    arguments = [(_DEFAULTS | call).get(name) for name in names]

    def launch() -> LaunchOutput:
        out, lse, *_ = operator(*arguments)
        if not problem.is_varlen:
            lse = lse.unflatten(1, (problem.batch, problem.seqlen_q)).transpose(0, 1)
        return LaunchOutput(out.view(problem.out_shape), lse)

    return launch
