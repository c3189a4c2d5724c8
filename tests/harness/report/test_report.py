"""Report: pages are self-contained, escaped, stable and honest; data files are whole or refused."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import h5netcdf
import html5lib
import numpy as np
import pytest
import xarray as xr

from fa3verify import files as atomic
from fa3verify.judging.gate import GateRow
from fa3verify.judging.metrics import MEASURES
from fa3verify.report import dataset, tables
from fa3verify.report.build import rebuild, write_report
from fa3verify.report.svg import colour

_SPEC = importlib.util.spec_from_file_location("fake_summary", Path(__file__).with_name("fake_summary.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
_FAKE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_FAKE)
make_summary = _FAKE.summary
read = _FAKE.read
_VOID = {"meta", "link", "br", "hr", "img", "input", "wbr"}


MOST_BYTES = 2_000_000  # of a page


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    return write_report(tmp_path_factory.mktemp("report"), read(make_summary(verdict="fail")))


class _Page(HTMLParser):
    """Collects what a page refers to, its ids, and whether its tags nest."""

    def __init__(self) -> None:
        super().__init__()
        self.references: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.references += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href", "action", "data", "srcset")]
        self.ids += [v or "" for k, v in attrs if k == "id"]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def _parse(text: str) -> _Page:
    parser = _Page()
    parser.feed(text)
    return parser


def test_page_is_self_contained_and_small(page):
    text = page.read_text("utf-8")
    parsed = _parse(text)
    outside = [r for r in parsed.references if not r.startswith(("#", "data:image/png;base64,"))]
    assert outside == []
    assert "http:" not in text
    assert "https:" not in text
    assert "url(" not in re.sub(r"url\(#", "", text)
    assert "@import" not in text
    assert "script" not in parsed.tags
    assert len(text.encode()) <= MOST_BYTES


def test_page_is_well_formed_and_its_anchors_exist_once(page):
    parsed = _parse(page.read_text("utf-8"))
    assert parsed.open == []
    assert len(parsed.ids) == len(set(parsed.ids))
    assert {r[1:] for r in parsed.references if r.startswith("#")} <= set(parsed.ids)


def check_alone(text):
    """Assert that a page is valid, small, and asks for nothing outside."""
    assert len(text.encode()) <= MOST_BYTES
    assert html_errors(text) == []
    assert not re.search(r"<(script|link|iframe)|@import|(src|srcset)=[\"'](?!data:)", text)


def test_a_report_is_valid_html(page):
    assert html_errors(page.read_text("utf-8")) == []
    assert html_errors("<!doctype html><p><em>a</p>") != []


def html_errors(text):
    """What the standard's own parsing algorithm calls an error."""
    parser = html5lib.HTMLParser()
    parser.parse(text)
    return parser.errors


def test_dark_and_print_styles_define_every_colour_used(page):
    text = page.read_text("utf-8")
    dark = "".join(re.findall(r"prefers-color-scheme: dark\) \{(.*?)\n *\}\n", text, re.DOTALL))  # of both style sheets
    used = set(re.findall(r"var\((--[\w-]+)\)", text)) - {"--short", "--m", "--n", "--s"}  # numbers of columns, a shade
    assert len(used) > 5
    for name in used:
        assert f"{name}:" in text, f"{name} is used but not defined"
        assert f"{name}:" in dark, f"{name} has no dark value"


def test_names_are_escaped(tmp_path):
    name = "<script>alert(1)</script>|`x`"
    page = write_report(tmp_path, read(make_summary(kernels=(name,))))
    assert "<script" not in page.read_text("utf-8")
    assert "&lt;script&gt;" in page.read_text("utf-8")
    markdown = (tmp_path / "report.md").read_text("utf-8")
    assert "<script" not in re.sub(r"`[^`]*`", "", markdown)  # inside a code span it is literal
    assert r"\|" in markdown


def test_failed_rules_come_first_and_passed_rules_are_folded(page):
    text = page.read_text("utf-8")
    assert text.index("Rules that failed or were not compared") < text.index("rules passed</summary>")
    assert '<div class="banner fail">' in text
    assert "not run: no GPU" in text
    assert "fa3verify replay worst/x.json" in text


def test_what_a_kernel_does_not_return_is_one_row_and_not_one_a_family():
    known = GateRow("L1", "error / bound", "k", "peaky", 2.0, 1.0, None, "fail")
    unknown = replace(known, rule="lse error / bound", observed=None, status="not compared")
    rules = [*(replace(unknown, family=name) for name in ("normal", "peaky")), known]
    rules.append(replace(unknown, kernel="other", family="normal"))
    rows = tables.gate(rules, passed=False).rows
    assert [(row["kernel"], row["rule"], row["family"]) for row in rows] == [
        ("k", "error / bound", "peaky"),
        ("k", "lse error / bound", "2 families"),
        ("other", "lse error / bound", "normal"),
    ]


def test_an_empty_gate_is_not_called_passed(tmp_path):
    text = write_report(tmp_path, read(make_summary() | {"gate": []})).read_text("utf-8")
    assert "No rule was compared." in text
    assert "Every rule passed." not in text


def test_maxima_stand_beside_their_search_effort(page):
    text = page.read_text("utf-8")
    columns = re.search(r"error / bound</th>.*?</thead>", text, re.DOTALL)
    assert columns
    assert "search effort, cases" in columns[0]
    assert "2\u202f048" in text


def test_markdown_holds_verdict_failures_and_replay(page):
    text = page.with_name("report.md").read_text("utf-8")
    assert text.startswith("# fa3verify: FAIL\n")
    assert "| fail | baseline | rel\\_rmse\\_seen | twin.fp16 | peaky |" in text
    assert "`fa3verify replay worst/twin.e4m3.json`" in text


@pytest.mark.parametrize("name", ["report.html", "report.md"])
def test_a_verdict_is_told_in_words_not_in_the_keys_of_files(page, name):
    text = re.sub(r"<[^>]*>|(worst/)\S+", " ", page.with_name(name).read_text("utf-8"))
    assert re.findall(r"\bL[012]\b|\b[Ll]aws?\b|\b[Dd]rift", text) == []
    assert [word in text for word in ("bits", "bound", "baseline")] == [True] * 3


def test_a_summary_survives_the_file(page):
    run = dataset.from_tree(dataset.load(page.with_name("run.nc")))
    assert run == read(make_summary(verdict="fail"))
    assert json.loads(page.with_name("summary.json").read_text("utf-8")) == atomic.plain(run.to_json())


def test_a_file_of_an_earlier_version_which_has_studies_is_read_and_shown_without_them(page, tmp_path):
    tree = dataset.load(page.with_name("run.nc"))
    old = xr.DataTree.from_dict(
        {node.path: node.to_dataset() for node in tree.subtree} | {"/studies/drift": xr.Dataset({"x": ("n", [1.0])})}
    )
    old.attrs |= {"content_sha256": dataset.checksum(old)}
    dataset.save(old, tmp_path / "old.nc")
    assert dataset.from_tree(dataset.load(tmp_path / "old.nc")) == read(make_summary(verdict="fail"))
    assert "<h1>" in rebuild(tmp_path / "old.nc", tmp_path / "pages").read_text("utf-8")


def test_cases_follow_cf_and_hold_every_measure(page):
    tree = dataset.load(page.with_name("run.nc"))
    assert tree.attrs["Conventions"] == "CF-1.11"
    cases = tree["cases"].to_dataset()
    assert set(MEASURES) <= set(cases.data_vars)
    assert all({"units", "long_name"} <= set(cases[name].attrs) for name in MEASURES)
    assert cases.sizes["case"] == len(make_summary()["cases"])
    assert set(tree.children) == {"cases", "laws", "gate", "provenance"}


def test_infinite_figures_survive_as_json(tmp_path):
    summary = make_summary()
    summary["kernels"][0]["worst_ratio"] = float("inf")
    text = write_report(tmp_path, read(summary)).read_text("utf-8")
    assert "∞" in text
    strict = json.loads((tmp_path / "summary.json").read_text("utf-8"), parse_constant=lambda name: pytest.fail(name))
    assert strict["kernels"][0]["worst_ratio"] == "Infinity"


def test_bytes_are_stable_and_rebuilding_gives_the_same_pages(tmp_path):
    page = write_report(tmp_path / "run", read(make_summary(verdict="fail")))
    again = rebuild(page.with_name("run.nc"), tmp_path / "pages")
    for name in ("report.html", "report.md", "summary.json"):
        assert page.with_name(name).read_bytes() == again.with_name(name).read_bytes(), name
    dataset.save(dataset.to_tree(read(make_summary(verdict="fail"))), tmp_path / "run.nc")
    assert page.with_name("run.nc").read_bytes() == (tmp_path / "run.nc").read_bytes()


def _truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flipped(data: bytes) -> bytes:
    where = data.index(b"ratio_max")
    return data[:where] + b"ratio_mat" + data[where + 9 :]


@pytest.mark.parametrize("damage", [_truncated, _flipped, lambda _: b"", lambda _: b"not netCDF at all"])
def test_damaged_files_are_refused_by_name_in_one_line(page, tmp_path, damage):
    path = tmp_path / "some.nc"
    path.write_bytes(damage(page.with_name("run.nc").read_bytes()))
    with pytest.raises(ValueError, match=r"some\.nc is") as caught:
        dataset.load(path)
    assert "\n" not in str(caught.value)


def test_equal_data_have_an_equal_checksum_whenever_and_wherever_they_were_found():
    summary = make_summary()
    elsewhere = {"command": "fa3verify merge a b", "started": "2031-01-01T00:00:00+00:00", "wall_s": 1.5, "cpu_s": {}}
    elsewhere["provenance"] = summary["provenance"] | {"cpu_count": 3}
    moved, worse = make_summary() | elsewhere, make_summary()
    worse["cases"][0]["measures"]["ratio_max"] *= 1 + 2**-52
    trees = [dataset.to_tree(read(s)) for s in (summary, moved, worse)]
    first, second, third = (tree.attrs["content_sha256"] for tree in trees)
    assert first == second != third
    assert trees[0].attrs["provenance_sha256"] != trees[1].attrs["provenance_sha256"]
    assert dataset.from_tree(trees[1]) == read(moved)


@pytest.fixture
def edited(page, tmp_path):
    """A copy of a run's file whose bytes a test may change."""
    return shutil.copy(page.with_name("run.nc"), tmp_path / "edited.nc")


@pytest.mark.parametrize(("group", "name"), [("", "history"), ("", "circumstances_json"), ("provenance", "version")])
def test_changed_circumstances_are_noticed_too(edited, group, name):
    with h5netcdf.File(edited, "r+") as file:
        attributes = file[group].attrs if group else file.attrs
        assert name in attributes
        attributes[name] = "{}"
    with pytest.raises(ValueError, match="damaged"):
        dataset.load(edited)


def test_a_changed_value_is_noticed(edited):
    with h5netcdf.File(edited, "r+") as file:
        file["cases"]["ratio_max"][0] = 0.0
    with pytest.raises(ValueError, match="damaged"):
        dataset.load(edited)


def test_foreign_and_missing_files_are_refused(tmp_path):
    xr.Dataset({"x": ("t", np.arange(3.0))}).to_netcdf(tmp_path / "foreign.nc", engine="h5netcdf")
    with pytest.raises(ValueError, match=r"foreign\.nc is not a run of this program"):
        dataset.load(tmp_path / "foreign.nc")
    with pytest.raises(ValueError, match=r"absent\.nc"):
        dataset.load(tmp_path / "absent.nc")
    with pytest.raises(ValueError, match="schema"):
        read({"schema": "other/1"})


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "run.nc"
    tree = dataset.to_tree(read(make_summary()))
    dataset.save(tree, path)
    before = path.read_bytes()

    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic.os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        dataset.save(tree, path)
    with pytest.raises(OSError, match="No space"):
        atomic.write_text(tmp_path / "report.md", "text")
    assert [p.name for p in tmp_path.iterdir()] == ["run.nc"]
    assert path.read_bytes() == before


def test_a_file_that_does_not_read_back_is_not_put_in_place(tmp_path, monkeypatch):
    tree = dataset.to_tree(read(make_summary()))
    monkeypatch.setattr(xr.DataTree, "to_netcdf", lambda _self, path, **__: Path(path).write_bytes(b"half"))
    with pytest.raises(OSError, match="could not be written"):
        dataset.save(tree, tmp_path / "run.nc")
    assert list(tmp_path.iterdir()) == []


def test_a_kernel_has_one_colour_everywhere():
    assert colour("twin.fp16") != colour("twin.bf16") != colour("twin.e4m3") != colour("twin.e4m3_chained")
    assert colour("standard FP16") != colour("twin.fp16")
    assert colour("mine") == colour("yours")
