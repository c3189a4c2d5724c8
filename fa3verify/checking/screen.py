"""Which rows of a call on a GPU are farthest from what is due: all of them are computed there, in float64.

It ranks rows and judges none: those that it names are checked against the truth and the bound like any others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fa3_reference.formats import FORMATS
from fa3verify.checking.call import TERMS, AttentionCall

_TILE = 1 << 26  # scores that are held at once: 512 MiB
_MOST_UNITS = 64  # kv heads of sequences that are


def can_screen(call: AttentionCall) -> bool:
    """Whether the call is on a GPU, and of masks that this module knows.

    Parameters
    ----------
    call : AttentionCall
        Of torch.
    """
    return _is_on_gpu(call.out) and all(getattr(call, name) is None for name in TERMS)


def _is_on_gpu(x: torch.Tensor) -> bool:
    return x.is_cuda


def worst_rows(
    call: AttentionCall, units: Sequence[tuple[int, int]], most: int, most_pairs: int
) -> tuple[list[tuple[int, int, int]], int]:
    """Return the rows that are farthest from what is due for their size.

    Parameters
    ----------
    call : AttentionCall
        One that can be screened.
    units : sequence of (int, int)
        Pairs of a sequence and a kv head, in the order in which they are computed as long as there is room.
    most : int
        Rows of a unit to return.
    most_pairs : int
        Pairs of queries and keys to compute, of one head each; a first unit is computed whatever its size.

    Returns
    -------
    list of (sequence, query head, query), int
        The worst first, NaN before numbers; and how many rows, of one head each, were computed.
    """
    ranked: list[tuple[float, int, int, int]] = []
    count = 0
    pairs = 0
    for sequence, head_kv in units[:_MOST_UNITS]:
        heads = call.heads_of(head_kv)
        size = (heads.stop - heads.start) * call.lengths_q[sequence]
        pairs += size * call.lengths_k[sequence]
        if count and pairs > most_pairs:
            break
        count += size
        far = _distances(call, sequence, head_kv).nan_to_num(nan=torch.inf)
        values, at = far.flatten().topk(min(most, far.numel()))
        for value, i in zip(values.tolist(), at.tolist(), strict=True):
            ranked.append((value, sequence, heads.start + i % far.shape[1], i // far.shape[1]))
    return [(sequence, head, row) for _, sequence, head, row in sorted(ranked, reverse=True)], count


def _distances(call: AttentionCall, sequence: int, head_kv: int) -> torch.Tensor:
    """Return errors of out over about what rounding makes of them, float64 (seqlen_q, heads of a group)."""
    due, size = exact_out(call, sequence, head_kv)
    out = call.queries(call.out, sequence)[:, call.heads_of(head_kv)].double()
    of_p, of_out = (FORMATS[name] for name in call.formats)
    allowed = of_p.unit_roundoff * size + of_out.unit_roundoff * due.abs() + of_out.min_subnormal
    return ((out - due).abs() / allowed).amax(2)


def exact_out(call: AttentionCall, sequence: int, head_kv: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of the query heads of a kv head where the tensors are.

    Parameters
    ----------
    call : AttentionCall
        One that can be screened.
    sequence, head_kv : int
        The sequence, and the kv head.

    Returns
    -------
    float64 tensors (seqlen_q, heads of a group, head_dim_v)
        The exact out, 0 in rows that see no key, and the same sums of absolute values of V.
    """
    heads = call.heads_of(head_kv)
    problem = call.problem(sequence, heads.stop - heads.start)
    factors = {name: call.descale(name, sequence, head_kv) for name in "qkv"}
    q = call.queries(call.q, sequence)[:, heads].double() * (problem.softmax_scale * factors["q"] * factors["k"])
    k = call.keys(call.k, sequence, head_kv).double()
    v = call.keys(call.v, sequence, head_kv).double() * factors["v"]
    ends = problem.visible_keys(np.arange(len(q)), len(q), len(k))
    first, stop = (torch.as_tensor(x, device=q.device)[:, None, None] for x in ends)
    keys = torch.arange(len(k), device=q.device)
    height = max(1, _TILE // (q.shape[1] * max(1, len(k))))
    found = []
    for rows in (slice(a, a + height) for a in range(0, len(q), height)):
        s = q[rows] @ k.T
        if problem.softcap:
            s = problem.softcap * torch.tanh(s / problem.softcap)
        s = s.masked_fill((keys < first[rows]) | (keys >= stop[rows]), -torch.inf)
        if call.sinks is not None:
            s = torch.cat([s, call.sinks[heads].double()[None, :, None].expand(len(s), -1, 1)], 2)
        p = s.softmax(2)[:, :, : len(k)].nan_to_num(nan=0.0)  # of rows that see no key
        found.append((p @ v, p @ v.abs()))
    due, size = map(torch.cat, zip(*found, strict=True))
    return due, size
