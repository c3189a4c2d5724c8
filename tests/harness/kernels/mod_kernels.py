"""Functions of scores and masks as users of FlexAttention write them, and kernels with them built in.

``attention`` is right without a mistake. It goes over tiles of queries and keys, in torch and binary32, layout bhsd.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

TILE = 32
SLOPES = torch.exp2(-torch.arange(1, 65) / 4)
TABLE = torch.randn(64, 8192, generator=torch.Generator().manual_seed(1))
DOCUMENTS = (torch.arange(8192) + 5 * torch.arange(8)[:, None]) // 13  # of a sequence and a position
FAR = torch.randn(4096, 4096, generator=torch.Generator().manual_seed(3))
Mod = Callable[..., torch.Tensor]


def alibi(score, b, h, q_idx, kv_idx):
    return score - SLOPES[h] * (q_idx - kv_idx).abs()


def alibi_of_numbers(score, b, h, q_idx, kv_idx):
    return score + torch.exp2(-((h + 1) * 8.0 / 16)) * (kv_idx - q_idx)


def softcap(score, b, h, q_idx, kv_idx):
    return 5 * torch.tanh(score / 5)


def relative(score, b, h, q_idx, kv_idx):
    return score + TABLE[h, (q_idx - kv_idx) + 4096]


def chained(score, b, h, q_idx, kv_idx):
    return score + FAR[q_idx][kv_idx]


def squared(score, b, h, q_idx, kv_idx):
    return score * score / 4


def tempered(score, b, h, q_idx, kv_idx):
    return score * (1 + b) / (1 + h)


def causal_score(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx >= kv_idx, score, -float("inf"))


def least(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx >= kv_idx, score, torch.finfo(score.dtype).min)


def thresholded(score, b, h, q_idx, kv_idx):
    return torch.where(score > 0, score, -float("inf"))


def stepped(score, b, h, q_idx, kv_idx):
    return torch.where(score > 0, score + 1, score)


def logarithm(score, b, h, q_idx, kv_idx):
    return torch.log(score)


def sliding(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 20)


def document(b, h, q_idx, kv_idx):
    return DOCUMENTS[b, q_idx] == DOCUMENTS[b, kv_idx]


def blocks(b, h, q_idx, kv_idx):
    return q_idx // 8 >= kv_idx // 8


def two_of_three(b, h, q_idx, kv_idx):
    return (q_idx % 3 != 1) & (kv_idx >= 0)


def of_window(size: int) -> Mod:
    def window(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() < size

    return window


window = of_window(9)


def scored(s: torch.Tensor, mod: Mod | None, places: tuple[torch.Tensor, ...], mistake: str) -> torch.Tensor:
    if mod is None:
        return s
    if mistake == "in bf16":
        return mod(s.bfloat16(), *places).float()
    if mistake == "twice":
        return mod(mod(s, *places), *places)
    if mistake == "of the negative score":
        return mod(-s, *places)
    if mistake == "of approximate bits":  # as tanh.approx, whose relative error is 2^-11
        return mod(s, *places) * (1 - 2.0**-11)
    if mistake == "not in a later tile of keys" and int(places[3][0, 0]) >= TILE:
        return s
    return mod(s, *places)


def places_of(mistake: str, b: int, h: int, group: int, rows: slice, keys: slice, ends: tuple[int, int]):
    q = torch.arange(rows.start, rows.stop)[:, None]
    kv = torch.arange(keys.start, keys.stop)[None]
    if mistake == "kv_idx off by one in a later tile" and keys.start:
        kv = kv + 1
    if mistake == "q_idx of the tile":
        q = q - rows.start
    if mistake == "kv_idx of the tile":
        kv = kv - keys.start
    if mistake == "q_idx from the last key":
        q = q + max(0, ends[1] - ends[0])
    if mistake == "q_idx and kv_idx exchanged":
        q, kv = kv, q
    b = 0 if mistake == "batch 0 for all" else b
    h = h // group if mistake == "kv head" else h
    return torch.tensor(b), torch.tensor(h), q, kv


def attention(q, k, v, *, softmax_scale, score_mod=None, mask_mod=None, mistake="", in_log2=False):
    dtype = q.dtype
    batch, nheads, n, _ = q.shape
    m, group = k.shape[2], nheads // max(1, k.shape[1])
    q, k, v = q.float(), k.float(), v.float()
    out = torch.zeros(batch, nheads, n, v.shape[-1], dtype=torch.float32)
    lse = torch.full((batch, nheads, n), -math.inf, dtype=torch.float32)
    for b in range(batch):
        for h in range(nheads):
            for start in range(0, n, TILE):
                rows = slice(start, min(start + TILE, n))
                s = torch.full((rows.stop - start, m), -math.inf, dtype=torch.float32)
                for first in range(0, m, TILE):
                    keys = slice(first, min(first + TILE, m))
                    raw = q[b, h, rows] @ k[b, h // group, keys].T
                    places = places_of(mistake, b, h, group, rows, keys, (n, m))
                    if mistake == "before the scale":
                        x = scored(raw, score_mod, places, mistake) * softmax_scale
                    else:
                        x = scored(raw * softmax_scale, score_mod, places, mistake)
                    if mask_mod is not None and not (mistake == "mask forgotten in the last tile" and keys.stop == m):
                        x = masked(x, mask_mod(*places), raw, places, score_mod, mistake)
                    s[:, keys] = x
                out[b, h, rows], lse[b, h, rows] = softmax(s, v[b, h // group], dtype, in_log2)
                if mistake == "mean in empty rows" and m:
                    empty = s.isneginf().all(-1)
                    out[b, h, rows][empty] = v[b, h // group].mean(0)
    return out.to(dtype), lse


def masked(x, seen, raw, places, score_mod, mistake):
    if mistake == "hidden scores are -1000":
        return torch.where(seen, x, -1000.0)
    if mistake == "hidden before the score_mod":
        return scored(torch.where(seen, raw, -1e4), score_mod, places, mistake)
    if mistake == "mask inverted in a row" and places[2].numel() > 3:
        seen = seen.clone()
        seen[3] = ~seen[3]
    return torch.where(seen, x, -math.inf)


def softmax(s, v, dtype, in_log2):
    top = s.amax(-1, keepdim=True) if s.shape[-1] else torch.full((len(s), 1), -math.inf, dtype=s.dtype)
    base = torch.where(top.isneginf(), 0.0, top)
    unit = torch.tensor(1 / math.log(2), dtype=torch.float32)
    p = torch.exp2(s * unit - base * unit) if in_log2 else torch.exp(s - base)
    total = p.sum(-1, keepdim=True)
    out = p.to(dtype).float() @ v / torch.where(total == 0, 1.0, total)
    return out, (base + total.log())[:, 0]


def flex(query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False) -> Any:
    """FlexAttention of torch, which is not compiled on a CPU."""
    named = {"score_mod": score_mod, "block_mask": block_mask, "scale": scale, "enable_gqa": enable_gqa}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow without torch.compile
        out, aux = flex_attention(query, key, value, **named, return_aux=AuxRequest(lse=True))
    return out, aux.lse
