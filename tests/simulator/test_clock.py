"""The clock predicted under load: what it may depend on, and what a launch takes at it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fa3_kernels.plan.config import default_config
from fa3_reference.problem import AttentionProblem
from fa3_simulator.clock import busy_shares, clock_under_load, config_under_load
from fa3_simulator.cta import operations
from fa3_simulator.machine import load
from fa3_simulator.run import estimate

H200 = load("h200")
DENSE = AttentionProblem(2, 16, 16, 8192, 8192, 128)
DECODE = AttentionProblem(32, 32, 8, 1, 8192, 128)
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "e4m3"])
def test_a_busier_launch_clocks_no_higher_and_none_clocks_above_the_largest(dtype) -> None:
    for other in SHARES:
        of_tensor = [clock_under_load(H200, dtype, share, other) for share in SHARES]
        of_smem = [clock_under_load(H200, dtype, other, share) for share in SHARES]
        for clocks in (of_tensor, of_smem):
            assert clocks == sorted(clocks, reverse=True)
            assert max(clocks) <= H200.clock["largest_mhz"].value
    assert clock_under_load(H200, dtype, 0.9, 0.9) < clock_under_load(H200, dtype, 0.5, 0.5) - 50


@pytest.mark.parametrize("problem", [DENSE, DECODE])
def test_shares_of_busy_time_are_shares(problem) -> None:
    tensor, smem = busy_shares(estimate(problem, default_config(problem), H200))
    assert 0 < tensor <= 1
    assert 0 < smem <= 1


def test_figures_under_load_are_those_of_the_launch_simulated_at_the_predicted_clock() -> None:
    config = default_config(DENSE)
    figures = config_under_load(DENSE, config, H200, estimate(DENSE, config, H200))
    again = estimate(DENSE, config, H200, figures["clock_under_load_mhz"])
    assert figures["milliseconds_under_load"] == again.seconds * 1e3
    assert figures["tflops_under_load"] == operations(DENSE, config) / again.seconds / 1e12
    assert figures["clock_under_load_mhz"] < H200["max_clock_mhz"]


def test_a_launch_that_hbm_binds_is_busy_for_less_of_its_time_and_takes_as_long_at_the_predicted_clock() -> None:
    config = replace(default_config(DECODE), pack_gqa=True)
    found = estimate(DECODE, config, H200)
    assert found.hbm_cycles > found.cta_cycles
    assert busy_shares(found)[0] * found.hbm_cycles == pytest.approx(found.tensor_cycles)
    assert config_under_load(DECODE, config, H200, found)["milliseconds_under_load"] == pytest.approx(
        found.seconds * 1e3, rel=0.02
    )


def test_nothing_is_predicted_of_a_stated_clock_or_of_a_machine_without_a_fit() -> None:
    config = default_config(DENSE)
    for machine, clock in ((H200, 1500.0), (load("h100"), None), (replace(H200, clock={}), None)):
        assert config_under_load(DENSE, config, machine, estimate(DENSE, config, machine, clock)) == {}


def test_cycles_do_not_depend_on_the_fit_of_the_clock() -> None:
    config = default_config(DENSE)
    assert estimate(DENSE, config, replace(H200, clock={})) == estimate(DENSE, config, H200)
