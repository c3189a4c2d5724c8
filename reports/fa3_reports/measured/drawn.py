"""Draw six public kernels from the list of those that nobody here has described, and six more.

    python -m fa3_reports.measured.drawn reports/h200/schedules/sources.toml

The list was committed before it was drawn from, so that no kernel is in it or out of it for how fast it is.
"""

from __future__ import annotations

import random
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

DRAW = 20261130
SPARES = 20261201
COUNT = 6
NEXT = 20261202  # of the second six, drawn from those that are left when the first six have been timed


def drawn(names: Sequence[str], unbuildable: Sequence[str] = ()) -> list[str]:
    """Return the kernels drawn; one that cannot be built leaves its place to the first spare that can.

    Raises
    ------
    ValueError
        If more were left out than there are spares.
    """
    first = random.Random(DRAW).sample(names, COUNT)
    spares = iter(spares_of(names))
    chosen = list(first)
    for place, name in enumerate(first):
        if name in unbuildable:
            spare = next((each for each in spares if each not in unbuildable), None)
            if spare is None:
                raise ValueError(f"no spare is left in the place of {name}")
            chosen[place] = spare
    return chosen


def spares_of(names: Sequence[str]) -> list[str]:
    """Return the spares of the second draw, in the order in which they take a place."""
    first = random.Random(DRAW).sample(names, COUNT)
    return random.Random(SPARES).sample([name for name in names if name not in first], COUNT)


def next_six(names: Sequence[str], unbuildable: Sequence[str] = ()) -> list[str]:
    """Return the six kernels of the second test: of the names that the first one left, the first six that can be built
    in the order of one draw of all."""
    known = {*drawn(names, unbuildable), *unbuildable}
    left = [name for name in names if name not in known]
    return random.Random(NEXT).sample(left, len(left))[:COUNT]


def main(arguments: Sequence[str]) -> None:
    """Print the kernels drawn from the list that is given, and those of the second test."""
    listed = tomllib.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    names = [kernel["name"] for kernel in listed["kernel"]]
    dropped = [kernel["name"] for kernel in listed["kernel"] if "dropped" in kernel]
    print("\n".join([*drawn(names, dropped), *next_six(names, dropped)]))


if __name__ == "__main__":
    main(sys.argv[1:])
