"""What a table says of arrivals at mbarriers and of ``mma.sync``, one figure a line.

python -m fa3_reports.microbench.read_off TABLE.csv
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from fa3_reports.microbench.arrivals import MOST, ROUNDS, Kind
from fa3_reports.microbench.constants import Statistic, Stretches, read, select
from fa3_reports.microbench.warp_mma import CHAINS, COUNT, FLOPS, PEAK, TILES


def cycles_per_arrival(kind: Kind, warpgroups: int) -> Statistic:
    """Return what each further arrival adds to a round trip: all threads of the consumers against one of each."""

    def cycles(table: Stretches) -> float:
        few, most = warpgroups, MOST[warpgroups]
        trips = [
            select(table, "mbarrier_arrivals", kind=kind, arrivals=count, warpgroups=warpgroups)[0][0][0] / ROUNDS
            for count in (few, most)
        ]
        return (trips[1] - trips[0]) / (most - few)

    return cycles


def share_of_wgmma(experiment: str, warpgroups: int, **parameters: object) -> Statistic:
    """Return the fastest rate of so many warpgroups, as a fraction of what wgmma reaches."""

    def share(table: Stretches) -> float:
        found = select(table, experiment, count=COUNT, warpgroups=warpgroups, **parameters)
        fastest = min(max(group[0] for group in groups) for groups in found)
        return COUNT * 4 * warpgroups * FLOPS / fastest / PEAK

    return share


def figures() -> Mapping[str, Statistic]:
    """Return what is read off, by what it is called."""
    found: dict[str, Statistic] = {}
    kinds: tuple[Kind, ...] = ("empty", "both")
    for kind, warpgroups in product(kinds, MOST):
        name = f"cycles of an arrival, {kind}, {warpgroups} consumer warpgroups"
        found[name] = cycles_per_arrival(kind, warpgroups)
    for chains, warpgroups in product(CHAINS, (1, 2, 3, 4)):
        name = f"mma.sync over wgmma, {chains} accumulators, {4 * warpgroups} warps"
        found[name] = share_of_wgmma("mma_sync", warpgroups, chains=chains)
    for (rows, columns, has_rows), warpgroups in product(TILES, (1, 2)):
        loaded = "columns" if has_rows else "both operands"
        name = f"mma.sync over wgmma, {rows} x {columns} a warp, {loaded} by ldmatrix, {4 * warpgroups} warps"
        tile = {"rows": rows, "columns": columns, "has_rows": has_rows}
        found[name] = share_of_wgmma("mma_sync_ldmatrix", warpgroups, **tile)
    return found


def main(arguments: Sequence[str]) -> None:
    """Print the figures of the table that is given."""
    table = read(Path(arguments[0]))
    for name, statistic in figures().items():
        print(f"{statistic(table):8.3f}  {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
