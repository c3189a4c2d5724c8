"""The code under test: FlashAttention-3 kernels and their bit-exact CPU twins.

Users may import the names of this module; each is loaded when it is first used, so that importing the package needs no
torch. The functions need torch, and a Hopper GPU to be called.

>>> import fa3_kernels
>>> fa3_kernels.Config(dtype="e4m3", tile_n=160).out_dtype
'bf16'
"""

from typing import TYPE_CHECKING

__all__ = ["Config", "default_config", "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

if TYPE_CHECKING:
    from fa3_kernels.api import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
    from fa3_kernels.plan.config import Config, default_config
else:
    from fa3_reference.lazy import exporter

    __getattr__, __dir__ = exporter(
        __name__,
        {
            "Config": "fa3_kernels.plan.config",
            "default_config": "fa3_kernels.plan.config",
            "flash_attn_func": "fa3_kernels.api",
            "flash_attn_varlen_func": "fa3_kernels.api",
            "flash_attn_with_kvcache": "fa3_kernels.api",
        },
    )
