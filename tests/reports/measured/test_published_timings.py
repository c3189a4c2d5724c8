"""The simulator beside published timings of FlashAttention-3 FP16 on an H100 held near 1500 MHz.

Rows: FlashGPU-Sim (arXiv 2609.15311), documentation. No constant was fitted to them: the machine's come from
microbenchmarks. The bands say what is reached today, so that a change of the model shows; see
reports/notes/simulator.md.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fa3_kernels.plan.config import default_config
from fa3_reference.problem import AttentionProblem
from fa3_reports.stored import read_csv
from fa3_simulator.machine import load
from fa3_simulator.roofline import closed_form, roofline
from fa3_simulator.run import estimate

H100, CLOCK_MHZ = load("h100"), 1500.0


def errors() -> dict[str, np.ndarray]:
    """Relative errors of three predictions over the rows, and which rows are of what kind."""
    found: dict[str, list] = {
        "simulated": [],
        "roofline": [],
        "closed form": [],
        "head_dim": [],
        "causal": [],
        "seqlen": [],
    }
    for row in read_csv(Path(__file__).parent / "published_h100.csv"):
        d, causal, seqlen = int(row["head_dim"]), row["causal"] == "1", int(row["seqlen"])
        nheads = int(row["nheads"])
        problem = AttentionProblem(int(row["batch"]), nheads, nheads, seqlen, seqlen, d, causal=causal)
        config = default_config(problem, family="flash3")
        measured = float(row["microseconds"]) * CLOCK_MHZ
        found["simulated"].append(estimate(problem, config, H100, CLOCK_MHZ).cycles / measured - 1)
        bound = roofline(problem, config, H100, CLOCK_MHZ).cycles + H100["launch_cycles"]
        found["roofline"].append(bound / measured - 1)
        found["closed form"].append(closed_form(problem, config, H100) / measured - 1)
        found["head_dim"].append(d)
        found["causal"].append(causal)
        found["seqlen"].append(seqlen)
    return {name: np.array(values) for name, values in found.items()}


@pytest.fixture(scope="module")
def found() -> dict[str, np.ndarray]:
    return errors()


def test_mean_error_is_what_the_note_says(found) -> None:
    simulated, bound = (np.abs(found[name]).mean() for name in ("simulated", "roofline"))
    assert simulated == pytest.approx(0.073, abs=0.001)
    assert simulated < bound / 3.1


def test_long_dense_sequences_at_head_dim_128_are_within_fifteen_percent(found) -> None:
    """7 to 15 % too slow, most at 1k keys, where the same kernels are within 4 % on an H200."""
    chosen = (found["head_dim"] == 128) & ~found["causal"] & (found["seqlen"] >= 1024)
    assert np.abs(found["simulated"][chosen]).max() < 0.15


def test_the_roofline_is_a_lower_bound_of_the_hardware(found) -> None:
    assert found["roofline"].max() < 0.0
