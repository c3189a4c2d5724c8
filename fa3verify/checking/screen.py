"""Which rows of a call on a GPU are farthest from what is due: all of them are computed there, in float64.

It ranks rows and judges none: those that it names are checked against the truth and the bound like any others.
"""

from __future__ import annotations

import numpy as np
import torch

from fa3_reference.formats import FORMATS
from fa3verify.checking.call import TERMS, AttentionCall

_MOST_UNITS = 64  # kv heads of sequences that are computed
_LSE = 1e-4  # an error of lse that ranks as one of a unit roundoff of out; those of right kernels are far below it
_SCORES = 1 << 26  # that are held at once: 512 MiB


def can_screen(call: AttentionCall) -> bool:
    """Tell whether the call is on a GPU, and of masks that this module knows.

    Parameters
    ----------
    call : AttentionCall
        Of any library.
    """
    return call.is_on_gpu and all(getattr(call, name) is None for name in TERMS)


def worst_rows(
    call: AttentionCall,
    *,
    seed: int,
    rows: int,
    heads: int,
    pairs: int,
    scores: int = _SCORES,
    dtype: torch.dtype = torch.float64,
) -> tuple[dict[tuple[int, int], list[int]], int]:
    """Return the rows that are farthest from what is due for their size, NaN before numbers.

    Parameters
    ----------
    call : AttentionCall
        One that can be screened.
    seed : int
        Draws the order in which kv heads of sequences are computed as long as there is room.
    rows : int
        Rows to return.
    heads : int
        Heads that they may be of.
    pairs : int
        Pairs of queries and keys to compute, of one head each; a first kv head is computed whatever its size.
    scores : int
        Pairs that are held at once, of which each takes some 30 bytes.
    dtype : torch.dtype
        The format to compute in; float32 ranks operands of 16 bits and less as well, in less time on a CPU.

    Returns
    -------
    dict of (sequence, query head) to list of int, int
        Queries in rising order, by their head; and how many rows, of one head each, were computed.
    """
    units = [(i, head) for i, n in enumerate(call.lengths_q) if n for head in range(call.nheads_kv)]
    ranked: list[tuple[float, int, int, int]] = []
    count = 0
    for sequence, head_kv in np.random.default_rng(seed).permutation(units)[:_MOST_UNITS].tolist():
        size = call.group * call.lengths_q[sequence]
        pairs -= size * call.lengths_k[sequence]
        if count and pairs < 0:
            break
        count += size
        far = _distances(call, sequence, head_kv, scores, dtype).nan_to_num(nan=torch.inf)
        values, at = far.flatten().topk(min(rows, far.numel()))
        for value, i in zip(values.tolist(), at.tolist(), strict=True):
            ranked.append((value, sequence, call.heads_of(head_kv).start + i % call.group, i // call.group))
    chosen: dict[tuple[int, int], list[int]] = {}
    for _, sequence, head, row in sorted(ranked, reverse=True):
        if len(chosen) < heads or (sequence, head) in chosen:
            chosen[sequence, head] = sorted([*chosen.get((sequence, head), []), row])
        if sum(map(len, chosen.values())) == rows:
            break
    return chosen, count


def _distances(call: AttentionCall, sequence: int, head_kv: int, scores: int, dtype: torch.dtype) -> torch.Tensor:
    """Return errors of out and lse over about what rounding makes of them, (seqlen_q, heads of a group)."""
    due, size, exact = exact_out(call, sequence, head_kv, scores, dtype)
    heads = call.heads_of(head_kv)
    out = call.queries(call.out, sequence)[:, heads].to(dtype)
    of_p, of_out = (FORMATS[name] for name in call.formats)
    allowed = of_p.unit_roundoff * size + of_out.unit_roundoff * due.abs() + of_out.min_subnormal
    far = ((out - due).abs() / allowed).amax(2)
    if exact is None:
        return far
    lse = call.lse_of(sequence, heads).T.to(dtype) * call.lse_unit
    return torch.maximum(far, torch.where(lse == exact, 0, (lse - exact).abs() / (_LSE * (1 + exact.abs()))))


def exact_out(
    call: AttentionCall, sequence: int, head_kv: int, scores: int = _SCORES, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Compute attention of the query heads of a kv head where the tensors are.

    Parameters
    ----------
    call : AttentionCall
        One that can be screened.
    sequence, head_kv : int
        The sequence, and the kv head.
    scores : int
        Pairs of queries and keys that are held at once.
    dtype : torch.dtype
        The format to compute in.

    Returns
    -------
    tensors of dtype
        The exact out (seqlen_q, heads of a group, head_dim_v), 0 in rows that see no key; the same sums of absolute
        values of V; and the exact lse (seqlen_q, heads of a group), None where the call has no lse.
    """
    heads = call.heads_of(head_kv)
    problem = call.problem(sequence, call.group)
    factors = {name: call.descale(name, sequence, head_kv) for name in "qkv"}
    q = call.queries(call.q, sequence)[:, heads].to(dtype) * (problem.softmax_scale * factors["q"] * factors["k"])
    k = call.keys(call.k, sequence, head_kv).to(dtype)
    v = call.keys(call.v, sequence, head_kv).to(dtype) * factors["v"]
    ends = problem.visible_keys(np.arange(len(q)), len(q), len(k))
    first, stop = (torch.as_tensor(x, device=q.device)[:, None, None] for x in ends)
    keys = torch.arange(len(k), device=q.device)
    height = max(1, scores // (call.group * max(1, len(k))))
    found = []
    lse = []
    for rows in (slice(a, a + height) for a in range(0, len(q), height)):
        seen = int(ends[1][rows].max())
        s = q[rows] @ k[:seen].T
        if problem.softcap:
            s = problem.softcap * torch.tanh(s / problem.softcap)
        s = s.masked_fill((keys[:seen] < first[rows]) | (keys[:seen] >= stop[rows]), -torch.inf)
        if call.sinks is not None:
            s = torch.cat([s, call.sinks[heads].to(dtype)[None, :, None].expand(len(s), -1, 1)], 2)
        p = s.softmax(2)[:, :, :seen].nan_to_num(nan=0.0)  # of rows that see no key
        found.append((p @ v[:seen], p @ v[:seen].abs()))
        if call.lse is not None:
            lse.append(s.logsumexp(2))
    due, size = map(torch.cat, zip(*found, strict=True))
    return due, size, torch.cat(lse) if lse else None
