"""What an error bound must know of a kernel: its formats, its tiling and the order of its operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fa3_reference.bounds.device import TENSOR_CORE, TensorCore
from fa3_reference.problem import Dtype


@dataclass(frozen=True, slots=True)
class SoftmaxOrder:
    """Where the online softmax rounds.

    Parameters
    ----------
    maxima : {"scaled", "unscaled"}
        Whether a row's running maximum is taken of the scores in log2 units, so that weights, rescaling and LSE share
        one rounded number, or of the raw scores, which each of the three then scales for itself.
    rescale : {"always", "lazy"}
        Whether O takes the factor of every key block, or only where the maximum has grown by much.
    """

    maxima: Literal["scaled", "unscaled"] = "scaled"
    rescale: Literal["always", "lazy"] = "always"


@dataclass(frozen=True, slots=True)
class KernelModel:
    """Formats, tiling, the three switches that change bits, and the order of the softmax."""

    dtype: Dtype
    out_dtype: str
    tile_m: int
    tile_n: int
    promotion_interval: int = 0
    num_splits: int = 1
    pack_gqa: bool = False
    order: SoftmaxOrder = SoftmaxOrder()

    @property
    def core(self) -> TensorCore:
        return TENSOR_CORE[self.dtype]

    @property
    def p_offset_log2(self) -> int:
        return 8 if self.dtype == "e4m3" else 0
