"""The quantiser against its twin, bit for bit: codes, descales, LSE correction and K mean."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fa3_kernels.audit.evidence import evidence_facts
from fa3_kernels.twin.quantize import quantize_qkv as twin_quantize
from fa3_reports.bits.quantise_cases import Case, arrays, cases
from fa3_reports.bits.table import CaseTable, Wrong
from fa3verify.known.device import run_quantiser
from fa3verify.tensors.convert import to_numpy

FIELDS = ("q", "k", "v", "q_descale", "k_descale", "v_descale", "lse_correction", "k_mean")
COLUMNS = (
    "dtype",
    "family",
    "seed",
    "packed",
    "lengths",
    "heads",
    "head_dims",
    "options",
    "values",
    "values_differing",
    "floats",
    "floats_differing",
)


def evidence() -> dict[str, Any]:
    """What provenance says of the kernels."""
    return evidence_facts("quantize")


def key(case: Case) -> list[Any]:
    """What the row of a case begins with: the case itself."""
    named = [getattr(case, name) for name in COLUMNS[: COLUMNS.index("options")]]
    return [*named, json.dumps(case.options)]


def _bits(x: Any) -> np.ndarray:
    """Codes as uint8, everything else as the bits of float32."""
    x = np.ascontiguousarray(x)
    return x.view(np.uint8 if x.itemsize == 1 else np.int32)


def device_bits(given: Mapping[str, np.ndarray], options: Mapping[str, Any]) -> dict[str, np.ndarray | None]:
    """Bits of every field on the GPU; memory that the launch does not write is filled with NaN."""
    torch.use_deterministic_algorithms(True)
    got = run_quantiser(given, dict(options))
    found = {name: getattr(got, name) for name in FIELDS}
    return {name: None if x is None else _bits(to_numpy(x)) for name, x in found.items()}


def twin_bits(given: Mapping[str, np.ndarray], options: Mapping[str, Any]) -> dict[str, np.ndarray | None]:
    """Bits of every field that the twin computes."""
    want = twin_quantize(**given, **options)
    found = {name: getattr(want, name) for name in FIELDS}
    return {name: None if x is None else _bits(x) for name, x in found.items()}


def differing(name: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where bits differ; any NaN equals any NaN among the results that are plain sums."""
    wrong = a != b
    if name in ("lse_correction", "k_mean"):
        wrong &= ~(np.isnan(a.view(np.float32)) & np.isnan(b.view(np.float32)))
    return wrong


def rows(case: Case) -> list[list[Any]]:
    """The row of a case; where bits differ is said on standard error."""
    given = arrays(case)
    want = twin_bits(given, case.options)
    got = device_bits(given, case.options)
    counts = {"codes": [0, 0], "floats": [0, 0]}
    for name in FIELDS:
        a = got[name]
        b = want[name]
        if a is None and b is None:
            continue
        if a is None or b is None or a.shape != b.shape:
            raise Wrong(f"{name} has another shape than the twin's")
        wrong = differing(name, a, b)
        count = counts["codes" if a.dtype == np.uint8 else "floats"]
        count[0] += a.size
        count[1] += int(wrong.sum())
        if wrong.any():
            print("DIFFERS", case, name, int(wrong.sum()), np.argwhere(wrong)[:3].tolist(), file=sys.stderr, flush=True)
    return [[*key(case), *counts["codes"], *counts["floats"]]]


BITS = CaseTable("quantize_bits.csv", COLUMNS, cases, key, rows)
