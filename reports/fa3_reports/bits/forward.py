"""The forward kernel against its twin, bit for bit, and against twins with planted faults, which it must differ from.

Every case also runs a second time, and some with parts of the schedule switched off: no bit may depend on either.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from fa3_kernels.audit.evidence import evidence_facts
from fa3_kernels.faults.table import Fault, faulty
from fa3_kernels.plan.choose import config_of
from fa3_kernels.plan.tile_order import shape_of
from fa3_kernels.plan.variant import variant_of
from fa3_kernels.twin.forward import forward as twin_forward
from fa3_reference.problem import AttentionProblem, Dtype, Operands
from fa3_reports.bits.forward_cases import DEFAULTS, DTYPES, Case, cases, operands
from fa3_reports.bits.table import CaseTable
from fa3verify.known.device import run_forward

FAULTS = ("truncated_p", "coarse_exp2", "fp16_row_sum", "kv_head_modulo", "swapped_v_rows")
E4M3_FAULTS = (
    *FAULTS,
    "neighbour_q_descale",
    "neighbour_k_descale",
    "neighbour_v_descale",
    "descales_ignored",
    "no_p_offset",
    "no_promotion",
)
LEAST_SHARES = 16  # a piece of work is at most half of one: a budget must get something done with few workers too
SWITCHES = ((True, True), (False, True), (True, False))  # pingpong, overlap: one of them is what ships
SWITCHED = ("dense", "causal", "varlen", "packed-splits")  # features whose cases also run with the switches
COLUMNS = (
    "feature",
    "dtype",
    "out_dtype",
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
    "pack_gqa",
    "num_splits",
    "promotion_interval",
    "q_scope",
    "k_scope",
    "v_scope",
    "softmax_scale",
    "family",
    "seed",
    "values",
    "values_differing",
    "lse",
    "lse_differing",
    "variants_differing",
)
CONTROL_COLUMNS = ("dtype", "fault", "values", "values_differing", "lse", "lse_differing")

Bits = tuple[np.ndarray, np.ndarray]


def evidence() -> dict[str, Any]:
    """What provenance says of the kernels."""
    return evidence_facts("forward+packed")


def device_bits(case: Case, given: Operands, **switches: bool) -> Bits:
    """Bits of O and LSE on the GPU; memory that the launch does not write is filled with NaN."""
    torch.use_deterministic_algorithms(True)
    out, lse = run_forward(case.problem, given, {**case.choices, **switches})
    return out.view(np.int16), lse.view(np.int32)


def twin_bits(case: Case, given: Operands, fault: Fault | None = None) -> Bits:
    """Bits of O and LSE that the twin computes."""
    run = twin_forward if fault is None else faulty(fault)
    want = run(case.problem, given, config_of(case.problem, **case.choices))
    return want.out.view(np.int16), want.lse.view(np.int32)


def differing(got: Bits, want: Bits) -> tuple[int, int]:
    """Count the values and the LSEs that differ."""
    return int((got[0] != want[0]).sum()), int((got[1] != want[1]).sum())


def switches_of(case: Case) -> list[dict[str, bool]]:
    """A repeat, and where they are tried the switches of the schedule."""
    is_tried = case.problem.dtype == "fp16" or DEFAULTS.items() <= case.choices.items()
    tried = SWITCHES if case.feature in SWITCHED and is_tried else ()
    return [{}, *({"pingpong": a, "intra_wg_overlap": b} for a, b in tried)]


def key(case: Case) -> list[Any]:
    """What the row of a case begins with: the case itself."""
    p = case.problem
    config = config_of(case.problem, **case.choices)
    return [
        case.feature,
        p.dtype,
        config.out_dtype,
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
        config.pack_gqa,
        config.num_splits,
        config.promotion_interval,
        *case.scopes,
        p.softmax_scale,
        case.family,
        case.seed,
    ]


def rows(case: Case) -> list[list[Any]]:
    """The row of a case."""
    given = operands(case)
    again = (device_bits(case, given, **switches) for switches in switches_of(case))
    return [[*key(case), *counted(case, twin_bits(case, given), device_bits(case, given), again)]]


def counted(case: Case, want: Bits, got: Bits, again: Iterable[Bits]) -> list[int]:
    """The last columns of a row: values and LSE, how many differ, and how many of other launches do from ``got``.

    Where bits differ is said on standard error.
    """
    values, lse = differing(got, want)
    variants = sum(sum(differing(bits, got)) for bits in again)
    if values or lse or variants:
        where = [np.argwhere(a != b)[:3].tolist() for a, b in zip(got, want)]
        print("DIFFERS", case, values, lse, variants, where, file=sys.stderr, flush=True)
    return [want[0].size, values, want[1].size, lse, variants]


def kind(case: Case) -> tuple[Any, ...]:
    """What of a case changes the compiled kernel."""
    config = config_of(case.problem, **case.choices)
    shape = shape_of(case.problem, pack_gqa=config.pack_gqa, num_splits=config.num_splits)
    by_tile = any(scope.isdigit() for scope in case.scopes[1:])
    variant = variant_of(config, case.problem, shape, block_descales=by_tile)
    return config.dtype, config.out_dtype, config.head_dim, config.tile_n, variant


def cost(case: Case) -> int:
    """Products of the two GEMMs: what the twin's time goes with."""
    p = case.problem
    return p.nheads * p.q_shape[0] * (1 if p.is_varlen else p.seqlen_q) * p.seqlen_k * (p.head_dim + p.head_dim_v)


def batches(grid: Sequence[Case], workers: int) -> list[list[Case]]:
    """Cases that share a compiled kernel, up to a share of the work at a time, the longest first."""
    alike: dict[tuple[Any, ...], list[list[Case]]] = {}
    limit = sum(map(cost, grid)) / (2 * max(workers, LEAST_SHARES))
    for case in grid:
        pieces = alike.setdefault(kind(case), [[]])
        if sum(map(cost, pieces[-1])) + cost(case) > limit and pieces[-1]:
            pieces.append([])
        pieces[-1].append(case)
    return sorted((x for pieces in alike.values() for x in pieces), key=lambda piece: -sum(map(cost, piece)))


def control_case(dtype: Dtype) -> Case:
    """The problem of the controls: every fault shows in it."""
    problem = AttentionProblem(2, 4, 2, 500, 900, 128, dtype=dtype, causal=True)
    if dtype != "e4m3":
        return Case("control", problem)
    return Case("control", problem, choices=dict(DEFAULTS), scopes=("64", "128", "128"))


def control_rows(control: tuple[Dtype, str]) -> list[list[Any]]:
    """The GPU against a twin with a planted fault."""
    dtype, fault = control
    case = control_case(dtype)
    given = operands(case)
    got = device_bits(case, given)
    values, lse = differing(got, twin_bits(case, given, Fault(fault)))
    return [[dtype, fault, got[0].size, values, got[1].size, lse]]


@cache
def controls() -> tuple[tuple[Dtype, str], ...]:
    """Every dtype with every fault that its kernel could have."""
    return tuple((dtype, fault) for dtype in DTYPES for fault in (E4M3_FAULTS if dtype == "e4m3" else FAULTS))


BITS = CaseTable("gluon_forward_bits.csv", COLUMNS, cases, key, rows, batches)
CONTROLS = CaseTable("gluon_forward_controls.csv", CONTROL_COLUMNS, controls, list, control_rows, rule="differ")
