"""Gradients recorded on an H100: every head_dim, windows, packed sequences, groups, subnormal, huge and special values.

``golden/backward_recorded.xz`` holds a line for each of 952 launches, 268,805,440 gradients: the problem, the recipe
that draws its operands, and digests of the operands, of what the forward returned, and of every gradient whose bits no
order of additions in memory decides. Here a part of the short ones is run.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from fa3_kernels.plan.backward import backward_config
from fa3_kernels.plan.order import BackwardOrder
from fa3_kernels.twin.backward import Gradients, backward
from fa3_reference.formats import FORMATS, encode
from fa3_reference.problem import AttentionProblem, BackwardOperands
from fa3_reports.gradient_range import backward_range
from fa3verify.files import read_text
from fa3verify.inputs.recipe import Recipe
from fa3verify.operations.backward import drawn_dout
from tests.kernels.device_inputs import GOLDEN
from tests.kernels.twin.test_backward import FAMILY, NAMES, with_forward

STRIDE = 14  # of the launches, the short ones of which are run
PARTS = 4
MOST_PRODUCTS = 12_000_000  # scores times head_dim


@cache
def recorded() -> dict[str, dict[str, Any]]:
    _, *lines = read_text(GOLDEN / "backward_recorded.xz").splitlines()
    return {entry["key"]: entry for entry in map(json.loads, lines)}


def digest(*arrays: np.ndarray) -> str:
    found = hashlib.blake2b(digest_size=8)
    for x in arrays:
        found.update(np.ascontiguousarray(x).tobytes())
    return found.hexdigest()


def joint(digests: list[str]) -> str:
    return hashlib.blake2b(" ".join(digests).encode(), digest_size=8).hexdigest()


def of_heads(problem: AttentionProblem, x: np.ndarray, rows_of) -> list[str]:
    return [digest(rows_of(x, seq)[:, head]) for seq in problem.sequences() for head in range(x.shape[-2])]


def drawn(key: str) -> tuple[AttentionProblem, BackwardOperands]:
    entry = recorded()[key]
    problem, recipe = AttentionProblem.from_json(entry["problem"]), Recipe.from_json(entry["recipe"])
    fmt = FORMATS[problem.dtype]
    q, k, v, dout = (encode(x, fmt, "ieee") for x in (*recipe.draw(problem), drawn_dout(problem, recipe)))
    assert joint([digest(q, k, v), digest(dout)]) == entry["operands"], (
        "other operands are drawn here than were recorded"
    )
    operands = with_forward(problem, q, k, v, dout)
    lse = [digest(problem.rows_lse(operands.lse, s)[h]) for s in problem.sequences() for h in range(problem.nheads)]
    assert joint(of_heads(problem, operands.out, problem.rows_q) + lse) == entry["forward"]
    return problem, operands


def differing(key: str, order: BackwardOrder | None = None) -> list[str]:
    problem, operands = drawn(key)
    got = backward(problem, operands, backward_config(problem, family=FAMILY), order=order)
    rows = (problem.rows_q, problem.rows_k, problem.rows_k)
    found = {name: joint(of_heads(problem, x, y)) for name, x, y in zip(NAMES, got, rows, strict=True)}
    return [f"{key}.{name}" for name in NAMES if recorded()[key][name] not in (None, found[name])]


def chosen() -> list[str]:
    def products(problem: dict[str, Any]) -> int:
        sizes = (problem[x] for x in ("batch", "nheads", "seqlen_q", "seqlen_k", "head_dim"))
        return int(np.prod([*sizes]))

    return [key for key, entry in [*recorded().items()][::STRIDE] if products(entry["problem"]) <= MOST_PRODUCTS]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("part", range(PARTS))
def test_no_gradient_differs_from_what_was_recorded(part: int) -> None:
    keys = chosen()[part::PARTS]
    assert len(keys) >= 12
    assert not [name for key in keys for name in differing(key)]


def test_the_launches_that_are_run_are_of_every_kind() -> None:
    problems = [recorded()[key]["problem"] for key in chosen()]
    assert {p["head_dim"] for p in problems} >= {40, 64, 72, 96, 128, 160, 192, 224, 256}
    assert any(p["seqlens_q"] for p in problems)
    assert any(p["nheads"] > p["nheads_kv"] for p in problems)
    assert sum(p["window"] != [-1, -1] for p in problems) >= 10


@pytest.mark.parametrize(
    ("key", "switch", "value"),
    [("basic_fp16.189", "factor", "float32"), ("extremes.99", "keeps_subnormals", True)],
)
def test_switches_that_older_recordings_do_not_decide(key: str, switch: str, value: object) -> None:
    assert not differing(key)
    assert differing(key, replace(BackwardOrder(), **{switch: value}))


# dQ of 52 key blocks and of 8; dK and dV of 32 heads.
@pytest.mark.parametrize(("key", "names"), [("long.2", ["dq"]), ("long.3", ["dq"]), ("long.6", ["dk", "dv"])])
def test_what_was_recorded_lies_within_what_some_order_gives(key: str, names: list[str]) -> None:
    problem, operands = drawn(key)
    config = backward_config(problem, family=FAMILY)
    ends, ours = backward_range(problem, operands, config), backward(problem, operands, config)
    with np.load(GOLDEN / "backward.npz") as stored:
        kept = {name: stored[f"{key}.{name}"].view(operands.q.dtype) for name in names}
    observed = Gradients(**(ours._asdict() | kept))
    assert not any(x.any() for x in ends.outside(observed))
    assert not any(x.any() for x in ends.outside(ours))
    assert any((getattr(ours, name) != kept[name]).any() for name in names)
    wrong = {name: (x.view(np.uint16) ^ 2).view(x.dtype) for name, x in kept.items()}  # the last bit but one
    assert all(getattr(ends.outside(observed._replace(**wrong)), name).mean() > 0.9 for name in names)


def test_nan_of_the_next_packed_sequence_reaches_the_one_before() -> None:
    """As the library does (measured): the last tile of a packed sequence reads into the next one."""
    problem = AttentionProblem.varlen((70, 100), (128, 90), nheads=1, nheads_kv=1, head_dim=64)
    operands = drawn_for(problem)
    config = backward_config(problem, family=FAMILY)
    poisoned = operands.dout.copy()
    poisoned[70, 0, 3] = np.nan  # the first row of the second sequence
    got = backward(problem, replace(operands, dout=poisoned), config)
    first = slice(0, 128)
    assert np.isnan(got.dv[first, :, 3]).all()
    assert np.isnan(got.dk[first]).all()
    assert np.isfinite(backward(problem, operands, config).dk.astype(np.float64)).all()


def drawn_for(problem: AttentionProblem) -> BackwardOperands:
    recipe = Recipe("normal", seed=1)
    arrays = (*recipe.draw(problem), drawn_dout(problem, recipe))
    return with_forward(problem, *(encode(x, FORMATS[problem.dtype], "ieee") for x in arrays))
