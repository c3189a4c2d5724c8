"""Right kernels of caches, and of torch, in legal styles."""

from __future__ import annotations

import numpy as np
import torch

from tests.quality.calls import tensors
from tests.quality.calls.exhibits import PAGES, ROWS, right
from tests.quality.calls.gradients import Function
from tests.quality.calls.plain import cached

SMALL = {"head_dims": (64,)}
TORCH = {"library": "torch", "min_seqlen": 1}


@right("appended keys are rotated and written into pages", *PAGES, "append", "rotary", **SMALL)
def rotates_and_appends(q, k, v, **o):
    return cached(q, k, v, **o)


@right("rows with leftpad, batch indices and appended keys", *ROWS, "append", "leftpad", "batch_idx", **SMALL)
def rows_of_all_kinds(q, k, v, **o):
    return cached(q, k, v, **o)


@right("pages of e4m3 with a descale for each head", *PAGES, "varlen", "fp8_cache", dtypes=("bf16",), **SMALL)
def coded_pages(q, k, v, **o):
    return cached(q, k, v, **o)


@right("pages of e4m3 with a descale for each key", *PAGES, "fp8_rows", dtypes=("bf16",), **SMALL)
def coded_keys(q, k, v, **o):
    return cached(q, k, v, **o)


@right("pages with sinks, chunks and windows", *PAGES, "sinks", "attention_chunk", "window", **SMALL)
def masked_pages(q, k, v, **o):
    return cached(q, k, v, **o)


@right("a cache whose heads lie in front of its keys", *PAGES, "append", cache_layout="hnd", **SMALL)
def pages_of_hnd(q, k, v, **o):
    return cached(q, k.swapaxes(1, 2), v.swapaxes(1, 2), **o)


@right("vLLM's cache", *PAGES, cache_layout="vllm", page_sizes=(16, 32), **SMALL)
def of_vllm(q, k, v, **o):
    keys = k.transpose(0, 3, 1, 2, 4).reshape(len(k), k.shape[3], k.shape[1], -1)
    return cached(q, keys, v.transpose(0, 3, 1, 2), **o)


@right("it loads whole pages, with what lies behind a sequence masked and cleared", *PAGES, **SMALL)
def whole_pages(q, k, v, *, cache_seqlens, page_table, **o):
    size = k.shape[1]
    counts = -(-cache_seqlens // size)
    pages = [page_table[b, :n] for b, n in enumerate(counts)]
    longest = max([1, *counts]) * size
    held = [np.zeros((len(q), longest, *x.shape[2:]), x.dtype) for x in (k, v)]
    for b, own in enumerate(pages):
        for to, x in zip(held, (k, v), strict=True):
            to[b, : len(own) * size] = x[own].reshape(-1, *x.shape[2:])
            to[b, cache_seqlens[b] :] = 0
    return cached(q, *held, cache_seqlens=cache_seqlens, **o)


@right("an autograd function with gradients of its own", gradients="autograd", **TORCH, **SMALL)
def autograd_function(q, k, v, *, softmax_scale, causal=False):
    return Function.apply(q, k, v, causal, softmax_scale)


@right("gradients by autograd of single steps", gradients="autograd", dtypes=("bf16",), **TORCH, **SMALL)
def autograd_of_steps(q, k, v, **o):
    return tensors.attend(q, k, v, **o)[0]


@right("it makes its operands contiguous, and its settings last as long as the call", **TORCH, **SMALL)
def restores_settings(q, k, v, **o):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.no_grad():
            return tensors.attend(q.contiguous(), k.contiguous(), v.contiguous(), **o)
    finally:
        torch.set_default_dtype(before)


@right("it writes every element of what empty gives it", dtypes=("bf16",), **TORCH, **SMALL)
def fills_empty(q, k, v, **o):
    found, lse = tensors.attend(q, k, v, **o)
    out = torch.empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3], dtype=q.dtype).transpose(1, 2)
    return out.copy_(found), lse
