"""Probabilities as the e4m3 operand of P V, in registers: rounded without a shuffle, carried as words.

The consumers of the e4m3 forward pack P with these functions. Of every 16 keys, lane 0 to 3 of a row holds four in the
fp32 accumulator, those with octet and element 0 or 1, and must hold four neighbours in the e4m3 operand:

    key 8 octet + 2 lane + element  ->  position 4 lane + 2 octet + element

:mod:`fa3_kernels.gluon.v_transpose` stores V in the same order. No bit
depends on the order, as the tensor core adds the 32 products of one instruction as one exact sum
(:mod:`fa3_kernels.twin.wgmma_exact`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# cvt puts its first source into the upper byte; NaN becomes 0x7f, beyond 448 saturates (PTX ISA, cvt .satfinite).
_ROUND_FOUR = gl.constexpr(
    "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;"
    " cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }"
)


@gluon.jit
def pack(p, OPERAND: gl.constexpr):
    """Round P float32 (rows, keys) to e4m3 and pack four keys in a word: int32 (rows, keys / 4).

    OPERAND is the layout of P as the left operand of P V, a DotOperandLayout of four e4m3 numbers to a register. A word
    has two keys of each of two octets. P is carried round the loop over key blocks as 32 bits: as 16 or 8 bits, every
    half or byte would get a register of its own and be put together again in each step of the loop, by 16 byte moves
    for halves and 112 for bytes.
    """
    rows: gl.constexpr = p.shape[0]
    keys: gl.constexpr = p.shape[1]
    p = gl.permute(gl.reshape(p, [rows, keys // 16, 2, 4, 2]), (0, 1, 3, 2, 4))  # 16 keys, lane, octet, element
    p = gl.convert_layout(gl.reshape(p, [rows, keys]), OPERAND, assert_trivial=True)
    even, odd = gl.split(gl.reshape(p, [rows, keys // 4, 2, 2]))
    even_0, even_1 = gl.split(even)  # by octet
    odd_0, odd_1 = gl.split(odd)
    return gl.inline_asm_elementwise(
        _ROUND_FOUR, "=r,f,f,f,f", [even_0, odd_0, even_1, odd_1], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def unpack(words, OPERAND: gl.constexpr):
    """Return the e4m3 operand (rows, keys) of packed words; registers get other names, and no instruction is made.

    Two words are the same four keys of rows r and r + 8. As int8 each becomes an output with four elements, which
    Triton believes to be (element, row + 8). In truth the second of these is the octet, and which output it is tells
    the row; the permutation sets that right.
    """
    rows: gl.constexpr = words.shape[0]
    quads: gl.constexpr = words.shape[1]
    octets = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    words = gl.join(octets[0], octets[1])
    upper, lower = gl.inline_asm_elementwise(
        "mov.b32 $0, $2; mov.b32 $1, $3;", "=&r,=r,r,r", [words], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
    )
    both = gl.reshape(gl.join(upper, lower), [rows // 16, 2, 8, quads, 2, 2])  # ., octet, 8 rows, quads, element, row
    both = gl.reshape(gl.permute(both, (0, 5, 2, 3, 1, 4)), [rows, 4 * quads])
    return gl.convert_layout(both, OPERAND, assert_trivial=True).to(gl.float8e4nv, bitcast=True)


@gluon.jit
def key_halves(x):
    """Split (rows, keys) into its left and its right half."""
    rows: gl.constexpr = x.shape[0]
    keys: gl.constexpr = x.shape[1]
    return gl.split(gl.permute(gl.reshape(x, [rows, 2, keys // 2]), (0, 2, 1)))


@gluon.jit
def pack_chunks(p, OPERAND: gl.constexpr, CHUNK: gl.constexpr):
    """Return P in packed chunks of CHUNK keys, a tuple from left to right."""
    if p.shape[1] == CHUNK:
        return (pack(p, OPERAND),)
    else:
        left, right = key_halves(p)
        return pack_chunks(left, OPERAND, CHUNK) + pack_chunks(right, OPERAND, CHUNK)
