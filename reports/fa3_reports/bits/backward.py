"""The backward kernel against its twin, bit for bit.

dK and dV are compared in both modes, dQ in the deterministic one, which also runs a second time. Where parts of dQ are
added in any order it must lie within the range of all orders.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any

import numpy as np
import torch

from fa3_kernels.audit.evidence import evidence_facts
from fa3_kernels.plan.backward import BackwardConfig, backward_config
from fa3_kernels.twin.backward import backward as twin_backward
from fa3_reference.formats import FORMATS, narrowed
from fa3_reference.problem import AttentionProblem, BackwardOperands, Dtype, Operands
from fa3_reports.bits import forward_cases
from fa3_reports.bits.forward_cases import FAMILIES, Case
from fa3_reports.bits.table import CaseTable
from fa3_reports.gradient_range import backward_range
from fa3verify.known import launches
from fa3verify.known.device import run_forward

COLUMNS = (
    "feature",
    "dtype",
    "head_dim",
    "head_dim_v",
    "causal",
    "left",
    "right",
    "softcap",
    "batch",
    "nheads",
    "nheads_kv",
    "seqlen_q",
    "seqlen_k",
    "varlen",
    "family",
    "seed",
    "dq",
    "dq_differing",
    "dk",
    "dk_differing",
    "dv",
    "dv_differing",
    "repeats_differing",
    "free_differing",
    "ranged",
    "outside_differing",
)
DTYPES: tuple[Dtype, ...] = ("fp16", "bf16")
HEAD_DIMS = (64, 96, 128, 192, 256)
PADDED = (40, 80, 160)
LENGTHS: dict[str, Any] = {"seqlens_q": (100, 1, 0, 260, 512), "seqlens_k": (130, 300, 50, 0, 700)}
RANGED = 1 << 18  # values of dQ times key blocks, up to which the range of all orders is found


def evidence() -> dict[str, Any]:
    """What provenance says of the kernels."""
    return evidence_facts("backward")


def _problems(d: int, dtype: Dtype) -> Iterator[tuple[str, AttentionProblem]]:
    """Every mask, kind of heads and of lengths."""

    def of(batch: int, nheads: int, nheads_kv: int, rows: int, keys: int, **more: Any) -> AttentionProblem:
        return AttentionProblem(batch, nheads, nheads_kv, rows, keys, d, dtype=dtype, **more)

    yield "dense", of(1, 2, 2, 512, 512)
    yield "dense", of(2, 3, 3, 300, 500)
    yield "dense", of(1, 2, 2, 260, 1300)
    yield "dense", of(1, 2, 2, 1300, 260)
    yield "causal", of(1, 2, 2, 1000, 1000, causal=True)
    yield "causal", of(1, 2, 2, 700, 2100, causal=True)
    yield "causal", of(2, 2, 2, 2100, 700, causal=True)
    yield "causal", of(1, 1, 1, 129, 128, causal=True)
    yield "gqa", of(1, 4, 2, 200, 333, causal=True)
    yield "gqa", of(1, 8, 1, 130, 600)
    yield "window", of(1, 4, 1, 129, 700, window=(60, 20))
    yield "window", of(1, 2, 2, 300, 400, window=(100, -1))
    yield "window", of(1, 2, 1, 500, 500, window=(-1, 70))
    yield "window", of(1, 2, 2, 900, 900, window=(130, 0))
    yield "softcap", of(1, 2, 1, 500, 900, softcap=5.0)
    yield "softcap", of(2, 6, 2, 1030, 1030, causal=True, softcap=3.0)
    yield "short", of(1, 1, 1, 1, 300)
    yield "short", of(1, 1, 1, 1, 129, causal=True)
    yield "short", of(1, 2, 2, 64, 1)
    yield "head_dim_v", of(1, 2, 2, 200, 300, head_dim_v=max(8, d // 2))
    for heads in ((2, 2), (4, 2)):
        sizes = {"nheads": heads[0], "nheads_kv": heads[1], "head_dim": d, "dtype": dtype}
        yield "varlen", AttentionProblem.varlen(**LENGTHS, **sizes)
        yield "varlen", AttentionProblem.varlen(**LENGTHS, **sizes, causal=True)
        yield "varlen", AttentionProblem.varlen(**LENGTHS, **sizes, window=(90, 30))


@cache
def cases() -> tuple[Case, ...]:
    """Every problem once, some with every family of values, padded head_dims, and volume."""
    found = []
    seed = count(7000)
    for dtype in DTYPES:
        for d in HEAD_DIMS:
            found += [Case(feature, problem, "normal", next(seed)) for feature, problem in _problems(d, dtype)]
            for family in FAMILIES[1:]:
                some = [x for x in _problems(d, dtype) if x[0] in ("gqa", "varlen", "softcap")]
                found += [Case(feature, problem, family, next(seed)) for feature, problem in some]
            for causal in (False, True):
                volume = AttentionProblem(1, 1024 // d, 1024 // d, 4096, 4096, d, dtype=dtype, causal=causal)
                found.append(Case("volume", volume, "normal", next(seed)))
        for d in PADDED:
            some = [x for x in _problems(d, dtype) if x[0] in ("gqa", "window", "varlen")]
            found += [Case(feature, problem, "normal", next(seed)) for feature, problem in some]
    return tuple(found)


def operands(case: Case) -> BackwardOperands:
    """Draw q, k and v as the forward's cases do, dO by the seed's complement, and run our forward for out and lse."""
    given = forward_cases.operands(case)
    p = case.problem
    dout = np.random.default_rng(2**32 - case.seed).standard_normal(p.out_shape)
    if case.family == "special":
        dout.reshape(-1)[::4001] = np.nan
    elif case.family == "subnormal":
        dout *= 2.0 ** np.random.default_rng(case.seed).integers(-24, 3, p.out_shape)
    out, lse = run_forward(p, Operands(given.q, given.k, given.v), {})
    return BackwardOperands(given.q, given.k, given.v, dout=narrowed(dout, FORMATS[p.dtype]), out=out, lse=lse)


def config_of(problem: AttentionProblem) -> BackwardConfig:
    """The configuration of a launch on this GPU."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    return replace(backward_config(problem, family="gluon"), num_ctas=sms)


def differing(got: np.ndarray, want: np.ndarray) -> int:
    """Count the values whose bits differ, but for the bits of NaN."""
    is_nan = np.isnan(got.astype(np.float32)) & np.isnan(want.astype(np.float32))
    return int(((got.view(np.int16) != want.view(np.int16)) & ~is_nan).sum())


def key(case: Case) -> list[Any]:
    """What the row of a case begins with: the case itself."""
    p = case.problem
    return [
        case.feature,
        p.dtype,
        p.head_dim,
        p.head_dim_v,
        p.causal,
        *p.window,
        p.softcap,
        p.batch,
        p.nheads,
        p.nheads_kv,
        p.seqlen_q,
        p.seqlen_k,
        p.is_varlen,
        case.family,
        case.seed,
    ]


def rows(case: Case) -> list[list[Any]]:
    """The row of a case; where bits differ is said on standard error."""
    problem = case.problem
    given = operands(case)
    torch.use_deterministic_algorithms(True)  # fills with NaN what a launch does not write
    config = config_of(problem)
    want = twin_backward(problem, given, config)
    got, again, free = (
        launches.run(name, problem, given, {}) for name in ("gluon.deterministic", "gluon.deterministic", "gluon")
    )
    found = [differing(a, b) for a, b in zip(got, want)]
    repeats = sum(differing(a, b) for a, b in zip(again, got))
    freed = sum(differing(a, b) for a, b in zip(free[1:], want[1:]))
    ranged = outside = 0
    if want.dq.size * -(-problem.seqlen_k // config.tile_n) <= RANGED:
        ranged = want.dq.size
        outside = int(backward_range(problem, given, config).outside(type(want)(*free)).dq.sum())
    if any(found) or repeats or freed or outside:
        where = [np.argwhere(a.view(np.int16) != b.view(np.int16))[:3].tolist() for a, b in zip(got, want)]
        print("DIFFERS", case, found, repeats, freed, outside, where, file=sys.stderr, flush=True)
    counted = [n for x, bad in zip(want, found) for n in (x.size, bad)]
    return [[*key(case), *counted, repeats, freed, ranged, outside]]


def cost(case: Case) -> int:
    """Products of the five GEMMs: what the twin's time goes with."""
    p = case.problem
    return (
        p.nheads * p.q_shape[0] * (1 if p.is_varlen else p.seqlen_q) * p.seqlen_k * (3 * p.head_dim + 2 * p.head_dim_v)
    )


def batches(grid: Sequence[Case], workers: int) -> list[list[Case]]:
    """Cases of one compiled kernel together, in as many pieces as there are workers, the longest first."""
    ordered = sorted(grid, key=lambda c: (c.problem.dtype, c.problem.head_dim, c.feature, -cost(c)))
    limit = sum(map(cost, grid)) / (4 * max(workers, 1))
    pieces: list[list[Case]] = [[]]
    for case in ordered:
        if pieces[-1] and sum(map(cost, pieces[-1])) + cost(case) > limit:
            pieces.append([])
        pieces[-1].append(case)
    return sorted(pieces, key=lambda piece: -sum(map(cost, piece)))


BITS = CaseTable("gluon_backward_bits.csv", COLUMNS, cases, key, rows, batches)
