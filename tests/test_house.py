"""The house stays within its budgets, and the budgets follow it down."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import house
from tests.house import FIGURES, SLACK, House, budget

BUILT = """
@dataclass(frozen=True, slots=True)
class Part:
    first: dict[str, Any]

class Row(NamedTuple):
    first: Mapping[str, Any]

def fields(given: dict[str, int]) -> Row:
    "Return what is given."
    return Row(1, 2, 3, 4, 5, 6)

Part(*given), Row(1, 2, 3, 4, 5), shards.Row(1, 2, 3, 4, 5, third=6), other(*given)
"""


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.__name__)
def test_house_is_within_its_budget(figure: Callable[[House], int]) -> None:
    """A house above its budget has grown; one far below has a budget that is to be written lower."""
    name = figure.__name__
    today = figure(house.house())
    most = budget()[name]
    assert today <= most, f"{name}: {today}, at most {most} by {house.TABLE.name}; delete {today - most}"
    least = most - SLACK.get(name, 0)
    assert today >= least, f"{name}: {today} where {most} are allowed; `python -m tests.house` lowers the budget"


def test_every_budget_is_of_a_figure() -> None:
    assert sorted(budget()) == sorted(figure.__name__ for figure in FIGURES)


def test_statements_and_records_are_counted_as_they_say() -> None:
    built = {Path("built.py"): house.syntax(BUILT)}
    assert house.statements(built) == 7  # two classes, a field each, a function, its return, the calls; no docstring
    assert house.records(built) == 2
    assert house.records_by_position(built) == 1
    assert house.splatted_records(built) == 1
    assert house.untyped_mappings(built) == 2


def test_long_functions_leave_device_code_and_signatures_out() -> None:
    body = "    x = 1\n" * house.LONG_FUNCTION
    many = ", ".join(f"x{i}" for i in range(house.LONG_SIGNATURE + 1))
    short = house.syntax("def f(x):\n" + body.removesuffix("    x = 1\n"))
    long = house.syntax("def f(x):\n" + body)
    public = house.syntax(f"def f({many}):\n" + body)
    assert [house.long_functions({Path("a.py"): nodes}) for nodes in (short, long, public)] == [0, 1, 0]
    assert house.long_functions({Path("kernels/gluon/a.py"): long}) == 0
