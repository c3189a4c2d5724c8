"""What an error bound must know of a kernel: its formats, its tiling and the order of its operations.

Plans of launches (``fa3_kernels.plan``) state these records for kernels whose order is known, and every bound of
:mod:`fa3_reference.bounds` is evaluated for one of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fa3_reference.bounds import device
from fa3_reference.bounds.order import SoftmaxOrder
from fa3_reference.bounds.quantises import CODES, Codes, Quantises
from fa3_reference.formats import FORMATS, Format
from fa3_reference.problem import Dtype


@dataclass(frozen=True, slots=True)
class KernelModel:
    """States the formats, tiling and order of operations of a forward kernel; :meth:`any_order` is for an unknown one.

    Parameters
    ----------
    dtype : {"fp16", "bf16", "e4m3", "fp32"}
        Format of the operands.
    out_dtype : {"fp16", "bf16", "fp32"}
        Format of the output; "fp32" bounds the error before the last rounding, which binary32 has in the division.
    tile_m, tile_n : int
        Query rows and keys of a tile; 0 where it is not known.
    promotion_interval : int
        Keys after which an e4m3 sum of P V moves to binary32; 0 chains all of them in the tensor core.
    num_splits : int
        Parts into which the keys are split.
    pack_gqa : bool
        Whether the query heads of a group share a row tile.
    order : SoftmaxOrder
        In which order keys are visited, and where the softmax rounds.
    scores : str
        Format in which S is kept between the two products. Where it has 16 bits a score is rounded to it at most twice
        (before and after scaling), and a sink once.
    probabilities : str
        Format of P as it enters the second product; ``dtype`` by default.
    accumulator : {"wgmma", "fp32", "fp16", "either", "tf32"}
        What adds the products: Hopper's tensor core as measured ("wgmma"), or any tree of additions in that format,
        each to nearest or toward zero. "either" is for a kernel that may use binary32 or the tensor core in either
        product, and charges the larger error of the two at each step. The tensor core may then add any channels or keys
        as a group, of at least half a wgmma step each, and chain the groups or promote them to binary32 after any
        number of them. "tf32", of binary32 operands alone, rounds each factor of a product to 10 fraction bits, to
        nearest or toward zero.
    exp_error : float
        Relative error of the exponential.
    tanh_error : float
        Relative error of the tanh of a softcap where one instruction takes it of softmax_scale / softcap times a score;
        0 where the kernel makes it of ex2 and rcp. Where the order of keys is "any" the kernel may use either tanh.
    keeps_subnormals : bool
        Whether binary32 results below 2^-126 are kept, except those of MUFU; otherwise they may be flushed to zero.
    pads_group : bool
        Whether a packed group is padded to a power of two in its row tile.
    quantises : Quantises
        Which operands the kernel quantises itself; its ``p`` stands for ``probabilities``.

    Raises
    ------
    ValueError
        If keys are split without ``tile_n``, for an accumulator that operands do not have, and if e4m3 is quantised.
    """

    dtype: Dtype
    out_dtype: str
    tile_m: int = 0
    tile_n: int = 0
    promotion_interval: int = 0
    num_splits: int = 1
    pack_gqa: bool = False
    order: SoftmaxOrder = field(default_factory=SoftmaxOrder)
    scores: str = "fp32"
    probabilities: str = ""
    accumulator: Literal["wgmma", "fp32", "fp16", "either", "tf32"] = "wgmma"
    exp_error: float = device.EX2_REL
    tanh_error: float = 0.0
    keeps_subnormals: bool = True
    pads_group: bool = True
    quantises: Quantises = Quantises()  # noqa: RUF009 (immutable)

    @classmethod
    def any_order(
        cls,
        dtype: Dtype,
        out_dtype: str,
        accumulator: Literal["wgmma", "fp32", "either", "tf32"] = "fp32",
        row_sum_of: Literal["weights", "rounded"] = "weights",
        weights: Literal["running", "normalised", "any"] = "any",
    ) -> KernelModel:
        """Return the model of a kernel that states no order.

        Only this is assumed: S and exponentials are in binary32, P is in the operands' format, and a softcap takes any
        tanh. Running weights are rounded as they are; those of e4m3 may be multiplied first by a number such as 256 or
        448, which is within 2^-12 of a number of that format.

        Parameters
        ----------
        dtype : {"fp16", "bf16", "e4m3", "fp32"}
            Format of the operands.
        out_dtype : {"fp16", "bf16", "fp32"}
            Format of the output.
        accumulator : {"wgmma", "fp32", "either", "tf32"}
            What the machine adds products with. An e4m3 product keeps 13 bits on Ada and Hopper (sm_89, sm_90), so that
            their kernels need "either"; so do 16-bit kernels on Hopper, whose tensor core aligns subnormal operands as
            if they were normal. Blackwell and CPUs add in binary32. Those of binary32 are multiplied so, or in "tf32".
        row_sum_of : {"weights", "rounded"}
            As of :class:`SoftmaxOrder`. :meth:`hypotheses` has both.
        weights : {"running", "normalised", "any"}
            As of :class:`SoftmaxOrder`; always "running" where ``row_sum_of`` is "rounded". :meth:`hypotheses` has two.

        Returns
        -------
        KernelModel
            The widest model: its bound holds for every order of keys and of additions.
        """
        weights = "running" if row_sum_of == "rounded" else weights
        order = SoftmaxOrder("unscaled", "lazy", "any", weights, row_sum_of=row_sum_of)
        free: dict[str, Any] = {"accumulator": accumulator, "tanh_error": device.TANH_REL, "keeps_subnormals": False}
        return cls(dtype, out_dtype, order=order, exp_error=4 * device.EX2_REL, **free)

    @classmethod
    def hypotheses(
        cls, dtype: Dtype, out_dtype: str, accumulator: Literal["wgmma", "fp32", "either", "tf32"] = "fp32"
    ) -> dict[str, KernelModel]:
        """Return the models that a kernel which states no order may have, by name; each is of the whole kernel.

        A correct kernel keeps the bound of one of them in every element of every launch. None of their bounds contains
        another: a row sum of rounded weights errs more in lse, and less in O; running weights that are all equal are
        rounded exactly, and normalised ones only where one key is visible.

        Parameters
        ----------
        dtype : {"fp16", "bf16", "e4m3", "fp32"}
            Format of the operands.
        out_dtype : {"fp16", "bf16", "fp32"}
            Format of the output.
        accumulator : {"wgmma", "fp32", "either", "tf32"}
            As of :meth:`any_order`.

        Returns
        -------
        dict of str to KernelModel
            The models; the name of each says in words what it assumes.
        """
        free = dtype, out_dtype, accumulator
        return {
            "the row sum adds P": cls.any_order(*free, weights="running"),
            "the row sum adds the rounded P": cls.any_order(*free, row_sum_of="rounded"),
            "the row sum divides P": cls.any_order(*free, weights="normalised"),
        }

    def __post_init__(self) -> None:
        own = self.quantises.p
        object.__setattr__(self, "probabilities", own[0] if own else self.probabilities or self.dtype)
        if self.quantises.said and self.dtype == "e4m3":
            raise ValueError("operands of e4m3 are codes: a kernel does not quantise them")
        device.check_products(self.dtype, self.accumulator)
        if self.num_splits > 1 and not self.tile_n:
            raise ValueError("parts of the keys are whole tiles: num_splits > 1 needs tile_n")

    @property
    def core(self) -> device.TensorCore:
        """Return what the tensor core keeps of products, which are of e4m3 where the kernel makes such codes."""
        fmt = "e4m3" if any(fmt == "e4m3" for fmt, _ in self.quantises.said.values()) else self.dtype
        return replace(device.TENSOR_CORE.get(fmt, device.TF32_CORE), operand=FORMATS[self.dtype])

    @property
    def tiny(self) -> float:
        """Largest error of a binary32 result below the normal range."""
        return 2.0**-149 if self.keeps_subnormals else device.FP32_MIN_NORMAL

    @property
    def p_format(self) -> Format | Codes:
        """Number format of P as it enters the second product."""
        return self.quantises.weights or FORMATS[self.probabilities]

    @property
    def p_offset_log2(self) -> int:
        """Log2 of the least factor of P: 8 for e4m3 in the scale of the running maximum (P fills [0, 256]), else 0."""
        is_shifted = self.order.weights == "running" and self.order.rescale != "lazy" and not self.quantises.p
        return 8 if self.probabilities == "e4m3" and is_shifted else 0

    @property
    def largest_offset_log2(self) -> int:
        """Log2 of the largest factor that P may be multiplied with, rounded up: 9 where the factor is not known, which
        may take P to the end of e4m3 at 448.
        """
        if self.probabilities not in CODES or self.order.weights == "normalised":
            return 0
        return 8 if self.p_offset_log2 else 9

    @property
    def is_blocked(self) -> bool:
        """Tell whether it is known which running maximum each key meets, because the tile and the order of keys are."""
        return self.tile_n > 0 and self.order.keys != "any" and self.order.weights == "running"

    @property
    def is_stated(self) -> bool:
        """Tell whether every rounding in the softmax is known, so that its result follows from its operand.

        That is the case where it is known which running maximum each weight meets, and where that maximum is rounded
        once, in log2 units that all exponents share.
        """
        order = self.order
        steps = (order.maxima, order.rescale, order.exponent, order.scale, order.lse, order.row_sum_of)
        is_plain = self.is_blocked and not self.quantises.said
        return is_plain and steps == ("scaled", "always", "contracted", "float64", "together", "weights")

    @property
    def row_sum_depth(self) -> int:
        """Longest chain of additions behind one block's share of the row sum, where the blocks are known.

        Four threads share a row, and each adds a quarter of the block's weights. Where they add one by one, the sums of
        the four threads may also be added in every block, which takes two additions more.
        """
        return self.tile_n // 8 if self.order.row_sum == "pairs" else self.tile_n // 4 + 2

    @property
    def addition(self) -> float:
        """Relative error of one addition of an accumulator that is not the tensor core's."""
        if self.accumulator == "tf32":
            return device.TF32_ADDITION
        return FORMATS["fp16" if self.accumulator == "fp16" else "fp32"].epsilon

    @property
    def factors(self) -> float:
        """Relative error of the two factors of a product that is not of their own format, together."""
        return device.TF32_FACTORS if self.accumulator == "tf32" else 0.0

    @property
    def tanh_errors(self) -> tuple[float, ...]:
        """Relative error of each tanh that a softcap may take; 0 stands for the one made of ex2 and rcp."""
        return (self.tanh_error, 0.0) if self.tanh_error and self.order.keys == "any" else (self.tanh_error,)


@dataclass(frozen=True, slots=True)
class BackwardModel:
    """States the formats, tiling and order of operations of a backward kernel; :meth:`any_order` is for an unknown one.

    Parameters
    ----------
    dtype : {"fp16", "bf16", "fp32"}
        Format of operands and gradients.
    tile_n : int
        Keys of a block; each block adds one part to dQ. 0 stands for any number of at least 16.
    dots_depth : int
        Additions one after the other in a row's D; 0 for any order.
    out_dtype : str
        Format of the gradients, ``dtype`` by default; "fp32" bounds the error before the last rounding.
    tile_m : int
        Rows of a block where each block adds a part to dK and dV; 0 where all rows are one chain.
    heads : {"added", "chained", "any"}
        Whether each query head of a group adds a part to dK and dV, or one chain runs over the rows of all heads, or
        either may be.
    accumulator : {"wgmma", "fp32", "either", "tf32"}
        As of :class:`KernelModel`.
    exponent : {"contracted", "rounded"}
        Whether a weight's exponent is one fused operation, or a rounded scaled score less the lse.
    scales : {"sums", "weights", "any"}
        Whether softmax_scale multiplies dQ and dK, or dS before it is rounded, or either or both of these.
    forward : {"given", "own"}
        Whether the kernel reads the out and lse that it is given, or computes its own, as automatic differentiation
        does. In the second case its gradients are compared with those of the exact forward.
    scores, dp : str
        Formats in which S and dP are kept between two products.
    weights : str
        Format of P and dS as they enter a product; ``dtype`` by default. A kernel that computes its own forward and
        keeps P in binary32 computes D from P and dP, not from dO and O.
    parts : str
        Format in which gradients are kept between the blocks and the heads that add to them.
    exp_error : float
        Relative error of the exponential.
    tanh_error : float
        Relative error of the tanh of a softcap, whose magnitude is never beyond 1; 0 where the kernel makes it of ex2
        and rcp. With ``scales`` "any" the kernel may use either tanh.
    dots : {"out", "weights"}
        Whether D is the row sum of dO O, or of P dP, where P may be rounded; the two differ by the rounding of O.
    ds_of : {"weights", "rounded"}
        Whether dS is made of the unrounded P, or of P rounded to the format of ``weights``.

    Raises
    ------
    ValueError
        For an accumulator that the operands do not have, as of :class:`KernelModel`.
    """

    dtype: Dtype
    tile_n: int = 0
    dots_depth: int = 0
    out_dtype: str = ""
    tile_m: int = 0
    heads: Literal["added", "chained", "any"] = "added"
    accumulator: Literal["wgmma", "fp32", "either", "tf32"] = "wgmma"
    exponent: Literal["contracted", "rounded"] = "contracted"
    scales: Literal["sums", "weights", "any"] = "sums"
    forward: Literal["given", "own"] = "given"
    scores: str = "fp32"
    dp: str = "fp32"
    weights: str = ""
    parts: str = "fp32"
    exp_error: float = device.EX2_REL
    tanh_error: float = 0.0
    dots: Literal["out", "weights"] = "out"
    ds_of: Literal["weights", "rounded"] = "weights"

    def __post_init__(self) -> None:
        device.check_products(self.dtype, self.accumulator)

    @classmethod
    def any_order(
        cls,
        dtype: Dtype,
        forward: Literal["given", "own"] = "given",
        accumulator: Literal["wgmma", "fp32", "either", "tf32"] = "fp32",
        dots: Literal["out", "weights"] = "out",
    ) -> BackwardModel:
        """Return the model of a kernel that states no order.

        Only this is assumed: S, dP and exponentials are in binary32, P and dS are in the operands' format or better,
        and dS is made of a P that is not rounded.

        Parameters
        ----------
        dtype : {"fp16", "bf16", "fp32"}
            Format of operands and gradients.
        forward : {"given", "own"}
            Whose out and lse the kernel uses.
        accumulator : {"wgmma", "fp32", "either", "tf32"}
            As of :meth:`KernelModel.any_order`.
        dots : {"out", "weights"}
            What D is computed from; :meth:`hypotheses` has both.

        Returns
        -------
        BackwardModel
            The widest model: its bound holds for every order of blocks and of additions.
        """
        free: dict[str, Any] = {"exponent": "rounded", "scales": "any", "heads": "any", "tanh_error": device.TANH_REL}
        return cls(dtype, forward=forward, accumulator=accumulator, exp_error=4 * device.EX2_REL, dots=dots, **free)

    @classmethod
    def hypotheses(
        cls,
        dtype: Dtype,
        forward: Literal["given", "own"] = "given",
        accumulator: Literal["wgmma", "fp32", "either", "tf32"] = "fp32",
    ) -> dict[str, BackwardModel]:
        """Return the models that a kernel which states no order may have, as :meth:`KernelModel.hypotheses` does.

        A kernel that computes its own forward has one model, whose bound holds for both ways to compute D.

        Parameters
        ----------
        dtype : {"fp16", "bf16", "fp32"}
            Format of operands and gradients.
        forward : {"given", "own"}
            Whose out and lse the kernel uses.
        accumulator : {"wgmma", "fp32", "either", "tf32"}
            As of :meth:`KernelModel.any_order`.

        Returns
        -------
        dict of str to BackwardModel
            The models; the name of each says in words what it assumes.
        """
        names: dict[str, Literal["out", "weights"]] = {"D is of dO and O": "out", "D is of P and dP": "weights"}
        if forward == "own":
            return {"the forward is its own": cls.any_order(dtype, forward, accumulator)}
        return {name: cls.any_order(dtype, forward, accumulator, dots) for name, dots in names.items()}

    @property
    def core(self) -> device.TensorCore:
        """Return what the tensor core keeps of products of this format."""
        return device.TENSOR_CORE.get(self.dtype, device.TF32_CORE)

    @property
    def addition(self) -> float:
        """Relative error of one addition of an accumulator that is not the tensor core's."""
        return device.TF32_ADDITION if self.accumulator == "tf32" else FORMATS["fp32"].epsilon

    @property
    def factors(self) -> float:
        """As of :class:`KernelModel`."""
        return device.TF32_FACTORS if self.accumulator == "tf32" else 0.0

    @property
    def weight(self) -> Format:
        """Number format of P and dS as they enter a product."""
        return FORMATS[self.weights or self.dtype]

    @property
    def output(self) -> Format:
        """Number format of the gradients."""
        return FORMATS[self.out_dtype or self.dtype]
