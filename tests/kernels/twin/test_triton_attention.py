"""Whole Triton attention kernels of an H200, composed from the twin's primitives: every bit of O and of the
LSE.

Their order of operations is not the production order, so it lives here: key blocks left to right, row sums
serial over (8 j + 2 q, 8 j + 2 q + 1) and reduced over the quad in every block, multiply-adds contracted
where that compiler did.
"""

from __future__ import annotations

import numpy as np
import pytest

from fa3_kernels.twin.convert import encode_f32
from fa3_kernels.twin.float32 import exp2_scaled, fma, fmax, quad_sum, row_max
from fa3_kernels.twin.mufu import ex2, rcp
from fa3_kernels.twin.wgmma import OperandB, operand, operand_b, wgmma
from tests.kernels import device_inputs as device

TILE_N = 64
SCALE = np.float32(np.log2(np.e) / 8)
# fmt: off
LOG2_COEFFICIENTS = (
    0x3DC6B27F, 0xBE2C7F30, 0x3E2FCF2A, 0xBE374E43, 0x3E520BF4,
    0xBE763C8B, 0x3E93BF99, 0xBEB8AA49, 0x3EF6384A, 0xBF38AA3B,
)
# fmt: on
LOG2_E = 0x3FB8AA3B


def f32(bits: int) -> np.float32:
    return np.uint32(bits).view(np.float32)


def libdevice_log2(x: np.ndarray) -> np.ndarray:
    """log2 of normal float32 numbers as libdevice computes it: a polynomial of fused multiply-adds."""
    bits = x.view(np.int32)
    exponent = (bits - np.int32(0x3F3504F3)) & np.int32(-(1 << 23))
    u = (bits - exponent).view(np.float32) - np.float32(1)
    p = np.full(x.shape, f32(LOG2_COEFFICIENTS[0]), np.float32)
    for c in LOG2_COEFFICIENTS[1:]:
        p = fma(p, u, f32(c))
    tail = fma(u, f32(LOG2_E), u * (u * p))
    return exponent.astype(np.float32) * np.float32(2.0**-23) + tail


def serial_row_sum(p: np.ndarray) -> np.ndarray:
    """Quad lane q adds its columns one by one, starting with the first two."""
    columns = p.reshape(len(p), -1, 4, 2)
    sums = columns[:, 0, :, 0] + columns[:, 0, :, 1]
    for j in range(1, columns.shape[1]):
        sums = (sums + columns[:, j, :, 0]) + columns[:, j, :, 1]
    return quad_sum(sums)


def triton_attention(q: np.ndarray, k: OperandB, v: OperandB, fmt: str) -> tuple[np.ndarray, np.ndarray]:
    """O (rows, 64) and base-2 LSE (rows,) of one head."""
    fp8 = fmt == "e4m3"
    left = operand(q, fmt)
    rows, keys = len(q), k.bits.shape[1]
    m, total = np.full(rows, -np.inf, np.float32), np.zeros(rows, np.float32)
    acc = np.zeros((rows, v.bits.shape[1]), np.float32)
    scale = np.full(rows, SCALE)
    for j in range(0, keys, TILE_N):
        s = wgmma(left, k.n_slice(j, j + TILE_N))
        m_new = fmax(m, row_max(s))
        if fp8:  # P carries an offset of 8, and alpha comes from the difference of maxima
            base = fma(m_new, SCALE, np.float32(-8))
            alpha = ex2((m - m_new) * SCALE)
        else:
            base = m_new * SCALE
            alpha = ex2(fma(m, SCALE, -base))
        p = exp2_scaled(s, scale, base)
        total = fma(total, alpha, serial_row_sum(p))
        p_operand = operand(encode_f32(p, fmt), fmt)
        acc = wgmma(p_operand, v.k_slice(j, j + TILE_N), acc * alpha[:, None])
        m = m_new
    log2_total = libdevice_log2(total)
    lse = fma(m, SCALE, log2_total) if fp8 else m * SCALE + log2_total
    return acc * rcp(total)[:, None], lse


@pytest.mark.parametrize("distribution", ["normal", "outlier"])
@pytest.mark.parametrize("fmt", ["fp16", "bf16", "e4m3"])
def test_primitives_reproduce_a_whole_attention_kernel(fmt: str, distribution: str) -> None:
    q, k, v = device.attention_operands(fmt, distribution == "outlier")
    key = f"fa_{device.DEVICE_NAMES[fmt]}_64_{distribution}"
    assert device.digest((q, k, v)) == device.stored_digest(key), "inputs are not the device's"
    with np.load(device.GOLDEN / "fa_triton_outputs_d64.npz") as stored:
        want_out, want_lse = stored[f"{key}_O"], stored[f"{key}_L"]
    for head in range(2):
        right = operand_b(k[head], fmt), operand_b(v[head].T, fmt)
        out, lse = triton_attention(q[head], *right, fmt)
        differing = [
            (x.view(np.uint32) != y.view(np.uint32)).sum() for x, y in ((out, want_out[head]), (lse, want_lse[head]))
        ]
        assert differing == [0, 0], f"{key} head {head}: O and LSE differ in {differing} elements"
