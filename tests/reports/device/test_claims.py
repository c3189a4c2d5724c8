"""The page of claims: its figures are those of the data, and no verdict outlives the figures that it rests on."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from fa3_reports import claims
from fa3_reports.device import quoted
from fa3_reports.device.source import Source

REPORTS = Path(__file__).parents[3] / "reports"
CLAIM = """
title = "t"
text = []
[sources]
P = "a paper"
[[claim]]
topic = "speed"
text = "is fast"
source = "P, table 2"
said = "661"
verdict = "{verdict}"
measured = "{{speed:.0f}} TFLOP/s"
[claim.figures]
speed = {{ file = "bench.csv", where = {{ kernel = "cudnn", head_dim = [64, 128] }}, column = "burst_tflops"{how} }}
[claim.holds]
speed = {holds}
"""
BENCH = """grid,dtype,batch,seqlen_q,seqlen_k,nheads,nheads_kv,head_dim,causal,v_mean,kernel,status,burst_tflops
paper,fp16,1,8,8,1,1,64,False,0,gluon,ok,600
paper,fp16,1,8,8,1,1,64,False,0,torch.cudnn,ok,300
paper,fp16,1,8,8,1,1,128,False,0,gluon,ok,800
paper,fp16,1,8,8,1,1,128,False,0,torch.cudnn,ok,100
paper,fp16,1,8,8,1,1,256,False,0,torch.cudnn,ok,
"""


def page_of(tmp_path: Path, *, verdict: str = "confirmed", holds: str = "[290, 310]", how: str = "") -> str:
    (tmp_path / "bench.csv").write_text(BENCH)
    (tmp_path / "claims.toml").write_text(CLAIM.format(verdict=verdict, holds=holds, how=how))
    return claims.render(tmp_path / "claims.toml")[claims.PAGE]


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    """Files of the published claims, made of their data."""
    return claims.render(REPORTS / "claims.toml")


def test_the_page_is_that_of_the_data_byte_for_byte(made):
    assert {claims.PAGE, claims.FACTS} <= set(made)
    for name, text in made.items():
        assert text == (REPORTS / name).read_text(), f"{name}: python -m fa3_reports claims reports/claims.toml"


def test_every_verdict_rests_on_data_or_is_not_tested(made):
    told = json.loads(made[claims.FACTS])["claims"]
    assert {claim["verdict"] for claim in told} > {"confirmed", "not tested"}
    for claim in told:
        assert (claim["verdict"] == "not tested") == (not claim["figures"]), claim["text"]


def test_a_figure_is_the_statistic_of_its_rows(tmp_path):
    assert "300 TFLOP/s" in page_of(tmp_path, how=', statistic = "max"')
    with pytest.raises(ValueError, match="has 2 such rows, and no statistic is named"):
        page_of(tmp_path)


def test_a_verdict_falls_with_the_figure_that_it_rests_on(tmp_path):
    with pytest.raises(ValueError, match=r"rests on speed in \[310, 400\], it is 300 now"):
        page_of(tmp_path, how=', statistic = "max"', holds="[310, 400]")


def test_only_known_verdicts_are_given(tmp_path):
    with pytest.raises(ValueError, match="verdict must be one of confirmed"):
        page_of(tmp_path, verdict="true")


def test_ratios_are_of_kernels_in_the_same_cell(tmp_path):
    page_of(tmp_path, how=', statistic = "max"')
    figure = {"file": "bench.csv", "ratio": ["gluon", "cudnn"], "statistic": "geometric mean"}
    (tmp_path / "bench.csv").write_text(BENCH.replace("paper,fp16,1,8,8,1,1,256,False,0,torch.cudnn,ok,\n", ""))
    assert math.isclose(quoted.value_of(Source(tmp_path), figure, {}), math.sqrt(2 * 8))


def test_figures_of_markdown_tables_are_found_by_row_and_column(tmp_path):
    (tmp_path / "a.md").write_text("# A\n| kernel | error | \n|---|---:|\n| x | 1.5 % | \n| y | 2e-3 | \n")
    read = [
        quoted.value_of(Source(tmp_path), {"file": "a.md", "row": row, "column": "error"}, {}) for row in ("x", "y")
    ]
    assert read == [1.5, 2e-3]
    with pytest.raises(LookupError, match="0 rows 'z'"):
        quoted.value_of(Source(tmp_path), {"file": "a.md", "row": "z", "column": "error"}, {})
