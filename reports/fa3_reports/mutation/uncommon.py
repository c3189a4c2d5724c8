"""Bugs that only uncommon inputs show, planted as those of the museum are.

Each is a shortcut that is sound for the inputs that most tests draw: what it gets wrong lies 2^-24 below a maximum,
below the normal numbers, near a sentinel, beyond the range of an exponential, or in a shape that is rare.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fa3_kernels.faults.table import Fault, Rewrite
from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem, Operands
from fa3_reports.mutation.forward_faults import Run, fed, posed, where
from fa3_reports.mutation.museum import Exhibit
from fa3verify.cases.coverage import COVER
from fa3verify.operations.forward import Result

_F16 = "twin.fp16"
_BF16 = "twin.bf16"
_FP8 = "twin.e4m3"
_CHUNKS = frozenset({"attention_chunk"})


def _flushed_operands(problem: AttentionProblem, operands: Operands) -> dict[str, Any]:
    """Q, K and V below the normal numbers of their format are taken as 0."""
    fmt = FORMATS[problem.dtype]
    arrays = {name: getattr(operands, name) for name in ("q", "k", "v")}
    return {
        name: np.where(np.abs(x.astype(np.float64)) < fmt.min_normal, np.zeros_like(x), x) for name, x in arrays.items()
    }


def _mean_of_values(problem: AttentionProblem, operands: Operands, config: Any, run: Run) -> Result:
    """Weights of a row that sees no key are all equal, as those of a finite mask are: the mean of V."""
    found = run()
    out = found.out.copy()
    for seq in problem.sequences():
        lse = problem.rows_lse(np.array(found.lse), seq)
        v = problem.rows_k(operands.v, seq).astype(np.float32)
        if len(v):
            mean = np.repeat(v.mean(0), problem.group, axis=0)[..., : out.shape[-1]]
            rows = problem.rows_q(out, seq)
            rows[...] = np.where(np.isneginf(lse).T[..., None], mean.astype(out.dtype), rows)
    return Result(out, found.lse)


def _heads_by_four(problem: AttentionProblem, operands: Operands) -> dict[str, Any]:
    """Only four kv heads are told apart: the fifth reads the first."""
    heads = np.arange(problem.nheads_kv) % 4
    return {name: np.ascontiguousarray(getattr(operands, name)[..., heads, :]) for name in ("k", "v")}


def _sequences_by_four(problem: AttentionProblem, operands: Operands) -> dict[str, Any]:
    """Only four sequences of a batch are told apart: the fifth reads keys of the first."""
    if problem.is_varlen:
        return {}
    sequences = np.arange(problem.batch) % 4
    return {name: getattr(operands, name)[sequences] for name in ("k", "v")}


def _half_a_tile_last(problem: AttentionProblem) -> bool:
    return not problem.is_varlen and problem.seqlen_k % 128 == 64


def _without_a_chunk_of_all_keys(problem: AttentionProblem) -> dict[str, Any]:
    """A chunk as long as all keys is dropped, as if it hid none: not even from queries in front of the first key."""
    longest = max(problem.seqlens_k or (problem.seqlen_k,))
    return {"attention_chunk": 0} if problem.attention_chunk >= longest else {}


def _first_chunk_in_front(problem: AttentionProblem, operands: Operands, config: Any, run: Run) -> Result:
    """Queries in front of the first key see its chunk, in batched calls without another mask."""
    found = run()
    early = problem.seqlen_q - problem.seqlen_k
    chunk = min(problem.attention_chunk, problem.seqlen_k)
    if problem.is_varlen or problem.causal or problem.window != (-1, -1) or early <= 0 or not chunk:
        return found
    first = run(
        p=replace(problem, seqlen_q=early, seqlen_k=chunk, attention_chunk=0),
        o=replace(operands, q=operands.q[:, :early], k=operands.k[:, :chunk], v=operands.v[:, :chunk]),
    )
    out = found.out.copy()
    lse = np.array(found.lse)
    out[:, :early] = first.out
    lse[..., :early] = first.lse
    return Result(out, lse)


def _in_encode_p(floor: str) -> Rewrite:
    before = "        return convert.encode_f32(p, self.dtype)"
    return Rewrite("arithmetic", (before, f"        p = np.where(p < {floor}, np.float32(0), p)\n{before}"))


_WEIGHTS = "        p = arithmetic.exp2_scaled(s, c, minus)\n"
_FAINT = "np.float32(2.0 ** (p_offset_log2 - 23))"
_LOG2 = "        return row_max + mufu.lg2(row_sum)\n"
_NATURAL = "        return mufu.lg2(mufu.ex2(row_max) * row_sum)\n"
_TANH = (
    "    half = mufu.rcp(ex2(s * factor) + np.float32(1))\n"
    "    return float32.fma(half, np.full_like(half, -2), np.ones_like(half))"
)
_QUOTIENT = "    grown = ex2(s * factor)\n    return (grown - np.float32(1)) / (grown + np.float32(1))"
_HIDDEN = "np.where(hidden, {}, s)"

EXHIBITS: tuple[Exhibit, ...] = (
    Exhibit(
        0,
        "weights 2^-23 below the maximum are skipped, thousands of keys of them",
        _F16,
        Rewrite("softmax", (_WEIGHTS, f"{_WEIGHTS}        p = np.where(p < {_FAINT}, np.float32(0), p)\n")),
        COVER,
    ),
    Exhibit(0, "subnormal P is flushed to zero", _F16, _in_encode_p("np.float32(2.0**-14)"), COVER),
    Exhibit(0, "subnormal P is flushed to zero", _FP8, _in_encode_p("np.float32(2.0**-6)"), COVER),
    Exhibit(0, "subnormal operands are flushed to zero", _F16, fed(_flushed_operands), "subnormals"),
    Exhibit(0, "subnormal operands are flushed to zero", _FP8, fed(_flushed_operands), "subnormals"),
    Exhibit(
        0,
        "masked scores are -5e4",
        _F16,
        Rewrite("forward", (_HIDDEN.format("softmax.NEG_INF"), _HIDDEN.format("np.float32(-5e4)"))),
        COVER,
    ),
    Exhibit(
        0,
        "an lse below -88 or above 88 is that of an exponential out of range",
        _F16,
        Rewrite("softmax", (_LOG2, _NATURAL)),
        COVER,
    ),
    Exhibit(
        0, "tanh of a saturated score is infinity over infinity", _F16, Rewrite("softmax", (_TANH, _QUOTIENT)), COVER
    ),
    *(
        Exhibit(
            0,
            f"half a tile at the end is never visited, {name}",
            _BF16,
            where(Fault("dropped_last_tile"), lambda p, mask=mask: _half_a_tile_last(p) and mask(p)),
            COVER,
        )
        for name, mask in (
            ("without a mask", lambda p: not p.causal and p.window == (-1, -1)),
            ("causal", lambda p: p.causal),
            ("with a window", lambda p: not p.causal and p.window != (-1, -1)),
        )
    ),
    Exhibit(
        0,
        "causal is aligned top-left where there is one query",
        _F16,
        where(Fault("causal_top_left"), lambda p: p.seqlen_q == 1),
        COVER,
    ),
    Exhibit(
        0,
        "a window is ignored where there is one query",
        _F16,
        posed(lambda p: {"window": (-1, -1)} if p.seqlen_q == 1 else {}),
        COVER,
    ),
    Exhibit(0, "kv heads are counted modulo four", _F16, fed(_heads_by_four), COVER),
    Exhibit(0, "sequences are counted modulo four", _F16, fed(_sequences_by_four), COVER),
    Exhibit(0, "a row without a key gives the mean of V", _F16, _mean_of_values, "empty_rows_are_zero"),
    # The last two were ours, until 2026-11-30.
    Exhibit(
        0,
        "a chunk as long as all keys is dropped though queries stand in front of the first key",
        _F16,
        posed(_without_a_chunk_of_all_keys),
        "empty_rows_are_zero",
        _CHUNKS,
    ),
    Exhibit(
        0,
        "queries in front of the first key see the first chunk",
        _F16,
        _first_chunk_in_front,
        "empty_rows_are_zero",
        _CHUNKS,
    ),
)
