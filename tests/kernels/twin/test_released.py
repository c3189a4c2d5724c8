"""Released kernels on the twin: 0 values differ from what they returned on a GPU, and every switch of an order shows.

``golden/released.json`` holds seeds and hashes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

from fa3_kernels.plan.config import Config, default_config
from fa3_kernels.plan.families import FAMILIES
from fa3_kernels.plan.order import Order
from fa3_kernels.twin.forward import Forward, forward
from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem, Descale, Operands
from fa3verify.cases.case import Case
from fa3verify.files import read_text
from tests.kernels.device_inputs import GOLDEN

PARTS = 8  # of the recorded launches, so that workers share them


def sha(x: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()[:16]


class Launch(NamedTuple):
    """One recorded call, by its ``key``, and the digests of its outputs."""

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
    return json.loads(read_text(GOLDEN / "released.json"))


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
    """Return which outputs differ in words, nothing where none does."""
    wrong = [name for name in ("out", "lse") if sha(getattr(got, name)) != getattr(launch, name)]
    return f"{launch.key}, {launch.problem}: {', '.join(wrong)} differ" if wrong else ""


def test_no_value_of_a_small_launch_differs_from_what_a_released_kernel_returned() -> None:
    """Every fourth of the small ones of every family; the next test has all launches."""
    wrong = []
    for kind, made in (("seeded", seeded), ("recorded", recorded)):
        small = [e for e in golden()[kind] if products(e) < 2_000_000]
        for family in RELEASED:
            chosen = [e for e in small if e["family"] == family][::4]
            wrong += [text for launch in map(made, chosen) if (text := differing(launch, launch.run()))]
    assert not wrong


def products(entry: dict[str, Any]) -> float:
    """Return the number of scores of a recorded call times its head_dim."""
    if "sizes" in entry:
        batch, nheads, _, seqlen_q, seqlen_k, head_dim, *_ = entry["sizes"]
        return batch * nheads * seqlen_q * seqlen_k * head_dim
    problem = Case.from_json(entry["case"]).problem
    return float(np.prod(problem.q_shape)) * problem.seqlen_k


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
def test_no_value_differs_from_what_a_released_kernel_returned(part: int) -> None:
    entries = [*map(seeded, golden()["seeded"][part::PARTS]), *map(recorded, golden()["recorded"][part::PARTS])]
    assert not [text for launch in entries if (text := differing(launch, launch.run()))]


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


# A recorded launch that shows the switch put as it is in ours, the cheapest that was found.
SHOWN_BY = {
    ("flash3", "combine"): "flash3-rec-433",
    ("flash3", "compiles_masked_apart"): "flash3.corners-rec-18",
    ("flash3", "descales"): "flash3-rec-1174",
    ("flash3", "factor"): "flash3-rec-1044",
    ("flash3", "hides_nan"): "flash3-rec-1075",
    ("flash3", "keeps_subnormals"): "flash3-rec-62",
    ("flash3", "lse"): "flash3-rec-190",
    ("flash3", "maxima"): "flash3-rec-190",
    ("flash3", "row_sum"): "flash3-rec-190",
    ("flash3", "softcap"): "flash3-rec-614",
    ("cudnn", "contracts_exponent"): "cudnn-rec-44",
    ("cudnn", "diagonal"): "cudnn-rec-8",
    ("cudnn", "factor"): "cudnn-rec-59",
    ("cudnn", "keeps_subnormals"): "cudnn-rec-178",
    ("cudnn", "keys"): "cudnn-rec-1",
    ("cudnn", "lse"): "cudnn-rec-44",
    ("cudnn", "quad"): "cudnn-rec-44",
    ("cudnn", "row_sum"): "cudnn-rec-44",
    ("flash2", "combine"): "flash2-rec-2",
    ("flash2", "contracts_exponent"): "flash2-rec-8",
    ("flash2", "factor"): "flash2-rec-76",
    ("flash2", "gradual_exp2"): "flash2.corners-rec-141",
    ("flash2", "inverse"): "flash2-rec-34",
    ("flash2", "lse"): "flash2-rec-8",
    ("flash2", "lse_empty"): "flash2-rec-28",
    ("flash2", "maxima"): "flash2-rec-8",
    ("flash2", "row_sum"): "flash2-rec-8",
}


def test_every_switch_of_an_order_has_a_launch_that_shows_it() -> None:
    assert set(SHOWN_BY) == set(switches())


def shows(family: str, key: str, **changes: object) -> bool:
    """Whether the launch of this key comes out otherwise by a changed order."""
    found = [seeded(e) for e in golden()["seeded"] if (e["family"], e["key"]) == (family, key)]
    found += [recorded(e) for e in golden()["recorded"] if (e["family"], e["key"]) == (family, key)]
    assert found, "no launch has this key"
    other = replace(FAMILIES[family].order, **changes)
    return any(differing(launch, launch.run(other)) for launch in found)


@pytest.mark.parametrize(("family", "switch"), SHOWN_BY)
def test_every_switch_of_an_order_shows_in_recorded_values(family: str, switch: str) -> None:
    default = next(f.default for f in fields(Order) if f.name == switch)
    assert shows(family, SHOWN_BY[family, switch], **{switch: default})


# Mistakes that are no switch of ours put back: the other side of what the families share with us.
MISTAKES = [
    ("flash3", "keys", "left_to_right", "flash3-rec-166"),
    ("flash3", "contracts_exponent", False, "flash3-rec-190"),
    ("flash3", "contracts_row_sum", False, "flash3-rec-1059"),
    ("flash3", "quad", "near_first", "flash3-rec-190"),
    ("flash3", "inverse", "division", "flash3-rec-839"),
    ("cudnn", "contracts_row_sum", False, "cudnn-1"),
    ("cudnn", "inverse", "division", "cudnn-rec-94"),
    ("cudnn", "row_sum", "running", "cudnn-1"),
    ("flash2", "keys", "left_to_right", "flash2-rec-1"),
    ("flash2", "contracts_row_sum", False, "flash2-rec-10"),
    ("flash2", "quad", "near_first", "flash2-rec-8"),
]


@pytest.mark.parametrize(("family", "switch", "value", "key"), MISTAKES)
def test_a_planted_mistake_of_the_order_shows_in_recorded_values(
    family: str, switch: str, value: object, key: str
) -> None:
    assert shows(family, key, **{switch: value})
