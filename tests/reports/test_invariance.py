"""The table of what may change without changing a bit: it is made of the stored comparisons, and cells run again."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner

from fa3_reports import invariance
from fa3_reports.__main__ import main
from fa3_reports.invariance import KERNELS, page
from fa3verify import records
from fa3verify.compare import compare_over, tasks
from fa3verify.compare.axes import AXES, axis_of
from fa3verify.compare.run import Compared
from fa3verify.files import read_text
from fa3verify.known.registry import find

STORED = Path(__file__).parents[2] / "reports" / "invariance"
QUICK = (  # of the published table, what takes no second; the first is equal, the others differ
    ("twin.flash3.e4m3", "pack_gqa"),
    ("twin.fp16", "tile_n"),
    ("twin.e4m3", "num_splits"),
    ("twin.flash3.bf16", "tile_n"),
    ("twin.flash3.fp16", "decode"),
    ("twin.flash3.fp16[num_splits=4]", "num_splits"),
)


@pytest.fixture(scope="module")
def stored():
    return json.loads(read_text(STORED / "table.json"))["comparisons"]


def test_the_published_page_is_that_of_the_stored_comparisons(stored):
    version = json.loads(read_text(STORED / "table.json"))["version"]
    found = [row["found"] and records.read(Compared, row["found"], "found") for row in stored]
    assert len(found) == len(KERNELS) * len(AXES)
    assert (STORED / "README.md").read_text() == page(found, version)


@pytest.mark.parametrize(("kernel", "axis"), QUICK)
def test_the_published_table_is_what_runs_today(stored, kernel, axis):
    (row,) = (row for row in stored if (row["kernel"], row["axis"]) == (kernel, axis))
    now = asdict(compare_over(find(kernel), axis_of(axis)))
    assert json.loads(json.dumps(now)) == row["found"]


@pytest.mark.usefixtures("in_this_process")
def test_the_verb_writes_the_page_and_every_comparison(tmp_path, monkeypatch):
    kernels = ("twin.flash3.e4m3", "twin.fp16")
    monkeypatch.setattr(invariance, "KERNELS", kernels)
    for module in (invariance, tasks):
        monkeypatch.setattr(module, "AXES", (axis_of("pack_gqa"),))
    result = CliRunner().invoke(main, ["invariance", "--out", str(tmp_path), "--workers", "1"])
    assert result.exit_code == 0, result.output
    made = json.loads((tmp_path / "table.json").read_text())["comparisons"]
    assert [(row["kernel"], row["axis"]) for row in made] == [(kernel, "pack_gqa") for kernel in kernels]
    text = (tmp_path / "README.md").read_text()
    assert "| what changes | tried | `twin.flash3.e4m3` | `twin.fp16` |" in text
    assert "| packed heads (`pack_gqa`) | False, True | equal over " in text
