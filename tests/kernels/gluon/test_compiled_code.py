"""What ptxas makes of the forward kernel, on a machine without a GPU: no spill, no serialised wgmma, no contraction.

Counts of fp32 instructions are derived by hand for a 64 x 128 tile per warpgroup: a thread holds 64 elements in 2 rows.
"""

from __future__ import annotations

from functools import cache

import pytest

pytestmark = pytest.mark.optional

CONSUMERS = 2
# (causal, even_k, copies of the step in one consumer): causal has a masked and an unmasked loop.
MASKS = ((False, True, 1), (False, False, 1), (True, False, 2), (True, True, 2))
P, ROWS = 64, 2  # elements of P and rows per thread
FUSED = P + ROWS + ROWS  # ex2's argument, the scaled maximum, the thread sum
HGMMA = 8  # 128 / 16 instructions per 64 x 128 x 128 product


@pytest.fixture(params=["fp16", "bf16"])
def dtype(request: pytest.FixtureRequest):
    gl = pytest.importorskip("triton.experimental.gluon.language", reason="needs triton: pip install triton==3.6.0")
    return {"fp16": gl.float16, "bf16": gl.bfloat16}[request.param]


@cache
def compiled(dtype, causal: bool, even_k: bool, *, pingpong: bool = True, overlap: bool = True):
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from fa3_kernels.gluon.compile import FakeTensor, compile_kernel
    from fa3_kernels.gluon.forward_fp16 import forward_fp16

    def descriptor(rows: int) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, 128], dtype)
        strides = [1 << 19, 128, 512, 1]
        return TensorDescriptor(FakeTensor(dtype), [2, 4, 1000, 128], strides, [1, 1, rows, 128], layout)

    q, k = descriptor(64), descriptor(128)
    sizes = (5, 4, 1, 1000, 1000, 0.1275)
    args = (
        q,
        k,
        k,
        q,
        FakeTensor(gl.float32),
        FakeTensor(gl.int32),
        *sizes,
        causal,
        even_k,
        pingpong,
        overlap,
        240,
        24,
    )
    return compile_kernel(forward_fp16, args, num_warps=4, maxnreg=168, enable_fp_fusion=False)


@pytest.mark.parametrize(("causal", "even_k", "steps"), MASKS)
def test_forward_compiles_to_the_intended_instructions(dtype, causal: bool, even_k: bool, steps: int) -> None:
    code = compiled(dtype, causal, even_k)
    assert code.spill_bytes == 0
    assert code.serialisation == (), "ptxas serialised the wgmma pipeline"
    assert code.registers == 168
    assert code.count("HGMMA") == CONSUMERS * HGMMA * (
        1 + 2 * steps + 2
    )  # first S; S and P V per step; last P V, next S
    assert code.count("UTMALDG") > 0
    assert code.count("UTMASTG") == CONSUMERS
    assert code.count("USETMAXREG") > 0


@pytest.mark.parametrize(("causal", "even_k", "steps"), MASKS)
def test_no_multiply_and_add_is_contracted(dtype, causal: bool, even_k: bool, steps: int) -> None:
    code = compiled(dtype, causal, even_k)
    assert code.count("FFMA") == CONSUMERS * (steps + 1) * FUSED
    assert code.count("FMUL") == CONSUMERS * (steps * P + P + ROWS)  # O * rescale; O * inverse and lse * ln 2


@pytest.mark.parametrize(("pingpong", "overlap"), [(False, True), (True, False), (False, False)])
def test_schedule_switches_compile_without_spills(dtype, pingpong: bool, overlap: bool) -> None:
    code = compiled(dtype, True, False, pingpong=pingpong, overlap=overlap)
    assert (code.spill_bytes, code.serialisation) == (0, ())
