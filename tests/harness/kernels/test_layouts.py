"""Functions whose operands lie otherwise than FlashAttention-3's pass where they declare it, and fail where not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fa3verify.cases import space
from fa3verify.judging.judgement import judge
from fa3verify.kernels.calls import KernelError
from fa3verify.kernels.functions import array_kernel
from fa3verify.kernels.layouts import laid
from fa3verify.kernels.record import Kernel
from tests.harness.kernels import serving_kernels as kernels

PAGES = ("causal", "gqa", "paged", "append")


def of(function: Callable[..., Any], features: tuple[str, ...], **facts: Any) -> Kernel:
    (kernel,) = array_kernel(function, layout="bshd", features=features, head_dims=(64,), **facts)
    return kernel


def worst(kernel: Kernel, **chosen: str) -> float:
    """Largest error / bound over few cases; infinite where the kernel cannot take what it is given."""
    masks = ({"mask": mask, "batch": "2"} | chosen for mask in ("none", "causal"))
    try:
        cases = [space.case_of(kernel, point, seed) for seed, point in enumerate(masks)]
        return max(judge(kernel, case, unrounded=False).measures["ratio_max"] for case in cases)
    except KernelError:
        return math.inf


def hnd(q: Any, k_cache: Any, v_cache: Any, **given: Any) -> Any:
    """Attention over pages (pages, heads, page_size, channels), which appended keys are written into."""
    ours = [x.swapaxes(1, 2) for x in (k_cache, v_cache)]
    return kernels.cached(q, *ours, **given)


def vllm(q: Any, k_cache: Any, v_cache: Any, **given: Any) -> Any:
    """Attention over a K cache (pages, heads, channels / 8, page_size, 8) and a V cache with the keys last."""
    pages, heads, parts, page_size, width = k_cache.shape
    k = np.zeros((pages, page_size, heads, parts * width), k_cache.dtype)
    for i in range(parts * width):
        k[..., i] = k_cache[:, :, i // width, :, i % width].swapaxes(1, 2)
    v = np.ascontiguousarray(np.moveaxis(v_cache, -1, 1))
    out = kernels.cached(q, k, v, **given)
    for i in range(parts * width):
        k_cache[:, :, i // width, :, i % width] = k[..., i].swapaxes(1, 2)
    v_cache[...] = np.moveaxis(v, 1, -1)
    return out


@pytest.mark.parametrize("cache", [{"cache": "pages of 16"}, {"appended": "one per query"}], ids=["pages", "appended"])
@pytest.mark.parametrize(("layout", "function"), [("hnd", hnd), ("vllm", vllm)])
def test_a_cache_lies_as_it_is_declared(layout: Any, function: Any, cache: dict[str, str]) -> None:
    chosen = {**cache, "kv_heads": "2 or 3"}
    assert worst(of(function, PAGES, page_sizes=(16,), cache_layout=layout), **chosen) <= 1
    assert worst(of(function, PAGES, page_sizes=(16,)), **chosen) > 1
    assert worst(of(kernels.cached, PAGES, page_sizes=(16,), cache_layout=layout), **chosen) > 1


@pytest.mark.parametrize("kind", [np.float16, np.uint8])
@pytest.mark.parametrize("layout", ["nhd", "hnd", "vllm"])
def test_a_cache_comes_back_as_it_was(layout: Any, kind: Any) -> None:
    x = np.arange(3 * 4 * 2 * 32).reshape(3, 4, 2, 32).astype(kind)
    for name in ("k_cache", "v_cache", "q"):
        given = laid(layout, name, x)
        assert given.flags.c_contiguous
        np.testing.assert_array_equal(laid(layout, name, given, back=True), x)
    shapes = {"nhd": (3, 4, 2, 32), "hnd": (3, 2, 4, 32), "vllm": (3, 2, 32 // (16 // x.itemsize), 4, 16 // x.itemsize)}
    assert laid(layout, "k_cache", x).shape == shapes[layout]


def packed_qkv(qkv: Any, **given: Any) -> Any:
    return kernels.plain(*np.moveaxis(qkv, -3, 0), **given)


def packed_kv(q: Any, kv: Any, **given: Any) -> Any:
    return kernels.plain(q, kv[..., 0, :, :], kv[..., 1, :, :], **given)


def packed_kqv(qkv: Any, **given: Any) -> Any:
    k, q, v = np.moveaxis(qkv, -3, 0)
    return kernels.plain(q, k, v, **given)


def packed_vk(q: Any, kv: Any, **given: Any) -> Any:
    return packed_kv(q, kv[..., ::-1, :, :], **given)


@pytest.mark.parametrize(
    ("packed", "right", "wrong"), [("qkv", packed_qkv, packed_kqv), ("kv", packed_kv, packed_vk)], ids=["qkv", "kv"]
)
def test_operands_are_packed_as_declared(packed: Any, right: Any, wrong: Any) -> None:
    kernel = of(right, ("causal",), packed=packed)
    assert kernel.sizes.equal_lengths == (packed == "qkv")
    assert worst(kernel, kv_heads="2 or 3") <= 1
    assert worst(of(wrong, ("causal",), packed=packed), kv_heads="2 or 3") > 1


def interleaved(q: Any, k: Any, v: Any, **given: Any) -> Any:
    """Attention whose query head h goes with kv head h mod nheads_kv."""
    group = q.shape[2] // k.shape[2]
    return kernels.plain(q, np.tile(k, (1, 1, group, 1)), np.tile(v, (1, 1, group, 1)), **given)


@pytest.mark.parametrize("sinks", ["off", "on"])
def test_query_heads_of_a_group_lie_as_declared(sinks: str) -> None:
    features = ("causal", "gqa", "sinks")
    chosen = {"group": "2 to 4", "kv_heads": "2 or 3", "sinks": sinks}
    assert worst(of(interleaved, features, groups="interleaved"), **chosen) <= 1
    assert worst(of(interleaved, features), **chosen) > 1
    assert worst(of(kernels.plain, features, groups="interleaved"), **chosen) > 1


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"cache_layout": "dhn", "features": PAGES}, "cache_layout must be among nhd, hnd, vllm"),
        ({"cache_layout": "hnd"}, "cache_layout is that of a cache"),
        ({"packed": "qkv", "layout": "bhsd"}, "packed operands are those of a forward without a cache"),
        ({"packed": "qkv", "features": ("gqa",)}, "q, k and v in one array have one shape"),
        ({"packed": "vk"}, "packed must be among , qkv, kv"),
        (
            {"groups": "interleaved", "features": ("gqa", "alibi")},
            "interleaved groups are those of a forward with none",
        ),
        ({"groups": "interleaved", "gradients": "own"}, "interleaved groups are those of a forward"),
    ],
)
def test_what_no_layout_is_is_refused(facts: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        array_kernel(kernels.plain, **{"layout": "bshd"} | facts)
