"""Launches over a cache in pages: what pages cost, and what was measured of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fa3_kernels.plan.choose import config_of
from fa3_kernels.plan.config import Config
from fa3_reference.problem import AttentionProblem
from fa3_simulator.machine import load
from fa3_simulator.pages import paged
from fa3_simulator.run import estimate

H200 = load("h200")
MEASURED = Path(__file__).parents[2] / "reports" / "h200" / "serving" / "serving.json"
PROMPT = AttentionProblem(4, 32, 8, 1024, 1024, 128, causal=True, dtype="bf16")


def microseconds(problem: AttentionProblem, page_size: int) -> float:
    config, machine = paged(problem, config_of(problem, num_splits=0), H200, page_size)
    return 1e6 * estimate(problem, config, machine, 1755).seconds


def test_pages_as_long_as_a_tile_cost_nothing_and_shorter_ones_never_less_than_longer_ones() -> None:
    config = config_of(PROMPT)
    alone = 1e6 * estimate(PROMPT, config, H200, 1755).seconds
    found = [microseconds(PROMPT, page) for page in (256, 128, 64, 32, 16, 8)]
    assert found[0] == found[1] == alone
    assert found == sorted(found)
    assert found[-1] > 1.5 * alone


def test_a_step_has_the_tile_of_its_launch_and_a_tile_that_is_asked_for_stays() -> None:
    step = AttentionProblem(8, 32, 8, 1, 1024, 128, dtype="bf16")
    config = config_of(step)
    assert paged(step, config, H200, 64)[0].tile_m == 64
    assert paged(step, config, H200, 64, keeps_tile=True)[0] == config


@pytest.mark.parametrize("page_size", [0, 4, 24, 192])
def test_pages_that_no_tile_is_made_of_are_refused(page_size: int) -> None:
    with pytest.raises(ValueError, match=f"page_size must be a multiple of 8 that divides 128.*, got {page_size}"):
        paged(PROMPT, config_of(PROMPT), H200, page_size)


@pytest.mark.parametrize(("nheads", "nheads_kv", "is_packed"), [(32, 8, True), (28, 4, False), (28, 4, True)])
def test_groups_are_packed_over_pages_where_a_launch_packs_them(nheads: int, nheads_kv: int, is_packed: bool) -> None:
    step = AttentionProblem(8, nheads, nheads_kv, 1, 1024, 128, dtype="bf16")
    in_pages = AttentionProblem.varlen(
        (1,) * 8, (1024,) * 8, nheads=nheads, nheads_kv=nheads_kv, head_dim=128, dtype="bf16"
    )
    config = config_of(step, pack_gqa=is_packed)
    try:
        launched = config_of(in_pages, pack_gqa=is_packed)
    except ValueError as error:
        with pytest.raises(ValueError, match=f"^{re.escape(str(error))}$"):
            paged(step, config, H200, 16)
    else:
        assert paged(step, config, H200, 16)[0].pack_gqa == launched.pack_gqa


def test_kernels_of_others_are_refused() -> None:
    with pytest.raises(ValueError, match="pages are simulated for the forward of our own kernels"):
        paged(PROMPT, Config(family="flash3"), H200, 64)


@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
def test_launches_over_small_pages_take_what_was_measured(dtype: str) -> None:
    """Of 16 keys, where a producer starts most copies: 7 % off in the mean, from 16k keys on, and 20 % at most, in a
    launch of 15 us.
    """
    rows = json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]
    errors = []
    for r in rows:
        kind = "e4m3" if r["dtype"].startswith("float8") else "bf16"
        if (kind, r["page_size"], r["is_ragged"]) != (dtype, 16, False) or not 16384 <= r["keys"] * r[
            "batch"
        ] <= 262144:
            continue
        sizes = (r["batch"], 32, r["heads_kv"], r["queries"], r["keys"], 128)
        problem = AttentionProblem(*sizes, causal=r["queries"] > 1, dtype=kind)
        errors.append(abs(microseconds(problem, 16) / r["us"]["ours"] - 1))
    assert len(errors) >= 10
    assert sum(errors) / len(errors) < 0.07
    assert sorted(errors)[-2] < 0.1
    assert max(errors) < 0.21
