"""Other ways of dQ to memory: variants are the shipped kernel but for two places, and add what they say."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton")

from fa3_reference.problem import AttentionProblem
from tests.gpu import dq_paths
from tests.gpu.dq_paths import SHARE
from tests.kernels.audit.opcodes import count

pytestmark = pytest.mark.optional

PROBLEM = AttentionProblem(1, 4, 4, 1024, 1024, 64)


@pytest.mark.parametrize("name", ["backward", "backward_wide"])
@pytest.mark.parametrize("times", [0, 2])
def test_a_kernel_that_hands_dq_on_otherwise_is_refused(name: str, times: int) -> None:
    text = (dq_paths.FOLDER / f"{name}.py").read_text(encoding="utf-8")
    place = dq_paths.REPLACED[name][0][0]
    assert dq_paths.replaced(name, text) != text
    with pytest.raises(ValueError, match=f"has it {times} times"):
        dq_paths.replaced(name, text.replace(place, place * times))


@pytest.mark.parametrize(
    ("name", "tma", "red"), [("red of 4, whole lines", 0, 2 * 8), ("tma, the consumer", 2, 0), ("neither", 0, 0)]
)
def test_a_path_adds_a_row_block_in_as_many_instructions_as_its_form_takes(name: str, tma: int, red: int) -> None:
    """Of two warpgroups, each with 32 elements of dQ in a thread."""
    found = dq_paths.compiled(name, PROBLEM)
    assert (count(found, "UTMAREDG"), count(found, "RED")) == (tma, red)
    assert not found.serialisation


def test_elements_that_lie_in_lines_are_found_again() -> None:
    """Where a thread puts its four elements of 16 rows and 8 channels, as wgmma holds them: 16 bytes a lane in turn."""
    tile, lines = np.arange(SHARE * SHARE).reshape(SHARE, SHARE), np.zeros((SHARE, SHARE), int)
    for warp, lane, chunk, element in np.ndindex(4, 32, 8, 4):
        row = 16 * warp + lane // 4 + 8 * (element // 2)
        channel = 8 * chunk + 2 * (lane % 4) + element % 2
        lines[16 * warp + 2 * chunk + lane // 16, 4 * (lane % 16) + element] = tile[row, channel]
    assert np.array_equal(dq_paths.in_place(np.tile(lines, (2, 3))), np.tile(tile, (2, 3)))
