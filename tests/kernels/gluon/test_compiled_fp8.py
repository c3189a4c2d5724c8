"""What ptxas makes of the e4m3 forward kernels, on a machine without a GPU.

Counts are derived by hand for a 64 x 128 tile per warpgroup: a thread holds 64 scores and head_dim / 2 values of O in
2 rows. One step is compiled once per consumer: a single loop runs over masked and unmasked blocks.
"""

from __future__ import annotations

import re
from functools import cache

import pytest

from fa3_kernels.gluon.choose import config_of, shape_of
from fa3_kernels.gluon.sass import undefined_uniform_registers
from fa3_kernels.gluon.variant import variant_of
from fa3_reference.problem import AttentionProblem

pytestmark = pytest.mark.optional

CONSUMERS, ROWS, SCORES = 2, 2, 64
# Bytes ptxas 12.8.93 spills in all; none is inside the loop over blocks unless head_dim is 256. Everything else: 0.
SPILLS = {
    (128, True, 128, True): 8,
    (256, False, 128, False): 32,
    (256, False, 0, False): 16,
    (256, True, 128, True): 132,
    (256, True, 0, False): 32,
}
# (head_dim, causal, promotion_interval, block descales)
SHIPPED = (
    (64, False, 128, False),
    (64, True, 128, True),
    (64, True, 0, False),
    (128, False, 128, False),
    (128, True, 128, False),
    (128, True, 128, True),
    (128, False, 0, False),
    (128, True, 0, False),
    (128, False, 64, False),
    *SPILLS.keys() - {(128, True, 128, True)},
)


@cache
def compiled(head_dim: int, causal: bool, promotion_interval: int, block_descales: bool):
    gl = pytest.importorskip("triton.experimental.gluon.language", reason="needs triton: pip install triton==3.6.0")
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from fa3_kernels.gluon.compile import FakeTensor, compile_kernel
    from fa3_kernels.gluon.forward_fp8 import forward_fp8

    problem = AttentionProblem(2, 4, 4, 1024, 1024, head_dim, dtype="e4m3", causal=causal)
    config = config_of(problem, promotion_interval=promotion_interval)
    variant = variant_of(config, problem, shape_of(problem), block_descales=block_descales)

    def descriptor(rows: int, channels: int, dtype) -> TensorDescriptor:
        block = [1, 1, rows, channels]
        layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
        strides = [1 << 20, head_dim, 4 * head_dim, 1]
        return TensorDescriptor(FakeTensor(dtype), [2, 4, 1024, head_dim], strides, block, layout)

    q = descriptor(64, head_dim, gl.float8e4nv)
    k = descriptor(config.tile_n, head_dim, gl.float8e4nv)
    out = descriptor(64, min(head_dim, 128), gl.bfloat16)
    f32 = FakeTensor(gl.float32)
    descales = (f32, 4, 1, 0) * 3 + (1 << 30,)
    sizes = (5, 4, 1, 1024, 1024, -1, -1, 1, 8192)
    args = (
        q,
        k,
        k,
        out,
        f32,
        f32,
        FakeTensor(gl.int32),
        FakeTensor(gl.int64),
        *descales,
        0.0,
        0.0,
        *sizes,
        0.125,
        variant,
    )
    return compile_kernel(forward_fp8, args, num_warps=4, maxnreg=variant.entry_regs, enable_fp_fusion=False)


@pytest.mark.parametrize("case", SHIPPED, ids=str)
def test_spills_are_none_or_listed_and_wgmma_is_not_serialised(case) -> None:
    code = compiled(*case)
    assert code.spill_bytes == SPILLS.get(case, 0)
    assert code.serialisation == (), "ptxas serialised the wgmma pipeline"
    # P in registers: such a wgmma reads only the second half of its descriptor pair, V^T.
    unset = [x for x in undefined_uniform_registers(code.sass) if not re.search(r"GMMA\S* R\d+, R\d+, gdesc", x)]
    assert unset == [], "ptxas reads an address that a skipped loop sets"
    assert code.smem_bytes <= 227 * 1024


@pytest.mark.parametrize("case", SHIPPED, ids=str)
def test_products_take_the_expected_instructions(case) -> None:
    head_dim, _, promotion_interval, _ = case
    code = compiled(*case)
    slices = {64: 1, 128: 2 if promotion_interval else 1, 256: 2}[head_dim]
    scores, output = head_dim // 32, 4 * slices  # k32 steps of Q K^T; 128 / 32 of each slice of P V
    assert code.count("QGMMA") == CONSUMERS * (2 * scores + 2 * output + scores * (head_dim != 256))
    assert code.count("HGMMA") == 0
    assert code.count("UTMASTG") == CONSUMERS * (2 if head_dim == 256 else 1)


@pytest.mark.parametrize("case", SHIPPED, ids=str)
def test_v_is_transposed_by_matrix_moves_and_p_is_packed_without_byte_moves(case) -> None:
    head_dim = case[0]
    code = compiled(*case)
    copies = 3 if head_dim == 256 else 2  # in the loop and behind it; with one Q slot also before a tile
    assert code.count("LDSM") == copies * head_dim * 128 // (128 * 16)  # 16 bytes per thread and instruction
    assert (
        code.opcodes["F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C"] == CONSUMERS * 2 * SCORES // 2
    )  # first block and step
    sorting = copies * head_dim * 128 // (128 * 4)  # one per word of V
    assert code.count("PRMT") <= sorting + CONSUMERS * 2 * SCORES // 2 + 64


@pytest.mark.parametrize("case", [c for c in SHIPPED if not c[3]], ids=str)
def test_promotion_costs_no_instruction_and_nothing_else_is_contracted(case) -> None:
    head_dim, _, promotion_interval, _ = case
    code = compiled(*case)
    softmax = 2 * (SCORES + ROWS + ROWS)  # ex2's argument, the scaled maximum, the thread sums; first block and step
    o = head_dim // 2
    promoted = 2 * o if promotion_interval else 0  # step and last block
    rescaled = 0 if promotion_interval else o
    assert code.count("FFMA") == CONSUMERS * (softmax + promoted)
    at_least = CONSUMERS * (rescaled + o)  # O * rescale; O * inverse; the rest are factors of rows
    assert at_least <= code.count("FMUL") <= at_least + CONSUMERS * 20
