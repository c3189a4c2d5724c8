"""Attention of one layer with a mistake in it, and exact otherwise: what known bugs do to a model's log-probabilities.

A mistake is a layer with other operands or weights. Some have an amount; the others are there or not. Pages, and the
blocks of keys that a kernel visits from the last to the first, have usual sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from fa3verify.models.attention import ExactAttention, LayerCall, seen_keys

_PAGE = 16
_BLOCK = 128  # keys; a tile has as many queries, or a divisor of them


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What attention of one text has in a layer, in binary32, and what it computes of that for all heads at once.

    Parameters
    ----------
    q, keys, values : float32 tensors (heads or kv heads, tokens, channels)
    kv : int64 tensor (heads,)
        The kv head of each head.
    seen : bool tensor (tokens, tokens)
        Where a query sees a key.
    scale, softcap : float
    sinks : float32 tensor (heads, 1, 1) or None
    window : int
        Keys before a query's own that it sees; negative if all.
    frequencies : float32 tensor
        Of rotary positions, radians a position, for half the channels that are rotated; empty if they are not known.
    """

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    kv: torch.Tensor
    seen: torch.Tensor
    scale: float
    softcap: float
    sinks: torch.Tensor | None
    window: int
    frequencies: torch.Tensor

    @classmethod
    def of(cls, asked: LayerCall, frequencies: torch.Tensor) -> Layer:
        problem = asked.problem
        q, keys, values = (x[0].detach().float() for x in asked.qkv)
        return cls(
            q=q,
            keys=keys,
            values=values,
            kv=torch.arange(problem.nheads, device=q.device) // problem.group,
            seen=seen_keys(problem, q.device),
            scale=problem.softmax_scale,
            softcap=problem.softcap,
            sinks=None if asked.sinks is None else asked.sinks.detach().float()[:, None, None],
            window=problem.window[0],
            frequencies=frequencies,
        )

    @cached_property
    def key(self) -> torch.Tensor:
        """Positions (tokens,)."""
        return torch.arange(len(self.seen), device=self.q.device)

    @cached_property
    def ahead(self) -> torch.Tensor:
        """Positions by which a key lies before a query, (tokens, tokens)."""
        return self.key[:, None] - self.key

    @cached_property
    def s(self) -> torch.Tensor:
        """Scores (heads, tokens, tokens)."""
        s = self.q @ self.keys[self.kv].mT * self.scale
        return self.softcap * torch.tanh(s / self.softcap) if self.softcap else s

    @cached_property
    def lse(self) -> torch.Tensor:
        """Natural logarithm of the sum of exponentials, (heads, tokens, 1); 0 of queries that see no key."""
        sinks = [] if self.sinks is None else [self.sinks.expand(*self.s.shape[:-1], 1)]
        lse = torch.cat([self.s.masked_fill(~self.seen, -torch.inf), *sinks], -1).logsumexp(-1, keepdim=True)
        return lse.nan_to_num(neginf=0)

    @cached_property
    def p(self) -> torch.Tensor:
        """Weights (heads, tokens, tokens)."""
        return torch.exp((self.s - self.lse).masked_fill(~self.seen, -torch.inf))

    @cached_property
    def v(self) -> torch.Tensor:
        return self.values[self.kv]

    @cached_property
    def out(self) -> torch.Tensor:
        """Float32 (heads, tokens, channels)."""
        return self.p @ self.v

    def where(self, seen: torch.Tensor) -> torch.Tensor:
        """Return out if other keys are seen."""
        return replace(self, seen=seen).out

    def is_of_block(self, visited: int) -> torch.Tensor:
        """Return where a key is in the block that is visited so many after the query's own, which is the first."""
        block = self.key // _BLOCK
        return self.seen & (block == block[:, None] - visited)


class Mistake(NamedTuple):
    """A mistake in words, with ``{}`` where it has an amount, and the amount that is tried; the output of a layer that
    has it, and whether a layer can. Without an amount the mistake is there once or not at all.
    """

    words: str
    amount: float
    attend: Callable[[Layer, float], torch.Tensor]
    can_be: Callable[[Layer], object] = lambda _: True


def _rotated(x: Layer, positions: float) -> torch.Tensor:
    half = len(x.frequencies)
    pairs = torch.complex(x.keys[..., :half], x.keys[..., half : 2 * half])
    turned = pairs * torch.polar(torch.ones_like(x.frequencies), x.frequencies * positions)
    return replace(x, keys=torch.cat([turned.real, turned.imag, x.keys[..., 2 * half :]], -1)).out


def _missed_rescale(x: Layer) -> torch.Tensor:
    tops = [x.s.masked_fill(~x.is_of_block(visited), -torch.inf).amax(-1, keepdim=True) for visited in (0, 1)]
    factor = torch.exp((tops[1] - tops[0]).clamp(min=0, max=80)).nan_to_num(1)
    return torch.where(x.is_of_block(0), x.p * factor, x.p) @ x.v


def _stale_block(x: Layer) -> torch.Tensor:
    held = torch.nn.functional.pad(x.v, (0, 0, 0, _BLOCK))[:, _BLOCK:]
    return x.out + torch.where(x.is_of_block(1), x.p, 0) @ (held - x.v)


def _stale_page(x: Layer, head: int, page: int) -> torch.Tensor:
    begin = page * _PAGE
    own, before = slice(begin, begin + _PAGE), slice(begin - _PAGE, begin)
    heads = x.kv == head
    removed = x.p[heads, begin:, own]
    held = torch.exp(x.s[heads, begin:, before] - x.lse[heads, begin:]).where(x.seen[begin:, own], 0)
    moved = x.out[heads, begin:] + held @ x.v[heads, before] - removed @ x.v[heads, own]
    out = x.out.clone()
    out[heads, begin:] = moved / (1 + held.sum(-1, keepdim=True) - removed.sum(-1, keepdim=True)).clamp(min=1e-30)
    return out


def _merged(x: Layer, at: int) -> torch.Tensor:
    """Return out of two parts that are merged by 2 to the power of their lse, which is a natural logarithm."""
    parts = [torch.where(of, x.p, 0) for of in (x.key < at, x.key >= at)]
    sums = [part.sum(-1, keepdim=True).clamp(min=1e-30) for part in parts]
    p = torch.stack([part * each ** (math.log(2) - 1) for part, each in zip(parts, sums, strict=True)]).sum(0)
    return p * (sum(sums) / sum(each ** math.log(2) for each in sums)) @ x.v


_KNOWN = (
    Mistake("scores scaled by {:+.2%}", 0.01, lambda x, by: replace(x, scale=x.scale * (1 + by)).out),
    Mistake("outputs or V scaled by {:+.2%}", 0.01, lambda x, by: x.out * (1 + by)),
    Mistake("the query's own key missed", 1, lambda x, _: x.where(x.seen & (x.ahead > 0))),
    Mistake("one key beyond the query's own seen", 1, lambda x, _: x.where(x.seen | (x.ahead == -1))),
    Mistake("keys rotated by {:+.2f} positions", 0.1, _rotated, lambda x: len(x.frequencies)),
    Mistake("keys rotated one position on", 1, lambda x, _: _rotated(x, 1), lambda x: len(x.frequencies)),
    Mistake("keys rotated one position back", 1, lambda x, _: _rotated(x, -1), lambda x: len(x.frequencies)),
    Mistake(
        "kv heads taken by remainder",
        1,
        lambda x, _: replace(x, kv=torch.arange(len(x.q), device=x.kv.device) % len(x.keys)).out,
        lambda x: 1 < len(x.keys) < len(x.q),
    ),
    Mistake("windows one key short", 1, lambda x, _: x.where(x.seen & (x.ahead < x.window)), lambda x: x.window > 0),
    Mistake(
        "windows one key long", 1, lambda x, _: x.where(x.seen | (x.ahead == x.window + 1)), lambda x: x.window > 0
    ),
    Mistake("windows left out", 1, lambda x, _: x.where(x.ahead >= 0), lambda x: x.window > 0),
    Mistake("sinks left out", 1, lambda x, _: replace(x, sinks=None).out, lambda x: x.sinks is not None),
    Mistake("softcap left out", 1, lambda x, _: replace(x, softcap=0.0).out, lambda x: x.softcap),
    Mistake(
        "the last key of 128 m + 1 dropped",
        1,
        lambda x, _: x.where(x.seen & ~((x.ahead == 0) & (x.key % _BLOCK == 0) & (x.key > 0))),
        lambda x: len(x.key) > _BLOCK,
    ),
    Mistake(
        "column 0 of blocks of 128 left out of row sums",
        1,
        lambda x, _: (x.out / (1 - x.p[..., ::_BLOCK].sum(-1, keepdim=True))).nan_to_num(0, 0, 0),
        lambda x: len(x.key) > _BLOCK,
    ),
    Mistake(
        "the last block of 128 keys dropped",
        1,
        lambda x, _: x.where(x.seen & ~x.is_of_block(0)),
        lambda x: len(x.key) > _BLOCK,
    ),
    Mistake(
        "no rescale at the second block of 128 keys",
        1,
        lambda x, _: _missed_rescale(x),
        lambda x: len(x.key) > _BLOCK,
    ),
    Mistake(
        "the second block of 128 keys with the V of the last",
        1,
        lambda x, _: _stale_block(x),
        lambda x: len(x.key) > _BLOCK,
    ),
    *(
        Mistake(
            f"a merge in base 2 at {at} keys",
            1,
            lambda x, _, at=at: _merged(x, at),
            lambda x, at=at: len(x.key) > at,
        )
        for at in (128, 256, 512, 1024)
    ),
)


def known(x: Layer) -> dict[str, Mistake]:
    """Return the mistakes that a layer can have, by their words; pages of K and V are stale one by one."""
    pages = [
        Mistake(
            f"page {page} of kv head {head} with K and V of the page before",
            1,
            lambda x, _, head=head, page=page: _stale_page(x, head, page),
        )
        for head in range(len(x.keys))
        for page in range(1, len(x.key) // _PAGE)
    ]
    return {mistake.words: mistake for mistake in (*_KNOWN, *pages) if mistake.can_be(x)}


class Mistaken(ExactAttention):
    """Exact attention in binary32, of which a function gets every call, and what computes it as it is due."""

    def __init__(self, attended: Callable[[LayerCall, Callable[[LayerCall], torch.Tensor]], torch.Tensor]) -> None:
        super().__init__(torch.float32)
        self._attended = attended

    def attend(self, asked: LayerCall) -> torch.Tensor:
        return self._attended(asked, super().attend)


def rotary(model: PreTrainedModel) -> torch.Tensor:
    """Return the frequencies of rotary positions, radians a position, where all layers have the same; else none."""
    found = [x.float() for name, x in model.named_buffers() if name.endswith("inv_freq") and "original" not in name]
    return found[0] if found and all(torch.equal(x, found[0]) for x in found) else torch.zeros(0)
