"""The order of operations of a softmax, as an error bound must know it: the part of a
:class:`~fa3_reference.bounds.model.KernelModel` that is about the visit of the keys and the roundings on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class SoftmaxOrder:
    """Says in which order a kernel visits the keys, and where its softmax rounds.

    Parameters
    ----------
    maxima : {"scaled", "unscaled"}
        Whether a row's running maximum is taken of the scores in log2 units, so that weights, rescaling and LSE share
        one rounded number, or of the raw scores. In the second case weights, rescaling and LSE each scale it again. A
        bound for unscaled maxima holds for scaled ones.
    rescale : {"always", "contracted", "lazy"}
        Whether O is multiplied by a factor in every key block ("always"), or only where the maximum has grown by much
        ("lazy"), so that P may exceed 1. "contracted" is "always" with a factor that is the exponential of one fused
        operation on an unscaled maximum: it is not exactly 1 where the maximum stays.
    keys : {"right_to_left", "left_to_right", "any"}
        Order of the key blocks of a row tile.
    weights : {"running", "normalised", "any"}
        Whether P is rounded in the scale of the running maximum and O divided at the end, or P is divided by the row
        sum before it is rounded.
    row_sum : {"pairs", "blocks", "any"}
        Whether a thread adds the weights of a block in neighbouring pairs, which halves the chain of its additions, or
        one by one. With "any" it may also add them one by one to its sum of all blocks so far, so that each addition
        rounds the whole sum.
    exponent : {"contracted", "rounded"}
        Whether a weight's exponent is one fused operation, or a rounded scaled score less the maximum.
    scale : {"float64", "float32", "in_turn", "folded"}
        Where softmax_scale is rounded. "float64": the factor softmax_scale log2(e) is rounded as a whole. "float32":
        softmax_scale is rounded to binary32 before it is multiplied by log2(e). "in_turn": scores are multiplied by
        softmax_scale and rounded, and then multiplied by log2(e); for 16-bit operands only. "folded": Q is multiplied
        by it, with log2(e) or without, and rounded to the operands' format again.
    lse : {"together", "apart"}
        Whether the maximum and the logarithm of the row sum are added and then taken to natural units, or each is taken
        there by itself first.
    combine : {"sum", "lse"}
        Whether the weights of split keys are divided by their sum, or are exponentials of each part's lse less the
        rounded lse of all parts.
    row_sum_of : {"weights", "rounded"}
        Whether the row sum adds the weights before or after they are rounded to P's format. Rounded weights give an
        exact mean of V rows, and an lse that is off by their rounding.
    key_tiles : {"from_first_key", "from_window"}
        Whether the key tiles of a row tile are counted from the first key of its sequence, or from the first key that
        the window of its first row leaves.
    promotion : {"fused", "rounded"}
        Whether a promoted O is multiplied by its factor and added to a block's first part in one fused operation, or is
        rounded in between. The a-priori bound charges both roundings either way.

    Raises
    ------
    ValueError
        If the row sum adds rounded weights that are not running ones.
    """

    maxima: Literal["scaled", "unscaled"] = "scaled"
    rescale: Literal["always", "contracted", "lazy"] = "always"
    keys: Literal["right_to_left", "left_to_right", "any"] = "right_to_left"
    weights: Literal["running", "normalised", "any"] = "running"
    row_sum: Literal["pairs", "blocks", "any"] = "any"
    exponent: Literal["contracted", "rounded"] = "contracted"
    scale: Literal["float64", "float32", "in_turn", "folded"] = "float64"
    lse: Literal["together", "apart"] = "together"
    combine: Literal["sum", "lse"] = "sum"
    row_sum_of: Literal["weights", "rounded"] = "weights"
    key_tiles: Literal["from_first_key", "from_window"] = "from_first_key"
    promotion: Literal["fused", "rounded"] = "fused"

    def __post_init__(self) -> None:
        if self.row_sum_of == "rounded" and self.weights != "running":
            raise ValueError(
                f"weights that the row sum divides are rounded after it: row_sum_of 'rounded' needs weights 'running', "
                f"got {self.weights!r}"
            )

    @property
    def scales_maximum_for_lse(self) -> bool:
        """Tell whether the maximum is taken to the units of lse by a rounding of its own."""
        return self.maxima == "unscaled" or self.lse == "apart"
