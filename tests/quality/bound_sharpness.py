"""How sharp bound and enclosure are, by family: ``python -m tests.quality.bound_sharpness --jobs 16 --out table.md``.

Error / bound of the twins over the quick profile's cases; the same with the largest error that the enclosure admits;
and how much larger that is than the largest error of 64 executions of the stated order that are drawn at random, over
the first case of a family. Elements without a bound are left out and counted.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from fa3_reference.attention import attention
from fa3_reference.bounds.enclosure import forward_enclosure
from fa3_reference.bounds.forward import forward_bound
from fa3verify.campaign.profiles import PROFILES, families, family_cases
from fa3verify.judging.metrics import share_of
from fa3verify.known import registry
from tests.reference.bounds.executions import forward_execution

KERNELS = ("twin.fp16", "twin.bf16", "twin.e4m3")
EXECUTIONS = 64
HEADS = (
    "kernel",
    "family",
    "elements",
    "no bound",
    "error / bound, median",
    "bound > 100 errors",
    "enclosed, median",
    "one value",
    "outside",
    "enclosure > 100 executions",
    "truth s",
    "bound s",
    "enclosure s",
    "population",
)


def measure(kernel: str, family: str) -> list[object]:
    """One row of the table."""
    asked = registry.find(kernel)
    cases = family_cases(asked, family, PROFILES["quick"], 0)
    digest, seconds = hashlib.sha256(), np.zeros(3)
    bounds, enclosed, single, loose = [], [], [], []
    outside = unbounded = elements = 0
    for number, case in enumerate(cases):
        problem, x = case.problem, case.operands()
        config = asked.config_for(problem, case.changes)
        model = config.kernel_model()
        got = asked.code.run(problem, x, config).out.astype(np.float64)
        digest.update(got.tobytes())
        start = time.perf_counter()
        truth = attention(problem, *x.dequantized(problem)).out
        seconds[0] += time.perf_counter() - start
        start = time.perf_counter()
        bound = forward_bound(problem, x, model).out
        seconds[1] += time.perf_counter() - start
        start = time.perf_counter()
        low, high = forward_enclosure(problem, x, model).out
        seconds[2] += time.perf_counter() - start
        allowed = np.maximum(np.abs(low - truth), np.abs(high - truth))
        ok = np.isfinite(bound) & np.isfinite(truth) & np.isfinite(allowed)
        elements, unbounded = elements + ok.size, unbounded + int((~ok).sum())
        outside += int((~((low <= got) & (got <= high)))[ok].sum())
        error = np.abs(got - truth)
        bounds.append(share_of(error, bound)[ok])
        enclosed.append(share_of(error, allowed)[ok])
        single.append((low == high)[ok])
        if number == 0 and model.num_splits == 1:
            rng, reached = np.random.default_rng(0), np.zeros(truth.shape)
            for _ in range(EXECUTIONS):
                reached = np.maximum(reached, np.abs(forward_execution(problem, x, model, rng).out.low - truth))
            loose.append(share_of(reached, allowed)[ok])
    bounds, enclosed, single, loose = (np.concatenate(values) for values in (bounds, enclosed, single, loose))
    return [
        kernel,
        family,
        elements,
        unbounded,
        f"{np.median(bounds):.3f}",
        f"{np.mean(bounds < 0.01):.1%}",
        f"{np.median(enclosed):.3f}",
        f"{np.mean(single):.1%}",
        outside,
        f"{np.mean(loose < 0.01):.2%}",
        *(f"{s:.2f}" for s in seconds),
        digest.hexdigest()[:8],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    tasks = [(kernel, family) for kernel in KERNELS for family in families(registry.find(kernel), PROFILES["quick"])]
    with ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool:
        rows = list(pool.map(measure, *zip(*tasks, strict=True)))
    lines = [HEADS, ["---"] * len(HEADS), *rows]
    arguments.out.write_text("".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines))


if __name__ == "__main__":
    main()
