"""GPU evidence belongs to the sources it was measured on: a kernel that changes makes it stale until measured again."""

from __future__ import annotations

import ast
import csv
import json
from pathlib import Path

import pytest

from fa3_kernels import evidence
from fa3_kernels.accepted import read_golden
from fa3_kernels.evidence import FORWARD_PTX, FORWARD_SOURCES, TIMELINE_SOURCES, files_sha256

PACKAGE = Path(__file__).parents[3] / "kernels" / "fa3_kernels"
H200 = Path(__file__).parents[3] / "reports" / "h200"


OF_ROWS = {"microbench_provenance"}  # each row has its own hash: tests/simulator/test_microbench.py
PROVENANCE = sorted(path for path in H200.rglob("*_provenance.json") if path.stem not in OF_ROWS)


@pytest.mark.parametrize("path", PROVENANCE, ids=lambda path: path.stem)
def test_evidence_is_of_this_kernel_or_marked_stale(path):
    facts = json.loads(path.read_text())
    is_stale = not all((PACKAGE / name).exists() or name == FORWARD_PTX for name in facts["kernel_files"])
    is_stale = is_stale or facts["kernel_sources_sha256"] != files_sha256(facts["kernel_files"])
    assert facts.get("stale", False) == is_stale, f"{path.name}: measure again, or add '\"stale\": true'"


def imports(path: Path) -> set[str]:
    """Modules of the package that a module imports, as paths from the package's folder."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        paths = [name.removeprefix("fa3_kernels.").replace(".", "/") + ".py" for name in names]
        found |= {path for path in paths if (PACKAGE / path).exists()}
    return found


def test_every_module_that_the_launch_reaches_is_hashed_or_compiled():
    found, left = set(), {"gluon/launch.py", *(f"gluon/{p.name}" for p in (PACKAGE / "gluon").glob("forward_*.py"))}
    while left:
        found |= left
        left = {name for module in left for name in imports(PACKAGE / module)} - found
    of_device = {name for name in found if "@gluon.jit" in (PACKAGE / name).read_text()}
    stamps_alone = {"timeline.py"}
    assert found - of_device - stamps_alone == set(FORWARD_SOURCES) - {FORWARD_PTX}
    assert not any(name.startswith("twin/") for name in found)


def test_timelines_are_of_every_module_that_stamps():
    stamping = {f"gluon/{p.name}" for p in (PACKAGE / "gluon").glob("*.py") if "gluon/stamps.py" in imports(p)}
    assert {*stamping, "gluon/stamps.py", "timeline.py"} == set(TIMELINE_SOURCES) - set(FORWARD_SOURCES)


def test_evidence_is_of_the_accepted_ptx_of_every_forward_kernel_and_of_no_other(monkeypatch):
    golden = read_golden()
    before = files_sha256(FORWARD_SOURCES)
    for kernel, changes in (
        ("fp16_d128_dense/forward_fp16", True),
        ("fp16_d128_splits/combine", True),
        ("fp16_d128_lockstep/forward_lockstep", True),
        ("quantize_d64_plain/quantize", False),
    ):
        edited = golden | {kernel: golden[kernel] | {"ptx_sha256": "0" * 64}}
        monkeypatch.setattr(evidence, "read_golden", lambda edited=edited: edited)
        assert (files_sha256(FORWARD_SOURCES) != before) == changes


def rows(name: str) -> list[dict[str, str]]:
    with (H200 / name).open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_recorded_kernel_equals_its_twin_in_every_bit_and_broken_twins_do_not():
    cases = rows("gluon_forward_bits.csv")
    facts = json.loads((H200 / "gluon_forward_bits_provenance.json").read_text())
    for dtype in facts.get("dtypes", ("fp16", "bf16")):
        assert sum(int(r["values"]) for r in cases if r["dtype"] == dtype) > 10**8
    assert all(int(r[name]) == 0 for r in cases for name in ("values_differing", "lse_differing", "variants_differing"))
    assert all(int(r["values_differing"]) > 0 for r in rows("gluon_forward_controls.csv"))
