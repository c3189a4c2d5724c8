"""GPU evidence belongs to the sources it was measured on: a kernel that changes makes it stale until measured again."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from fa3_kernels.evidence import files_sha256, source_sha256

H200 = Path(__file__).parents[3] / "reports" / "h200"


@pytest.mark.parametrize("path", sorted(H200.rglob("*_provenance.json")), ids=lambda path: path.stem)
def test_evidence_is_of_this_kernel_or_marked_stale(path):
    facts = json.loads(path.read_text())
    files = facts.get("kernel_files")  # where given, only changes of these make it stale
    is_stale = facts["kernel_sources_sha256"] != (files_sha256(files) if files else source_sha256())
    assert facts.get("stale", False) == is_stale, f"{path.name}: measure again, or add '\"stale\": true'"


def rows(name: str) -> list[dict[str, str]]:
    with (H200 / name).open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_recorded_kernel_equals_its_twin_in_every_bit_and_broken_twins_do_not():
    cases = rows("gluon_forward_bits.csv")
    assert sum(int(r["values"]) for r in cases) > 10**8
    assert all(int(r[name]) == 0 for r in cases for name in ("values_differing", "lse_differing", "variants_differing"))
    assert all(int(r["values_differing"]) > 0 for r in rows("gluon_forward_controls.csv"))
