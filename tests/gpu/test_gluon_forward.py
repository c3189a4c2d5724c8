"""The Gluon forward on a Hopper GPU: every bit of O and of the LSE is the CPU twin's."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from fa3_kernels.plan.request import Choices, Semantics
from fa3_kernels.twin.forward import forward as twin_forward
from fa3_reference.problem import AttentionProblem, Operands

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

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
each_head_dim = pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
each_dtype = pytest.mark.parametrize("dtype", list(NUMPY))


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


def device_forward(problem: AttentionProblem, given: Operands, **choices) -> tuple[np.ndarray, np.ndarray]:
    import torch

    from fa3_kernels.gluon.arguments import packed_of
    from fa3_kernels.gluon.launch import forward

    tensors = [to_device(x) for x in (given.q, given.k, given.v)]
    out, lse = forward(*tensors, Semantics.of(problem), Choices(**choices), packed=packed_of(problem))
    return out.view(torch.int16).cpu().numpy(), lse.view(torch.int32).cpu().numpy()


def assert_bits(problem: AttentionProblem, given: Operands, **choices) -> None:
    from fa3_kernels.plan.choose import config_of

    want = twin_forward(problem, given, config_of(problem, **choices))
    got = device_forward(problem, given, **choices)
    for name, a, b in zip(("out", "lse"), got, (want.out.view(np.int16), want.lse.view(np.int32)), strict=True):
        wrong = np.argwhere(a != b)
        first = wrong[0].tolist() if len(wrong) else None
        assert len(wrong) == 0, f"{problem} {choices}: {len(wrong)} of {a.size} {name} differ, first at {first}"


@each_dtype
@each_mask
@each_head_dim
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_the_twins(shape: tuple[int, ...], head_dim: int, dtype: str, causal: bool) -> None:
    problem = AttentionProblem(*shape, head_dim, dtype=dtype, causal=causal)
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
@pytest.mark.parametrize("head_dim", [8, 40, 72, 80, 96, 120, 136, 200])
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


@each_dtype
@each_mask
@pytest.mark.parametrize("overlap", [False, True])
def test_no_warp_specialisation_changes_no_bit(dtype: str, causal: bool, overlap: bool) -> None:
    for seqlen_q, seqlen_k, head_dim in ((1, 1, 128), (300, 700, 96), (512, 512, 128), (129, 257, 128)):
        problem = AttentionProblem(2, 4, 2, seqlen_q, seqlen_k, head_dim, dtype=dtype, causal=causal)
        assert_bits(problem, draw(problem), warp_specialize=False, intra_wg_overlap=overlap)


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
    causal = Semantics(causal=True)
    got, want = forward(*views, causal), forward(*(x.contiguous() for x in views), causal)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@each_dtype
def test_a_value_dim_of_its_own_gives_the_twins_bits(dtype: str) -> None:
    for dim, dim_v in ((192, 128), (64, 256), (128, 40)):
        problem = AttentionProblem(2, 4, 2, 200, 333, dim, dim_v, dtype=dtype, causal=True)
        assert_bits(problem, draw(problem))


@each_head_dim
@pytest.mark.parametrize("window", [(100, 0), (0, 0), (90, 150), (250, -1), (-1, 40), (10_000, 3)])
def test_windows_give_the_twins_bits(head_dim: int, window: tuple[int, int]) -> None:
    for m, n in ((700, 700), (300, 900), (500, 130), (129, 257)):
        problem = AttentionProblem(1, 4, 2, m, n, head_dim, window=window)
        assert_bits(problem, draw(problem, special=1e-5))


@each_head_dim
@each_mask
@pytest.mark.parametrize("softcap", [0.5, 20.0])
def test_a_cap_gives_the_twins_bits(head_dim: int, causal: bool, softcap: float) -> None:
    problem = AttentionProblem(2, 4, 2, 300, 515, head_dim, softcap=softcap, causal=causal)
    assert_bits(problem, draw(problem, special=1e-5))


# Groups padded to 2, 4, 4, 8, 32 and 64 rows per position; a group that leaves padded heads must not write them.
@each_mask
@pytest.mark.parametrize(("nheads", "nheads_kv"), [(4, 2), (6, 2), (8, 2), (7, 1), (28, 1), (64, 1)])
def test_packed_heads_give_the_twins_bits(nheads: int, nheads_kv: int, causal: bool) -> None:
    for m, n in ((1, 700), (33, 260), (130, 520)):
        problem = AttentionProblem(2, nheads, nheads_kv, m, n, 128, causal=causal)
        assert_bits(problem, draw(problem, special=1e-5), pack_gqa=True)


@each_head_dim
@pytest.mark.parametrize("num_splits", [0, 2, 7])
def test_splits_give_the_twins_bits(head_dim: int, num_splits: int) -> None:
    for m, n, causal in ((1, 3000, False), (200, 700, True), (300, 40, True)):
        problem = AttentionProblem(2, 8, 2, m, n, head_dim, causal=causal)
        assert_bits(problem, draw(problem, special=3e-5), num_splits=num_splits)


@each_dtype
@each_head_dim
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (120, 10)}, {"causal": True, "softcap": 9.0}])
@pytest.mark.parametrize("choices", [{"pack_gqa": False}, {"pack_gqa": True}, {"num_splits": 3}])
def test_packed_sequences_give_the_twins_bits(dtype: str, head_dim: int, mask: dict, choices: dict) -> None:
    lengths = ((100, 1, 0, 257, 64), (130, 500, 70, 0, 64))  # empty ones on either side
    problem = AttentionProblem.varlen(*lengths, nheads=4, nheads_kv=2, head_dim=head_dim, dtype=dtype, **mask)
    assert_bits(problem, draw(problem), **choices)


def test_nothing_of_a_neighbour_reaches_a_sequence() -> None:
    """The rows before and behind the middle sequence are NaN; its bits are those it has alone."""
    lengths_q, lengths_k = (50, 77, 60), (90, 135, 40)
    problem = AttentionProblem.varlen(lengths_q, lengths_k, nheads=4, nheads_kv=2, head_dim=128)
    given = draw(problem)
    inside_q, inside_k = slice(50, 127), slice(90, 225)
    for x, inside in ((given.q, inside_q), (given.k, inside_k), (given.v, inside_k)):
        outside = np.ones(len(x), bool)
        outside[inside] = False
        x[outside] = np.nan
    out, lse = device_forward(problem, given)
    alone = AttentionProblem(1, 4, 2, 77, 135, 128)
    single = Operands(given.q[None, inside_q], given.k[None, inside_k], given.v[None, inside_k])
    want_out, want_lse = device_forward(alone, single)
    assert np.array_equal(out[inside_q], want_out[0])
    assert np.array_equal(lse[:, inside_q], want_lse[0])


@pytest.mark.parametrize(
    ("batch", "mode"), [(1, "mixed"), (40, "mixed"), (40, "decode"), (700, "mixed"), (30, "no keys")]
)
@each_mask
def test_the_gpu_makes_the_schedule_that_the_rule_says(batch: int, mode: str, causal: bool) -> None:
    import torch

    from fa3_kernels.gluon import launch
    from fa3_kernels.gluon.arguments import packed_of
    from tests.kernels.packed_schedule import packed_schedule

    rng = np.random.default_rng(batch)
    lengths_q = rng.integers(1, 2 if mode == "decode" else 900, batch)
    lengths_k = rng.integers(0, 1500, batch) * (mode != "no keys")
    lengths_k[-1] = 1000 if mode != "no keys" else 0
    problem = AttentionProblem.varlen(
        tuple(map(int, lengths_q)), tuple(map(int, lengths_k)), nheads=8, nheads_kv=2, head_dim=64, causal=causal
    )
    made = []
    workspace = launch._packed_workspace

    def kept(plan, packed, values, device):
        made.append((plan, values, workspace(plan, packed, values, device)))
        return made[0][2]

    keys = (max(problem.k_shape[0], 1), 2, 64)
    q, k, v = (torch.randn(x, device="cuda", dtype=torch.float16) for x in (problem.q_shape, keys, keys))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_packed_workspace", kept)
        out, lse = launch.forward(q, k, v, Semantics(causal=causal), packed=packed_of(problem))
    ((plan, values, made_on_gpu),) = made
    shape, first = (values["ctas"], values["width"]), (values["schedule"] - made_on_gpu.data_ptr()) // 8
    order, _ = plan.order(int(lengths_q.sum()), max(lengths_q))
    want = packed_schedule(order, problem.seqlens_q, problem.seqlens_k, plan.num_sms, max(lengths_q))
    assert shape == want.shape
    got = made_on_gpu.cpu().numpy()[first : first + shape[0] * shape[1]].reshape(shape)
    ends = (want >= 0).sum(1)
    assert all(np.array_equal(a[: n + 1], b[: n + 1]) for a, b, n in zip(got, want, ends, strict=True))
    assert bool(torch.isfinite(out).all())
    if mode == "no keys":
        assert bool((out == 0).all() and (lse == -math.inf).all())


def test_starts_that_leave_the_tensors_read_and_write_nothing_outside() -> None:
    import torch

    from fa3_kernels.gluon.arguments import Packed
    from fa3_kernels.gluon.launch import forward

    q, k = (torch.randn(n, 4, 64, device="cuda", dtype=torch.float16) for n in (300, 500))
    starts = torch.tensor([0, 9000, -7, 300], dtype=torch.int32, device="cuda")
    forward(q, k, k, packed=Packed(starts, starts, 400, 600))
    torch.cuda.synchronize()


def test_a_sequence_has_its_bits_at_every_place_of_a_batch() -> None:
    problem = AttentionProblem(5, 4, 2, 333, 450, 64, causal=True)
    given = draw(problem)
    same = Operands(*(np.repeat(x[:1], 5, axis=0) for x in (given.q, given.k, given.v)))
    out, lse = device_forward(problem, same)
    assert all(np.array_equal(out[0], x) for x in out)
    assert all(np.array_equal(lse[0], x) for x in lse)


def test_illegal_operands_are_refused() -> None:
    import torch

    from fa3_kernels.gluon.arguments import Packed
    from fa3_kernels.gluon.launch import forward

    def tensor(*shape: int, dtype=torch.float16):
        return torch.zeros(shape, device="cuda", dtype=dtype)

    q, k = tensor(1, 8, 3, 128), tensor(1, 8, 2, 128)
    with pytest.raises(ValueError, match="multiple of nheads_kv, got 3 and 2"):
        forward(q, k, k)
    with pytest.raises(ValueError, match="head_dim must be a multiple of 8"):
        forward(*[torch.zeros(1, 8, 2, 64, device="cuda", dtype=torch.float16)[..., :60]] * 3)
    starts = torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"cu_seqlens_q must be int32 .* on cuda"):
        forward(*[tensor(8, 2, 64)] * 3, packed=Packed(starts, starts, 8, 8))
    with pytest.raises(ValueError, match="must share float16, bfloat16 or float8_e4m3fn"):
        forward(*[tensor(1, 8, 2, 128, dtype=torch.float32)] * 3)
    assert math.isfinite(float(forward(k, k, k)[1].sum()))
