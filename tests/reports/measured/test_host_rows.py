"""Host costs: a row that is 100 times its peers' is refused by name, whoever it is of, and published ones hold."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fa3_reports.measured import host_rows
from fa3_reports.measured.host_rows import Cost, check
from fa3_reports.stored import read_csv

PUBLISHED = Path(__file__).parents[3] / "reports" / "h200" / "speed" / "host" / "host.csv"
OURS, FLASH3 = Cost("decode", "gluon", 38.75, 56.18), Cost("decode", "flash3", 27.3, 32.86)


def test_a_cost_of_a_thousand_times_its_peers_is_refused_with_both_figures():
    """SDPA without a pinned backend, which stood on the page of the H200."""
    slow = Cost("decode", "torch.sdpa", 49441.5, 52222.29)
    with pytest.raises(ValueError, match=r"decode: .* got 49442 us of torch\.sdpa beside 27\.3 us of flash3"):
        check([OURS, FLASH3, slow])


@pytest.mark.parametrize("order", [1, -1])
def test_two_slow_kernels_do_not_hide_each_other(order):
    rows = [Cost("decode", "a", 40_000.0, 50_000.0), Cost("decode", "b", 35_000.0, 50_000.0), FLASH3]
    with pytest.raises(ValueError, match=r"beside 27\.3 us of flash3"):
        check(rows[::order])


def test_a_cost_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="got nan us of gluon"):
        check([FLASH3, OURS._replace(median_us=math.nan)])


def test_a_situation_is_compared_with_itself_alone_and_up_to_the_factor():
    check([OURS, FLASH3, Cost("graph", "gluon", 0.2, 0.3), Cost("decode", "torch.sdpa (flash)", 2730.0, 3000.0)])
    check([Cost("decode", "gluon", 49441.5, 52222.29)])


def test_a_stated_reason_is_accepted_for_its_own_row_alone(monkeypatch):
    monkeypatch.setitem(host_rows.REASONS, ("decode", "slow"), "it plans every shape anew")
    check([FLASH3, Cost("decode", "slow", 49441.5, 52222.29)])
    with pytest.raises(ValueError, match="us of other"):
        check([FLASH3, Cost("decode", "slow", 49441.5, 0.0), Cost("decode", "other", 49441.5, 0.0)])


def test_published_host_costs_hold():
    rows = read_csv(PUBLISHED)
    assert len(rows) == 16
    check(Cost(row["situation"], row["kernel"], float(row["median_us"]), math.nan) for row in rows)


@pytest.mark.optional
def test_sdpa_is_held_to_the_backend_that_its_name_says():
    torch = pytest.importorskip("torch", reason="needs torch")
    from fa3_reports.measured import host_cost

    kernel = host_cost.sdpa()
    assert kernel.name == "torch.sdpa (flash)"
    flags = torch.backends.cuda
    with kernel.pinned():
        assert flags.flash_sdp_enabled()
        others = (flags.mem_efficient_sdp_enabled(), flags.math_sdp_enabled(), flags.cudnn_sdp_enabled())
        assert not any(others)
