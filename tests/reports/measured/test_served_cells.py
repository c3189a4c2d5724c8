"""How far off the simulator is where a server calls, by class, and that it is what the pages say."""

from __future__ import annotations

import numpy as np

from fa3_reports.measured.served_cells import errors

# Mean absolute error at most, and largest, by class.
WANTED = {
    "decode over pages": (0.075, 0.36),
    "over pages, up to 25 us": (0.13, 0.32),
    "chunks over pages": (0.13, 0.36),
    "prompts over pages": (0.11, 0.16),
    "decode packed": (0.05, 0.11),
    "prompts packed": (0.05, 0.07),
    "chunks packed": (0.04, 0.05),
    "windows": (0.02, 0.02),
}


def test_calls_of_servers_take_what_was_measured() -> None:
    found = errors()
    for kind, (mean, largest) in WANTED.items():
        size = np.abs(found[kind])
        assert size.mean() < mean, kind
        assert size.max() < largest, kind
    assert sum(len(found[kind]) for kind in WANTED if "us" not in kind) > 200
