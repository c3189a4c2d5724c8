"""The order in which a kernel rounds, forward and backward, as switches in which the families of kernels differ.

Each file of :mod:`fa3_kernels.plan.families` states the order of its family once. The twin runs it, and the error bound
reads :attr:`Order.softmax`. Below M is a row's running maximum, m that of its raw scores s, c the factor to log2 units,
l the row sum, D a row's dot product of dO and O; every operation rounds to binary32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fa3_reference.bounds.order import SoftmaxOrder
from fa3_reference.rules import require


@dataclass(frozen=True, slots=True)
class Order:
    """The order of operations of one family; the defaults are those of our kernels.

    Parameters
    ----------
    keys : {"right_to_left", "left_to_right"}
        The order in which the key blocks of a row tile are visited.
    diagonal : {"bottom_right", "top_left"}
        How masks are aligned: the diagonal of query 0 is key seqlen_k - seqlen_q, or key 0 whatever the lengths.
    factor : {"float64", "of_float32", "float32", "in_turn", "folded", "folded_log2"}
        How softmax_scale * log2(e) is formed: in float64 and rounded; in float64 of a scale rounded to binary32; as the
        product of two binary32 numbers; or not at all: scores take the scale and then log2(e), each rounded; or Q takes
        the scale before Q K^T, with log2(e) or without, and is rounded to the operands' format again.
    descales : {"in_turn", "product_first"}
        Whether c takes q_descale, then k_descale, and is lifted to 2^-126 where it underflowed; or takes their product.
    softcap : {"ex2", "tanh"}
        How a softcap b is made: 1 - 2 rcp(ex2(s * (c * 2 / b)) + 1); or tanh.approx of s * (softmax_scale / b), whose
        factor takes the descales as c does. Afterwards c is b * log2(e).
    maxima : {"scaled", "unscaled"}
        Whether the running maximum is M = fma(max s, c, -offset) or m = max s, which each use then scales for itself.
    contracts_exponent : bool
        Whether a weight's exponent is one fma(s, c, -M), or fp32(s * c) - M.
    rescale : {"of_difference", "contracted"}
        With unscaled maxima alpha = ex2((m_old - m) * c), or ex2(fma(m_old, c, -fp32(m * c))).
    gradual_exp2 : bool
        Whether weights and alpha below 2^-126 are kept as subnormal numbers, as exp2f does without -ftz, or are zero.
    row_sum : {"block_pairs", "block_serial", "block_row", "running"}
        A thread adds its columns of a block in neighbouring pairs or one by one, and l = l * alpha + that;
        ``block_row`` adds the four threads of a row in every block; ``running`` starts at l * alpha + the first column.
    contracts_row_sum : bool
        Whether that l * alpha + x is one fma.
    quad : {"far_first", "near_first"}
        Sums of the four threads of a row: (t0 + t2) + (t1 + t3), or (t0 + t1) + (t2 + t3).
    inverse : {"reciprocal", "division"}
        1 / l by the multi-function unit, or correctly rounded.
    lse : {"log2", "natural", "natural_by_scale", "log2_polynomial"}
        (M + lg2 l) * ln2; fma(M, ln2, lg2(l) * ln2), of unscaled maxima fma(m, c * ln2, .); the same with m *
        softmax_scale, or times the softcap; or (m * c + log2 l) * ln2 with libdevice's polynomial for the logarithm.
    lse_empty : float
        lse of a row that sees no key; of a part of the keys, before the combine, it is -inf.
    lse_without_keys : float
        lse where no sequence has a key, which a host may write by itself.
    hides_nan : bool
        Whether the lse of a row whose sum is NaN is that of an empty row.
    compiles_masked_apart : bool
        Whether the first block of a tile takes no factor, and blocks that mask nothing are not guarded against rows
        whose maximum is still -inf: -inf minus -inf is NaN there.
    keeps_subnormals : bool
        Whether the build keeps binary32 operands and results below 2^-126, or takes them as zero (-ftz=true).
    combine : {"in_turn", "flash3", "flash2"}
        How splits are merged, see :mod:`fa3_kernels.twin.combine`.
    splits_visible : bool
        Whether the key blocks that a row tile visits are cut into parts; otherwise all key blocks of the sequence are.
    rescale_threshold_log2 : float
        A row's maximum stays as it is, and O and l take no factor, until the maximum of a block is larger by more than
        this in log2 units; weights may then exceed 1. With 0 every larger maximum is taken.
    row_sum_of : {"weights", "rounded"}
        Whether l adds the weights, or the weights rounded to P's format.
    accumulator : {"wgmma", "fp32"}
        Whether both products are the tensor core's, or binary32 fma one after the other, k ascending.
    probabilities : {"", "fp16", "bf16", "fp32"}
        A format to which P is rounded before it is rounded to the operands'. "fp32" leaves P unrounded, which the
        tensor core cannot do.
    p_rounding : {"nearest", "toward_zero"}
        How P is rounded; toward zero makes every output too small.
    key_tiles : {"from_first_key", "from_window"}
        Whether the key tiles of a row tile begin at the first key of the sequence, or at the first key in the window of
        the tile's first row; in the latter case a window of 128 keys meets one tile less.
    contracts_promotion : bool
        Whether a promoted O takes its factor and the first part of a block in one fma, or is rounded in between.
    sinks_without_keys : bool
        Whether a row whose tile visits no key block still takes its sink, so that its lse is the sink, or is empty. A
        row without a key in a tile that visits some blocks always takes it.

    Raises
    ------
    ValueError
        For probabilities "fp32" with products of the tensor core, and for probabilities that are truncated to a format
        other than the operands'.
    """

    keys: Literal["right_to_left", "left_to_right"] = "right_to_left"
    diagonal: Literal["bottom_right", "top_left"] = "bottom_right"
    factor: Literal["float64", "of_float32", "float32", "in_turn", "folded", "folded_log2"] = "float64"
    descales: Literal["in_turn", "product_first"] = "in_turn"
    softcap: Literal["ex2", "tanh"] = "ex2"
    maxima: Literal["scaled", "unscaled"] = "scaled"
    contracts_exponent: bool = True
    rescale: Literal["of_difference", "contracted"] = "of_difference"
    gradual_exp2: bool = False
    row_sum: Literal["block_pairs", "block_serial", "block_row", "running"] = "block_pairs"
    contracts_row_sum: bool = True
    quad: Literal["far_first", "near_first"] = "far_first"
    inverse: Literal["reciprocal", "division"] = "reciprocal"
    lse: Literal["log2", "natural", "natural_by_scale", "log2_polynomial"] = "log2"
    lse_empty: float = float("-inf")
    lse_without_keys: float = float("-inf")
    hides_nan: bool = False
    compiles_masked_apart: bool = False
    keeps_subnormals: bool = True
    combine: Literal["in_turn", "flash3", "flash2"] = "in_turn"
    splits_visible: bool = True
    rescale_threshold_log2: float = 0.0
    row_sum_of: Literal["weights", "rounded"] = "weights"
    accumulator: Literal["wgmma", "fp32"] = "wgmma"
    probabilities: Literal["", "fp16", "bf16", "fp32"] = ""
    p_rounding: Literal["nearest", "toward_zero"] = "nearest"
    key_tiles: Literal["from_first_key", "from_window"] = "from_first_key"
    contracts_promotion: bool = True
    sinks_without_keys: bool = True

    def __post_init__(self) -> None:
        require(
            self.probabilities != "fp32" or self.accumulator == "fp32",
            "probabilities 'fp32' needs accumulator 'fp32': the tensor core multiplies smaller formats",
        )
        require(
            not self.probabilities or self.p_rounding == "nearest",
            f"p_rounding 'toward_zero' is to the operands' format, got {self.probabilities!r}",
        )

    @property
    def unproved(self) -> str:
        """Return in words the steps for which no error bound is proved; an empty text if there are none."""
        steps = {
            "a truncated P": self.p_rounding == "toward_zero",
            f"a P that passes through {self.probabilities}": self.probabilities not in ("", "fp32"),
            f"maxima that stay over {self.rescale_threshold_log2:g} in log2": self.rescale_threshold_log2 > 8,
        }
        return " and ".join(words for words, is_taken in steps.items() if is_taken)

    @property
    def folds_scale(self) -> bool:
        """Tell whether Q is multiplied by the scale and rounded again."""
        return self.factor.startswith("folded")

    @property
    def softmax(self) -> SoftmaxOrder:
        """Return the order as the error bound reads it, which distinguishes fewer steps."""
        sums = {"block_pairs": "pairs", "running": "any"}
        rescale = "contracted" if self.rescale == "contracted" else "always"
        scales = {"of_float32": "float32", "folded_log2": "folded"}
        return SoftmaxOrder(
            maxima=self.maxima,
            rescale="lazy" if self.rescale_threshold_log2 else rescale,  # type: ignore[arg-type]
            keys=self.keys,
            row_sum=sums.get(self.row_sum, "blocks"),  # type: ignore[arg-type]
            exponent="contracted" if self.contracts_exponent else "rounded",
            scale=scales.get(self.factor, self.factor),  # type: ignore[arg-type]
            lse="together" if self.lse.startswith("log2") else "apart",
            combine="lse" if self.combine == "flash2" else "sum",
            row_sum_of=self.row_sum_of,
            key_tiles=self.key_tiles,
            promotion="fused" if self.contracts_promotion else "rounded",
        )


OUR_ORDER = Order()


@dataclass(frozen=True, slots=True)
class BackwardOrder:
    """The order of operations of one family's backward; the defaults are those of FlashAttention-3.

    Parameters
    ----------
    factor : {"float64", "of_float32", "float32"}
        As in :class:`Order`.
    exponent : {"log2", "natural"}
        Whether a weight is ex2(fma(s, c, -fp32(lse * log2 e))), or ex2(fp32(fma(s, softmax_scale, -lse) * log2 e)).
    softcap : {"ex2", "tanh"}
        As in :class:`Order`. The last factor of dS is then fma(-t, t, 1), where t is that tanh.
    contracts_exponent : bool
        Whether the first multiplication and the subtraction in the exponent are one fma.
    dots_run : int
        Neighbouring channels that a thread multiplies one after the other for D. Between two runs of a thread lie those
        of the other threads of the row. Sums are by fma, which equals adding rounded products, as these are exact.
    dots_far_first : bool
        Whether the threads of a row exchange their sums over the longest distance first, or over the shortest.
    contracts_ds : bool
        Whether dS is fma(P, dP, -fp32(P * D)), or P * fp32(dP - D).
    scales_ds : bool
        Whether softmax_scale multiplies dS before dS is rounded to 16 bits; otherwise it multiplies dQ and dK at the
        end.
    scales_sums : bool
        Whether dK of a group is scaled after its heads are added; otherwise dK of every head is scaled before.
    rows : {"ascending", "descending", "walk"}
        The order in which the row blocks of a key block are visited; the tensor core chains their parts of dK and dV.
        ``walk`` is :meth:`fa3_kernels.plan.key_tiles.Walk.rows`.
    heads : {"added", "chained"}
        Whether the heads of a group give parts of dK and dV that are added, or continue one chain.
    keys : {"ascending", "descending", "in_turn"}
        The order in which the twin adds the key blocks' parts of dQ, and the heads' of dK and dV; ``in_turn`` is
        :meth:`fa3_kernels.plan.key_tiles.Walk.parts`. A library that adds by reductions in memory may use any order.
    reads_past : bool
        Whether the last row block and key block of a packed sequence read into the next sequence; otherwise zeros are
        read there.
    keeps_subnormals : bool
        As in :class:`Order`.
    """

    factor: Literal["float64", "of_float32", "float32"] = "of_float32"
    exponent: Literal["log2", "natural"] = "log2"
    softcap: Literal["ex2", "tanh"] = "tanh"
    contracts_exponent: bool = True
    dots_run: int = 8
    dots_far_first: bool = True
    contracts_ds: bool = False
    scales_ds: bool = False
    scales_sums: bool = False
    rows: Literal["ascending", "descending", "walk"] = "ascending"
    heads: Literal["added", "chained"] = "added"
    keys: Literal["ascending", "descending", "in_turn"] = "ascending"
    reads_past: bool = True
    keeps_subnormals: bool = False


OUR_BACKWARD_ORDER = BackwardOrder(
    factor="float64",
    softcap="ex2",
    rows="walk",
    heads="chained",
    keys="in_turn",
    reads_past=False,
    keeps_subnormals=True,
)
