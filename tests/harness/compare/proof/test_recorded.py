"""Classes of recorded calls of three binaries, predicted from the plan alone, and their bits from the twin.

Calls of one query over 2,000 keys in 22 batches, with num_splits 1, 0 and 4, with scheduler metadata or without, 32
heads on 8 of head_dim 128, on an H200: ``recorded.json`` has the digests of the row's outputs.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from fa3_kernels.plan.families import traits_of
from fa3_kernels.twin.forward import forward
from fa3_reference.cache import Cache
from fa3_reference.problem import AttentionProblem, Operands
from fa3verify.compare.proof.plans import Batch, planner

KEYS, OTHERS, CAPACITY = 2000, 3000, 3008
SIZES = {"nheads": 32, "nheads_kv": 8, "head_dim": 128, "causal": True}
RECORDED = json.loads(Path(__file__).with_name("recorded.json").read_text())
BUILDS = [(family, dtype) for family in RECORDED for dtype in RECORDED[family]]
FORMATS = {"bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn}


def lengths(name):
    """Return the sequences of a recorded batch, the row's own first."""
    own = ((1, KEYS),)
    if name.startswith("last of its own"):
        return ((int(name.split()[-1]), KEYS),)
    if name.startswith("+prefill"):
        return (*own, (int(name.split()[-1]), OTHERS))
    count = {"alone": 0, "last of 9": 8}.get(name)
    return own + ((1, OTHERS),) * (int(name) if count is None else count)


def planned(family, dtype, case):
    """Return what is launched for a recorded call: the plan, its configuration, and what decides the row's bits.

    The host knows the capacity of the cache; metadata were made for the longest keys.
    """
    name, splits, metadata = case.split("|")
    batch = Batch(lengths(name))
    longest = max(k for _, k in batch.lengths) if metadata == "1" else CAPACITY
    family, _, pages = family.partition(".")
    sizes = SIZES | ({"cache": Cache(16)} if pages else {})
    asked = planner(f"twin.{family}.{dtype}[num_splits={splits}]", sizes, "chunk")
    asked = replace(asked, declared=(0, longest))
    config = asked.config(len(batch.lengths), asked.longest(batch.lengths))
    return replace(config, num_splits=asked.splits(config, batch.lengths)), asked.bits(batch)


@pytest.mark.parametrize(("family", "dtype"), BUILDS)
def test_calls_have_equal_digests_where_their_plans_decide_equal_bits(family, dtype):
    digests = {case: digest for digest, cases in RECORDED[family][dtype].items() for case in cases}
    assert len(digests) == 78
    bits = {case: planned(family, dtype, case)[1] for case in digests}
    wrong = [(a, b) for a, b in combinations(digests, 2) if (digests[a] == digests[b]) != (bits[a] == bits[b])]
    assert wrong == []


def normal(seed, shape, dtype):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32).astype(FORMATS[dtype])


@pytest.mark.parametrize(("family", "dtype"), BUILDS)
def test_the_twin_has_the_bits_of_every_class_but_where_it_says_that_it_has_not(family, dtype):
    problem = AttentionProblem(1, 32, 8, 1, KEYS, 128, dtype=dtype)  # type: ignore[arg-type]
    if traits_of(family.partition(".")[0]).refuses(problem):
        assert (family, dtype) == ("vllm.paged", "e4m3")
        return
    k, v = (normal(seed, (CAPACITY, 8, 128), dtype)[:KEYS] for seed in (31, 32))
    operands = Operands(normal(30, (2000, 32, 128), dtype)[None, -1:], k[None], v[None])
    for digest, cases in RECORDED[family][dtype].items():
        config, _ = planned(family, dtype, cases[0])
        out = np.ascontiguousarray(forward(problem, operands, config).out)
        assert hashlib.sha1(out.tobytes()).hexdigest()[:8] == digest, cases[0]
