"""A campaign of bits over problems that somebody wrote down: which cases it has, and what is done without a GPU."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("triton")

from fa3_reports.__main__ import main
from fa3_reports.bits import campaign, forward, paged, paged_cases
from fa3_reports.bits.asked_cases import cases_of
from fa3_reports.bits.campaign import Settings
from fa3_reports.bits.forward_cases import Case
from fa3verify.cases.lines import read_line

pytestmark = pytest.mark.optional
LINES = (
    "6/2 3 x 1 x 40-700 page 16 d64",
    "6/2 2 x 30 x 300 chunk 64 causal d64",
    "4/2 2 x 20,1 x 300,77 rows e4m3",
    "4/2 1 x 40-200 e4m3",
    "4/2 3 x 70,33,130 window 50 backward d64 fp16",
)
FILE = "# kinds\n" + "\n".join(LINES)


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["bits", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_every_line_meets_every_family_and_the_seed_draws_the_rest() -> None:
    found = cases_of(LINES, 5)
    assert {part: {x.feature for x in cases} for part, cases in found.items()} == {
        "forward": {LINES[1], LINES[3]},
        "paged": {LINES[0], LINES[2]},
        "backward": {LINES[4]},
    }
    every = [x for cases in found.values() for x in cases]
    assert len({x.seed for x in every}) == len(every)
    for line in LINES:
        own = [x for x in every if x.feature == line]
        assert {x.family for x in own} >= {"normal", "outlier", "peaky", "subnormal", "special"}
        assert {x.problem for x in own} == {read_line(line, 5)[0]}
    assert found == cases_of(LINES, 5)
    others = [x for cases in cases_of(LINES, 6).values() for x in cases]
    assert not {x.seed for x in others} & {x.seed for x in every}
    assert [x.choices for x in others] != [x.choices for x in every]


def test_keys_of_rows_tell_all_cases_apart() -> None:
    for part, table in campaign.asked_parts(cases_of(LINES, 3)).items():
        (only,) = table.tables
        keys = [only.key_of(x) for x in only.cases()]
        assert len(set(keys)) == len(keys) > 0
        assert only.file != campaign.PARTS[part].tables[0].file


@pytest.mark.parametrize("line", LINES[:4])
def test_a_kernel_with_the_bits_of_the_twin_breaks_no_row_and_another_does(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((part, cases),) = cases_of([line], 2).items()
    module: Any = {"forward": forward, "paged": paged}[part]
    case = next(x for x in cases if x.family == "peaky")
    flips = 0

    def device(case: Case, given: Any, *_: Any, **__: Any) -> tuple[np.ndarray, np.ndarray]:
        out, lse = module.twin_bits(case, given)
        out = out.copy()
        out.ravel()[:flips] ^= 1
        return out, lse

    monkeypatch.setattr(module, "device_bits", device)
    (table,) = campaign.asked_parts({part: cases})[part].tables
    (sound,) = table.rows(case)
    assert not table.is_broken([*map(str, sound)])
    flips = 3
    (wrong,) = table.rows(case)
    assert table.is_broken([*map(str, wrong)])
    assert tuple(map(str, sound[: len(table.key(case))])) == table.key_of(case)
    given = (paged_cases if part == "paged" else forward).operands(case)
    assert given.q.shape == case.problem.q_shape


def test_without_a_gpu_cases_are_listed_and_the_run_is_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fa3verify.tensors.here.unavailable", lambda: "no CUDA device")
    path = tmp_path / "problems.txt"
    path.write_text(FILE)
    code, out, err = run("--cases", path, "--seed", 7, "--out", tmp_path / "out")
    assert (code, err) == (3, "fa3verify: bits needs a GPU: no CUDA device\n")
    rows = list(csv.DictReader((tmp_path / "out" / "asked_cases.csv").read_text().splitlines()))
    assert out == f"{len(rows)} cases in {tmp_path / 'out' / 'asked_cases.csv'}\n"
    assert [(x["line"], int(x["seed"])) for x in rows] == [
        (x.feature, x.seed) for cases in cases_of(LINES, 7).values() for x in cases
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("16 2 x 50 pge 16\n", "'pge' is not understood"),
        ("16 2 x 50 d100\n", "our kernels refuse '16 2 x 50 d100': head_dim must be a multiple of 8"),
        ("16 2 x 50 e4m3 backward\n", "our kernels refuse '16 2 x 50 e4m3 backward'"),
        ("# nothing\n", "has no problem"),
    ],
)
def test_a_problem_that_cannot_be_compared_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "problems.txt"
    path.write_text(text)
    code, _, err = run("--cases", path, "--out", tmp_path / "out")
    assert (code, err.count("\n")) == (2, 1)
    assert said in err
    assert not (tmp_path / "out").exists()


def test_rows_of_asked_cases_are_kept_in_tables_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {"forward": cases_of(LINES, 1)["forward"][:2]}
    parts = campaign.asked_parts(cases)
    row = ["0"] * (len(forward.COLUMNS) - len(parts["forward"].tables[0].key(cases["forward"][0])))
    filled = campaign.Filled(parts["forward"].tables[0], [row], 0)
    monkeypatch.setattr(campaign, "fill", lambda table, *_: filled)
    monkeypatch.setattr(campaign, "query", lambda field: f"some {field}")
    (found,) = campaign.run(["forward"], Settings(tmp_path, ("fp16", "bf16", "e4m3")), print, parts)
    assert found is filled
    assert [x.name for x in tmp_path.iterdir()] == ["asked_gluon_forward_bits_provenance.json"]
