"""`audit` on the command line: exit codes, one line per trouble, golden files. No compiler."""

from __future__ import annotations

import copy
import json

import pytest
from click.testing import CliRunner

from fa3_reports.__main__ import main
from fa3_reports.audit import figures as audit, golden as accepted
from fa3_reports.cli.console import print_audit

FIGURES = {
    "fp16_d64_dense/forward_fp16": {
        "registers": {"entry": 168, "setmaxnreg": [240, 24]},
        "memory": {"spill_bytes": 0, "smem_bytes": 1000},
        "tensor": {"HGMMA": 8, "QGMMA": 0},
        "tma": {"UTMALDG": 1, "UTMASTG": 1},
        "special": {"MUFU.EX2": 2, "MUFU.LG2": 1, "MUFU.RCP": 1},
        "fp32": {"FFMA": 7, "FMUL": 1, "FADD": 1, "FMNMX": 1},
        "moves": {"LDSM": 0, "STSM": 0, "PRMT": 0, "SHFL": 0, "LDL": 0, "STL": 0},
        "barriers": {"BAR.SYNC": 1, "BAR.ARV": 1, "SYNCS": 1, "USETMAXREG": 1},
        "contraction": {"fmad": True, "ptx_fma": 7, "sass_ffma": 7, "ptx_contractible": 0},
        "serialisation": [],
        "undefined_registers": [],
        "loops": ["instructions 9 HGMMA 8"],
        "ptx_sha256": "a" * 64,
    }
}


def invoke(*arguments: object):
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.fixture
def compiled(monkeypatch):
    """What the compiler returns, to be changed by a test."""
    figures = copy.deepcopy(FIGURES)
    monkeypatch.setattr(audit, "compile_all", lambda names, workers, tell: figures)
    return figures


@pytest.fixture
def golden(tmp_path):
    path = tmp_path / "golden.json"
    path.write_text(accepted.golden_text(FIGURES))
    return path


def test_an_audit_without_changes_passes(compiled, golden):
    result = invoke("audit", "--golden", golden)
    assert result.exit_code == 0, result.output
    assert "AUDIT PASS 1 kernel, 0 figures moved" in result.stdout


def test_a_figure_that_moved_fails_by_name_until_it_is_accepted(compiled, golden):
    compiled["fp16_d64_dense/forward_fp16"]["registers"]["entry"] = 128
    result = invoke("audit", "--golden", golden, "--quiet")
    assert result.exit_code == 1
    assert "MOVED fp16_d64_dense/forward_fp16: registers.entry 168 -> 128" in result.stdout
    assert invoke("audit", "--golden", golden, "--accept").exit_code == 0
    assert accepted.read_rows(golden) == compiled
    assert invoke("audit", "--golden", golden).exit_code == 0


def test_a_broken_rule_fails_even_when_accepted(compiled, golden):
    compiled["fp16_d64_dense/forward_fp16"]["serialisation"] = ["C7510"]
    result = invoke("audit", "--golden", golden, "--accept")
    assert result.exit_code == 1
    assert "BROKEN fp16_d64_dense/forward_fp16: ptxas serialised wgmma: C7510" in result.stdout


def test_accepting_some_launches_keeps_the_others(compiled, golden):
    other = {"bf16_d64_dense/forward_fp16": FIGURES["fp16_d64_dense/forward_fp16"]}
    golden.write_text(accepted.golden_text(FIGURES | other))
    assert invoke("audit", "fp16_d64_dense", "--golden", golden, "--accept").exit_code == 0
    assert set(accepted.read_rows(golden)) == set(FIGURES | other)


def test_figures_are_json_on_request(compiled, golden):
    result = invoke("audit", "--golden", golden, "--json", "-")
    body = json.loads(result.stdout)
    assert body["kernels"] == FIGURES
    assert (body["broken"], body["moved"]) == ([], [])


def test_an_unsupported_triton_is_refused_by_name(monkeypatch, golden):
    monkeypatch.setattr("fa3_kernels.gluon.unsupported", lambda: "needs triton 3.6, found 3.7.0 (extra 'gpu')")
    result = invoke("audit", "--golden", golden)
    assert result.exit_code == 3
    assert "needs triton 3.6, found 3.7.0 (extra 'gpu')" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_damaged_golden_file_is_a_usage_error(tmp_path):
    path = tmp_path / "golden.json"
    path.write_text("{}")
    result = invoke("audit", "--golden", path)
    assert result.exit_code == 2
    assert "golden.json is not a golden file" in result.stderr


def test_an_audit_says_what_was_accepted_and_passes_with_it(capsys):
    print_audit({}, [], ["one", "two"], True, quiet=True)
    print_audit({}, [], ["one"], False, quiet=True)
    print_audit({}, [], [], True, quiet=True)
    assert capsys.readouterr().out.splitlines() == [
        "MOVED one",
        "MOVED two",
        "accepted: 2 figures written to the golden file",
        "AUDIT PASS 0 kernels, 2 figures moved",
        "MOVED one",
        "AUDIT FAIL 0 kernels, 1 figures moved",
        "AUDIT PASS 0 kernels, 0 figures moved",
    ]
