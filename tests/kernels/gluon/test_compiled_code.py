"""What ptxas makes of every shipped forward kernel, on a machine without a GPU: no spill, no serialised wgmma, no contraction.

Counts of fp32 instructions are derived by hand: of a 64 x n tile per warpgroup a thread holds n / 2 elements in 2 rows.
"""

from __future__ import annotations

from functools import cache

import pytest

from fa3_kernels.config import Config
from fa3_kernels.gluon.choose import config_of, shape_of
from fa3_kernels.gluon.sass import undefined_uniform_registers
from fa3_kernels.gluon.variant import Variant, variant_of
from fa3_reference.problem import AttentionProblem

pytestmark = pytest.mark.optional

ROWS = 2  # rows per thread
# Spilled bytes that are accepted: scalars of a tile; the loop without a mask holds no local load or store (read in SASS).
ACCEPTED_SPILLS = {"d256-window": 96, "d256-packed-splits": 8, "d256-varlen-packed-splits": 64}


def dense(head_dim: int, seqlen_k: int = 1000, **semantics) -> AttentionProblem:
    return AttentionProblem(2, 4, 4, 1000, seqlen_k, head_dim, **semantics)


def varlen(head_dim: int, **semantics) -> AttentionProblem:
    return AttentionProblem.varlen((100, 200), (300, 200), nheads=8, nheads_kv=4, head_dim=head_dim, **semantics)


def problems(d: int) -> dict[str, tuple[AttentionProblem, dict]]:
    """Problems and choices that between them reach every shipped kind of kernel of a head_dim."""
    few_rows = AttentionProblem(2, 16, 2, 20, 1000, d, causal=True)
    return {
        "dense": (dense(d, 1024), {}),
        "tail": (dense(d), {}),
        "causal": (dense(d, causal=True), {}),
        "causal-long": (AttentionProblem(1, 1, 1, 4096, 4096, d, causal=True), {}),
        "window": (dense(d, window=(100, 0)), {}),
        "left": (dense(d, window=(100, -1)), {}),
        "softcap": (dense(d, causal=True, softcap=20.0), {}),
        "splits": (dense(d), {"num_splits": 2}),
        "packed": (few_rows, {}),
        "packed-splits": (few_rows, {"num_splits": 3}),
        "varlen": (varlen(d), {"pack_gqa": False}),
        "varlen-causal": (varlen(d, causal=True), {"pack_gqa": False}),
        "varlen-packed-splits": (varlen(d, causal=True), {"pack_gqa": True, "num_splits": 2}),
    }


SHIPPED = {
    f"d{d}-{name}": case
    for d in (64, 128, 256)
    for name, case in problems(d).items()
    if (name != "causal-long" or d == 64)
    and (d == 128 or name not in ("tail", "left", "packed"))  # what the others show, at less than three minutes for all
}
COUNTED = [(f"d{d}-{name}", "float16") for d in (64, 128, 256) for name in ("dense", "causal")]
COUNTED += [("d128-dense", "bfloat16"), ("d128-causal", "bfloat16")]


@pytest.fixture
def gl():
    return pytest.importorskip("triton.experimental.gluon.language", reason="needs triton: pip install triton==3.6.0")


def variant(name: str, **switches) -> tuple[Config, Variant]:
    problem, choices = SHIPPED[name]
    config = config_of(problem, **choices, **switches)
    shape = shape_of(problem, pack_gqa=config.pack_gqa, num_splits=config.num_splits)
    return config, variant_of(config, problem, shape)


@cache
def compiled(name: str, dtype, **switches):
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from fa3_kernels.gluon.compile import FakeTensor, compile_kernel
    from fa3_kernels.gluon.forward_fp16 import forward_fp16

    config, v = variant(name, **switches)

    def descriptor(*rows: int) -> TensorDescriptor:
        block = [1, 1, *rows, config.head_dim]
        strides = [1 << (28 - 4 * i) for i in range(len(block) - 1)] + [1]
        layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
        return TensorDescriptor(FakeTensor(dtype), [1000] * len(block), strides, block, layout)

    head = (1,) if v.is_varlen else ()
    k = descriptor(*head, config.tile_n)
    q = descriptor(64 // v.pack, v.pack) if v.pack > 1 else descriptor(*head, 64)
    pointers = [FakeTensor(kind) for kind in (gl.float32, gl.float32, gl.int32, gl.int64)]
    sizes = (5, 8, 2, 1000, 1000, 7, 0, 2, 8000, 0.1275, 0.0)
    return compile_kernel(
        forward_fp16, (q, k, k, q, *pointers, *sizes, v), num_warps=4, maxnreg=v.entry_regs, enable_fp_fusion=False
    )


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_kernels_neither_spill_nor_serialise_wgmma(gl, name: str) -> None:
    code = compiled(name, gl.float16)
    v = variant(name)[1]
    assert code.spill_bytes <= ACCEPTED_SPILLS.get(name, 0)
    assert code.serialisation == (), "ptxas serialised the wgmma pipeline"
    assert code.registers == v.entry_regs
    assert code.smem_bytes <= 227 * 1024
    assert undefined_uniform_registers(code.sass) == [], "ptxas reads an address that a skipped loop sets"
    assert code.count("UTMALDG") > 0
    assert code.count("UTMASTG") == (0 if v.is_split else v.consumers)
    assert code.count("USETMAXREG") > 0


@pytest.mark.parametrize(("name", "dtype"), COUNTED)
def test_kernels_compile_to_the_intended_instructions(gl, name: str, dtype: str) -> None:
    code = compiled(name, getattr(gl, dtype))
    config, v = variant(name)
    steps = 2 if v.is_right_limited else 1  # copies of the step in one consumer: with and without a mask
    # k steps of 16 per product; head_dim 256 starts its first S itself instead of with the last P V of the tile before
    s_wgmmas, o_wgmmas = config.head_dim // 16, config.tile_n // 16
    first = 1 + (v.query_slots > 1)
    assert code.count("HGMMA") == v.consumers * ((steps + first) * s_wgmmas + (steps + 1) * o_wgmmas)
    p, o = config.tile_n // 2, config.head_dim // 2  # elements per thread
    fused = p + ROWS + ROWS  # ex2's argument, the scaled maximum, the thread sum
    assert code.count("FFMA") == v.consumers * (steps + 1) * fused, "a multiply and an add were contracted"
    assert code.count("FMUL") == v.consumers * (steps * o + o + ROWS)  # O * rescale; O * inverse and lse * ln 2
    assert code.count("PRMT") < p, "P is taken apart and put together again in the loop"


@pytest.mark.parametrize(("pingpong", "overlap"), [(False, True), (True, False), (False, False)])
def test_schedule_switches_compile_without_spills(gl, pingpong: bool, overlap: bool) -> None:
    code = compiled("d128-causal", gl.float16, pingpong=pingpong, intra_wg_overlap=overlap)
    assert (code.spill_bytes, code.serialisation) == (0, ())


def test_the_combine_has_its_multiply_adds_and_no_others(gl) -> None:
    from fa3_kernels.gluon.combine import combine
    from fa3_kernels.gluon.compile import FakeTensor, compile_kernel

    pointers = [FakeTensor(kind) for kind in (gl.float32, gl.float32, gl.float16, gl.float32)]
    code = compile_kernel(combine, (*pointers, 100, 10, 4, 3, 128, 4, 128), num_warps=4, enable_fp_fusion=False)
    loads = code.count("LDG.E.128")  # of four partials each, one multiply-add per partial
    assert code.count("FFMA") == 4 * loads > 0
    assert code.spill_bytes == 0
