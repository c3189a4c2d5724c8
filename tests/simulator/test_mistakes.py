"""The descriptions in docs/schedules are safe for any tiles, and what is planted in them is found by name and line."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from fa3_simulator.described import hazards
from fa3_simulator.description import Description, described
from fa3_simulator.machine import load
from fa3_simulator.unbounded import Proof
from tests.sampling import sampled
from tests.simulator.further_mistakes import FURTHER
from tests.simulator.listed_mistakes import LISTED
from tests.simulator.mistakes import BIG, FRESH, Mistake

PAGES = Path(__file__).parents[2] / "docs/schedules"
UNSEEN = sorted(PAGES.glob("unseen*/*.py"))
H200 = load("h200")
MISTAKES = [*FRESH, *LISTED, *FURTHER]
SECONDS = 60.0
LONG = ("gemm.pingpong", "gemm.cooperative", "flashmla.flashmla")  # to prove
LINES = 120  # of a description at most, without its launch
NO_PLACE = ("registers", "shared memory", "share id", "is not read by", "ends while")  # findings that no operation has
# Descriptions with the values to prove them at: pingpong takes minutes with more stages, and a program of two CTAs
# is larger than an SM.
RIGHT: dict[str, tuple[dict[str, Any], ...]] = {
    "gemm.cooperative": ({}, {"bm": 128, "bn": 128, "stages": 4}),
    "gemm.pingpong": ({"stages": 2},),
    "gemm.cluster": ({},),
    "fast_cu.one_warpgroup": ({}, {"bm": 64, "bn": 64, "registers": 64}),
    "fast_cu.queue": ({}, {"bn": 128, "stages": 5, "consumers": 1, "persistent": False}),
    "fast_cu.fast_queue": ({}, {"cluster": 2}),
    "fast_cu.stored_by_tma": ({},),
    "attention.flash3": ({}, {"bm": 192, "bn": 128, "d": 64}),
    "attention.flash2": ({},),
    "attention.tutorial": ({}, {"bm": 64, "stages": 3}, BIG),
    "attention.thunderkittens": ({}, {"d": 64, "stages": 4}),
    "attention.decode": ({},),
    "flashmla.flashmla": ({},),
    "absorbed.one_softmax": ({}, {"bn": 32, "stages": 3}),
    "absorbed.two_softmaxes": ({}, {"bn": 32, "stages": 3}),
}


def description(kernel: str) -> Description:
    page, name = kernel.split(".")
    return described(PAGES / f"{page}.py")[name]


def planted(mistake: Mistake, folder: Path) -> Proof:
    page, name = mistake.kernel.split(".")
    file = folder / f"{Path(page).name}.py"
    file.write_text(mistake.planted((PAGES / f"{page}.py").read_text(encoding="utf-8")), encoding="utf-8")
    return hazards(described(file)[name](**mistake.values), H200)


def test_every_description_has_values_to_be_proved_at() -> None:
    found = {f"{page.stem}.{name}" for page in PAGES.glob("*.py") for name in described(page)}
    assert found == set(RIGHT)


@pytest.mark.parametrize(
    ("kernel", "values"),
    sampled(
        [(kernel, values) for kernel, many in RIGHT.items() for values in many],
        [(kernel, many[0]) for kernel, many in RIGHT.items() if kernel not in LONG],
    ),
)
def test_a_description_is_clean_for_any_tiles(kernel: str, values: dict[str, Any]) -> None:
    began = time.process_time()
    proof = hazards(description(kernel)(**values), H200)
    assert time.process_time() - began < SECONDS
    races = [hazard for hazard in proof.findings if hazard.kind != "footprint" or kernel != "gemm.cluster"]
    assert not races
    assert proof.is_complete


@pytest.mark.parametrize("page", sampled(UNSEEN, [page for page in UNSEEN if page.stem in ("sgemm", "flag")]), ids=str)
def test_kernels_described_from_their_sources_lack_no_barrier(page: Path) -> None:
    """Nothing is said of them but that Triton leaves out a fence between cp.async and wgmma."""
    for kernel in described(page).values():
        proof = hazards(kernel(), H200)
        assert proof.is_complete or proof.is_undecided
        assert all("no proxy fence" in hazard.text for hazard in proof.findings)


@pytest.mark.parametrize("kernel", RIGHT)
def test_a_description_is_a_page(kernel: str) -> None:
    page, name = kernel.split(".")
    text = (PAGES / f"{page}.py").read_text(encoding="utf-8")
    (body,) = re.findall(rf'@kernel\ndef {name}\(.*?"""\n(.*?)(?=\n\n\n@)', text, re.DOTALL)
    assert sum(bool(line.strip()) for line in body.splitlines()) <= LINES


@pytest.mark.parametrize("mistake", sampled(MISTAKES, MISTAKES[::3]), ids=lambda m: f"{m.kernel}, {m.what}")
def test_a_planted_mistake_is_named(mistake: Mistake, tmp_path: Path) -> None:
    proof = planted(mistake, tmp_path)
    said = " | ".join(f"{hazard.kind}: {hazard.text}" for hazard in proof.findings)
    if mistake.missed:
        assert not any(word in said for word in mistake.words), "now it is found: drop the reason why it was not"
        return
    assert all(word in said for word in mistake.words), said
    if not any(reason in said for reason in NO_PLACE):
        assert re.search(rf"{Path(mistake.kernel.split('.')[0]).name}\.py:\d+", said), said
