"""Launches over a cache in pages: what pages cost a tile, and what was measured of calls as servers make them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fa3_reference.layout import Cache
from fa3_reference.problem import AttentionProblem
from fa3_simulator.forward_choice import schedule_for
from fa3_simulator.machine import load
from fa3_simulator.pages import over_pages
from fa3_simulator.run import estimate

H200 = load("h200")
SIZES = {"nheads": 32, "nheads_kv": 8, "head_dim": 128, "dtype": "bf16"}
PROMPT = AttentionProblem.varlen((1024,) * 4, (1024,) * 4, causal=True, **SIZES)


def in_pages(problem: AttentionProblem, page_size: int) -> AttentionProblem:
    return replace(problem, cache=Cache(page_size=page_size))


def cycles(problem: AttentionProblem) -> float:
    return estimate(problem, schedule_for(problem, num_splits=1), H200).cycles


def test_pages_as_long_as_a_tile_cost_nothing_and_shorter_ones_never_less_than_longer_ones() -> None:
    found = [cycles(in_pages(PROMPT, page)) for page in (256, 128, 64, 32, 16, 8)]
    rows = cycles(in_pages(PROMPT, 0))
    assert found[0] == found[1] == rows
    assert found == sorted(found)
    assert found[-1] > 1.5 * rows
    # of packed keys without a cache the kernel behind the one that makes the schedule is launched later
    assert cycles(PROMPT) - rows == H200["launch_cycles"]


def test_a_step_has_the_tile_of_its_launch_and_a_tile_that_is_asked_for_stays() -> None:
    step = in_pages(AttentionProblem.varlen((1,) * 8, (1024,) * 8, **SIZES), 64)
    assert schedule_for(step).tile_m == 64
    assert schedule_for(step, tile=(128, 128)).tile_m == 128


@pytest.mark.parametrize("page_size", [1, 4, 24, 192])
def test_rows_that_are_gathered_take_as_long_whatever_the_page(page_size: int) -> None:
    problem = in_pages(PROMPT, page_size)
    found = over_pages(problem, schedule_for(problem), H200)
    assert found["tma_box_bytes"] == 8 * 256
    assert found["tma_issue_cycles"] == pytest.approx(8 * (400 / 128 + 256 / 45))


@pytest.mark.parametrize(("head_dim", "dtype", "read"), [(128, "bf16", 1), (80, "bf16", 1.2), (80, "e4m3", 1.6)])
def test_a_row_of_a_head_is_read_in_pieces_of_64_bytes(head_dim: int, dtype: str, read: float) -> None:
    problem = in_pages(replace(PROMPT, head_dim=head_dim, head_dim_v=head_dim, dtype=dtype), 256)
    machine = over_pages(problem, schedule_for(problem), H200)
    assert H200["hbm_bytes_per_ns"] / machine["hbm_bytes_per_ns"] == pytest.approx(read)


def test_pages_are_refused_for_kernels_of_others_and_for_gradients() -> None:
    with pytest.raises(
        ValueError, match="windows, packed sequences and pages are simulated for the forward of our own"
    ):
        estimate(in_pages(PROMPT, 64), schedule_for(in_pages(PROMPT, 64), "flash3"), H200)
    from fa3_simulator import backward_choice

    with pytest.raises(ValueError, match="the simulator does not know paged"):
        estimate(in_pages(PROMPT, 64), backward_choice.schedule_for(PROMPT), H200)


@pytest.mark.parametrize(("head_dim", "dtype", "copies"), [(128, "bf16", 2), (64, "bf16", 1), (256, "e4m3", 2)])
def test_a_page_is_copied_in_panels_of_a_swizzled_row(head_dim: int, dtype: str, copies: int) -> None:
    """A panel is 128 bytes of channels wide, or all channels where they are fewer; a page is looked up once for all."""
    page_size = 32 if dtype == "e4m3" else 16  # smaller ones are gathered
    problem = in_pages(replace(PROMPT, head_dim=head_dim, head_dim_v=head_dim, dtype=dtype), page_size)
    machine = over_pages(problem, schedule_for(problem), H200)
    size = head_dim * (1 if dtype == "e4m3" else 2)
    assert machine["tma_box_bytes"] * copies == size * page_size
    assert machine["tma_issue_cycles"] * copies == 43 * copies + 64
