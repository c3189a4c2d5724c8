"""Released kernels on the twin: 0 values differ from what they returned on a GPU, and every switch of an order shows.

``golden/released.json`` holds seeds and hashes, ``golden/released.npz`` some of the outputs, to locate a difference.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

from fa3_kernels.plan.config import Config, default_config
from fa3_kernels.plan.order import Order
from fa3_kernels.plan.traits import FAMILIES
from fa3_kernels.twin.forward import Forward, forward
from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem, Descale, Operands
from fa3verify.cases import Case
from tests.kernels.device_inputs import GOLDEN

PARTS = 8  # of the recorded launches, so that workers share them


def sha(x: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()[:16]


class Launch(NamedTuple):
    """One recorded call: ``key`` names its outputs where they are kept whole."""

    family: str
    problem: AttentionProblem
    operands: Operands
    config: Config
    out: str
    lse: str
    key: str

    def run(self, order: Order | None = None) -> Forward:
        return forward(self.problem, self.operands, self.config, order=order)


@cache
def golden() -> dict[str, Any]:
    return json.loads((GOLDEN / "released.json").read_text())


def drawn(recipe: str, rng: np.random.Generator, shape: tuple[int, ...], which: str) -> np.ndarray:
    """Values as the recorded calls drew them."""
    x = rng.standard_normal(shape)
    if recipe == "peaky" and which != "v":
        x *= 4
    if recipe == "outlier":
        x += 10 * rng.standard_normal(shape) * (rng.random(shape) < 0.002)
    if recipe == "offset" and which == "v":
        x += 1
    return np.clip(x, -448, 448)


def descale(values: list, group: int) -> Descale:
    return Descale(np.repeat(np.array(values, np.float32), group, axis=1)[:, :, None])


def seeded(case: dict[str, Any]) -> Launch:
    """A call whose operands come of a seed; cuDNN's were drawn with heads in front of positions, of which there is
    one."""
    problem = AttentionProblem(*case["sizes"], dtype=case["dtype"], causal=case["causal"])
    rng = np.random.default_rng(case["seed"])
    dtype = FORMATS[problem.dtype].dtype
    shapes = {"q": problem.q_shape, "k": problem.k_shape, "v": problem.v_shape}
    arrays = [drawn(case["recipe"], rng, shape, which).astype(dtype) for which, shape in shapes.items()]
    factors = case.get("descales")
    descales = [descale(x, group) for x, group in zip(factors, (problem.group, 1, 1), strict=True)] if factors else ()
    x = Operands(*arrays, *descales)
    return Launch(
        case["family"], problem, x, config_of(case["family"], problem, {}), case["out"], case["lse"], case["key"]
    )


def recorded(entry: dict[str, Any]) -> Launch:
    """A call whose operands come of a case of the harness."""
    case = Case.from_json(entry["case"])
    config = config_of(entry["family"], case.problem, dict(case.changes))
    return Launch(entry["family"], case.problem, case.operands(), config, entry["out"], entry["lse"], entry["key"])


def config_of(family: str, problem: AttentionProblem, options: dict[str, Any]) -> Config:
    return default_config(problem, family=family, **{k: v for k, v in options.items() if v is not None})


def differing(launch: Launch, got: Forward) -> str:
    """Nothing, or what differs: the elements where the outputs are kept, else which of them."""
    wrong = [name for name in ("out", "lse") if sha(getattr(got, name)) != getattr(launch, name)]
    if not wrong:
        return ""
    with np.load(GOLDEN / "released.npz") as kept:
        counts = {
            name: int(
                (kept[f"{launch.key}.{name}"] != getattr(got, name).view(f"u{getattr(got, name).itemsize}")).sum()
            )
            for name in wrong
            if f"{launch.key}.{name}" in kept
        }
    return f"{launch.family} {launch.problem}: {', '.join(wrong)} differ; elements {counts or 'not kept'}"


@pytest.mark.parametrize("part", range(PARTS))
def test_no_value_differs_from_what_a_released_kernel_returned(part: int) -> None:
    entries = [*map(seeded, golden()["seeded"][part::PARTS]), *map(recorded, golden()["recorded"][part::PARTS])]
    assert not [text for launch in entries if (text := differing(launch, launch.run()))]


def test_the_kept_outputs_are_those_of_the_hashes() -> None:
    hashes = {
        f"{entry['key']}.{name}": entry[name]
        for kind in ("seeded", "recorded")
        for entry in golden()[kind]
        for name in ("out", "lse")
    }
    with np.load(GOLDEN / "released.npz") as kept:
        assert len(kept.files) >= 40
        assert {name: sha(kept[name]) for name in kept.files} == {name: hashes[name] for name in kept.files}


RELEASED = ("flash3", "cudnn", "flash2")
# What no recorded launch decides, so that upstream's source alone stands for it.
BY_SOURCE = {
    ("flash3", "lse_without_keys"),  # no key at all
    ("flash2", "lse_without_keys"),
    ("flash2", "compiles_masked_apart"),
    ("flash2", "splits_visible"),  # a causal mask over parts of several key blocks
    ("flash2", "hides_nan"),
}


def switches() -> Iterator[tuple[str, str]]:
    """Every switch of a family's order that is not as in ours."""
    for name in RELEASED:
        order = FAMILIES[name].order
        found = {(name, f.name) for f in fields(Order) if getattr(order, f.name) != f.default}
        yield from sorted(found - BY_SOURCE)


@cache
def shortest(family: str) -> list[Launch]:
    """A family's launches, those with the fewest scores first, and some of each kind."""
    kept = [e for e in golden()["seeded"] if e["family"] == family and np.prod(e["sizes"]) < 1e7]
    found = [*map(seeded, kept), *(recorded(e) for e in golden()["recorded"] if e["family"] == family)]
    found += [seeded(e) for e in golden()["seeded"][-60:] if e["key"] == f"{family}-tail"]
    return sorted(found, key=lambda launch: np.prod(launch.problem.q_shape) * launch.problem.seqlen_k)


# Where a switch can show that acts in few launches.
ACTS: dict[str, Callable[[Launch], bool]] = {
    "combine": lambda x: x.config.num_splits > 1,
    "softcap": lambda x: x.problem.softcap > 0,
    "compiles_masked_apart": lambda x: x.problem.causal,
    "lse_empty": lambda x: x.problem.causal,
}


@pytest.mark.parametrize(("family", "switch"), [*switches()])
def test_every_switch_of_an_order_shows_in_recorded_values(family: str, switch: str) -> None:
    order = FAMILIES[family].order
    default = next(f.default for f in fields(Order) if f.name == switch)
    other = replace(order, **{switch: default})
    launches = filter(ACTS.get(switch), shortest(family))
    assert any(differing(launch, launch.run(other)) for launch in launches)


# Mistakes that are no switch of ours put back: the other side of what the families share with us.
MISTAKES = [
    ("flash3", "keys", "left_to_right"),
    ("flash3", "contracts_exponent", False),
    ("flash3", "contracts_row_sum", False),
    ("flash3", "quad", "near_first"),
    ("flash3", "inverse", "division"),
    ("cudnn", "contracts_row_sum", False),
    ("cudnn", "inverse", "division"),
    ("cudnn", "row_sum", "running"),
    ("flash2", "keys", "left_to_right"),
    ("flash2", "contracts_row_sum", False),
    ("flash2", "quad", "near_first"),
]


@pytest.mark.parametrize(("family", "switch", "value"), MISTAKES)
def test_a_planted_mistake_of_the_order_shows_in_recorded_values(family: str, switch: str, value: object) -> None:
    other = replace(FAMILIES[family].order, **{switch: value})
    assert any(differing(launch, launch.run(other)) for launch in shortest(family))
