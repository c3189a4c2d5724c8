"""What ptxas makes of tiles that do not ship, and of the kernel that reads the SMs' counters, without a GPU."""

from __future__ import annotations

import pytest

from fa3_reference.problem import AttentionProblem
from fa3_reports.audit.calls import ShippedLaunch
from tests.kernels.audit.opcodes import count

pytestmark = pytest.mark.optional

# Bytes ptxas 12.8.93 spills, all of them outside the loops over key blocks, in dense kernels.
SPILLS = {
    ("fp16", 64, (128, 64)): 0,
    ("fp16", 64, (192, 64)): 0,
    ("fp16", 128, (128, 32)): 0,
    ("fp16", 128, (128, 64)): 0,
    ("fp16", 128, (192, 64)): 0,
    ("fp16", 256, (128, 32)): 0,
    ("e4m3", 64, (128, 64)): 0,
    ("e4m3", 128, (128, 32)): 0,
    ("e4m3", 128, (128, 64)): 0,
    ("e4m3", 256, (128, 64)): 84,
}


def compiled(dtype, head_dim: int, tile: tuple[int, int]):
    pytest.importorskip("torch", reason="needs torch (extra 'gpu')")
    pytest.importorskip("triton.experimental.gluon", reason="needs triton: pip install triton==3.6.0")
    from fa3_reports.audit.calls import calls_of
    from fa3_reports.audit.compile import compile_call

    problem = AttentionProblem(1, 4, 4, 4096, 4096, head_dim, dtype=dtype)
    (call,) = calls_of(ShippedLaunch("tile", problem, {"tile": tile}))
    return compile_call(call)


QUICK = (("fp16", 128, (128, 64)), ("e4m3", 256, (128, 64)))
KINDS = [*QUICK, *(pytest.param(kind, marks=pytest.mark.nightly) for kind in SPILLS if kind not in QUICK)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_tiles_compile_without_spills_in_the_loop_and_without_serialised_wgmma(kind) -> None:
    from fa3_kernels.audit.sass import work_loops

    code = compiled(*kind)
    assert code.spill_bytes <= SPILLS[kind]
    assert code.serialisation == ()
    assert code.smem_bytes <= 232448
    steps = [loop for loop in work_loops(code.sass).values() if loop["mufu"]]
    assert len(steps) >= kind[2][0] // 64  # one per consumer
    assert not any(loop["spill"] for loop in steps)


@pytest.mark.parametrize("dtype", ["fp16", "e4m3"])
def test_a_tile_of_256_keys_is_more_than_the_registers_hold(dtype: str) -> None:
    """The deliberately bad ones: 32 registers of O, 128 of S and 64 of P (e4m3: 32, and a part of P V) of 240."""
    assert compiled(dtype, 64, (128, 256)).serialisation != ()


def test_the_clock_kernel_reads_the_counters_once_each_and_stores_both() -> None:
    gl = pytest.importorskip("triton.experimental.gluon.language", reason="needs triton: pip install triton==3.6.0")
    from fa3_kernels.gluon.clock import SLOTS, read_clocks
    from fa3_reports.audit.compile import FakeTensor
    from tests.kernels.audit.compiled import compile_kernel

    code = compile_kernel(read_clocks, (FakeTensor(gl.int64), SLOTS), num_warps=1)
    for register in ("SR_VIRTUALSMID", "SR_CLOCKLO", "SR_GLOBALTIMERLO"):
        assert code.sass.count(register) == 1
    assert count(code, "STG.E.64") == 2
