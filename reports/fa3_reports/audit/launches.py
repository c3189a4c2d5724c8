"""Every compiled kernel of attention that ships, as a list of launches that reach all of them.

The audit compiles these launches (:mod:`fa3_reports.audit.calls`) and adds those of the quantiser and of writes to a
cache, which have no schedule. A new compile-time switch of a kernel needs a launch that turns it on.
"""

from __future__ import annotations

from typing import Any

from fa3_kernels.plan.backward import backward_of
from fa3_kernels.plan.config import KERNEL_HEAD_DIMS
from fa3_kernels.plan.families import OURS
from fa3_reference.cache import Cache
from fa3_reference.problem import AttentionProblem, Dtype
from fa3_reports.audit.calls import ShippedLaunch

# Kinds of problems that differ in their compiled code: which keys are hidden, how rows lie in tiles, where results go.
# By name: (seqlen_k, semantics, choices). 1024 keys are whole tiles, 1000 are not.
_MASKS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "dense": (1024, {}, {}),
    "tail": (1000, {}, {}),
    "causal": (1000, {"causal": True}, {}),
    "left": (1000, {"window": (100, -1)}, {}),
    "window": (1000, {"window": (100, 0)}, {}),
    "softcap": (1000, {"softcap": 20.0, "causal": True}, {}),
    "splits": (1000, {}, {"num_splits": 2}),
    "no_pingpong": (1024, {}, {"pingpong": False}),
    "no_overlap": (1024, {}, {"intra_wg_overlap": False}),
}
# Those of a dtype. The kernels of bf16 are those of fp16 with another format in the instructions.
_MASKS_OF = {
    "fp16": tuple(_MASKS),
    "bf16": ("dense", "causal"),
    "e4m3": ("dense", "causal", "window", "softcap", "splits"),
}
# What dense and causal launches of e4m3 are compiled with as well, by how their names end.
_E4M3_ONLY = {"chained": {"promotion_interval": 0}, "blocks": {"descale_blocks": (64, 128, 128)}}

_PACKED: dict[str, Any] = {"seqlens_q": (100, 200), "seqlens_k": (300, 200), "nheads": 8, "nheads_kv": 4}
_NARROW_V = ((192, 128),)  # sizes of Q and K with a smaller one of V: those of multi-head latent attention
# At head_dim 64 a tile has 192 rows or 128, by the launch; where keys are hidden or packed, mostly 128.
_TALL = ("dense", "tail", "splits", "no_pingpong", "no_overlap")
_BOTH = ("dense", "tail", "splits", "dense_chained", "dense_blocks")


def _of_head_dim(dtype: Dtype, d: int, v: int) -> list[ShippedLaunch]:
    """Return the launches of the forward of one dtype and pair of head_dim and head_dim_v."""
    tall = {"tile": (192, 128)} if d == 64 else {}
    launches = [
        ShippedLaunch(
            name,
            AttentionProblem(2, 4, 4, 1000, keys, d, v, dtype=dtype, **semantics),
            choices | (tall if name in _TALL else {}),
        )
        for name, (keys, semantics, choices) in _MASKS.items()
        if name in _MASKS_OF[dtype]
    ]
    if dtype == "e4m3":
        launches += [
            ShippedLaunch(f"{x.name}_{ending}", x.problem, {**x.choices, **choices})
            for ending, choices in _E4M3_ONLY.items()
            for x in launches
            if x.name in _MASKS_OF["bf16"]
        ]
    if dtype == "fp16":
        decode = AttentionProblem(2, 16, 2, 20, 1000, d, v, dtype=dtype, causal=True)
        lengths: dict[str, Any] = {**_PACKED, "head_dim": d, "head_dim_v": v, "dtype": dtype}
        if d == 128:
            launches += [ShippedLaunch("lockstep", launches[0].problem, {"warp_specialize": False})]
        launches += [
            ShippedLaunch("packed", decode, {"pack_gqa": True}),
            ShippedLaunch("packed_splits", decode, {"pack_gqa": True, "num_splits": 3}),
            ShippedLaunch("varlen", AttentionProblem.varlen(**lengths), {"pack_gqa": False}),
            ShippedLaunch("varlen_causal", AttentionProblem.varlen(**lengths, causal=True), {"pack_gqa": False}),
            ShippedLaunch(
                "varlen_window_packed", AttentionProblem.varlen(**lengths, window=(100, 0)), {"pack_gqa": True}
            ),
        ]
    if d == 64:
        launches.append(
            ShippedLaunch("causal_long", AttentionProblem(1, 1, 1, 4096, 4096, d, dtype=dtype, causal=True), tall)
        )
        launches += [
            ShippedLaunch(f"{x.name}_128_rows", x.problem, {**x.choices, "tile": (128, 128)})
            for x in launches
            if x.name in _BOTH
        ]
    size = f"{dtype}_d{d}" if d == v else f"{dtype}_d{d}_v{v}"
    return [ShippedLaunch(f"{size}_{x.name}", x.problem, x.choices) for x in launches]


# Kinds of caches: pages that are parts of a tile or whole tiles, rows without pages, sinks. By name: (page_size,
# semantics, choices).
_PAGED: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "pages16_causal": (16, {"causal": True}, {}),
    "pages256_sinks_splits": (256, {"sinks": True}, {"num_splits": 3}),
    "pages16_step": (16, {"causal": True, "seqlens_q": (2, 1)}, {}),
    "pages64_step_splits": (64, {"seqlens_q": (1, 1)}, {"num_splits": 3}),
    "pages1_causal": (1, {"causal": True}, {}),  # gathered row by row
    "pages1_step_of_7": (1, {"causal": True, "seqlens_q": (2, 1), "nheads": 14}, {}),  # stored by threads
}
_PAGED_ALONE: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {  # where fp16 has head_dim 128
    "pages8_window_softcap": (8, {"window": (100, 0), "softcap": 20.0}, {}),
    "pages64_sinks": (64, {"sinks": True}, {"pack_gqa": False}),
    "rows_splits": (0, {}, {"num_splits": 3}),
}


def _paged(dtype: Dtype, d: int, v: int) -> list[ShippedLaunch]:
    """Return the launches over a cache of one dtype and pair of head_dim and head_dim_v."""
    size = f"{dtype}_d{d}" if d == v else f"{dtype}_d{d}_v{v}"
    kinds = _PAGED | (_PAGED_ALONE if (dtype, d) == ("fp16", 128) else {})
    lengths = {**_PACKED, "seqlens_k": (300, 1000), "nheads_kv": 2, "head_dim": d, "head_dim_v": v, "dtype": dtype}
    problems = {
        name: AttentionProblem.varlen(**{**lengths, "cache": Cache(page_size), **semantics})
        for name, (page_size, semantics, _) in kinds.items()
    }
    return [ShippedLaunch(f"{size}_{x}", problems[x], {"pack_gqa": True, **kinds[x][2]}) for x in kinds]


# By name, as in _MASKS. Kernels with a fixed order of dQ are compiled apart: causal tiles fold in them, and packed ones
# go round as dense ones do.
_BACKWARD: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "dense": (1024, {}, {}),
    "in_turn": (1024, {}, {"is_deterministic": True}),
    "causal_in_turn": (1000, {"causal": True}, {"is_deterministic": True}),
}


def _backward(d: int) -> list[ShippedLaunch]:
    """Return the launches of the backward at one head_dim."""
    launches = [
        ShippedLaunch(name, AttentionProblem(2, 4, 2, 1000, keys, d, **semantics), choices)
        for name, (keys, semantics, choices) in _BACKWARD.items()
    ]
    launches.append(
        ShippedLaunch("varlen_in_turn", AttentionProblem.varlen(**_PACKED, head_dim=d), {"is_deterministic": True})
    )
    if d == 128:
        capped = AttentionProblem(2, 4, 2, 1000, 1000, d, dtype="bf16", window=(100, 0), softcap=20.0)
        launches.append(ShippedLaunch("bf16_window_softcap", capped))
    if d == 192:
        launches.append(
            ShippedLaunch("narrow_v", AttentionProblem(2, 4, 2, 1000, 1000, d, head_dim_v=128, causal=True))
        )
    return [ShippedLaunch(f"backward_d{d}_{x.name}", x.problem, x.choices, "backward") for x in launches]


def launches() -> tuple[ShippedLaunch, ...]:
    """Return the launches of forwards and backwards, in the order of every report.

    >>> [x.name for x in launches()][:2]
    ['fp16_d64_dense', 'fp16_d64_tail']
    """
    dtypes: tuple[Dtype, ...] = ("fp16", "bf16", "e4m3")
    sizes = (*((d, d) for d in KERNEL_HEAD_DIMS), *_NARROW_V)
    forward = [x for dtype in dtypes for d, v in sizes for x in _of_head_dim(dtype, d, v)]
    gradients = (x for d in backward_of(OURS).tiles for x in _backward(d))
    served: list[tuple[Dtype, int, int]] = [(dtype, *size) for dtype in dtypes for size in sizes]
    paged = [x for kind in served if kind[0] != "bf16" or kind[1:] == (128, 128) for x in _paged(*kind)]
    return (*forward, *gradients, *paged)
