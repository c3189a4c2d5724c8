"""The adversary on orders that no shipped family has: whether bred inputs break the bound that is proved for them.

python -m tests.quality.adversary_of_orders --problems 10000 --jobs 16 --out FILE
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Any

from fa3_kernels.plan.config import Config
from fa3_kernels.plan.order import Order
from fa3_kernels.twin.arithmetic import Source
from fa3_kernels.twin.forward import forward
from fa3_reference.bounds.model import KernelModel
from fa3_reference.problem import Dtype
from fa3_reports.adversary.forward import Twin, TwinSearch, over_bound
from fa3_reports.adversary.search import islands_of
from fa3_reports.adversary.violations import Violations
from fa3verify.search.forward.colony import ForwardColony, Island
from fa3verify.search.forward.judge import Pair

_IN_TURN = {"factor": "in_turn", "maxima": "unscaled", "keys": "left_to_right"}
ORDERS: dict[str, Order] = {
    "maxima that stay over 8": Order(rescale_threshold_log2=8.0),
    "maxima that stay over 4, unscaled": Order(rescale_threshold_log2=4.0, maxima="unscaled", lse="natural"),
    "a row sum of rounded weights": Order(row_sum_of="rounded"),
    "a folded scale": Order(factor="folded"),
    "a folded scale with log2(e)": Order(factor="folded_log2", lse="natural"),
    "scale and log2(e) in turn": Order(factor="in_turn"),
    "scale and log2(e) in turn, unscaled": Order(**_IN_TURN, lse="natural_by_scale", contracts_exponent=False),
    "scale and log2(e) in turn, tanh": Order(**_IN_TURN, lse="natural", softcap="tanh", keeps_subnormals=False),
    "binary32 products": Order(accumulator="fp32"),
    "binary32 products and P": Order(accumulator="fp32", probabilities="fp32"),
    "binary32 products, maxima that stay, rounded weights": Order(
        accumulator="fp32", rescale_threshold_log2=8.0, row_sum_of="rounded"
    ),
}


@dataclass(frozen=True, slots=True)
class OrderTwin(Twin):
    """Says that a colony is run in one order, whatever the family of its island, and held to the bound of another."""

    order: Order
    assumed: Order

    def model(self, config: Config) -> KernelModel:
        return config.kernel_model(self.assumed)

    def outputs(self, colony: ForwardColony, config: Config, ideal: frozenset[Source]) -> Pair:
        return forward(colony.problem, colony.operands, config, ideal=ideal, order=self.order)


def searched(name: str, dtype: Dtype, problems: int, seed: int, assumed: str = "") -> dict[str, Any]:
    """Search every island of a dtype that splits no keys, and return what was met; the bound is that of ``assumed``."""
    judge = over_bound(kernel=OrderTwin(ORDERS[name], ORDERS[assumed or name]))
    islands: list[Island] = [island for island in islands_of(dtype) if island.num_splits == 1]  # no split is learned
    total = Violations()
    for index, island in enumerate(islands):
        one = TwinSearch(island, [seed, index], judge)
        total.add(one.until(-(-problems // len(islands))), is_later=False)
    best = {record: total.height(record) for record in TwinSearch.JUDGE.records}
    return {"order": name, "dtype": dtype, "problems": total.problems, "above_1": total.above_1, "largest": best}


def main(arguments: list[str] | None = None) -> int:
    """Search every order and print the largest error / bound; 1 if one is above 1."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--problems", type=int, default=10_000, help="of each order and dtype")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out")
    asked = parser.parse_args(arguments)
    names, dtypes = zip(*product(ORDERS, ("fp16", "bf16")), strict=True)
    with ProcessPoolExecutor(asked.jobs) as pool:
        rows = []
        for row in pool.map(searched, names, dtypes, [asked.problems] * len(names), [asked.seed] * len(names)):
            rows.append(row)
            largest = ", ".join(f"{record} {value:.3f}" for record, value in row["largest"].items())
            print(f"{row['order']}, {row['dtype']}: {row['problems']} problems, {row['above_1']} above 1: {largest}")
    if asked.out:
        with open(asked.out, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    return int(any(row["above_1"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
