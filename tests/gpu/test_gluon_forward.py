"""The Gluon forward on a Hopper GPU: every bit of O and of the LSE is the CPU twin's."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from fa3_kernels.twin.forward import forward as twin_forward
from fa3_reference.problem import AttentionProblem, Operands

pytestmark = pytest.mark.gpu

NUMPY = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}
# One key, around one tile and around one warpgroup, GQA, more keys than queries, and rows without a key when causal.
SHAPES = (
    (1, 1, 1, 1, 1),
    (2, 2, 2, 63, 65),
    (2, 4, 2, 128, 128),
    (2, 4, 1, 129, 127),
    (1, 3, 1, 300, 257),
    (2, 2, 1, 100, 700),
    (1, 2, 2, 300, 40),
    (3, 6, 2, 1024, 1024),
)
each_mask = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
each_dtype = pytest.mark.parametrize("dtype", list(NUMPY))


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty comes filled with NaN."""
    import torch

    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def draw(problem: AttentionProblem, seed: int = 0, special: float = 0.0) -> Operands:
    """Normal operands with heavy tails; ``special`` is the share of Inf, NaN and the like."""
    rng = np.random.default_rng(seed)
    arrays = []
    for shape in (problem.q_shape, problem.k_shape, problem.v_shape):
        x = rng.standard_normal(shape) * np.where(rng.random(shape) < 0.01, 8, 1)
        values = rng.choice(np.array([np.inf, -np.inf, np.nan, 60000.0, -0.0]), shape)
        arrays.append(np.where(rng.random(shape) < special, values, x).astype(NUMPY[problem.dtype]))
    return Operands(*arrays)


def to_device(x: np.ndarray):
    import torch

    kind = torch.float16 if x.dtype == np.float16 else torch.bfloat16
    return torch.from_numpy(x.view(np.int16)).cuda().view(kind)


def device_forward(problem: AttentionProblem, given: Operands, **switches) -> tuple[np.ndarray, np.ndarray]:
    import torch

    from fa3_kernels.gluon.launch import forward

    tensors = [to_device(x) for x in (given.q, given.k, given.v)]
    out, lse = forward(*tensors, causal=problem.causal, softmax_scale=problem.softmax_scale, **switches)
    return out.view(torch.int16).cpu().numpy(), lse.view(torch.int32).cpu().numpy()


def assert_bits(problem: AttentionProblem, given: Operands, **switches) -> None:
    want = twin_forward(problem, given)
    got = device_forward(problem, given, **switches)
    for name, a, b in zip(("out", "lse"), got, (want.out.view(np.int16), want.lse.view(np.int32)), strict=True):
        wrong = np.argwhere(a != b)
        first = wrong[0].tolist() if len(wrong) else None
        assert len(wrong) == 0, f"{problem} {switches}: {len(wrong)} of {a.size} {name} differ, first at {first}"


@each_dtype
@each_mask
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_the_twins(shape: tuple[int, ...], dtype: str, causal: bool) -> None:
    problem = AttentionProblem(*shape, 128, dtype=dtype, causal=causal)
    assert_bits(problem, draw(problem))


@each_dtype
@each_mask
def test_bits_are_the_twins_for_every_tail(dtype: str, causal: bool) -> None:
    for seqlen in range(1, 301, 7):
        problem = AttentionProblem(2, 2, 1, seqlen, 301 - seqlen, 128, dtype=dtype, causal=causal)
        assert_bits(problem, draw(problem, seqlen))


@each_dtype
@each_mask
def test_non_finite_operands_give_the_twins_bits(dtype: str, causal: bool) -> None:
    for seed in range(4):
        problem = AttentionProblem(2, 2, 1, 400, 390, 128, dtype=dtype, causal=causal)
        assert_bits(problem, draw(problem, seed, special=3e-5))


@each_dtype
@pytest.mark.parametrize("head_dim", [72, 96, 120])
def test_padded_head_dims_give_the_twins_bits(dtype: str, head_dim: int) -> None:
    problem = AttentionProblem(2, 4, 2, 200, 333, head_dim, dtype=dtype, causal=True)
    assert_bits(problem, draw(problem))


@each_dtype
@pytest.mark.parametrize("softmax_scale", [1e-30, 2.0**-130, 3.0, 1e4])
def test_extreme_scales_give_the_twins_bits(dtype: str, softmax_scale: float) -> None:
    problem = AttentionProblem(1, 2, 2, 150, 200, 128, dtype=dtype, causal=True, softmax_scale=softmax_scale)
    assert_bits(problem, draw(problem))


@each_dtype
@pytest.mark.parametrize(("pingpong", "overlap"), [(False, True), (True, False), (False, False)])
def test_schedule_switches_change_no_bit(dtype: str, pingpong: bool, overlap: bool) -> None:
    problem = AttentionProblem(2, 4, 2, 700, 700, 128, dtype=dtype, causal=True)
    assert_bits(problem, draw(problem), pingpong=pingpong, intra_wg_overlap=overlap)


def test_persistent_loop_wraps_and_repeats() -> None:
    problem = AttentionProblem(2, 40, 8, 1024, 1024, 128, causal=True)  # 640 tiles on 132 SMs
    given = draw(problem)
    first = device_forward(problem, given)
    for _ in range(10):
        assert all(np.array_equal(a, b) for a, b in zip(first, device_forward(problem, given), strict=True))


def test_no_keys_give_zero_and_minus_infinity() -> None:
    problem = AttentionProblem(1, 2, 1, 5, 0, 128)
    assert_bits(problem, draw(problem))


def test_packed_qkv_gives_the_bits_of_separate_tensors() -> None:
    import torch

    from fa3_kernels.gluon.launch import forward

    packed = torch.randn(2, 300, 3, 4, 128, device="cuda", dtype=torch.float16)
    views = packed.unbind(2)
    got, want = forward(*views, causal=True), forward(*(x.contiguous() for x in views), causal=True)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_illegal_operands_are_refused() -> None:
    import torch

    from fa3_kernels.gluon.launch import forward

    def tensor(*shape: int, dtype=torch.float16):
        return torch.zeros(shape, device="cuda", dtype=dtype)

    q, k = tensor(1, 8, 3, 128), tensor(1, 8, 2, 128)
    with pytest.raises(ValueError, match="multiple of nheads_kv, got 3 and 2"):
        forward(q, k, k)
    with pytest.raises(ValueError, match="head_dim must be a multiple of 8"):
        forward(*[tensor(1, 8, 2, 64)] * 3)
    with pytest.raises(ValueError, match="all be fp16 or all bf16"):
        forward(*[tensor(1, 8, 2, 128, dtype=torch.float32)] * 3)
    assert math.isfinite(float(forward(k, k, k)[1].sum()))
