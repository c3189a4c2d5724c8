"""The page of studies: every study has a figure with words and its data; the verb tells what was lost."""

from __future__ import annotations

import pytest
import xarray as xr
from click.testing import CliRunner

from fa3_reports.__main__ import main
from fa3_reports.studies import STUDIES, Study, growth, run
from tests.harness.report.test_report import check_alone

MOST = {"rows": 32, "seqlen": 512, "tokens": 32}
SHORT = [128, 256, 512]


@pytest.fixture(scope="module")
def studies() -> dict[Study, xr.Dataset]:
    """Every study from few rows and keys of its first draw: what is under test is how figures are stored and shown."""
    chosen = {}
    for study in STUDIES:
        first = [u for u in study.units("quick", 0) if u.get("seqlen_k", 0) <= 8192 and not u.get("seed")]
        few = [{name: min(x, MOST[name]) if name in MOST else x for name, x in u.items()} for u in first]
        few = [given | ({"lengths": SHORT} if "lengths" in given else {}) for given in few]
        chosen[study] = study.assemble([study.measure(**given) for given in few])
    return chosen


def test_every_study_has_a_figure_with_words_and_a_data_group(studies, tmp_path):
    run.write(studies, tmp_path, "Profile quick.")
    text = (tmp_path / run.PAGE).read_text("utf-8")
    check_alone(text)
    assert text.count('<svg role="img" aria-label="') == text.count("<figcaption>") == len(STUDIES)
    assert all(f"<code>/{study.name}</code>" in text and study.title in text for study in STUDIES)
    assert "#0000a" not in text  # sentinel colours
    assert "drift" not in text.lower()
    with xr.open_datatree(tmp_path / run.DATA, engine="h5netcdf") as back:
        assert set(back.children) == {study.name for study in STUDIES}
        for study, data in studies.items():
            xr.testing.assert_equal(back[study.name].to_dataset().load(), data)


def test_pages_are_the_same_whenever_they_are_made(studies):
    some = {study: studies[study] for study in STUDIES[:1]}
    first = run.render(some, "Profile quick.")
    assert first == run.render(some, "Profile quick.")
    assert "| flash FP16 |" in first["studies.md"]


@pytest.fixture
def one_study(monkeypatch):
    """The verb runs two cheap units of one study, and another that is lost."""
    units = [u | {"rows": 8, "lengths": [128, 256]} for u in growth.units("quick", 0)[:2]]
    lost = units[0] | {"kernel": "twin.fp17"}
    monkeypatch.setattr(run, "STUDIES", (growth.STUDY,))
    monkeypatch.setattr(
        run, "plan", lambda *_: [run.CallTask("study: growth", growth.measure, unit) for unit in (*units, lost)]
    )


def test_the_verb_writes_what_it_has_and_names_what_was_lost(one_study, tmp_path):
    found = CliRunner().invoke(main, ["studies", "--profile", "quick", "--workers", "1", "--out", str(tmp_path)])
    assert found.exit_code == 1, found.output
    assert "LOST study: growth: " in found.stdout
    assert "unknown kernel 'twin.fp17'" in found.stdout
    assert found.stdout.endswith(f"{tmp_path / 'studies.html'}\n")
    assert "Profile quick, seed 0, by fa3verify" in (tmp_path / "studies.md").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"studies.html", "studies.md", "studies.nc"}
