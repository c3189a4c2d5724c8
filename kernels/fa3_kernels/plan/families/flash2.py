"""FlashAttention-2 as torch runs it: the tiles of its two kernels, one of which splits the keys where tiles are few.

Sources, of the repository Dao-AILab/flash-attention: csrc/flash_attn/flash_api.cpp and
csrc/flash_attn/src/flash_fwd_launch_template.h.
"""

from __future__ import annotations

import numpy as np

from fa3_kernels.plan.families.cudnn import refused_by_torch
from fa3_kernels.plan.families.flash3 import FULL, MAX_SPLITS, SMS, ceil, first_good
from fa3_kernels.plan.families.record import Shipped, Size, Traits
from fa3_kernels.plan.order import Order
from fa3_reference.problem import AttentionProblem


def flash2_splits(problem: AttentionProblem) -> int:
    """Return how many splits torch's FlashAttention-2 takes for a problem.

    With one query the heads that share a kv head become rows of a tile. Packed sequences are split only then.

    >>> flash2_splits(AttentionProblem(1, 1, 1, 200, 5000, 128))
    40
    """
    keys = 256 if problem.head_dim <= 64 else 128 if problem.head_dim <= 128 else 64
    is_swapped = problem.seqlen_q == 1 and problem.group > 1
    if problem.is_varlen and not is_swapped:
        return 1
    heads, rows = (problem.nheads_kv, problem.group) if is_swapped else (problem.nheads, problem.seqlen_q)
    tiles = problem.batch * heads * ceil(rows, 64)
    blocks = ceil(problem.seqlen_k, keys)
    if tiles >= FULL * np.float32(2 * SMS):
        return 1
    most = min(MAX_SPLITS, 2 * SMS, blocks)
    return first_good(
        tiles, 2 * SMS, most, lambda splits: splits == 1 or ceil(blocks, splits) != ceil(blocks, splits - 1)
    )


def _tile(problem: AttentionProblem, size: Size) -> Shipped:
    """Return the tile of the kernel for splits if the keys are split, otherwise that of the other kernel."""
    return size.other if flash2_splits(problem) > 1 else size.shipped


FAMILIES = {
    "flash2": Traits(
        "FlashAttention-2",
        "torch 2.11.0",
        {
            (False, d): Size(Shipped(*tile), Shipped(64, split_keys), rows=(64, 128))
            for d, tile, split_keys in (
                (32, (128, 128), 256),
                (64, (128, 128), 256),
                (96, (128, 64), 128),
                (128, (128, 64), 128),
                (192, (128, 64), 64),
                (256, (64, 64), 64),
            )
        },
        tile=_tile,
        splits=lambda problem, tile_m, tile_n: flash2_splits(problem),
        splits_unasked=True,
        dtypes=("fp16", "bf16"),
        order=Order(
            factor="of_float32",
            maxima="unscaled",
            contracts_exponent=False,
            gradual_exp2=True,
            row_sum="running",
            inverse="division",
            lse="natural_by_scale",
            lse_empty=float("inf"),
            lse_without_keys=float("inf"),
            hides_nan=True,
            compiles_masked_apart=True,
            combine="flash2",
            splits_visible=False,
        ),
        pads_head_dim=True,
        is_reproduced=True,
        features=frozenset({"causal", "gqa", "varlen"}),
        refuses=refused_by_torch,
    ),
}
