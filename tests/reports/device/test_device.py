"""Pages of devices: made of committed data alone, and made again the same; what is stale is left out and told."""

from __future__ import annotations

import importlib.metadata
import json
import math
import re
import shutil
from pathlib import Path

import pytest

from fa3_reports.bench.ratios import geometric_mean
from fa3_reports.device import evidence, front, keys, page, speed
from fa3_reports.device.source import Source
from fa3_reports.measured import timings
from fa3_simulator.machine import load
from fa3verify import files
from fa3verify.report import svg
from tests.harness.report.test_report import check_alone

REPORTS = Path(__file__).parents[3] / "reports"
DEVICES = ("h100", "h200")
DRAWN = ".svg"  # figures depend on the library that drew them


@pytest.fixture(scope="module", params=DEVICES)
def rendered(request) -> tuple[Path, dict[str, str]]:
    """The files of a device; its figures are composed and not painted, which takes most of the time."""
    folder = REPORTS / request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(svg, "render", lambda figure, name, alt: f'<svg id="{name}" viewBox="0 0 1 1"></svg>')
        return folder, page.render(folder)


@pytest.fixture(scope="module", params=DEVICES)
def painted(request) -> tuple[Path, dict[str, str]]:
    folder = REPORTS / request.param
    return folder, page.render(folder)


def again(folder: Path) -> str:
    return f"make it again: python -m fa3_reports device reports/{folder.name}"


def test_tables_markdown_and_facts_are_those_of_the_data_byte_for_byte(rendered):
    folder, files = rendered
    for name, text in files.items():
        if name.endswith(".html"):
            continue  # made and not committed
        stored = (folder / name).read_text()
        if name == page.FACTS:
            assert json.loads(text) | {"drawn_with": {}} == json.loads(stored) | {"drawn_with": {}}, again(folder)
        elif not name.endswith(DRAWN):
            assert text == stored, f"{name} is of other data; {again(folder)}"


@pytest.mark.nightly
def test_figures_are_the_same_under_the_libraries_that_drew_them(painted):
    folder, files = painted
    recorded = json.loads((folder / page.FACTS).read_text())["drawn_with"]
    if any(importlib.metadata.version(name) != version for name, version in recorded.items()):
        pytest.skip(f"figures were drawn with {recorded}")
    for name in (name for name in files if name.endswith(DRAWN)):
        assert files[name] == (folder / name).read_text(), f"{name} is of other data; {again(folder)}"


def test_nothing_is_left_of_an_earlier_page(rendered):
    folder, files = rendered
    kept = {p.relative_to(folder).as_posix() for sub in (page.TABLES, page.FIGURES) for p in (folder / sub).glob("*")}
    assert kept == {name for name in files if "/" in name}


SCRIPT = re.compile(r"<script>\n(.*?)</script>\n", re.DOTALL)
REACHES_OUT = ("fetch", "import", "XMLHttpRequest", "WebSocket", "http", "src", "eval", "innerHTML")
HTML = (page.PAGE, page.DETAILS)
MARKDOWN = (page.MARKDOWN, page.DETAILS_MARKDOWN)


def check_alone_but_for_sorting(html: str) -> None:
    """Assert that a page asks for nothing outside, and that its one script is ours and does not either."""
    (script,) = SCRIPT.findall(html)
    assert script.strip() == (page.TEMPLATES / "sort.js").read_text().strip()
    assert not [word for word in REACHES_OUT if word in script]
    check_alone(SCRIPT.sub("", html))


@pytest.mark.parametrize("name", HTML)
def test_a_page_without_its_figures_is_valid_and_asks_for_nothing_outside(rendered, name):
    _, files = rendered
    check_alone_but_for_sorting(files[name])


@pytest.mark.nightly
@pytest.mark.parametrize("name", HTML)
def test_a_page_is_small_and_asks_for_nothing_outside(painted, name):
    _, files = painted
    html = files[name]
    check_alone_but_for_sorting(html)
    assert len(html.encode()) < 2_000_000
    assert not any(mark in html for mark in ('src="http', "url(http", "@import", "<link"))
    assert html.count("<table") == html.count("</table>")


def test_the_first_page_opens_with_few_sentences_and_is_short(rendered):
    _, files = rendered
    lines = files[page.MARKDOWN].splitlines()
    first_figure = next(i for i, line in enumerate(lines) if line.startswith("<img"))
    assert 3 <= len([line for line in lines[:first_figure] if line.startswith("- **")]) <= 5
    assert len(lines) < 250
    assert f"({page.DETAILS_MARKDOWN})" in files[page.MARKDOWN]
    assert f'href="{page.DETAILS}"' in files[page.PAGE]


def blocks_of(markdown: str) -> list[str]:
    """Tables and figures of a page, each from its title on."""
    return re.split(r"^(?=### |\*\*|<details>)", markdown, flags=re.MULTILINE)


def test_every_table_and_figure_is_left_out_where_the_key_of_a_file_of_it_is_another(rendered):
    """A keyed file that a page reads stands below a table or figure, or among those that are left out as stale.

    What is drawn of other people's kernels alone stands apart, and no change of ours makes it stale. Charts
    and ratios of speed are stale where a row that they show is.
    """
    folder, files = rendered
    source = Source(folder)
    blocks = [block for name in MARKDOWN for block in blocks_of(files[name])]
    left_out = {name: re.findall(r"^- [^*].*: \[.*$", files[name], re.MULTILINE) for name in MARKDOWN}
    assert left_out[page.MARKDOWN] == left_out[page.DETAILS_MARKDOWN]
    left_out_data = json.loads(files[page.FACTS])["left_out"].values()
    for path in json.loads(files[page.FACTS])["sources"]:
        if keys.key_of((folder / path).resolve()).why_stale is keys._constant:
            continue
        is_told = any(f"[{path}](" in line for line in left_out[page.MARKDOWN])
        named = [b for b in blocks if f"[{path}](" in b.partition("Data: ")[2]]
        is_left_out = any(path in data for data in left_out_data)
        assert named or is_left_out, f"{path} was read for a table that does not name it: nobody looked at its key"
        of_ours = [b for b in named if f"[{path}](" in b.partition("Data: ")[2].partition("of other kernels also")[0]]
        if why := keys.why_stale(source, path):
            heads = [b.splitlines()[0] for b in of_ours]
            assert not [head for head in heads if not re.search("speed of ours over|TFLOP/s over", head, re.IGNORECASE)]
            assert not is_told or any(line.startswith(f"- {why}: ") for line in left_out[page.MARKDOWN])
        else:
            assert not is_told, path


@pytest.mark.parametrize("device", DEVICES)
def test_speed_is_called_stale_where_a_row_that_it_shows_is(device):
    source = Source(REPORTS / device)
    every = front.passes(source)
    shown = {block.name: block.stale for block in front.charts(source, every).blocks}
    assert set(shown) == {"speed-forward", "speed-backward", *(f"{one.what}-{one.dtype}" for one in every)}
    for one in every:
        ships, ours = (
            any(keys.is_stale(source, path, lambda row, own=own: own(row)) for path in one.paths(is_whole=True))
            for own in (lambda row, of=one: of.draws(row) and row["kernel"] == "gluon", one.draws)
        )
        assert shown[f"{one.what}-{one.dtype}"] == ours
        assert shown[f"speed-{one.what}"] or not ships


@pytest.mark.parametrize("device", DEVICES)
def test_of_files_that_stand_apart_no_kernel_of_ours_is_drawn(device):
    for one in front.passes(Source(REPORTS / device)):
        whole = [run for run in one.runs if run.is_whole]
        apart = {path: run for path in one.paths(is_whole=False) for run in one.runs if run.bench.path == path}
        speeds = {(c.width, c.causal, c.seqlen, name): x for c in one.cells() for name, x in c.tflops.items()}
        assert speeds
        for (*place, name), tflops in speeds.items():
            runs = whole if speed.is_ours(name) else one.runs
            of = [c for run in runs for c in run.bench.cells if [c.width, c.causal, c.seqlen] == place]
            assert tflops in [cell.tflops.get(name) for cell in of], (place, name)
        assert not [name for run in apart.values() for name in run.peers if speed.is_ours(name)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_kernel_is_drawn_of_one_run_of_a_grid(device):
    for one in front.passes(Source(REPORTS / device)):
        shown = [(run.bench.grid, name) for run in one.runs for name in run.peers]
        assert len(shown) == len(set(shown))
        wholes = [run.bench.grid for run in one.runs if run.is_whole]
        assert len(wholes) == len(set(wholes))


def test_a_run_of_todays_code_is_drawn_whole_before_a_larger_stale_one():
    passes = {one.title: one for one in front.passes(Source(REPORTS / "h200"))}
    whole = [run for run in passes["Backward, fp16"].runs if run.is_whole]
    assert not [run.bench.path for run in whole if run.is_stale]


def test_ratios_are_quotients_of_the_speeds_in_the_data():
    folder = REPORTS / "h200"
    source = Source(folder)
    bench = next(b for b in speed.benches(source, speed.CURVES) if (b.dtype, b.grid) == ("fp16", "paper"))
    table = speed.ratios(bench, source)
    rows = [r for r in source.rows(bench.path) if (r["dtype"], r["grid"]) == ("fp16", "paper")]
    by_kernel = {k: [float(r["burst_ms"]) for r in rows if r["kernel"] == k] for k in ("gluon", "flash3.dew")}
    told = next(row for row in table.rows if (row["kernel"], row["peer"]) == ("ours", "FlashAttention-3 (dew)"))
    times = zip(by_kernel["flash3.dew"], by_kernel["gluon"], strict=True)
    assert math.isclose(told["mean"], geometric_mean(theirs / ours for theirs, ours in times), rel_tol=1e-4)


@pytest.mark.parametrize("absent", ["flash3.dew", "torch.cudnn"])
def test_a_peer_without_a_common_cell_has_no_row_and_hides_no_other(absent):
    (present,) = {"flash3.dew", "torch.cudnn"} - {absent}
    row = {"head_dim": "64", "causal": "False", "seqlen_k": "512", "dtype": "fp16", "grid": "paper"}
    both = speed.Cell(row, {"gluon": 300.0, present: 200.0}, {})
    alone = speed.Cell(row | {"seqlen_k": "1024"}, {absent: 100.0}, {})
    bench = speed.Bench("speed/paper/bench.jsonl", "paper", "fp16", [both, alone])
    table = speed.ratios(bench, Source(REPORTS / "h200"))
    assert [(row["cells"], row["mean"]) for row in table.rows] == [(1, 1.5), (1, 1.5)]  # over the best, and over one


@pytest.mark.parametrize(
    ("dtype", "head_dim", "grid", "at_1000_mhz"),
    [
        ("fp16", 128, "paper", 132 * 4096 / 1e3),  # tensor cores bind: ex2 takes half their time
        ("e4m3", 256, "paper", 132 * 8192 / 1e3),
        ("e4m3", 64, "paper", 132 * 128 / 8.1 * 4 * 64 / 1e3),  # ex2 binds, 8.1 cycles for 32 lanes of 4 units
        ("fp16", 64, "backward", 132 * 4096 / 1e3),
    ],
)
def test_the_limit_is_the_slower_of_tensor_cores_and_exponentials(dtype, head_dim, grid, at_1000_mhz):
    row = {"dtype": dtype, "head_dim": str(head_dim), "grid": grid}
    assert math.isclose(speed.limit_tflops(load("h200"), row, 1000.0), at_1000_mhz, rel_tol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_no_measured_speed_is_above_the_limit_at_its_clock(device):
    source, machine = Source(REPORTS / device), load(device)
    cells = [(bench.path, cell) for bench in speed.benches(source, speed.CURVES) for cell in bench.cells]
    assert sum(len(cell.mhz) for _, cell in cells) > 20
    for path, cell in cells:
        for kernel, mhz in cell.mhz.items():
            assert cell.tflops[kernel] < speed.limit_tflops(machine, cell.row, mhz), (path, cell.name, kernel)


@pytest.mark.parametrize("device", DEVICES)
def test_predictions_are_of_the_rows_that_are_compared(device):
    """Every validation.csv has the line, kernel, cycles and clock of what is read of the records beside it."""
    source = Source(REPORTS / device)
    paths = source.find("**/validation.csv")
    assert len(paths) >= 3
    for path in paths:
        rows, _ = timings.read(REPORTS / device / path.replace("validation.csv", "bench.jsonl"))
        read = {row.line: row for row in rows}
        for row in source.rows(path):
            line = read[int(row["line"])]
            assert row["kernel"] == line.kernel
            found = (float(row["measured_cycles"]), float(row["clock_mhz"]))
            assert found == pytest.approx((line.cycles, line.clock_mhz), rel=1e-5), path


BY_HAND = """
title = "t"
lede = ""
machine = "h200"
date = "2026-11-27"
limits = []
notes = []
commands = []
more = []
[[conclusions]]
text = "**Ours** are {{mean:.2f}} times as fast."
[conclusions.figures]
mean = {{ table = "speed-forward", where = {{ dtype = "fp16", peer = "cuDNN" }}, column = "mean" }}
[conclusions.holds]
mean = [{low}, 2]
"""


def small_device(tmp_path: Path, *, stale: bool, low: float = 1) -> Path:
    """Return a folder with one speed table of one dtype."""
    folder = tmp_path / "device"
    shutil.copytree(REPORTS / "h200" / "speed" / "flash4", folder / "speed" / "flash4")
    (folder / page.HAND_WRITTEN).write_text(BY_HAND.format(low=low))
    facts = folder / "speed" / "flash4" / "bench_provenance.json"
    if stale:
        facts.write_text(json.dumps(json.loads(facts.read_text()) | {"launches_sha256": "0" * 64, "runs": []}))
    return folder


@pytest.mark.parametrize("stale", [True, False])
def test_stale_data_is_left_out_with_its_table_and_its_conclusion_and_the_page_says_so(tmp_path, stale):
    files = page.render(small_device(tmp_path, stale=stale))
    shown = {
        "fp16 forward, flash4: speed over peers": (page.DETAILS_MARKDOWN, page.DETAILS),
        "Forward: speed of ours over every other kernel": (page.MARKDOWN, page.PAGE),
        "times as fast.": (page.MARKDOWN, page.PAGE),
    }
    for text, names in shown.items():
        assert all((text in files[name]) != stale for name in names), text
    assert ("tables/speed-forward.csv" in files) != stale
    assert all(("will be measured again before the next release" in files[x]) == stale for x in (*HTML, *MARKDOWN))
    assert all(("[speed/flash4/bench.jsonl]" in files[name]) for name in MARKDOWN)


def test_a_conclusion_falls_with_the_figure_that_it_rests_on(tmp_path):
    folder = small_device(tmp_path, stale=False)
    source = Source(folder)
    rows = front._table(source, "forward", front.passes(source)).rows
    (mean,) = (row["mean"] for row in rows if (row["dtype"], row["peer"]) == ("fp16", "cuDNN"))
    assert f"**Ours** are {mean:.2f} times as fast." in page.render(folder)[page.MARKDOWN]
    with pytest.raises(ValueError, match=r"rests on mean in \[1.9, 2\], it is 1\.\d+ now"):
        page.render(small_device(tmp_path / "other", stale=False, low=1.9))


def test_the_page_follows_its_data(tmp_path):
    folder = small_device(tmp_path, stale=False)
    table = folder / "speed" / "flash4" / "bench.jsonl"
    before = page.render(folder)
    records = [json.loads(line) for line in files.read_text(table).splitlines()]
    record = next(x for x in records if x["kind"] == "cell" and x["cell"]["head_dim"] == 128)
    record["kernels"][0]["burst_ms"] *= 0.7
    files.write_text(table, "\n".join(map(json.dumps, records)) + "\n")
    after = page.render(folder)
    changed = {name for name in before if before[name] != after[name]}
    drawn = {"figures/forward-fp16-d128.svg", "figures/glance-forward.svg"}
    assert {"tables/cells-flash4-forward-fp16.csv", "tables/speed-forward.csv", page.FACTS, *drawn} <= changed


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (["NVIDIA H200"], ""),
        (["NVIDIA H100", "NVIDIA H200", "NVIDIA H100"], ", some launches on an NVIDIA H100"),
        (None, ""),
    ],
)
def test_launches_that_ran_on_another_gpu_are_said_to_have(kept, said, tmp_path):
    header = "dtype,feature,values,values_differing,lse,lse_differing"
    (tmp_path / "bits").mkdir()
    (tmp_path / evidence.FORWARD_BITS).write_text(f"{header}\nfp16,dense,8,0,1,0\n")
    if kept is not None:
        facts = {"gpu": "NVIDIA H200", "kept": [{"gpu": gpu} for gpu in kept]}
        (tmp_path / "bits" / "gluon_forward_bits_provenance.json").write_text(json.dumps(facts))
    table = evidence.bits(Source(tmp_path)).blocks[0]
    assert table.title == f"Forward against the twin{said}"
