"""The builds of FlashAttention-3 that serve, on the twin: 0 values differ from what vLLM's and SGLang's returned.

Outputs are of vllm 0.33.0, sglang-kernel 0.4.5 and fa3-fwd 0.0.3 on an H200 (torch 2.11): ``golden/serving.json`` has
the first 16 hexadecimal digits of their SHA-256, or 8 of their SHA-1, as they were recorded, and
``golden/serving.npz`` operands that no short seed draws. Configurations are those that the plan chooses by itself:
nothing here names a tile.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from fa3_kernels.plan.config import default_config
from fa3_kernels.plan.families import traits_of
from fa3_kernels.plan.order import Order
from fa3_kernels.twin.forward import forward
from fa3_reference.cache import Cache
from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem, Descale, Operands
from tests.kernels.device_inputs import GOLDEN

BF16 = FORMATS["bf16"].dtype


def normal(seed: int, *shape: int, std: float = 1.0, dtype: str = "bf16") -> np.ndarray:
    """Operands as the recorded calls drew them."""
    x = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) * np.float32(std)
    return x.astype(FORMATS[dtype].dtype)


@dataclass(frozen=True, slots=True)
class Call:
    """One call: packed sequences, the operands of a part of its heads, and what was chosen."""

    problem: AttentionProblem
    operands: Operands
    num_splits: int = 1

    def has_bits(self, build: str, recorded: str, order: Order | None = None) -> bool:
        """Tell whether the twin of a family, or of one over pages, returns what was recorded."""
        family, _, pages = build.partition(".")
        problem = (
            replace(self.problem, cache=replace(self.problem.cache or Cache(), page_size=16)) if pages else self.problem
        )
        config = default_config(problem, family=family, num_splits=self.num_splits)
        out = forward(self.problem, self.operands, config, order=order).out
        name = "sha256" if len(recorded) == 16 else "sha1"
        return hashlib.new(name, np.ascontiguousarray(out).tobytes()).hexdigest().startswith(recorded)


def call(
    queries: list[np.ndarray],
    keys: list[np.ndarray],
    values: list[np.ndarray],
    *,
    sinks: np.ndarray | None = None,
    descales: np.ndarray | None = None,
    num_splits: int = 1,
    **semantics: Any,
) -> Call:
    """Pack sequences; ``descales`` are one of Q, K and V for all."""
    lengths = [[len(x) for x in side] for side in (queries, keys)]
    sizes = {"nheads": queries[0].shape[1], "nheads_kv": keys[0].shape[1], "head_dim": keys[0].shape[2]}
    dtype = "e4m3" if queries[0].dtype != BF16 else "bf16"
    problem = AttentionProblem.varlen(*lengths, **sizes, head_dim_v=values[0].shape[2], dtype=dtype, **semantics)
    problem = replace(problem, sinks=sinks is not None)
    factors = {}
    if descales is not None:
        for name, value, heads in zip(
            "qkv", descales, (problem.nheads, problem.nheads_kv, problem.nheads_kv), strict=True
        ):
            factors[f"{name}_descale"] = Descale(np.full((problem.batch, heads, 1), value, np.float32))
    packed = [np.concatenate(x) for x in (queries, keys, values)]
    return Call(problem, Operands(*packed, **factors, sinks=sinks), num_splits)


def group(kv_head: int, size: int = 4) -> slice:
    """Query heads that read a kv head."""
    return slice(kv_head * size, kv_head * size + size)


def prefill(dtype: str) -> Call:
    q = normal(10, 128, 8, 128, dtype=dtype)
    k, v = (normal(seed, 300, 2, 128, dtype=dtype)[:, :1] for seed in (11, 12))
    descales = np.random.default_rng(13).uniform(0.5, 1.5, (3, 1, 2)).astype(np.float32)[:, 0, 0]
    return call([q[:, group(0)]], [k], [v], causal=True, descales=descales if dtype == "e4m3" else None)


def decode(name: str) -> Call:
    """One query over the keys of one kv head, e4m3: what no seed draws in a short time."""
    with np.load(GOLDEN / "serving.npz") as stored:
        q, k, v = (stored[f"{name}.{x}"].view(FORMATS["e4m3"].dtype) for x in "qkv")
        return call([q], [k], [v], causal=True, descales=stored[f"{name}.descales"])


def sinks(is_local: bool) -> Call:
    """Four queries over 300 and 700 keys, with one sink a head, which was bf16."""
    lengths, kv_head = {3: 300, 4: 700}, 6
    scores = normal(40, 32, std=2.0)[group(kv_head)].astype(np.float32)
    k, v = (normal(seed, 5, 704, 8, 128)[:, :, kv_head : kv_head + 1] for seed in (41, 42))
    q = normal(48, 5, 4, 32, 128)[:, :, group(kv_head)]
    semantics: dict[str, Any] = {"window": (127, 0)} if is_local else {"causal": True}
    rows = [[x[b][:n] for b, n in lengths.items()] for x in (k, v)]
    return call([q[b] for b in lengths], *rows, sinks=scores, **semantics)


def window(queries: int) -> Call:
    """Windows of 101 keys: of 80 queries every row tile begins its key tiles elsewhere."""
    lengths = (10, 100, 300, 700)
    q = normal(113 + queries, 4, queries, 32, 128)
    keys, values = ([x[b][:n] for b, n in enumerate(lengths)] for x in (normal(s, 4, 768, 8, 128) for s in (111, 112)))
    return call(list(q), keys, values, window=(100, 0))


def left_padded() -> Call:
    """Keys from the eighth on, in four parts."""
    k, v = (normal(seed, 3, 512, 8, 128)[1, 7:300, 2:3] for seed in (71, 72))
    return call([normal(77, 3, 4, 32, 128)[1][:, group(2)]], [k], [v], causal=True, num_splits=4)


def absorbed() -> Call:
    """Multi-head latent attention: V of 512 channels is also K's, and Q has a second part for it."""
    k, v = normal(91, 3, 704, 1, 64)[1, :129], normal(92, 3, 704, 1, 512, std=0.5)[1, :129]
    q = np.concatenate([normal(97, 3, 4, 16, 64)[1], normal(197, 3, 4, 16, 512, std=0.5)[1]], axis=-1)
    return call([q], [np.concatenate([k, v], axis=-1)], [v], causal=True, qv=True, softmax_scale=576**-0.5)


def rotated(is_interleaved: bool) -> Call:
    """Three keys that are appended to none, one, 100 and 500, and rotated by their positions, as queries are."""
    before, kv_head = (0, 1, 100, 500), 4
    k, v = (normal(seed, 4, 576, 8, 128)[:, :, kv_head : kv_head + 1] for seed in (61, 62))
    new_k, new_v = (normal(seed, 4, 3, 8, 128)[:, :, kv_head : kv_head + 1] for seed in (63, 64))
    q = normal(65, 4, 3, 32, 128)[:, :, group(kv_head)]
    keys, values = (
        [np.concatenate([x[b][:n], y[b]]) for b, n in enumerate(before)] for x, y in ((k, new_k), (v, new_v))
    )
    cache = Cache(new=(3,) * 4, rotary_dim=64, interleaved=is_interleaved)
    return call(list(q), keys, values, causal=True, cache=cache)


CALLS: dict[str, Callable[[], Call]] = {
    "prefill_bf16": lambda: prefill("bf16"),
    "prefill_e4m3": lambda: prefill("e4m3"),
    "decode_129": lambda: decode("decode_129"),
    "decode_160": lambda: decode("decode_160"),
    "sinks": lambda: sinks(is_local=False),
    "sinks_window": lambda: sinks(is_local=True),
    "window_4": lambda: window(4),
    "window_80": lambda: window(80),
    "left_padded": left_padded,
    "absorbed": absorbed,
    "rotated_pairs": lambda: rotated(is_interleaved=True),
    "rotated_halves": lambda: rotated(is_interleaved=False),
}


@cache
def golden() -> dict[str, dict[str, str]]:
    return json.loads((GOLDEN / "serving.json").read_text())


RECORDED = [(name, family) for name in CALLS for family in golden()[name]]


@pytest.mark.parametrize(("name", "family"), RECORDED)
def test_no_value_differs_from_what_a_serving_build_returned(name: str, family: str) -> None:
    assert CALLS[name]().has_bits(family, golden()[name][family])


# What tells these builds' order from upstream's, and a call whose recorded outputs show it.
SHOWN_BY = {
    ("vllm", "contracts_promotion"): ("decode_129", True),
    ("vllm.paged", "key_tiles"): ("sinks_window", "from_first_key"),
    ("sglang.paged", "key_tiles"): ("sinks_window", "from_first_key"),
}


@pytest.mark.parametrize(("family", "switch"), SHOWN_BY)
def test_every_switch_that_upstream_does_not_have_shows_in_recorded_values(family: str, switch: str) -> None:
    name, value = SHOWN_BY[family, switch]
    order = traits_of(family.partition(".")[0]).order
    assert getattr(order, switch) != value
    assert not CALLS[name]().has_bits(family, golden()[name][family], replace(order, **{switch: value}))


def test_a_sink_in_base_2_shows_in_recorded_values() -> None:
    one = CALLS["sinks"]()
    scores = one.operands.sinks
    assert scores is not None
    wrong = replace(one, operands=replace(one.operands, sinks=(scores * np.float32(np.log(2))).astype(np.float32)))
    assert not wrong.has_bits("vllm.paged", golden()["sinks"]["vllm.paged"])
