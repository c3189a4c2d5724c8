"""Attention over a cache against the twin of the keys in one piece, bit for bit, and against calls with a fault.

The twin knows no pages: with the same tiles and splits the bits are those of packed sequences. Every case also runs a
second time, and in pages of another size: no bit may depend on either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fa3_kernels.audit.evidence import evidence_facts
from fa3_kernels.plan.choose import config_of
from fa3_kernels.twin.forward import forward as twin_forward
from fa3_reference.cache import Cache, serve
from fa3_reference.problem import Array, AttentionProblem, Dtype, Operands
from fa3_reports.bits.forward import Bits, counted, differing
from fa3_reports.bits.forward_cases import DTYPES, Case
from fa3_reports.bits.paged_cases import cases, operands
from fa3_reports.bits.table import CaseTable
from fa3verify.known.device import run_served

FAULTS = ("none", "next_page", "stale_page", "one_key_less", "one_key_more", "sink_base_2", "sink_dropped")
COLUMNS = (
    "feature",
    "dtype",
    "head_dim",
    "head_dim_v",
    "causal",
    "left",
    "right",
    "softcap",
    "nheads",
    "nheads_kv",
    "seqlen_q",
    "seqlen_k",
    "page_size",
    "behind",
    "appended",
    "rotary_dim",
    "sinks",
    "pack_gqa",
    "num_splits",
    "promotion_interval",
    "scope",
    "family",
    "seed",
    "values",
    "values_differing",
    "lse",
    "lse_differing",
    "variants_differing",
)
CONTROL_COLUMNS = ("dtype", "fault", "values", "values_differing", "lse", "lse_differing")


def evidence() -> dict[str, Any]:
    """What provenance says of the kernels."""
    return evidence_facts("paged")


def _cache_of(problem: AttentionProblem) -> Cache:
    assert problem.cache is not None
    return problem.cache


def twin_bits(case: Case, given: Operands) -> Bits:
    """Bits of O and LSE that the twin computes, of the keys in one piece."""
    want = twin_forward(case.problem, given, config_of(case.problem, **case.choices))
    return want.out.view(np.int16), want.lse.view(np.int32)


def with_fault(call: Mapping[str, Array], fault: str) -> dict[str, Array]:
    """The call that a kernel with a fault makes of a call; sequences 0 and 1 have a page, or more.

    >>> with_fault({"cache_seqlens": np.array([3])}, "one_key_less")["cache_seqlens"].tolist()
    [2]
    """
    found = {name: x.copy() for name, x in call.items()}
    if fault == "next_page":  # the page table is read one entry too far
        found["page_table"][:, :-1] = call["page_table"][:, 1:]
    elif fault == "stale_page":  # an entry that has changed since is read as it was
        found["page_table"][0, 0] = call["page_table"][1, 0]
    elif fault.startswith("one_key"):
        found["cache_seqlens"] += -1 if fault.endswith("less") else 1
    elif fault == "sink_base_2":  # a sink in nats is taken for one in bits
        found["sinks"] *= np.float32(np.log(2))
    elif fault == "sink_dropped":
        found["sinks"][:] = -np.inf
    return found


def device_bits(case: Case, given: Operands, fault: str = "none") -> Bits:
    """Bits of O and LSE on the GPU; memory that the launch does not write is filled with NaN."""
    torch.use_deterministic_algorithms(True)
    choices = {name: x for name, x in case.choices.items() if name != "out_dtype"}
    out, lse = run_served(case.problem, given, choices, with_fault(serve(case.problem, given), fault))
    return out.view(np.int16), lse.view(np.int32)


def others(case: Case) -> list[Case]:
    """The case again, and with other pages, or in rows, and something else behind the keys."""
    cache = _cache_of(case.problem)
    pages = 64 if cache.page_size != 64 else 16
    elsewhere = replace(
        cache,
        page_size=pages if not (cache.leftpad or cache.indexed) else 0,
        leftpad=(),
        indexed=False,
        behind="random" if cache.behind == "nan" else "nan",
        seed=cache.seed + 1,
    )
    return [case, replace(case, problem=replace(case.problem, cache=elsewhere))]


def key(case: Case) -> list[Any]:
    """What the row of a case begins with: the case itself."""
    p = case.problem
    cache = _cache_of(p)
    choices = case.choices
    return [
        case.feature,
        p.dtype,
        p.head_dim,
        p.head_dim_v,
        p.causal,
        *p.window,
        p.softcap,
        p.nheads,
        p.nheads_kv,
        p.seqlen_q,
        p.seqlen_k,
        cache.page_size,
        cache.behind,
        sum(cache.new),
        cache.rotary_dim,
        p.sinks,
        choices["pack_gqa"],
        choices["num_splits"],
        choices.get("promotion_interval", 0),
        case.scopes[0],
        case.family,
        case.seed,
    ]


def rows(case: Case) -> list[list[Any]]:
    """The row of a case."""
    given = operands(case)
    again = (device_bits(other, given) for other in others(case))
    return [[*key(case), *counted(case, twin_bits(case, given), device_bits(case, given), again)]]


def control_case(dtype: Dtype) -> Case:
    """The call of the controls: every fault shows in it."""
    problem = AttentionProblem.varlen(
        (200, 300), (500, 900), nheads=4, nheads_kv=2, head_dim=128, dtype=dtype, sinks=True, cache=Cache(16)
    )
    choices = {"promotion_interval": 128, "out_dtype": "bf16"} if dtype == "e4m3" else {}
    return Case("control", problem, choices={"num_splits": 1, "pack_gqa": True, **choices})


def control_rows(control: tuple[Dtype, str]) -> list[list[Any]]:
    """A call with a planted fault against the twin; without one nothing differs."""
    dtype, fault = control
    case = control_case(dtype)
    given = operands(case)
    got = device_bits(case, given, fault)
    values, lse = differing(got, twin_bits(case, given))
    return [[dtype, fault, got[0].size, values, got[1].size, lse]]


def controls() -> tuple[tuple[Dtype, str], ...]:
    """Every dtype with every fault."""
    return tuple((dtype, fault) for dtype in DTYPES for fault in FAULTS[1:])


BITS = CaseTable("gluon_paged_bits.csv", COLUMNS, cases, key, rows)
CONTROLS = CaseTable("gluon_paged_controls.csv", CONTROL_COLUMNS, controls, list, control_rows, rule="differ")
