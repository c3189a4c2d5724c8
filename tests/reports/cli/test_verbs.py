"""The verbs of `python -m fa3_reports`: exit codes, and one line per trouble. No GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from fa3_reports.__main__ import JOURNEYS, main


def invoke(*arguments: object):
    return CliRunner().invoke(main, [str(a) for a in arguments])


def test_help_lists_every_verb_at_once_and_loads_nothing_heavy():
    program = (
        "import sys; from fa3_reports.__main__ import main; main.main(['--help'], standalone_mode=False);"
        "print([name for name in ('numpy', 'torch', 'xarray') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert found.endswith("[]\n")
    assert [str(verb.name) for verbs in JOURNEYS.values() for verb in verbs if f" {verb.name} " not in found] == []


@pytest.mark.parametrize(
    "verb", [("bits",), ("record", "flash3"), ("counters",), ("host",), ("sanitize",)], ids=lambda verb: verb[0]
)
def test_without_a_gpu_one_line_names_what_is_missing(verb, monkeypatch, tmp_path):
    monkeypatch.setattr("fa3verify.tensors.here.unavailable", lambda: "no CUDA device")
    result = invoke(*verb, "--out", tmp_path / "out")
    assert result.exit_code == 3
    assert result.stderr == f"fa3verify: {verb[0]} needs a GPU: no CUDA device\n"
    assert not (tmp_path / "out").exists()


def test_counters_take_the_cells_that_bench_takes(tmp_path):
    result = invoke("counters", "--grid", "accumulator_loss", "--dtype", "fp16", "--out", tmp_path / "out")
    assert result.exit_code == 5
    assert "no cell of grid accumulator_loss" in result.stderr


def test_a_folder_or_file_that_makes_no_page_is_named(tmp_path):
    for verb, name in (("device", tmp_path), ("claims", tmp_path / "claims.toml")):
        result = invoke(verb, name)
        assert result.exit_code in (2, 3)
        assert Path(name).name in result.stderr
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "word"), [(["sideways"], "unknown part 'sideways'"), (["--dtype", "fp8"], "fp8")]
)
def test_parts_of_the_campaign_are_known_by_name(arguments, word):
    result = invoke("bits", *arguments)
    assert result.exit_code == 2
    assert word in " ".join(result.stderr.split())


@pytest.mark.optional
@pytest.mark.parametrize(("differing", "left", "code"), [("0", 0, 0), ("1", 0, 1), ("1", 2, 1), ("0", 2, 5)])
def test_differing_bits_are_a_finding_and_missing_rows_no_pass(differing, left, code, monkeypatch, tmp_path):
    from fa3_reports.bits import campaign, forward

    asked = []

    def run(parts, settings, tell, known):
        assert known is campaign.PARTS
        asked.append((parts, settings))
        return [campaign.Filled(forward.CONTROLS, [["fp16", "fault", "9", "3", "9", "0"]], left), filled]

    bits = campaign.PARTS["quantise"].tables[0]
    filled = campaign.Filled(bits, [["x"] * 8 + ["9", differing, "4", "0"]], 0)
    monkeypatch.setattr("fa3verify.tensors.here.unavailable", lambda: None)
    monkeypatch.setattr(campaign, "run", run)
    result = invoke("bits", "--dtype", "bf16", "--budget", 60, "--workers", 3, "--out", tmp_path, "--json", "-")
    assert result.exit_code == code, result.output
    assert asked == [(("forward", "backward", "quantise"), campaign.Settings(tmp_path, ("bf16",), 3, 60.0))]
    sums = json.loads(result.stdout)["tables"]["quantize_bits.csv"]
    assert sums == {
        "values": 9,
        "values_differing": int(differing),
        "floats": 4,
        "floats_differing": 0,
        "rows": 1,
        "left": 0,
    }
