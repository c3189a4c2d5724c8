"""What ptxas makes of the quantiser, without a GPU: 16-byte accesses, no spill, no arithmetic but what is stated.

Counts are derived by hand from the channels of a thread. q, k and v share the code; v takes a branch around the
rotation.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

import numpy as np
import pytest

from fa3_kernels.plan.quantizer import MEAN_CHUNK_ROWS, MEAN_FINAL_ROWS, MEAN_TREE_ROWS, TileForm, tile_form
from tests.kernels.audit.opcodes import count

pytestmark = pytest.mark.optional

DIVISIONS = 2  # max / 448 and 1 / descale


@cache
def compiled(
    head_dim: int, rows: int, *, rotate: bool, phase: str = "one_pass", mean: bool = False, bf16: bool = False
):
    gl = pytest.importorskip("triton.experimental.gluon.language", reason="needs triton: pip install triton==3.6.0")
    from fa3_kernels.gluon.quantize_kernel import Correction, QuantizedOperand, quantize
    from fa3_reports.audit.compile import FakeTensor
    from tests.kernels.audit.compiled import compile_kernel

    fake = {bits: FakeTensor(dtype) for bits, dtype in ((16, gl.int16), (8, gl.uint8), (32, gl.float32), (1, gl.int32))}
    operand = QuantizedOperand(
        fake[16], fake[8], fake[32], fake[1], fake[1], 1 << 20, 2048, head_dim, 16, 1000, 8, 8, 1, 1
    )
    correction = Correction(fake[32], fake[32], 1000, 0.125, 1) if mean else None
    norm = float(np.float32(head_dim**-0.5)) if rotate else 1.0
    form = tile_form(rows, head_dim, rotate)
    args = (
        operand,
        operand,
        operand,
        128,
        128,
        128,
        fake[16] if rotate else None,
        correction,
        form.rows,
        form.parts,
        head_dim,
        head_dim,
        rotate,
        norm,
        phase,
        False,
        bf16,
        False,
        form.lanes,
    )
    options = {"num_warps": form.threads // 32, "maxnreg": form.registers, "enable_fp_fusion": False}
    return compile_kernel(quantize, args, **options), form


def channels_of_a_thread(form: TileForm, head_dim: int) -> int:
    return head_dim // form.lanes


def arithmetic(code) -> Counter:
    """Floating-point instructions of the PTX, which ptxas may not contract (--fmad=false)."""
    return Counter(re.findall(r"\b((?:add|sub|mul|fma|div|max)(?:\.rn)?\.(?:f32|f16x?2?))", code.ptx))


each_shape = pytest.mark.parametrize(("head_dim", "rows"), [(64, 128), (128, 64), (128, 128), (256, 64), (256, 128)])
each_rotation = pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
each_dtype = pytest.mark.parametrize("bf16", [False, True], ids=["fp16", "bf16"])


@each_dtype
@each_rotation
@each_shape
def test_one_pass_has_only_the_stated_arithmetic(head_dim: int, rows: int, rotate: bool, bf16: bool) -> None:
    code, form = compiled(head_dim, rows, rotate=rotate, bf16=bf16)
    found, channels = arithmetic(code), channels_of_a_thread(form, head_dim)
    in_thread = form.parts * int(np.log2(channels)) * channels // 2 if rotate else 0
    between_lanes = form.parts * int(np.log2(form.lanes)) * channels if rotate else 0
    assert (found["add.rn.f32"], found["sub.rn.f32"]) == (in_thread, in_thread)
    assert found["fma.rn.f32"] == between_lanes  # times +-1: a sum
    assert found["div.rn.f32"] == DIVISIONS
    assert found["mul.rn.f32"] == form.parts * channels + 2 * rotate  # norm: on the maximum, on 1 / descale
    assert not any(name.endswith(("f16", "f16x2")) for name in found)
    assert (
        code.ptx.count("cvt.rn.satfinite.e4m3x2.f32") == form.parts * channels // 2
    )  # one conversion for two elements
    assert count(code, "F2FP.SATFINITE.E4M3") == form.parts * channels // 2


@each_rotation
@each_shape
def test_accesses_are_16_bytes_wide_and_nothing_spills(head_dim: int, rows: int, rotate: bool) -> None:
    code, form = compiled(head_dim, rows, rotate=rotate)
    channels = channels_of_a_thread(form, head_dim)
    fetches = form.parts + 1  # one before the loop
    assert code.spill_bytes == 0
    assert code.registers <= form.registers
    assert count(code, "LDGSTS.E.BYPASS.128") == fetches * channels * 2 // 16 == count(code, "LDGSTS")
    assert count(code, "STG.E.128") == form.parts * channels // 16
    assert count(code, "STG") == count(code, "STG.E.128") + 2  # the descale, of an empty tile too
    assert count(code, "LDG.E") == count(code, "LDG.E.128")  # the signs


@pytest.mark.parametrize("phase", ["one_pass", "amax", "cast"])
def test_a_k_mean_costs_one_fma_and_one_dot_product(phase: str) -> None:
    code, _ = compiled(128, 128, rotate=True, phase=phase, mean=True)
    found, has_lse = arithmetic(code), phase != "amax"
    assert code.spill_bytes == 0
    # LLVM copies up to a quarter of the first round into the branches of q and k
    assert 7 * 64 <= found["sub.rn.f32"] <= 7 * 64 + 32
    assert 7 * 64 <= found["add.rn.f32"] - (127 if has_lse else 0) <= 7 * 64 + 32
    assert found["mul.rn.f32"] == (128 + 1 + 128 + 2 if has_lse else 0)  # terms, softmax_scale, factors, norm
    assert found["fma.rn.f32"] == 128  # y - 1 * mean, or y - 0 * mean behind the sequence


@pytest.mark.parametrize(("head_dim", "rows"), [(64, 128), (128, 128), (256, 64), (256, 128)])
@each_rotation
def test_a_k_mean_spills_six_registers_at_most(head_dim: int, rows: int, rotate: bool) -> None:
    spilled = 24 if (head_dim, rows, rotate) == (256, 64, True) else 0
    assert compiled(head_dim, rows, rotate=rotate, mean=True)[0].spill_bytes == spilled


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_the_sums_of_the_k_mean_are_not_contracted(head_dim: int) -> None:
    gl = pytest.importorskip("triton.experimental.gluon.language", reason="needs triton: pip install triton==3.6.0")
    from fa3_kernels.gluon.quantize_kernel import QuantizedOperand
    from fa3_kernels.gluon.quantize_mean import k_mean, k_mean_chunks
    from fa3_reports.audit.compile import FakeTensor
    from tests.kernels.audit.compiled import compile_kernel

    x, out, floats, lengths = (FakeTensor(dtype) for dtype in (gl.int16, gl.uint8, gl.float32, gl.int32))
    k = QuantizedOperand(x, out, floats, lengths, lengths, 1 << 20, 2048, head_dim, 16, 1000, 8, 8, 1, 1)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    chunks = compile_kernel(
        k_mean_chunks, (k, floats, 2, head_dim, MEAN_CHUNK_ROWS, MEAN_TREE_ROWS, head_dim, False, False), **options
    )
    mean = compile_kernel(
        k_mean, (floats, floats, x, lengths, 1000, 16, 2, MEAN_CHUNK_ROWS, MEAN_FINAL_ROWS, head_dim, False), **options
    )
    for code in (chunks, mean):
        assert code.spill_bytes == 0
        assert not any(name.startswith("fma") for name in arithmetic(code))
    assert count(chunks, "LDG.E.128") > 0
