"""`bench` on the command line: exit codes, one line per trouble. No GPU."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from fa3_reports.__main__ import main
from fa3_reports.bench.results import Results


def invoke(*arguments: object):
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["--seqlen", 1000], 2, "seqlen must divide 16384, got 1000"),
        (["--grid", "accumulator_loss", "--dtype", "fp16"], 5, "no cell of grid accumulator_loss"),
        (["--grid", "nonsense"], 2, "nonsense"),
    ],
)
def test_a_selection_that_cannot_be_measured_is_refused(arguments, code, word, tmp_path):
    result = invoke("bench", *arguments, "--out", tmp_path / "out")
    assert result.exit_code == code
    assert word in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists()


def test_without_a_gpu_one_line_names_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr("fa3verify.tensors.here.unavailable", lambda: "no CUDA device")
    result = invoke("bench", "--out", tmp_path / "out")
    assert result.exit_code == 3
    assert result.stderr == "fa3verify: bench needs a GPU: no CUDA device\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.optional
def test_wrong_bits_are_a_finding_and_cells_left_are_told(monkeypatch, tmp_path):
    from fa3_reports.bench import run as bench_run

    monkeypatch.setattr("fa3verify.tensors.here.unavailable", lambda: None)
    monkeypatch.setattr(bench_run, "run", lambda settings, tell: (Results(), 3))
    result = invoke("bench", "--out", tmp_path)
    assert result.exit_code == 0
    assert "3 cells left: the same command goes on with them" in result.stdout
    monkeypatch.setattr(bench_run, "failed", lambda known: ["cell: gluon: bits differ from the twin: 1 of 2"])
    result = invoke("bench", "--out", tmp_path)
    assert result.exit_code == 1
    assert "FAIL cell: gluon: bits differ" in result.stdout
