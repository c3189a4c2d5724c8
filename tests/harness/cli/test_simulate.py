"""simulate, its traces, and tune as a user calls them."""

from __future__ import annotations

import json
import re
from itertools import islice, pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from fa3_simulator import tune
from fa3_simulator.timeline import Bar
from fa3verify.cli.main import main
from fa3verify.report.schedules import COLOURS, draw_timeline


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    return result.exit_code, result.stdout, result.stderr


def test_simulate_says_cycles_and_what_binds() -> None:
    code, out, _ = run("simulate", "--seqlen", 2048)
    assert code == 0
    assert "tensor binds" in out
    assert "roofline" in out
    assert "closed form" in out
    assert "assumed" not in out
    assert "consumer 1" in out


def test_figures_as_json_are_consistent() -> None:
    code, out, _ = run("simulate", "--seqlen", 2048, "--clock-mhz", 1500, "--json", "-")
    assert code == 0
    figures = json.loads(out)
    assert figures["cycles"] >= figures["roofline_cycles"]
    assert figures["milliseconds"] == pytest.approx(figures["cycles"] / 1.5e6, rel=1e-3)
    assert sum(figures["idle_tensor_share"].values()) == pytest.approx(1)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tune rank three schedules, for what it says of any number."""
    every = tune.candidates
    monkeypatch.setattr(tune, "candidates", lambda *args, **kwargs: islice(every(*args, **kwargs), 3))


UNDER_LOAD = {"clock_under_load_mhz", "milliseconds_under_load", "tflops_under_load"}
LOADED = re.compile(r"  (\S+) ms, (\d+) TFLOP/s at (\d+) MHz, the clock predicted under load \((.*)\)")


def test_times_stand_at_the_largest_clock_and_at_the_one_predicted_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fa3verify.timed.timing.query", lambda field: {"power.limit": "700.00"}[field])
    told = json.loads(run("simulate", "--seqlen", 2048, "--json", "-")[1])
    milliseconds, tflops, mhz, fitted = LOADED.fullmatch(run("simulate", "--seqlen", 2048)[1].splitlines()[2]).groups()
    assert float(milliseconds) == pytest.approx(told["milliseconds_under_load"], rel=1e-3)
    assert int(tflops) == round(told["tflops_under_load"])
    assert int(mhz) == round(told["clock_under_load_mhz"]) < told["clock_mhz"]
    assert told["milliseconds_under_load"] / told["milliseconds"] == pytest.approx(
        told["tflops"] / told["tflops_under_load"]
    )
    assert fitted == "of a cool burst, fitted on one H200 at 700 W"


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("arguments", [("--clock-mhz", 1500), ("--machine", "h100")])
def test_no_clock_is_predicted_beside_a_stated_one_or_for_a_machine_without_a_fit(arguments: tuple) -> None:
    for verb in ("simulate", "tune"):
        command = (verb, "--seqlen", 2048, *arguments)
        told = json.loads(run(*command, "--json", "-")[1])
        assert not UNDER_LOAD & set(told.get("ranked", [told])[0])
        assert "predicted" not in run(*command)[1]


def test_another_power_cap_of_the_gpu_here_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fa3verify.timed.timing.query", lambda _: "600.00")
    assert "at 700 W; the GPU here is capped at 600 W)" in run("simulate", "--seqlen", 2048)[1]
    monkeypatch.setattr("fa3verify.timed.timing.query", lambda _: "[N/A]")
    assert "at 700 W)" in run("simulate", "--seqlen", 2048)[1]


def test_heads_of_a_group_that_no_tile_holds_are_apart_whatever_is_asked() -> None:
    step = ("--seqlen-q", 1, "--seqlen", 4096, "--batch", 8, "--page-size", 16, "--nheads", 130, "--nheads-kv", 2)
    asked, plain = (run("simulate", *step, *more) for more in (("--pack-gqa",), ("--no-pack-gqa",)))
    assert asked == plain
    assert "heads apart" in plain[1]


def test_what_a_servers_call_launches_is_said_in_one_line() -> None:
    step = ("simulate", "--seqlen-q", 1, "--seqlen", 4100, "--batch", 8, "--page-size", 16, "--dtype", "bf16")
    told = [run(*step, "--nheads", nheads, "--nheads-kv", 4)[1].splitlines()[3].strip() for nheads in (28, 16)]
    assert told == [
        "64x128, heads packed, num_splits 4: packed_order, forward_fp16, combine",
        "64x128, heads packed, num_splits 4: packed_order, forward_fp16, combine",
    ]
    packed = json.loads(run("simulate", "--seqlens-q", "700,30", "--causal", "--json", "-")[1])
    assert packed["launches"] == "128x128, num_splits 1: packed_order, forward_fp16"
    other = run("simulate", "--window", 500, 0, "--seqlen", 2048, "--tile", "128x96")[1]
    assert "128x96, num_splits 1: forward_fp16, but no launch of ours has this tile and schedule" in other
    assert "num_splits" not in run("simulate", "--seqlen", 2048)[1]


@pytest.mark.usefixtures("few")
def test_lengths_that_are_not_given_are_those_of_the_other_side() -> None:
    for given, wanted in (
        (("--seqlens-q", "700,30"), "2 x 16 heads, 700 x 700, 730 x 730 packed"),
        (("--seqlens-k", "700,30"), "2 x 16 heads, 700 x 700, 730 x 730 packed"),
        (("--seqlens-k", "700,30", "--seqlen-q", 1), "2 x 16 heads, 1 x 700, 2 x 730 packed"),
        (("--seqlens-q", "7,3", "--seqlen", 900), "2 x 16 heads, 7 x 900, 10 x 1800 packed"),
        (
            ("--batch", 3, "--seqlen-q", 1, "--seqlen", 900, "--page-size", 64),
            "3 x 16 heads, 1 x 900, 3 x 2700 packed, pages of 64",
        ),
    ):
        assert f"dense, {wanted}: gluon" in run("tune", *given, "--top", 1)[1].splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "is_said"),
    [
        (("--seqlen", 2048), True),
        (("--backward", "--seqlen", 2048), False),
        (("--backward", "--seqlen", 2048, "--head-dim", 256), False),
        (("--seqlen", 256, "--causal"), False),  # most of the time is its beginning and its end
    ],
)
def test_hidden_softmax_is_a_share_and_said_of_forwards_that_wait_for_it(arguments: tuple, is_said: bool) -> None:
    _, out, _ = run("simulate", *arguments)
    assert ("hidden softmax" in out) == is_said
    share = json.loads(run("simulate", *arguments, "--json", "-")[1]).get("hidden_softmax")
    assert 0 <= share <= 1 if is_said else share is None


def test_trace_opens_as_chrome_events_that_do_not_overlap(tmp_path: Path) -> None:
    target = tmp_path / "trace.json"
    assert run("simulate", "--trace", target, "--seqlen", 1024, "--causal")[0] == 0
    events = json.loads(target.read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {"tensor core", "producer", "consumer 0", "consumer 1"}
    by_row: dict[int, list] = {}
    for event in events:
        if event["ph"] == "X":
            by_row.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in by_row.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(spans))


def test_the_backward_says_what_binds_its_layout_and_its_turns() -> None:
    code, out, _ = run("simulate", "--backward", "--seqlen", 2048, "--turns", "ascending")
    assert code == 0
    assert "smem binds" in out
    assert "main kernel" in out
    assert "S transposed, dQ by tma warp; key tiles add in turns, ascending" in out
    assert "closed form" not in out


def test_the_backward_honours_kernel_tile_stages_window_and_svg(tmp_path: Path) -> None:
    def figures(*arguments: object) -> dict:
        common = ("--backward", "--seqlen", 2048, "--head-dim", 64, "--json", "-")
        return json.loads(run("simulate", *common, *arguments)[1])

    target = tmp_path / "backward.svg"
    plain, low = figures(), figures("--tile", "64x128", "--svg", target)
    assert plain["schedule"] == "gluon backward d64 128x128"
    assert low["schedule"] == "gluon backward d64 64x128"
    assert "backward d64 64x128" in target.read_text()
    assert plain["layout"] == "S transposed, dQ by tma warp"
    assert figures("--kernel", "flash3")["schedule"] == "flash3 backward d64 128x128"
    assert plain["cycles"] > plain["roofline_cycles"]
    upstream = ("--kernel", "flash3", "--head-dim", 128)
    assert figures(*upstream, "--stages", 1)["cycles"] > figures(*upstream)["cycles"]
    assert figures("--window", 256, 0)["cycles"] < plain["cycles"]
    assert figures("--turns", "ascending")["cycles"] > plain["cycles"]
    assert plain["main_cycles"] < plain["cycles"]


def test_trace_draws_the_backward(tmp_path: Path) -> None:
    target = tmp_path / "trace.json"
    assert run("simulate", "--trace", target, "--backward", "--kernel", "flash3", "--seqlen", 1024)[0] == 0
    events = json.loads(target.read_text())["traceEvents"]
    assert {"Q K^T (consumer 1)", "dQ warp"} <= {e["name"] for e in events} | {e["args"].get("name") for e in events}


def test_tune_ranks_backward_schedules_and_marks_upstreams() -> None:
    code, out, _ = run("tune", "--backward", "--kernel", "flash3", "--seqlen", 2048, "--causal", "--json", "-")
    assert code == 0
    figures = json.loads(out)
    assert [row["cycles"] for row in figures["ranked"]] == sorted(row["cycles"] for row in figures["ranked"])
    (chosen,) = (row for row in figures["ranked"] if row["flash3_choice"])
    assert (chosen["tile"], chosen["stages"]) == ("64x128", "2/2/2")
    assert not any(row["gluon"] for row in figures["ranked"])  # ours is laid out in another way
    wide = ("tune", "--backward", "--head-dim", 256, "--nheads", 8, "--seqlen", 2048)
    assert "dQ by registers" in run(*wide, "--kernel", "flash3")[1]
    (ours,) = (row for row in json.loads(run(*wide, "--json", "-")[1])["ranked"] if row["gluon"])
    assert ours["tile"] == "64x64"


def test_a_schedule_that_deadlocks_is_a_finding_that_names_the_circle_of_waits() -> None:
    """Scores run ahead of the slot of Q that they would free."""
    code, _, err = run("simulate", "--backward", "--stages", 1, "--seqlen", 1024)
    assert code == 1
    words = " ".join(err.split())
    assert "the schedule does not end: deadlock at cycle" in words
    assert "circle of waits: " in words
    assert "consumer 0 at wait q_full[0]" in words
    assert "producer at wait q_empty[0]" in words


@pytest.mark.parametrize("verb", ["simulate", "tune"])
def test_schedules_are_read_for_safety_too(verb: str) -> None:
    arguments = (verb, "--backward", "--seqlen", 1024)
    assert "hazards: none" in run(*arguments)[1]
    assert json.loads(run(*arguments, "--json", "-")[1])["hazards"] == []


@pytest.mark.parametrize("option", [("--measure", 3), ("--pack-gqa",)])
def test_tune_backward_refuses_what_it_cannot_build(option: tuple) -> None:
    code, _, err = run("tune", "--backward", *option)
    assert code == 2
    assert "--backward does not take" in err


@pytest.mark.parametrize("option", [("--schedule", "none"), ("--p-in-smem",), ("--promotion-interval", 0)])
def test_the_backward_refuses_options_it_does_not_take_by_name(option: tuple, tmp_path: Path) -> None:
    code, _, err = run("simulate", "--trace", tmp_path / "trace.json", "--backward", *option)
    assert code == 2
    assert f"--backward does not take {option[0]}" in err
    assert not list(tmp_path.iterdir())


def test_a_trace_says_where_it_is_beside_the_figures_and_in_json(tmp_path: Path) -> None:
    target = tmp_path / "trace.json"
    call = ("simulate", "--seqlen", 1024)
    _, out, _ = run(*call, "--trace", target)
    count = len(json.loads(target.read_text())["traceEvents"])
    assert out.startswith(run(*call)[1])
    assert out.splitlines()[-1].startswith(f"{target}: {count} events, ")
    figures = json.loads(run(*call, "--trace", target, "--json", "-")[1])
    assert figures.pop("trace") == {"events": count, "cycles": pytest.approx(figures["cta_cycles"], abs=1)}
    assert figures == json.loads(run(*call, "--json", "-")[1])
    assert run(*call, "--trace", target, "--quiet")[1] == f"{target}\n"


def test_svg_is_one_picture(tmp_path: Path) -> None:
    target = tmp_path / "timeline.svg"
    assert run("simulate", "--seqlen", 1024, "--svg", target)[0] == 0
    assert target.read_text().count("<svg") == target.read_text().count("</svg>") == 1


def test_every_bar_of_a_timeline_is_in_its_picture_in_the_row_and_colour_of_its_own(tmp_path: Path) -> None:
    bars = [Bar(row, "S", kind, 0.0, 90.0) for row, kind in zip(("a", "b", "c"), COLOURS, strict=False)]
    draw_timeline(tmp_path / "timeline.svg", "three rows", [*bars, Bar("a", "beyond", "copy", 120.0, 130.0)], 100.0)
    picture = (tmp_path / "timeline.svg").read_text()
    strokes = re.findall(r'<path d="M ([\d.]+) ([\d.]+) \nL ([\d.]+) [\d.]+ \n" clip-path[^>]*stroke: (#\w+)', picture)
    assert [colour for *_, colour in strokes] == [COLOURS[bar.kind] for bar in bars]
    heights = [float(y) for _, y, _, _ in strokes]
    assert heights == sorted(set(heights))
    assert len({(left, right) for left, _, right, _ in strokes}) == 1
    assert all(f">{words}<" in picture for words in ("a", "b", "c", *COLOURS))


def test_svg_says_what_it_shows(tmp_path: Path) -> None:
    target = tmp_path / "timeline.svg"
    run("simulate", "--seqlen", 4096, "--causal", "--clock-mhz", 1500, "--svg", target)
    picture = target.read_text()
    assert "fp16 d128 causal, 1 x 16 heads, 4096 x 4096, H200 at 1500 MHz: first 20000 cycles of a CTA" in picture


def test_tune_ranks_and_marks_what_gluon_can_build() -> None:
    code, out, _ = run("tune", "--head-dim", 256, "--nheads", 8, "--seqlen", 4096, "--kernel", "flash3", "--json", "-")
    assert code == 0
    figures = json.loads(out)
    cycles = [row["cycles"] for row in figures["ranked"]]
    assert cycles == sorted(cycles)
    (chosen,) = (row for row in figures["ranked"] if row["flash3_choice"])
    assert (chosen["tile"], chosen["schedule"], chosen["p"]) == ("128x80", "overlap", "reg")
    built = [row for row in figures["ranked"] if row["gluon"]]
    assert {row["tile"] for row in built} == {"128x64", "128x32"}
    assert {(row["stages"], row["p"]) for row in built} == {(2, "reg")}
    assert 0 <= figures["regret_gluon"] < 0.2


def test_decoding_is_faster_with_the_heads_of_a_group_packed_and_hbm_binds() -> None:
    decode = ("--batch", 32, "--seqlen-q", 1, "--seqlen", 8192, "--nheads", 32, "--nheads-kv", 8, "--json", "-")
    packed, unpacked = (json.loads(run("simulate", *decode, *more)[1]) for more in (("--pack-gqa",), ()))
    assert packed["roofline_binds"] == packed["binds"] == "hbm" != unpacked["binds"]
    assert f"would take {packed['cta_cycles']} cycles" in run("simulate", *decode[:-2], "--pack-gqa")[1]
    assert 1 < packed["cycles"] / packed["roofline_cycles"] < 1.05
    assert unpacked["cycles"] > 2 * packed["cycles"]


def test_keys_in_parts_say_what_merging_them_takes() -> None:
    decode = ("--seqlen-q", 1, "--seqlen", 65536, "--nheads", 8, "--num-splits", 16, "--pack-gqa", "--nheads-kv", 1)
    found = json.loads(run("simulate", *decode, "--json", "-")[1])
    assert 1840 < found["merge_cycles"] < 10000
    assert f"of these {found['merge_cycles']} cycles merge the parts of the keys" in run("simulate", *decode)[1]
    assert json.loads(run("simulate", *decode[:4], "--json", "-")[1])["merge_cycles"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tile", "128x256"), "does not fit an SM of the H200: consumer 0: S 128 + O 64 + P and sums 64 + 24"),
        (("--tile", "128x128", "--stages", 4), "bytes of shared memory, a CTA has 232448"),
        (("--tile", "100x128"), "tile_m must be 64, 128 or 192"),
        (("--tile", "128"), "must be ROWSxKEYS"),
        (("--schedule", "magic"), "schedule is made of pingpong, overlap, overlap3, or none, got magic"),
        (("--schedule", "overlap+overlap3"), "overlap (two stages) or overlap3 (three), got overlap+overlap3"),
        (
            ("--schedule", "overlap3"),
            "are 248 registers, a thread has 240; with 2 stages and this",
        ),
        (("--stages", 3), "with 3 stages and this schedule a tile of 128x64 or 192x32 fits"),
        (("--head-dim", 256, "--stages", 3), "with 3 stages and this schedule a tile of 128x32 fits"),
        (("--stages", 8), "with 8 stages and this schedule no tile fits"),
        (("--head-dim", 77), "head_dim must be a multiple of 8 (TMA), got 77"),
        (("--backward", "--head-dim", 77), "head_dim must be a multiple of 8 (TMA), got 77"),
        (("--schedule", "overlap3", "--tile", "128x64", "--stages", 1), "three softmax stages need"),
        (("--promotion-interval", 128), "promotion_interval must be 0, or for e4m3"),
        (("--machine", "a100"), "machine must be one of h100, h200"),
        (("--head-dim", 128, "--tile", "128x32", "--stages", 4), "turn[1] has id 16, legal are 0 to 15"),
        (("--nheads", 8, "--nheads-kv", 3), "nheads must be a multiple of nheads_kv, got 8 and 3"),
        (("--backward", "--pack-gqa"), "--backward does not take --pack-gqa"),
        (("--backward", "--num-splits", 2), "--backward does not take --num-splits"),
        (("--backward", "--dtype", "e4m3"), "the backward is for fp16 and bf16, got e4m3"),
        (("--backward", "--tile", "128x128"), "are 280 registers, a thread has 240"),
        (
            ("--backward", "--head-dim", 64, "--tile", "128x128", "--stages", 4),
            "bytes of shared memory, a CTA has 232448",
        ),
        (("--backward", "--kernel", "flash4"), "a backward schedule is known of flash3, gluon, got flash4"),
        (("--turns", "shift"), "--turns is for --backward"),
        (("--backward", "--turns", "shift", "--causal"), "turns shift is for dense problems of one length"),
        (
            ("--window", 128, 0, "--kernel", "flash3"),
            "windows, packed sequences and pages are simulated for the forward",
        ),
        (("--seqlens-q", "30,x"), "must be lengths such as"),
        (("--seqlens-q", "30,20", "--seqlens-k", "30"), "seqlens_k must hold batch = 2 integers"),
        (("--seqlens-q", "30", "--seqlens-k", "0"), "nothing is launched, as no query sees a key"),
    ],
)
def test_impossible_requests_are_refused_with_the_rule(arguments: tuple, message: str) -> None:
    code, _, err = run("simulate", *arguments)
    assert code == 2
    assert message in " ".join(err.split())
