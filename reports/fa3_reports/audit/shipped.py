"""Every compiled kernel that ships, as launches: those of the package, of the quantiser and of writes to a cache."""

from __future__ import annotations

from typing import Any

from fa3_kernels.plan.config import KERNEL_HEAD_DIMS
from fa3_kernels.plan.quantizer import ROTATED_HEAD_DIMS
from fa3_reference.cache import Cache
from fa3_reference.problem import AttentionProblem, Dtype
from fa3_reports.audit.calls import ShippedLaunch
from fa3_reports.audit.launches import launches


def _appending() -> list[ShippedLaunch]:
    """Return the launches that write to a cache."""
    lengths: dict[str, Any] = {"seqlens_q": (2, 1), "seqlens_k": (300, 1000), "nheads": 8, "nheads_kv": 2}
    lengths |= {"head_dim": 128, "causal": True}
    caches: tuple[tuple[str, Dtype, Cache], ...] = (
        ("fp16_plain", "fp16", Cache(16, new=(2, 1))),
        ("bf16_rotated", "bf16", Cache(16, new=(2, 1), rotary_dim=64)),
        ("fp16_interleaved", "fp16", Cache(0, new=(2, 1), rotary_dim=128, interleaved=True)),
        ("e4m3_plain", "e4m3", Cache(64, new=(2, 1))),
    )
    return [
        ShippedLaunch(f"append_{name}", AttentionProblem.varlen(**lengths, dtype=dtype, cache=cache), function="append")
        for name, dtype, cache in caches
    ]


def _quantisers(d: int) -> list[ShippedLaunch]:
    """Return the launches of the quantiser at one head_dim."""
    problem = AttentionProblem(2, 8, 2, 1000, 1000, d, dtype="bf16")
    choices: dict[str, dict[str, Any]] = {"plain": {}, "rotated": {"rotate": True}}
    if d == 128:
        choices |= {"head": {"scope": "head"}, "k_mean": {"rotate": True, "subtract_k_mean": True}}
    return [ShippedLaunch(f"quantize_d{d}_{name}", problem, x, "quantize_qkv") for name, x in choices.items()]


def shipped() -> tuple[ShippedLaunch, ...]:
    """Return the launches, in the order of every report: the quantiser's stand in front of the first backward.

    >>> len({x.function for x in shipped()})
    4
    """
    package = launches()
    first = next(place for place, x in enumerate(package) if x.function == "backward")
    quantisers = (x for d in KERNEL_HEAD_DIMS if d in ROTATED_HEAD_DIMS for x in _quantisers(d))
    return (*package[:first], *quantisers, *package[first:], *_appending())
