"""V^T inside the e4m3 kernel: wgmma reads its second operand only with the keys contiguous, but TMA brings the channels
so.

The producer (:mod:`fa3_kernels.gluon.produce_fp8`) transposes, and the consumers put O's columns in order again. Two
bytes, channels 2c and 2c + 1 of one key, are moved as one 16-bit element. ldmatrix with transpose gives a thread two
neighbouring keys of a channel pair. Two byte permutations sort two such registers (keys n, n + 1 and n + 8, n + 9) by
channel. stmatrix writes four keys of one channel as one word. That is exactly the key order of
:mod:`fa3_kernels.gluon.operand_fp8`.

Of 16 channels the even ones are written as rows 0 to 7 of V^T and the odd ones as rows 8 to 15. One stmatrix then
writes eight neighbouring rows, which lie in different banks; rows two apart would lie in the same banks in pairs. O has
its columns in that order, and :func:`channels_in_order` restores the order of V.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Bytes 0 and 2 (1 and 3) of both registers: the first (second) channel of four keys.
_SORT_CHANNELS = gl.constexpr("prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;")


@gluon.constexpr_function
def _chunk_keys(keys, pairs):
    """Return the keys that are transposed at a time: the producer has 40 registers per thread."""
    return min(keys, 32 if pairs >= 32 else 64)


@gluon.constexpr_function
def _chunk_layout(keys, pairs):
    """Return the layout of ldmatrix.trans over (keys, channel pairs): a lane has keys 0, 1, 8, 9 + 2 * (lane % 4).

    Warps lie side by side along the channels. With 32 channels, which are 16 pairs, two warps lie side by side and two
    below them.
    """
    registers = [[1, 0], [8, 0]]
    pair = 8
    warp_pairs = pairs // 4
    while pair < warp_pairs:
        registers.append([0, pair])
        pair *= 2
    warps = [[0, warp_pairs], [0, 2 * warp_pairs]] if warp_pairs >= 8 else [[0, 8], [16, 0]]
    key = 16 if warp_pairs >= 8 else 32
    while key < keys:
        registers.append([key, 0])
        key *= 2
    lanes = [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [keys, pairs])


@gluon.jit
def transpose(source, destination):
    """Write V^T (head_dim, keys) from V (keys, head_dim), both e4m3 in shared memory, 32 or 64 keys at a time.

    Runs in a partition of four warps. The caller must fence before wgmma reads the destination.
    """
    keys: gl.constexpr = source.shape[0]
    head_dim: gl.constexpr = source.shape[1]
    pairs: gl.constexpr = head_dim // 2
    chunk_keys: gl.constexpr = _chunk_keys(keys, pairs)
    layout: gl.constexpr = _chunk_layout(chunk_keys, pairs)
    source_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([keys, pairs], gl.int16)
    destination_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([head_dim, keys // 2], gl.int16)
    source = source._reinterpret(gl.int16, [keys, pairs], source_layout)
    destination = destination._reinterpret(gl.int16, [head_dim, keys // 2], destination_layout)
    for chunk in gl.static_range(keys // chunk_keys):
        x = source.slice(chunk * chunk_keys, chunk_keys).load(layout)
        x = gl.permute(gl.reshape(x, [chunk_keys // 16, 2, 8, pairs]), (0, 2, 3, 1))
        low, high = gl.split(x)  # keys n, n + 1 and n + 8, n + 9 of a thread
        even, odd = gl.inline_asm_elementwise(
            _SORT_CHANNELS, "=&r,=r,r,r", [low, high], dtype=(gl.int16, gl.int16), is_pure=True, pack=2
        )
        y = gl.reshape(gl.join(even, odd), [chunk_keys // 16, 8, pairs // 8, 8, 2])  # 16 keys, words, ., pair, channel
        y = gl.reshape(gl.permute(y, (2, 4, 3, 0, 1)), [head_dim, chunk_keys // 2])
        destination.slice(chunk * (chunk_keys // 2), chunk_keys // 2, dim=1).store(y)


@gluon.jit
def channels_in_order(o):
    """Return O (rows, channels) with its columns in the order of V's channels; registers get other names, no
    instruction.

    A thread then has four neighbouring columns.
    """
    rows: gl.constexpr = o.shape[0]
    channels: gl.constexpr = o.shape[1]
    o = gl.permute(gl.reshape(o, [rows, channels // 16, 2, 8]), (0, 1, 3, 2))
    return gl.reshape(o, [rows, channels])
