"""How wrong single Hopper operations can be: the constants every error bound is made of.

Tensor core: a wgmma step aligns its products and C to 2^(emax - align_bits), truncates each toward zero, adds exactly,
and truncates the sum to out_bits fraction bits. emax is the largest exponent of a product or of C. The exponent of a
product is the sum of its operands' exponents, and a subnormal operand has the least exponent of its format.
:mod:`fa3_reference.bounds.tensor_core` is the definition, number by number.

The rest holds for all 2^32 inputs of the bit-exact model, by exhaustion (tests/reference/bounds/test_device.py):

- ex2: largest relative error 2^-22.7091, at 0x3f88005d = 1.0625111. Never decreasing; exact at integers; 1 for
  |x| < 2^-23; at most 1 for x < 0 and at least 1 for x > 0; normal for -126 <= x < 128; +0 below, +Inf above.
- rcp: largest relative error 2^-23.2784, at the fraction 0x6cfdfd of every binade (0x3fecfdfd = 1.8515011). Exact at
  powers of two. Keeps the sign; its magnitude never increases with |x|; normal for 2^-126 <= |x| <= 2^126; 0 above, Inf
  below (subnormals).
- lg2 of normal numbers: largest |error| - LG2_REL |log2 x| 2^-22.6405, at 0x3f837fff = 1.0273436. Never decreasing;
  lg2(1) = 0; negative below 1; -Inf for zeros and subnormals. Exact at powers of two from 1 on.
- tanh: largest relative error 2^-16.4557, at 0x3f17040f = 0.5899056. Odd; x itself for |x| < 2^-8, +-1 from |x| = 8
  on, never beyond 1; not monotone: it may fall from one segment of its table to the next.
- Conversions to fp16, bf16 and e4m3 round to nearest even, subnormals included; beyond the largest number and half a
  step 16-bit formats give Inf; e4m3 saturates, for Inf too.
Source: measured on an NVIDIA H200 (tanh: on an H100), bit-exact model with 0 mismatches.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa3_reference.formats import FORMATS, Format
from fa3_reference.problem import Dtype

U_FP32 = 2.0**-24  # unit roundoff of fp32 add, mul and fma, round to nearest even
FP32_MAX = float.fromhex("0x1.fffffep127")
FP32_MIN_NORMAL = 2.0**-126  # MUFU results below are flushed to zero
EX2_REL = 2.0**-22.70  # ex2.approx.ftz against 2^x, all x with a normal result
# ex2 of a smaller |x| is 1. No other binary32 number is this near to 8, the exponent of the largest e4m3 weight.
EXACT_EX2 = 2.0**-23
RCP_REL = 2.0**-23.27  # rcp.approx.ftz against 1/x, normal x and result
TANH_REL = 2.0**-16.45  # tanh.approx against tanh, all x
# lg2.approx.ftz: |error| <= LG2_ABS + LG2_REL |log2 x|
LG2_ABS = 2.0**-22.64
LG2_REL = 2.0**-23


@dataclass(frozen=True, slots=True)
class TensorCore:
    """What the tensor core keeps when it adds products of one operand format to a binary32 accumulator."""

    k_step: int  # products per instruction
    align_bits: int  # bits that addends keep below the largest power of the step
    out_bits: int  # fraction bits that the sum keeps
    operand: Format

    @property
    def align(self) -> float:
        return 2.0**-self.align_bits

    @property
    def out(self) -> float:
        return 2.0**-self.out_bits

    @property
    def tiny(self) -> float:
        """Largest loss of a step whose sum is near 0, below the normal range, where a subnormal C counts as 2^-126."""
        return (self.k_step + 1) * 2.0 ** -(126 + self.out_bits)


TENSOR_CORE = {
    "fp16": TensorCore(16, 25, 23, FORMATS["fp16"]),
    "bf16": TensorCore(16, 25, 23, FORMATS["bf16"]),
    "e4m3": TensorCore(32, 13, 13, FORMATS["e4m3"]),
}
# Of binary32 operands, in tf32: not measured, and no bound rests on more than its steps of eight and its range.
TF32_CORE = TensorCore(8, 25, 23, FORMATS["fp32"])
# Largest relative error of a product whose two factors were cut to the 10 fraction bits of tf32, whose range is that of
# binary32.
TF32_FACTORS = (1 + 2.0**-10) ** 2 - 1
# What one addition of tf32 products may lose of sums of absolute values: a step of four products or more may cut each
# of them, C and its sum to 2^-23, which is 1.5 x 2^-23 a product. Assumed of all tensor cores.
TF32_ADDITION = 2.0**-22


def check_products(dtype: Dtype, accumulator: str) -> None:
    """Raise ValueError for an accumulator that operands of a format do not have; "fp32" is one of all formats."""
    if accumulator != "fp32" and (dtype == "fp32") != (accumulator == "tf32"):
        taken = "fp32 or tf32" if dtype == "fp32" else "fp32, wgmma or either"
        raise ValueError(f"accumulator of {dtype} operands must be {taken}, got {accumulator!r}")
