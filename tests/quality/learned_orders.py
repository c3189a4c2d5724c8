"""Kernels for trials of ``fa3verify learn``: twins of drawn orders, twins with mistakes, and kernels of no known order.

python -m tests.quality.learned_orders drawn 200 --jobs 16 --out FILE
python -m tests.quality.learned_orders faulty; ... outside; ... shipped
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from fa3_kernels.faults.table import Rewrite, load
from fa3_kernels.plan.config import Config
from fa3_kernels.plan.families import OURS, traits_of
from fa3_kernels.plan.order import Order
from fa3_kernels.twin.forward import forward
from fa3_reference.problem import AttentionProblem, Dtype, Operands
from fa3verify.kernels.functions import array_kernel
from fa3verify.kernels.record import Code, Kernel
from fa3verify.known import registry
from fa3verify.learn import Learned, learn, space
from fa3verify.operations.forward import Result
from tests.quality.outside.right import batch

INF = float("inf")


@dataclass(frozen=True, slots=True)
class DrawnTwin(Code):
    """The twin of any order, with one tile for all calls."""

    tile_n: int
    order: Order
    promotion_interval: int = 0

    def configure(self, problem: AttentionProblem) -> Config:
        head_dim, _ = traits_of(OURS).compiled_head_dims(problem)
        return Config(problem.dtype, head_dim, 128, self.tile_n, promotion_interval=self.promotion_interval)

    def run(self, problem: AttentionProblem, operands: Operands, config: Config) -> Result:
        return Result(*forward(problem, operands, config, order=self.order))

    def kernel(self, name: str, dtype: Dtype) -> Kernel:
        features = frozenset({"causal", "gqa", "softcap"})
        return Kernel(name, dtype, self, features, accumulator="either")


def drawn(seed: int) -> tuple[Kernel, DrawnTwin, int]:
    """Return the twin of a random order, as a kernel that says nothing of it, and a head_dim."""
    rng = np.random.default_rng([32, seed])

    def one(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    dtype = one("fp16", "bf16", "fp16", "bf16", "e4m3")
    maxima = one("scaled", "unscaled")
    lses = (
        ("log2", "natural", "log2_polynomial")
        if maxima == "scaled"
        else ("natural", "natural_by_scale", "log2_polynomial")
    )
    lses = lses if dtype != "e4m3" else lses[:2]  # the polynomial's does not take the offset of P away
    order = Order(
        keys=one("right_to_left", "left_to_right"),
        diagonal=one("bottom_right", "top_left"),
        factor=one(*space.FACTORS) if dtype != "e4m3" else one(*space.FACTORS[:3]),
        descales=one("in_turn", "product_first") if dtype == "e4m3" else "in_turn",
        softcap=one("ex2", "tanh"),
        maxima=maxima,
        contracts_exponent=one(True, False),
        rescale="of_difference" if maxima == "scaled" or dtype == "e4m3" else one("of_difference", "contracted"),
        gradual_exp2=one(False, True),
        row_sum=one("block_pairs", "block_serial", "block_row", "running"),
        contracts_row_sum=one(True, False),
        quad=one("far_first", "near_first"),
        inverse=one("reciprocal", "division"),
        lse=one(*lses),
        lse_empty=one(-INF, INF),
        lse_without_keys=one(-INF, INF),
        hides_nan=one(True, False),
        compiles_masked_apart=one(True, False),
        keeps_subnormals=one(True, False),
        rescale_threshold_log2=one(0.0, 0.0, 0.0, 8.0, 4.0) if dtype != "e4m3" else 0.0,
        row_sum_of=one("weights", "weights", "rounded"),
        accumulator=one("wgmma", "wgmma", "wgmma", "fp32") if dtype != "e4m3" else "wgmma",
    )
    tile = int(rng.integers(1, 9)) * 32
    interval = one(0, 32, tile) if dtype == "e4m3" else 0
    twin = DrawnTwin(tile, order, interval if tile % max(interval, 1) == 0 else 0)
    return twin.kernel(f"drawn.{seed}", dtype), twin, one(64, 128)


def grade(found: Learned, twin: DrawnTwin) -> list[str]:
    """Return what was found wrongly: a tile, an interval, or a field whose true value no survivor has."""
    wrong = []
    known = found.structure
    if (known.tile_n, known.promotion_interval) != (twin.tile_n, twin.promotion_interval):
        wrong.append(f"tile {known.tile_n} promoted {known.promotion_interval}")
    if not found.orders:
        wrong.append(f"none survives: {found.why}")
    elif twin.order not in found.orders:
        values = {f.name: {getattr(order, f.name) for order in found.orders} for f in fields(Order)}
        wrong += [
            f"{n} {v}, not {getattr(twin.order, n)}" for n, v in values.items() if getattr(twin.order, n) not in v
        ]
        wrong = wrong or ["no survivor has all the true values at once"]
    if found.differing:
        wrong.append(f"{found.differing} fresh outputs differ")
    return wrong


def try_drawn(seed: int, outputs: int) -> dict[str, Any]:
    """Learn one drawn order and grade what was found."""
    kernel, twin, head_dim = drawn(seed)
    found = learn(kernel, head_dim, outputs=outputs)
    return {
        "name": kernel.name,
        "dtype": kernel.dtype,
        "head_dim": head_dim,
        "wrong": grade(found, twin),
        "launches": found.launches,
        "seconds": round(found.seconds, 1),
        "survivors": len(found.orders),
        "free": {name: list(map(str, values)) for name, values in found.free.items()},
        "outputs": found.outputs,
        "differing": found.differing,
        "twin": repr(twin),
    }


# Kernels with one mistake, each by its name in the registry, and words that must stand among what is found of it.
FAULTY: tuple[tuple[str, str], ...] = (
    ("twin.fp16+truncated_p", "P is truncated"),
    ("twin.fp16+bf16_p", "P is bf16 where the operands are fp16"),
    ("twin.flash3.bf16+missed_rescale", "O is not rescaled in the second visited block"),
    ("twin.flash3.bf16+fp16_row_sum", "the row sum is kept in fp16"),
    ("twin.flash2.fp16+fp16_accumulator", "O is kept in fp16"),
    ("twin.fp16+coarse_exp2", "exp2 is a quadratic polynomial"),
    ("twin.fp16+finite_sentinel", "the running maximum starts at -5e4"),
    ("twin.cudnn.fp16+missing_column", "column 0 of every tile is left out"),
    ("twin.fp16+truncated_output", "the output is truncated"),
    ("twin.fp16+unguarded_inf", "-inf minus -inf"),
    ("twin.fp16+causal_top_left", "aligned top-left"),
    ("twin.fp16+kv_head_modulo", "kv head h mod nheads_kv"),
    ("twin.fp16+lse_base_2", "lse is returned in base 2"),
    ("twin.fp16+dropped_last_tile", "the last key block"),
    ("twin.flash3.fp16+stale_v", "still holds the tile before it"),
    ("twin.fp16+swapped_v_rows", "rows 2 and 3 of every 16 rows of V"),
    ("twin.fp16+softcap_after_mask", "softcap is applied after the mask"),
    ("twin.triton_unscaled.bf16+wrong_softmax_scale", "1/sqrt(head_dim + 1)"),
    ("twin.e4m3+truncated_p", "P is truncated"),
    ("twin.e4m3+no_promotion", "P V is chained"),
    ("twin.e4m3+no_p_offset", "P is not scaled by 2^8"),
    ("twin.e4m3+lse_keeps_offset", "taken out of the e4m3 lse"),
    ("twin.e4m3+unclamped_scale", "underflows to 0"),
    ("22 bits", "sums of P V keep 22 bits"),
)
_CHAIN = "if start == 0 else o) + chain)\n        return o"
_IN_22_BITS = Rewrite(
    "forward", (_CHAIN, f"{_CHAIN[:-8]}return (o.view(np.uint32) & np.uint32(2**32 - 4)).view(np.float32)")
)


def _faulty(name: str) -> Kernel:
    if name != "22 bits":
        return registry.find(name)
    package = load("fa3_twin_of_22_bits", _IN_22_BITS)

    def run(problem: AttentionProblem, operands: Operands, config: Config) -> Result:
        return Result(*import_module(f"{package}.forward").forward(problem, operands, config))

    return replace(registry.find("twin.fp16").altered(run=run), name=name, twin=None)


def try_faulty(index: int, outputs: int) -> dict[str, Any]:
    """Learn one kernel with a mistake, which must be among what is found."""
    name, words = FAULTY[index]
    found = learn(_faulty(name), 64, outputs=outputs)
    wrong = [] if any(words in told for told in found.findings) else [f"{words!r} is not among {found.findings}"]
    return row_of(found, name, wrong)


def _blocked(dtype: Dtype, **options: Any) -> Callable[[], Kernel]:
    def attention(q, k, v, *, softmax_scale, causal=False):
        return batch(q, k, v, softmax_scale=softmax_scale, causal=causal, **options)

    return lambda: array_kernel(attention, dtypes=(dtype,), layout="bshd", accumulator="fp32")[0]


def _named(name: str) -> Callable[[], Kernel]:
    return lambda: registry.find(name)


# Kernels that no order of the space describes, and what is certain of each all the same.
OUTSIDE: tuple[tuple[Callable[[], Kernel], dict[str, Any]], ...] = (
    (_blocked("fp16", tile=64), {"tile_n": 64, "keys": "left_to_right", "probabilities": "fp16"}),
    (_blocked("fp16", tile=32, backwards=True), {"tile_n": 32, "keys": "right_to_left"}),
    (_blocked("bf16", tile=64), {"tile_n": 64, "keys": "left_to_right", "probabilities": "bf16"}),
    (_blocked("bf16", tile=128, backwards=True), {"tile_n": 128, "keys": "right_to_left"}),
    (_blocked("fp16", tile=128), {"tile_n": 128, "tile_causal": 128, "row_sum_of": "weights"}),
    (_blocked("fp16", tile=192), {"tile_n": 192, "keys": "left_to_right"}),
    (_blocked("fp16", tile=256, backwards=True), {"tile_n": 256, "keys": "right_to_left"}),
    (_blocked("bf16", tile=96), {"tile_n": 96, "probabilities": "bf16"}),
    (_blocked("bf16", tile=64, lazy=5.0), {"tile_n": 64, "threshold_log2": 7.0}),  # 5 is 7.2 in log2
    (_blocked("fp16", tile=48), {"tile_n": 48}),
    (_blocked("fp16", tile=768), {"tile_n": 0, "probabilities": "fp16"}),
    (_named("torch.math.fp16"), {"tile_n": 0}),
    (_named("torch.math.bf16"), {"tile_n": 0}),
    (_named("torch.flash.fp16"), {"keys": "left_to_right"}),
    (_named("torch.flash.bf16"), {"keys": "left_to_right"}),
    (_named("torch.flex.bf16"), {"tile_n": 0}),
    (_named("jax.xla.fp16"), {"tile_n": 0}),
    (_named("jax.xla.bf16"), {"tile_n": 0}),
    (_named("onnxruntime.fp16"), {"tile_n": 0}),
    (_named("transformers.eager.bf16"), {"tile_n": 0}),
)


def try_outside(index: int, outputs: int) -> dict[str, Any]:
    """Learn one kernel of no known order: none may survive, and what is certain must be so."""
    made, facts = OUTSIDE[index]
    kernel = made()
    found = learn(kernel, 64, outputs=outputs)
    known = {name: getattr(found.structure, name) for name in facts}
    wrong = ["acquitted"] if found.is_whole else []
    wrong += [f"{name} {known[name]!r}, not {value!r}" for name, value in facts.items() if known[name] != value]
    return row_of(found, f"outside.{index}.{kernel.name}", wrong)


def row_of(found: Learned, name: str, wrong: list[str]) -> dict[str, Any]:
    """Return a row of what became of a kernel."""
    told = {"words": list(found.words()), "findings": found.findings}
    return {"name": name, "wrong": wrong, "launches": found.launches, "seconds": round(found.seconds, 1), **told}


SHIPPED = (
    *("twin.flash2.fp16", "twin.flash2.bf16", "twin.flash3.fp16", "twin.flash3.bf16", "twin.flash3.e4m3"),
    *("twin.flash3.dew.fp16", "twin.flash3.dew.bf16", "twin.cudnn.fp16", "twin.cudnn.bf16"),
    *("twin.triton_unscaled.fp16", "twin.triton_unscaled.bf16", "twin.fp16", "twin.bf16", "twin.e4m3"),
)


def try_shipped(index: int, outputs: int) -> dict[str, Any]:
    """Learn the twin of a row of the table, which the learner does not read while it learns."""
    name = SHIPPED[index]
    found = learn(registry.find(name), 64, outputs=outputs)
    return row_of(found, name, [] if found.is_whole else ["not learned"])


TRIALS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "drawn": try_drawn,
    "faulty": try_faulty,
    "outside": try_outside,
    "shipped": try_shipped,
}
COUNTS = {"faulty": len(FAULTY), "outside": len(OUTSIDE), "shipped": len(SHIPPED)}


def carried_out(trial: str, seed: int, outputs: int) -> dict[str, Any]:
    """Run one trial; one that ends in an error has failed."""
    try:
        return TRIALS[trial](seed, outputs)
    except Exception as error:
        return {"name": f"{trial}.{seed}", "wrong": [repr(error)]}


def main(arguments: list[str] | None = None) -> int:
    """Run trials and write what became of each; 1 if one failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("trial", choices=TRIALS)
    parser.add_argument("count", type=int, nargs="?", help="of drawn orders, or of the rows of a table: all")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, nargs="*")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--outputs", type=int, default=100_000)
    parser.add_argument("--out")
    asked = parser.parse_args(arguments)
    count = asked.count or COUNTS.get(asked.trial, 200)
    seeds = asked.seeds or range(asked.first, asked.first + count)
    with ProcessPoolExecutor(asked.jobs) as pool:
        rows = []
        for row in pool.map(partial(carried_out, asked.trial), seeds, [asked.outputs] * len(seeds)):
            rows.append(row)
            if row["wrong"]:
                print(row["name"], row["wrong"], row.get("twin", ""), flush=True)
    failed = sum(bool(row["wrong"]) for row in rows)
    seconds = [row["seconds"] for row in rows if "seconds" in row]
    print(
        f"{len(rows) - failed} of {len(rows)} right; seconds median {np.median(seconds):.1f}, most {max(seconds):.1f}"
    )
    if asked.out:
        with open(asked.out, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
