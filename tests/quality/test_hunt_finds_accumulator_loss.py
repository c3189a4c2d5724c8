"""The hunt finds what normal inputs hide: the sums that e4m3 loses over long keys without promotion."""

from __future__ import annotations

import pytest

from fa3_reference.attention import attention
from fa3verify.kernels import calls
from fa3verify.known.registry import find
from fa3verify.search import Ratio, hunt
from fa3verify.search.forward.colony import individual
from fa3verify.search.grounds import value_of

PROBLEMS, SEED = 112, 1  # reports/notes/hunt.md has other seeds


@pytest.mark.nightly  # 112 problems of 2,048 keys; tests/harness/hunt has the same search with fewer keys
def test_accumulator_loss_is_found_from_a_normal_start_at_2048_keys():
    faulty, sound = find("twin.e4m3+no_promotion"), find("twin.e4m3")
    found = hunt(faulty, Ratio(), PROBLEMS, SEED, grounds=("long",))
    assert found.curve[0][0] == 16, "the first generation is normal"
    assert found.curve[0][3] < 1, "normal inputs do not show it"
    best = found.best["out"]
    assert best.value > 1
    assert value_of(sound, Ratio(), best.content)["out"] <= 1, "it is the fault's doing"
    colony, (row, column) = individual(best.content)
    assert colony.island.keys == 2048
    got = calls.run(faulty, colony.problem, colony.operands, faulty.config_for(colony.problem))["out"]
    exact = attention(colony.problem, *colony.operands.dequantized(colony.problem)).out
    got, exact = (x.reshape(16, -1)[row, column] for x in (got, exact))
    assert abs(got) < 0.98 * abs(exact), "the sum is lost, not only rounded"
