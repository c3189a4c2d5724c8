"""simulate, hazards and tune of kernels that a user described, as he calls them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from fa3verify.cli.main import main

PAGE = Path(__file__).parents[3] / "docs" / "schedule.md"


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def gemm(tmp_path_factory) -> Path:
    """The description of docs/schedule.md as a file."""
    path = tmp_path_factory.mktemp("described") / "gemm.py"
    match = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert match
    path.write_text(match[1])
    return path


def test_the_page_is_simulated_and_its_settings_count(gemm: Path) -> None:
    code, out, _ = run("simulate", f"{gemm}:gemm", "--set", "stages=2")
    assert code == 0
    assert out.startswith("gemm(stages=2) on H200 at 1980 MHz")
    assert "TFLOP/s" in out
    assert "with vector counts 20% lower or higher" in out
    assert "consumer 1" in out
    told = json.loads(run("simulate", gemm, "--set", "stages=2", "--json", "-")[1])
    assert f"{told['cycles']} cycles" in out
    assert told["hazards"] == []


COPY = """from fa3verify.schedule import Launch, kernel

@kernel
def copy(cta, tiles):
    ring = cta.ring("X", 2, 65536, consumers=1)
    c, p = cta.warpgroup("consumer", registers=64), cta.warp("producer", registers=24)
    for tile in tiles:
        for _ in range(tile.blocks):
            c.release(c.wait_full(ring))
            p.tma_load(p.acquire(ring), far=True)

@copy.launch
def launch():
    return Launch([64] * 132, flops=1, hbm_bytes=132 * 64 * 65536)
"""


def test_what_a_kernel_that_hbm_binds_does_not_do_would_make_it_no_faster(tmp_path: Path) -> None:
    path = tmp_path / "copies.py"
    path.write_text(COPY)
    told = json.loads(run("simulate", path, "--quiet", "--json", "-")[1])
    assert told["binds"] == "hbm"
    assert told["times_as_fast_if_free"]["exponentials"] == 1
    assert told["times_as_fast_if_free"]["copies"] > 10


def test_two_kernels_are_compared_and_the_differences_add_up(gemm: Path) -> None:
    code, out, _ = run("simulate", f"{gemm},stages=2", f"{gemm},stages=4", "--quiet", "--json", "-")
    assert code == 0
    told = json.loads(out)
    first, second = (sum(causes.values()) for causes in told["causes"])
    assert second - first == sum(told["more"].values()) < 0
    assert told["kernels"] == ["gemm(stages=2)", "gemm(stages=4)"]


def test_families_are_compared_with_settings_of_their_own() -> None:
    code, out, _ = run("simulate", "flash3", "flash3,tile=128x128", "--seqlen", 2048)
    assert code == 0
    lines = out.splitlines()
    total = next(line for line in lines if "together" in line)
    (first, second) = (int(line.split(": ")[1].split()[0]) for line in lines[:2])
    assert int(total.split()[0]) == second - first
    assert run("simulate", "flash3", "flash3,tiles=1")[0] == 2


def test_a_timeline_of_a_description_is_written_for_perfetto(gemm: Path, tmp_path: Path) -> None:
    target = tmp_path / "trace.json"
    assert run("simulate", gemm, "--trace", target, "--svg", tmp_path / "trace.svg")[0] == 0
    assert json.loads(target.read_text())["traceEvents"]
    assert "<svg" in (tmp_path / "trace.svg").read_text()


def test_hazards_of_a_description_are_none_found_or_not_proven(gemm: Path, tmp_path: Path) -> None:
    code, out, _ = run("hazards", gemm)
    assert (code, out.split(" (")[0]) == (0, f"no hazard: description {gemm}:gemm")
    early = tmp_path / "early.py"
    release = "                c.release(stage)\n"
    wait = "                c.wgmma_wait(0)\n"
    early.write_text(gemm.read_text().replace(wait + release, release + wait))
    code, out, _ = run("hazards", early)
    assert code == 1
    assert re.search(r"race: slot A\[0\].* early\.py:\d+", out)
    short = tmp_path / "short.py"
    short.write_text(gemm.read_text().replace("consumers=consumers)\n", "consumers=1)\n"))
    assert run("hazards", short)[0] == 1


ONE_TILE = """
from fa3verify.schedule import Launch, kernel

@kernel
def copy(cta, tiles):
    slot, full = cta.smem("Q", 1024), cta.mbarrier("full")
    warps = cta.warpgroup("warps")
    for tile in tiles:
        warps.tma_load(full, slot)
        warps.wait(full, 0)
        warps.read(slot)

@copy.launch
def launch(persistent=False):
    return Launch([1] * 500, hbm_bytes=1e6, persistent=persistent)
"""


def test_a_tile_with_a_cta_of_its_own_is_not_judged_behind_another(tmp_path: Path) -> None:
    path = tmp_path / "copy.py"
    path.write_text(ONE_TILE)
    assert run("simulate", path)[0] == 0
    assert run("hazards", path)[0] == 0
    code, out, _ = run("simulate", path, "--set", "persistent=True")
    assert (code, "TB/s" in out) == (1, True)
    assert "barrier" in out or "race" in out


def test_values_are_ranked_and_the_first_is_said_in_a_sentence_and_drawn(gemm: Path, tmp_path: Path) -> None:
    picture = tmp_path / "gemm.svg"
    over = ("--over", "bn=64:256:64", "--over", "stages=2,3,9")
    code, out, _ = run("tune", gemm, *over, "--set", "m=2048", "--top", 4, "--svg", picture)
    assert code == 0
    assert re.search(r"^  1 bn 256, stages 3: \d+ cycles, \d+ TFLOP/s$", out, re.MULTILINE)
    assert re.search(r"and 8 more; of all, \d do not fit", out)
    assert re.search(
        r"^Take bn 256, stages 3: .*% ahead of bn 192, stages 3, bound by tensor; with vector counts 20% lower it is "
        r"still the first, 20% higher it is still the first\. Choices within 5% are a tie\.$",
        out,
        re.M,
    )
    drawn = re.findall(r">([^<>]+)</text>", picture.read_text())
    assert [words for words in drawn if words.startswith("bn")] == ["bn 128", "bn 192", "bn 256"]  # 64 is too slow
    assert [words for words in drawn if words.startswith("stages")] == ["stages 3", "stages 2"]
    assert any("gemm(m=2048) on H200" in words for words in drawn)


def test_nothing_to_choose_and_nothing_that_fits_are_said(gemm: Path, tmp_path: Path) -> None:
    assert "\nTake it as it is: bound by tensor; with" in run("tune", gemm)[1]
    answers = json.loads(run("tune", gemm, "--json", "-")[1])["answers"]
    assert answers["H200"].startswith("Take it as it is: bound by tensor")
    picture = tmp_path / "none.svg"
    assert run("tune", gemm, "--over", "stages=8:9", "--svg", picture)[1].endswith("\nnone of 2 fits\n")
    assert not picture.exists()


def test_what_if_changes_the_machine_for_families_and_descriptions(gemm: Path) -> None:
    def cycles(*arguments: object) -> int:
        return json.loads(run("simulate", *arguments, "--json", "-")[1])["cycles"]

    assert cycles(gemm, "--what-if", "tensor=x2") < cycles(gemm)
    assert cycles("--seqlen", 2048, "--what-if", "mufu=x2") < cycles("--seqlen", 2048)
    rank = run("tune", gemm, "--over", "stages=5", "--what-if", "smem=+64K")[1]
    assert "does not fit" not in rank
    assert "does not fit" in run("tune", gemm, "--over", "stages=5")[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("simulate", "{gemm}", "--set", "stage=2"), "gemm has no parameter stage"),
        (("simulate", "{gemm}", "--what-if", "smem=x2"), "--what-if takes tensor"),
        (("simulate", "{gemm}:other"), "name one of"),
        (("simulate", "nowhere.py"), "there is no file nowhere.py"),
        (("simulate", "gluon", "flash3", "flash4"), "two to compare, got 3"),
        (("tune", "{gemm}", "--over", "stages"), "a setting is NAME=VALUE"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(gemm: Path, arguments: tuple, words: str) -> None:
    code, _, err = run(*(a.format(gemm=gemm) for a in arguments))
    assert code == 2
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("c.wgmma(", "c.wgma(", "16: 'Warps' object has no attribute 'wgma'"),
        ("m=rows, ", "m=row, ", "16: name 'row' is not defined"),
        ("convert=0.5", "converts=0.5", "20: .*converts"),
        ("rows = bm // consumers\n", "rows = bm // (consumers\n", r"\d+: '\(' was never closed"),
    ],
)
@pytest.mark.parametrize("verb", ["simulate", "hazards"])
def test_a_slip_in_a_description_is_named_with_its_line(
    verb: str, old: str, new: str, words: str, gemm: Path, tmp_path: Path
) -> None:
    slip = tmp_path / "slip.py"
    slip.write_text(gemm.read_text().replace(old, new))
    code, _, err = run(verb, slip)
    assert code == 2
    assert re.search(rf"slip\.py:{words}", err)
