"""The table of other people's kernels. One that does not load is kept in the list, missing, with the reason.

``--peers DIR`` names a folder with their libraries; ``*.so.xz`` are unpacked beside themselves on first use. In DIR are
looked for: ``fa3_fwd_C.so`` (fa3), ``libdew_flash_attn3.so`` (fa3.dew), ``fa4/`` (fa4, or installed) and
``nvidia_cudnn_frontend*.whl`` (cudnn.fp8, or installed).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend

from fa3verify.adapters import cudnn_fp8, flash3_dew, flash3_fwd, flash4, torch_flex, torch_sdpa
from fa3verify.gpu.bench.cells import Cell
from fa3verify.gpu.bench.kernels import Inputs, Kernel, Prepare, Run, Unsupported


class Adapter(NamedTuple):
    """One peer: what it is, which operands it takes, and how it is loaded from the peers' folder."""

    about: str
    dtypes: tuple[str, ...]
    load: Callable[[Path | None], Prepare]


_TORCH, _SIXTEEN_BIT = f"torch {torch.__version__}", ("fp16", "bf16")
ADAPTERS: dict[str, Adapter] = {
    "torch.cudnn": Adapter(
        f"{_TORCH}, cuDNN {torch.backends.cudnn.version()}",
        _SIXTEEN_BIT,
        lambda _: torch_sdpa.prepare_with(SDPBackend.CUDNN_ATTENTION),
    ),
    "torch.flash2": Adapter(
        f"{_TORCH}, FlashAttention-2", _SIXTEEN_BIT, lambda _: torch_sdpa.prepare_with(SDPBackend.FLASH_ATTENTION)
    ),
    "torch.flex": Adapter(f"{_TORCH}, FlexAttention compiled", _SIXTEEN_BIT, lambda _: torch_flex.prepare),
    "fa3": Adapter("official FlashAttention-3, fa3-fwd", ("bf16", "e4m3"), flash3_fwd.load),
    "fa3.dew": Adapter("official FlashAttention-3, dew-flash-attn-cu13", _SIXTEEN_BIT, flash3_dew.load),
    "fa4": Adapter("FlashAttention-4 CuTe DSL on SM90", _SIXTEEN_BIT, flash4.load),
    "cudnn.fp8": Adapter("cuDNN frontend, e4m3 in and out", ("e4m3",), cudnn_fp8.load),
}


def load(name: str, adapter: Adapter, folder: Path | None) -> Kernel:
    """Load a peer now; whatever goes wrong is its reason to be missing."""
    try:
        return Kernel(name, adapter.about, adapter.dtypes, adapter.load(folder))
    except Exception as error:  # a third party's library may raise anything
        text = " ".join(str(error).split())[:200]
        reason = text if isinstance(error, Unsupported) else f"{type(error).__name__}: {text}"

        def prepare(cell: Cell, inputs: Sequence[Inputs]) -> Run:
            raise Unsupported(reason)

        return Kernel(name, adapter.about, adapter.dtypes, prepare, missing=reason)


def peers(folder: Path | None, wants: Callable[[str], bool] = lambda name: True) -> list[Kernel]:
    """Load the peers whose names are wanted.

    Parameters
    ----------
    folder : Path, optional
        Where their libraries are.
    wants : callable
        Tells whether a peer is wanted; the others are not loaded and not returned.
    """
    return [load(name, adapter, folder) for name, adapter in ADAPTERS.items() if wants(name)]
