"""FlashAttention-4 on Hopper: its tiles, from flash_attn/cute/interface.py.

The code that ptxas makes of it was not read: a step is assumed to be FlashAttention-3's. No bits of it are known.
"""

from __future__ import annotations

from dataclasses import replace

from fa3_kernels.plan.families.flash3 import FLASH3, SIZES
from fa3_kernels.plan.families.record import Shipped

_TILES = {64: Shipped(192, 128), 128: Shipped(128, 128), 256: Shipped(128, 80, pingpong=False)}
FAMILIES = {
    "flash4": replace(
        FLASH3,
        title="FlashAttention-4",
        version="flash-attn 4.0.0b36",
        sizes={(False, d): replace(SIZES[False, d], shipped=tile, other=tile) for d, tile in _TILES.items()},
        dtypes=("fp16", "bf16"),
        tile=lambda problem, size: size.shipped,
        tile_order="a CTA each",
        pads_head_dim=False,
        is_reproduced=False,
    ),
}
