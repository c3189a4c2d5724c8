"""Pages of atlases: from stored files alone, byte for byte, self-contained, and honest about what is not known."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from fa3_reports.atlas import page, tables
from fa3_reports.atlas.page import write_pages
from fa3verify import __version__
from fa3verify.campaign import atlas
from fa3verify.campaign.findings import Finding
from fa3verify.campaign.run import KernelRun
from fa3verify.files import stored as file_of
from fa3verify.judging.verdict import Part, Seen, What
from fa3verify.kernels.record import Identity
from tests.harness.report.atlases import FIGURES, entry, made_of, not_run, stored
from tests.harness.report.test_report import _parse, check_alone

REPORTS = Path(__file__).parents[3] / "reports"
PUBLISHED = REPORTS / "atlas"
ATLASES = tuple(path.parent / atlas.FILE for path in sorted(PUBLISHED.glob("*/*.xz")))


def pages(out: Path, *files: Path) -> tuple[str, str]:
    write_pages(out, files)
    return (out / "atlas.html").read_text(), (out / "atlas.md").read_text()


def test_pages_of_the_published_data_are_the_published_pages():
    files = [*ATLASES, PUBLISHED / "../findings/known.json"]
    made = page.render(page.read(PUBLISHED, files))
    assert set(made) == {page.PAGE, "atlas.md"}
    stored_page = (PUBLISHED / "atlas.md").read_text(encoding="utf-8")
    assert made["atlas.md"] == stored_page, "atlas.md is not what its data give"
    check_alone(made[page.PAGE])


def test_every_replay_file_that_the_published_atlases_name_is_there():
    named = [
        path.parent / row.replay
        for path in ATLASES
        for made in [atlas.read(path)]
        for row in (*made.failures, *(row for kernel in made.kernels for row in (*kernel.families, *kernel.laws)))
        if row.replay
    ]
    assert len(named) > 100
    assert not [path for path in named if not file_of(path).is_file()]


def test_a_page_is_self_contained_escaped_and_its_tags_nest(tmp_path):
    html, _ = pages(tmp_path, stored(tmp_path, entry("one.fp16"), entry("two.fp16")))
    parsed = _parse(html)
    assert not parsed.open
    assert len(parsed.ids) == len(set(parsed.ids))
    assert not {"script", "img", "link", "iframe"} & set(parsed.tags)
    assert not [x for x in parsed.references if "://" in x]
    inside = [x[1:] for x in parsed.references if x.startswith("#")]
    assert set(inside) <= set(parsed.ids)
    assert "<b>kernel" not in html


def test_kernels_of_one_operation_and_dtype_stand_side_by_side(tmp_path):
    here, there = tmp_path / "cpu", tmp_path / "gpu"
    files = stored(here, entry("a.fp16")), stored(there, entry("b.fp16"), entry("c.e4m3", dtype="e4m3"))
    html, text = pages(tmp_path, *files)
    assert html.index('id="forward-fp16"') < html.index('id="forward-e4m3"')
    rows = [line for line in text.splitlines() if line.startswith("| b.fp16")]
    assert [[cell.strip() for cell in row.strip("| ").split("|")] for row in rows] == [
        [
            "b.fp16",
            "pass",
            "–",
            "321",
            "0 of 8\u202f192",
            "same bits",
            "causal top left",
            __version__,
            "NVIDIA H200",
        ],
        ["b.fp16", "0.875", "–", "1.25e-3, 4.00e-3", "–", "0.573"],
    ]
    assert 'href="gpu/worst/b.fp16.json"' in html
    assert "0.0400" in html  # the largest error over the output's root mean square


def test_kernels_that_declare_the_same_stand_together_with_questions_beside_fails(tmp_path):
    plain = entry("c.fp16")
    plain = replace(plain, introduction=replace(plain.introduction, policy=()))
    made = [entry("a.fp16"), replace(entry("b.fp16"), verdict="question"), plain]
    html, text = pages(tmp_path, stored(tmp_path, *made))
    assert [line for line in text.splitlines() if line.startswith("| forward | ")] == [
        "| forward | causal top left | a.fp16 | b.fp16 | ",
        "| forward | nothing but the default | c.fp16 | – | ",
    ]
    assert html.index('id="contracts"') < html.index('id="forward-fp16"')


def test_a_kernel_that_one_machine_lacks_and_another_judged_is_not_listed_as_not_run(tmp_path):
    lacking = stored(tmp_path / "cpu", entry("a.fp16"), not_run("b.fp16", "no GPU"), not_run("c.fp16", "no GPU"))
    _, text = pages(tmp_path, lacking, stored(tmp_path / "gpu", entry("b.fp16")))
    assert "| c.fp16 | forward | – | no GPU |" in text
    assert "| b.fp16 | forward" not in text


def test_a_largest_error_is_proved_only_where_the_order_leaves_one_value_and_it_came():
    (row, _) = entry("a.fp16").families
    assert tables.status(row) == "searched"
    known = replace(row, figures=row.figures | {"determined": 1.0})
    assert tables.status(known) == "proved"
    assert tables.status(replace(row, figures=known.figures | {"outside": 1})) == "searched"
    assert tables.status(replace(row, figures={"ratio_max": 0.5})) == "searched"


FAILED = (
    Finding("a.fp16", What(Part.LAW, "error_within_bound"), "m", cause="RuntimeError: shape", raised="RuntimeError"),
    Finding(
        "a.fp16",
        What(Part.BOUND, "lse error / bound"),
        "m",
        cause="L1 lse error / bound",
        seen=Seen("lse", ratio=math.inf),
    ),
)


def cells(text: str, kernel: str) -> dict[str, str]:
    """The row of a kernel in the first table that has it, by heading."""
    lines = text.replace("\\_", "_").splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith(f"| {kernel} "))
    head = next(line for line in reversed(lines[:place]) if line.startswith("| kernel"))
    split = [[cell.strip() for cell in line.strip("| ").split("|")] for line in (head, lines[place])]
    return dict(zip(*split, strict=True))


def test_a_kernel_that_fails_says_why_in_its_row(tmp_path):
    entries = entry("a.fp16", verdict="fail"), entry("b.fp16"), entry("c.fp16", verdict="inconclusive")
    html, text = pages(tmp_path, stored(tmp_path, *entries, findings=FAILED))
    assert cells(text, "a.fp16")["why"] == "raises RuntimeError; lse error infinite"
    assert cells(text, "b.fp16")["why"] == "–"
    assert cells(text, "c.fp16")["why"] == "too little tried"
    assert "raises RuntimeError; lse error infinite" in html


def test_every_published_fail_names_its_reason():
    text = (PUBLISHED / "atlas.md").read_text()
    failing = [each.name for path in ATLASES for each in atlas.read(path).kernels if each.verdict == "fail"]
    assert failing
    for kernel in failing:
        assert len(cells(text, kernel)["why"].split()) >= 2, kernel


def test_rows_of_an_older_version_are_marked_and_others_are_not(tmp_path):
    old = stored(tmp_path / "old", entry("a.fp16"), version="0.0.9")
    html, text = pages(tmp_path, old, stored(tmp_path / "new", entry("b.fp16")))
    assert cells(text, "a.fp16")["fa3verify"] == "0.0.9, older"
    assert cells(text, "b.fp16")["fa3verify"] == __version__
    assert "**Stale**: 1 of 2 rows are of fa3verify 0.0.9" in text
    assert "0.0.9, older" in html
    _, text = pages(tmp_path, stored(tmp_path / "new", entry("b.fp16")))
    assert "Stale" not in text


def test_of_a_kernel_judged_twice_on_one_machine_the_later_row_stands(tmp_path):
    """Rows of a new campaign are merged by naming its atlas beside the old one, in whichever order."""
    cpu, gpu = Identity(device="CPU, x86_64"), Identity(device="NVIDIA H200")
    old = stored(
        tmp_path / "old",
        entry("a.fp16", verdict="fail", identity=Identity()),
        entry("b.fp16", identity=gpu),
        version="0.0.9",
    )
    new = stored(
        tmp_path / "new",
        entry("a.fp16", identity=cpu),
        entry("b.fp16", identity=cpu),
        not_run("c.fp16", "no GPU"),
        started="2026-02-01T00:00:00+00:00",
    )
    for files in ((old, new), (new, old)):
        _, text = pages(tmp_path, *files)
        assert cells(text, "a.fp16")["verdict"] == "pass"
        assert len([line for line in text.splitlines() if line.startswith("| a.fp16 ")]) == 2  # verdict and errors
        assert cells(text, "b.fp16 (NVIDIA H200)")["fa3verify"] == "0.0.9, older"
        assert cells(text, "b.fp16 (CPU, x86_64)")["fa3verify"] == __version__


def test_what_is_not_finite_or_above_its_bound_or_far_from_the_least_is_marked(tmp_path):
    def with_figures(name: str, **figures) -> KernelRun:
        made = entry(name, families=("normal",))
        return replace(made, families=(replace(made.families[0], figures=FIGURES | figures),))

    entries = [
        entry("a.fp16", families=("normal",)),
        with_figures("b.fp16", ratio_max=1.5, rel_rmse_seen=1e-2),
        with_figures("c.fp16", nonfinite=2, ratio_max=math.inf),
    ]
    rows = [tables.Judged(each.name, each, made_of(each), ".", "CPU") for each in entries]
    marks = [[mark for _, mark in m["rows"][0]["cells"]] for m in tables.matrices(rows, "")]
    assert marks == [["", "", "bad"], ["", "far", ""], ["", "", ""]]


def test_a_finding_is_explained_by_the_page_that_is_known_for_it_and_others_are_not(tmp_path):
    found = [
        Finding(kernel, What(Part.LAW, "empty_rows"), f"lse: got {x}", "case 5x0", x)
        for kernel in ("a.fp16", "b.fp16")
        for x in ("inf", "nan")
    ]
    known = tmp_path / "findings" / "known.json"
    known.parent.mkdir()
    row = {
        "page": "0009-a.md",
        "kernels": ["a.*"],
        "findings": ["property empty_rows: *got inf | * 5x0"],
        "because": "by design",
    }
    known.write_text(json.dumps({"schema": page.KNOWN_SCHEMA, "known": [row]}))
    entries = [entry(name, verdict="fail") for name in ("a.fp16", "b.fp16")]
    _, text = pages(tmp_path, stored(tmp_path, *entries, findings=tuple(found)), known)
    assert text.count("**by design** ([known](findings/0009-a.md), ") == 1
    assert (
        text.count("**no page explains it**") == 2
    )  # of the one kernel a cause, of the other both: they show the same
    assert text.count("lse: got ") == 4
    assert text.index("no page explains it") < text.index("by design")  # what nobody knows stands first


@pytest.mark.parametrize("name", ["x.json", "x.csv"])
def test_a_file_of_another_kind_is_refused_by_name(tmp_path, name):
    (tmp_path / name).write_text('{"schema": "fa3verify.compare/1"}')
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        write_pages(tmp_path, [stored(tmp_path, entry("a.fp16")), tmp_path / name])
    with pytest.raises(ValueError, match="at least one atlas"):
        write_pages(tmp_path, [])
