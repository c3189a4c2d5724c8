"""The quantiser on a Hopper GPU: every e4m3 code, descale and LSE correction has the CPU twin's bits."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fa3_kernels.twin.quantize import quantize_qkv as twin_quantize
from fa3_reference.problem import AttentionProblem

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

FIELDS = ("q", "k", "v", "q_descale", "k_descale", "v_descale", "lse_correction", "k_mean")
# Around a tile, below one, many tiles, GQA.
SHAPES = ((1, 1, 1, 1, 1), (2, 2, 2, 127, 129), (1, 4, 2, 300, 515), (2, 3, 1, 1024, 1030))
each_dtype = pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["fp16", "bf16"])
each_shape = pytest.mark.parametrize("shape", SHAPES)
each_head_dim = pytest.mark.parametrize("head_dim", [32, 64, 128, 256])


def draw(problem: AttentionProblem, dtype: Any, special: float = 0.0) -> tuple[np.ndarray, ...]:
    """Normal operands with heavy tails and channel offsets; ``special`` is the share of Inf, NaN and the like."""
    rng = np.random.default_rng(0)
    arrays = []
    for shape in (problem.q_shape, problem.k_shape, problem.v_shape):
        x = rng.standard_normal(shape) * np.where(rng.random(shape) < 0.01, 8, 1) + rng.standard_normal(shape[-1])
        values = rng.choice(np.array([np.inf, -np.inf, np.nan, 60000.0, -0.0]), shape)
        arrays.append(np.where(rng.random(shape) < special, values, x).astype(dtype))
    return tuple(arrays)


def to_device(x: np.ndarray):
    import torch

    kind = {"float16": torch.float16, "bfloat16": torch.bfloat16}[x.dtype.name]
    return torch.from_numpy(x.view(np.int16)).cuda().view(kind)


def assert_bits(problem: AttentionProblem, arrays: tuple[np.ndarray, ...], **options) -> None:
    import torch

    from fa3_kernels.gluon.quantize import quantize_qkv

    host: dict[str, Any] = {}
    device: dict[str, Any] = {}
    if problem.is_varlen:
        host = {"cu_seqlens_q": problem.cu_seqlens_q, "cu_seqlens_k": problem.cu_seqlens_k}
        device = {name: torch.from_numpy(x).cuda() for name, x in host.items()}
        device |= {"max_seqlen_q": problem.seqlen_q, "max_seqlen_k": problem.seqlen_k}
    want = twin_quantize(*arrays, **options, **host)
    got = quantize_qkv(*map(to_device, arrays), **options, **device)
    assert got.block_rows == want.block_rows
    for name in FIELDS:
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None), name
        if a is None:
            continue
        bits = a.contiguous().view(torch.uint8 if a.element_size() == 1 else torch.int32).cpu().numpy()
        b = np.ascontiguousarray(b)
        wrong = bits != b.view(bits.dtype)
        if name in ("lse_correction", "k_mean"):
            wrong &= ~(np.isnan(bits.view(np.float32)) & np.isnan(b))
        where = np.argwhere(wrong)
        first = where[0].tolist() if len(where) else None
        assert len(where) == 0, f"{problem} {options}: {len(where)} of {bits.size} {name} differ, first at {first}"


@each_dtype
@each_shape
@each_head_dim
@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
def test_one_pass_has_the_twins_bits(shape, head_dim: int, rotate: bool, dtype) -> None:
    problem = AttentionProblem(*shape, head_dim, dtype="e4m3")
    assert_bits(problem, draw(problem, dtype), block_rows=(64, 128, 32), rotate=rotate)


@each_dtype
@each_shape
@pytest.mark.parametrize("options", [{"scope": "head"}, {"block_rows": 256}, {"block_rows": (192, 128, 64)}], ids=str)
def test_two_passes_have_the_twins_bits(shape, options, dtype) -> None:
    problem = AttentionProblem(*shape, 128, dtype="e4m3")
    assert_bits(problem, draw(problem, dtype), rotate=True, scale="power_of_two", **options)


@each_dtype
@each_shape
@each_head_dim
@pytest.mark.parametrize("options", [{"scope": "head"}, {"rotate": True, "seed": 7}, {}], ids=str)
def test_a_k_mean_has_the_twins_bits(shape, head_dim: int, options, dtype) -> None:
    problem = AttentionProblem(*shape, head_dim, dtype="e4m3")
    assert_bits(problem, draw(problem, dtype), subtract_k_mean=True, softmax_scale=0.3, **options)


@each_dtype
@pytest.mark.parametrize("head_dims", [(16, 16), (96, 96), (128, 80), (64, 256), (256, 64)])
def test_padded_and_unequal_head_dims_have_the_twins_bits(head_dims, dtype) -> None:
    problem = AttentionProblem(2, 4, 2, 133, 200, *head_dims, dtype="e4m3")
    assert_bits(problem, draw(problem, dtype), block_rows=64, subtract_k_mean=True)


@each_dtype
@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("scope", ["block", "head"])
def test_non_finite_operands_have_the_twins_bits(scope, rotate: bool, dtype) -> None:
    problem = AttentionProblem(2, 2, 1, 400, 390, 128, dtype="e4m3")
    assert_bits(problem, draw(problem, dtype, special=1e-4), scope=scope, rotate=rotate, subtract_k_mean=rotate)


@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("scope", ["block", "head"])
def test_packed_sequences_have_the_twins_bits(scope, rotate: bool) -> None:
    lengths = (5, 300, 0, 128, 1), (64, 1, 700, 0, 129)
    problem = AttentionProblem.varlen(*lengths, nheads=4, nheads_kv=2, head_dim=128, dtype="e4m3")
    assert_bits(problem, draw(problem, np.float16), scope=scope, rotate=rotate, subtract_k_mean=True)


def test_views_have_the_bits_of_contiguous_tensors() -> None:
    import torch

    from fa3_kernels.gluon.quantize import quantize_qkv

    packed = torch.randn(2, 300, 3, 4, 128, device="cuda", dtype=torch.float16)
    views = packed.unbind(2)
    got = quantize_qkv(*views, rotate=True)
    want = quantize_qkv(*(x.contiguous() for x in views), rotate=True)
    for name in FIELDS[:6]:
        a, b = getattr(got, name), getattr(want, name)
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name


def test_no_keys_give_empty_operands() -> None:
    problem = AttentionProblem(1, 2, 1, 5, 0, 128, dtype="e4m3")
    assert_bits(problem, draw(problem, np.float16), subtract_k_mean=True)


def test_illegal_operands_are_refused() -> None:
    import torch

    from fa3_kernels.gluon.quantize import quantize_qkv

    def tensor(*shape: int, dtype=torch.float16):
        return torch.zeros(shape, device="cuda", dtype=dtype)

    good = tensor(1, 8, 2, 128)
    with pytest.raises(ValueError, match="must be on one GPU"):
        quantize_qkv(good.cpu(), good, good)
    with pytest.raises(ValueError, match="all be fp16 or all bf16"):
        quantize_qkv(*[tensor(1, 8, 2, 128, dtype=torch.float32)] * 3)
    with pytest.raises(ValueError, match="outer strides of 16 elements"):
        quantize_qkv(*[tensor(1, 8, 2, 136)[..., :128]] * 3)
    with pytest.raises(ValueError, match="given for packed tensors and only for them"):
        quantize_qkv(*[tensor(8, 2, 128)] * 3)


def test_the_kernel_has_the_bits_of_its_twin():
    from fa3verify.campaign.profiles import PROFILES, family_cases
    from fa3verify.judging.judgement import judge, passes
    from fa3verify.known import registry

    kernel = registry.find("gluon.quantize")
    for case in family_cases(kernel, "normal", PROFILES["quick"], 0):
        measures = judge(kernel, case).measures
        assert measures["bits_differing"] == 0, case.describe()
        assert passes(kernel, measures), case.describe()
