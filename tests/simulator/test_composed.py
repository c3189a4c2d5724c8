"""Softmax steps of one to three warpgroups, simulated beside what they were measured to take, without any kernel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fa3_reports.microbench.constants import Stretches, read
from fa3_simulator import engine
from fa3_simulator.costs import TICKS, costs
from fa3_simulator.machine import load
from fa3_simulator.program import Builder, Gemm, Slot, Work

H200 = load("h200")
TABLE = Path(__file__).parents[2] / "reports" / "h200" / "simulator" / "microbench" / "microbench.csv"
STEPS, MEASURED, LATER = 24, 8, 60  # simulated; of a stretch; cycles by which a warpgroup begins after the one before


@pytest.fixture(scope="module")
def table() -> Stretches:
    return read(TABLE)


def step(dtype: str, keys: int, head_dim: int) -> tuple[Work, Work, Work]:
    """A step of microbench.softmax: maxima, the quad's, and what ptxas mixes."""
    scores, chunks = keys // 2, max(1, keys // 8)
    maxima = scores + 6 if dtype == "fp16" else scores // 2 + 10
    packed = {"convert" if dtype == "fp16" else "convert_e4m3": scores // 2}
    rest = Work("softmax", chunks, fma=2 * scores + 2 + head_dim // 2, mufu=scores + 2, **packed)
    return Work("maxima", chunks, alu=maxima, fma=2), Work("quad", 1, shuffle=4), rest


def simulated(dtype: str, keys: int, head_dim: int, warpgroups: int, *, under_wgmma: bool) -> float:
    """Cycles of a step, behind the first half."""
    builder = Builder("steps")
    for group in range(warpgroups):
        stream = builder.actor(f"w{group}", 128, 200)
        if group:
            stream.work(Work("later", 1, stall=LATER * group))
        for i in range(STEPS):
            if i in (STEPS // 2, STEPS - 1):
                stream.mark("step")
            for work in step(dtype, keys, head_dim):
                stream.work(work)
    if under_wgmma:
        stream = builder.actor("wgmma", 128, 200)
        for _ in range(120):
            stream.issue(Gemm("busy", 8, 128, 16, True), None, Slot("b", 16384), Slot("s", 0))
    program = builder.build()
    marks = engine.simulate(program, costs(program, H200)).marks[:warpgroups]
    return float(np.mean([last - first for first, last in marks])) / TICKS / (STEPS - 1 - STEPS // 2)


@pytest.mark.parametrize(
    ("under_wgmma", "warpgroups", "mean", "bias"),
    [
        (False, 1, 0.04, 0.02),
        (False, 2, 0.06, 0.02),
        (False, 3, 0.07, 0.07),
        (True, 1, 0.06, 0.05),
        (True, 2, 0.05, 0.02),
    ],
)
def test_softmax_steps_of_several_warpgroups_take_what_was_measured(
    under_wgmma: bool, warpgroups: int, mean: float, bias: float, table: Stretches
) -> None:
    name, errors = "softmax_step_under_wgmma" if under_wgmma else "softmax_step", []
    for (experiment, of), groups in table.items():
        p: dict[str, Any] = dict(of)
        if (experiment, p.get("stamps"), p.get("order")) != (name, "whole", "serial") or p["warpgroups"] != warpgroups:
            continue
        taken = float(np.mean([stretches[1] for stretches in groups if len(stretches) > 1])) / MEASURED
        errors.append(simulated(p["dtype"], p["n"], p["head_dim"], warpgroups, under_wgmma=under_wgmma) / taken - 1)
    assert len(errors) >= 10, json.dumps(sorted({key[0] for key in table}))
    assert np.abs(errors).mean() <= mean, errors
    assert abs(np.mean(errors)) <= bias, errors
