"""Mistakes that only uncommon inputs show, in kernels of somebody's own: quick's covering array finds them."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import fa3verify
from fa3verify.campaign.cover import cover
from fa3verify.kernels.record import Kernel
from fa3verify.public import judge


def softmax(s, v, floor):
    top = np.maximum(s.max(-1, keepdims=True, initial=-np.inf), np.float32(floor))
    with np.errstate(all="ignore"):
        p = np.exp(s - np.where(np.isneginf(top), 0, top))
        total = p.sum(-1, keepdims=True)
        lse = np.where(np.isneginf(top), -np.inf, np.log(total) + top)
        return np.where(np.isneginf(lse), 0, p @ v / total), lse


def weighed(o, lse, o_block, lse_block):
    """Merge by weights of the two parts."""
    both = np.logaddexp(lse, lse_block)
    top = np.where(np.isneginf(both), 0, both)
    return np.exp(lse - top) * o + np.exp(lse_block - top) * o_block, both


def subtracted(o, lse, o_block, lse_block):
    """Merge by one weight, whose product cancels all of a large output."""
    with np.errstate(all="ignore"):
        weight = np.where(np.isneginf(lse_block), 0, 1 / (1 + np.exp(lse - lse_block)))
    return o - weight * (o - o_block), np.logaddexp(lse, lse_block)


def attention(  # noqa: PLR0913 (a call, and what is changed)
    q, k, v, *, softmax_scale, causal, merge, tile, floor=-np.inf, backwards=False
):
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, 1).astype(np.float32) for x in (k, v))
    s = q.astype(np.float32) @ k.swapaxes(-1, -2) * np.float32(softmax_scale)
    n, m = s.shape[-2:]
    if causal:
        s = np.where(np.tri(n, m, m - n, dtype=bool), s, -np.inf)
    out = np.zeros((*q.shape[:-1], v.shape[-1]), np.float32)
    lse = np.full((*q.shape[:-1], 1), -np.inf, np.float32)
    starts = range(0, m, tile)
    for start in reversed(starts) if backwards else starts:
        keys = slice(start, start + tile)
        out, lse = merge(out, lse, *softmax(s[..., keys], v[:, :, keys], floor))
    return out.astype(q.dtype)


WRONG = {
    "a merge that cancels": {"merge": subtracted, "tile": 128},
    "a merge that cancels, of small tiles": {"merge": subtracted, "tile": 32},
    "a merge that cancels, from the last key": {"merge": subtracted, "tile": 64, "backwards": True},
    "a floor of the maximum at -1e6": {"merge": weighed, "tile": 64, "floor": -1e6},
}
RIGHT = {"a merge by weights": {"merge": weighed, "tile": 32}}


def ratios(changed, seed):
    """Return the ratio of each case that quick's covering array has of the distributions that show these mistakes."""
    kernel: Kernel
    (kernel,) = fa3verify.array_kernel(partial(attention, **changed), name="merged", head_dims=(64,))
    drawn = "vanishing", "level"
    cases = [case for _, case in cover(kernel, 2, seed) if case and case.recipe.distribution in drawn]
    return [judge(kernel, case).measures["ratio_max"] for case in cases]


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("seed", [0, 1])
def test_quick_finds_what_uncommon_inputs_show(name, seed):
    assert max(ratios(WRONG[name], seed)) > 1


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_kernel_passes_on_uncommon_inputs(name):
    assert max(ratios(RIGHT[name], 0)) <= 1
