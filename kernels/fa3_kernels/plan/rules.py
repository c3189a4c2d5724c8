"""What a configuration of a kernel must keep to be one that wgmma and the family's program allow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from fa3_kernels.plan.config import Config

OutDtype = Literal["fp16", "bf16"]
K_STEP = {"fp16": 16, "bf16": 16, "e4m3": 32}  # keys or channels per wgmma instruction


def rules_of(c: Config) -> tuple[tuple[bool, str], ...]:
    """Return whether each rule is kept, and the rule in words."""
    traits = c.traits
    channels = 16 if c.is_fp8 else 8
    step = K_STEP[c.dtype]
    most = traits.head_dims(c.is_fp8)[-1]
    interval = c.promotion_interval
    is_part = c.is_fp8 and interval > 0 and interval % 32 == 0 and c.tile_n % interval == 0
    is_lockstep = traits.is_built_here and c.num_stages == 2 and not (c.pingpong or c.is_fp8)
    has_ring = c.intra_wg_overlap and c.warp_specialized and c.num_stages >= 2
    return (
        (c.out_dtype in get_args(OutDtype), f"out_dtype must be fp16 or bf16, got {c.out_dtype!r}"),
        (
            c.is_fp8 or c.out_dtype == c.dtype,
            f"a {c.dtype} kernel writes {c.dtype}, got out_dtype {c.out_dtype!r}",
        ),
        (
            0 < c.head_dim <= most and c.head_dim % channels == 0,
            f"head_dim must be a multiple of {channels} in [1, {most}], got {c.head_dim}",
        ),
        (
            0 < c.head_dim_v <= c.head_dim and c.head_dim_v % channels == 0,
            f"head_dim_v must be a multiple of {channels} in [1, {c.head_dim}], got {c.head_dim_v}",
        ),
        (c.tile_m in (64, 128, 192), f"tile_m must be 64, 128 or 192 (64 rows per warpgroup), got {c.tile_m}"),
        (
            c.num_consumer_warpgroups in (0, c.consumers),
            f"num_consumer_warpgroups must be {c.consumers} for tile_m {c.tile_m}, got {c.num_consumer_warpgroups}",
        ),
        (
            c.tile_n % step == 0 and 16 <= c.tile_n <= 256,
            f"tile_n must be a multiple of {step} in [16, 256] (k of wgmma), got {c.tile_n}",
        ),
        (
            interval == 0 or is_part,
            "promotion_interval must be 0, or for e4m3 a multiple of 32 that divides tile_n, "
            f"got {interval} with dtype {c.dtype} and tile_n {c.tile_n}",
        ),
        (1 <= c.num_splits <= 256, f"num_splits must lie in [1, 256], got {c.num_splits}"),
        (
            c.num_splits == 1 or traits.splits_keys,
            f"{traits.title} does not split keys, got num_splits {c.num_splits}",
        ),
        (1 <= c.num_stages <= 8, f"num_stages must lie in [1, 8], got {c.num_stages}"),
        (
            c.warp_specialized or is_lockstep,
            "without warp specialisation there is one schedule: our own, 16 bits, two stages, no pingpong",
        ),
        (c.softmax_stages in (2, 3), f"softmax_stages must be 2 or 3, got {c.softmax_stages}"),
        (
            c.softmax_stages == 2 or has_ring,
            "three softmax stages need intra_wg_overlap, warp specialisation and two stages of K",
        ),
    )
