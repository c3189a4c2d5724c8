"""The e4m3 forward on a Hopper GPU: all bits of O and LSE are the twin's; promotion keeps long contexts right."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from fa3_kernels.plan.choose import config_of
from fa3_kernels.plan.request import Choices, Semantics
from fa3_kernels.twin.forward import forward as twin_forward
from fa3_reference.problem import AttentionProblem, Descale, Operands

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

E4M3 = ml_dtypes.float8_e4m3fn
HEAD_DIMS = (64, 128, 256)
# One key, around one tile and one warpgroup, GQA, both lengths longer, rows without a key when causal, > 132 tiles.
SHAPES = (
    (1, 1, 1, 1, 1),
    (2, 2, 2, 63, 65),
    (2, 4, 1, 129, 127),
    (1, 3, 1, 300, 257),
    (2, 2, 1, 100, 700),
    (1, 2, 2, 300, 40),
    (3, 24, 8, 700, 700),
)
# Rows per block of q, k and v: none, one per head, key tiles, other blocks of q than of k, mixtures.
BLOCKS = ((None, None, None), (0, 0, 0), (128, 128, 128), (100, 256, 128), (None, 128, None), (64, None, 384))
each_head_dim = pytest.mark.parametrize("head_dim", HEAD_DIMS)
each_mask = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def draw(problem: AttentionProblem, blocks=(None, None, None), seed: int = 0, special: float = 0.0) -> Operands:
    """Normal operands with heavy tails and log-uniform descales; ``special`` is the share of NaN, +-448 and -0."""
    rng = np.random.default_rng(seed)
    arrays = []
    for shape in (problem.q_shape, problem.k_shape, problem.v_shape):
        x = np.clip(rng.standard_normal(shape) * np.where(rng.random(shape) < 0.01, 30, 1), -448, 448)
        values = rng.choice(np.array([np.nan, 448.0, -448.0, -0.0]), shape)
        arrays.append(np.where(rng.random(shape) < special, values, x).astype(E4M3))
    descales = []
    operands = (
        (problem.nheads, problem.seqlen_q),
        (problem.nheads_kv, problem.seqlen_k),
        (problem.nheads_kv, problem.seqlen_k),
    )
    for rows, (heads, seqlen) in zip(blocks, operands, strict=True):
        count = max(1, -(-seqlen // rows)) if rows else 1
        values = (2.0 ** rng.uniform(-3, 3, (problem.batch, heads, count))).astype(np.float32)
        descales.append(None if rows is None else Descale(values, rows))
    return Operands(*arrays, *descales)


def device_forward(problem: AttentionProblem, given: Operands, *, out_dtype: str = "bf16", **choices):
    import torch

    from fa3_kernels.gluon.arguments import Descales, packed_of
    from fa3_kernels.gluon.launch import forward

    tensors = [torch.from_numpy(x.view(np.int8)).cuda().view(torch.float8_e4m3fn) for x in (given.q, given.k, given.v)]
    factors = (given.q_descale, given.k_descale, given.v_descale)
    values = [None if d is None else torch.from_numpy(d.values).cuda() for d in factors]
    descales = Descales(*values, blocks=tuple(d.block_rows if d else 0 for d in factors))
    chosen = Choices(out_dtype=out_dtype, **choices)
    out, lse = forward(*tensors, Semantics.of(problem), chosen, descales=descales, packed=packed_of(problem))
    return out.view(torch.int16).cpu().numpy(), lse.view(torch.int32).cpu().numpy()


def assert_bits(problem: AttentionProblem, given: Operands, *, out_dtype: str = "bf16", **choices) -> None:
    want = twin_forward(problem, given, config_of(problem, out_dtype=out_dtype, **choices))
    got = device_forward(problem, given, out_dtype=out_dtype, **choices)
    for name, a, b in zip(("out", "lse"), got, (want.out.view(np.int16), want.lse.view(np.int32)), strict=True):
        wrong = np.argwhere(a != b)
        first = wrong[0].tolist() if len(wrong) else None
        assert len(wrong) == 0, f"{problem} {choices}: {len(wrong)} of {a.size} {name} differ, first at {first}"


@each_head_dim
@each_mask
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_the_twins(shape: tuple[int, ...], head_dim: int, causal: bool) -> None:
    problem = AttentionProblem(*shape, head_dim, dtype="e4m3", causal=causal)
    assert_bits(problem, draw(problem, (0, 0, 0)))


@each_head_dim
@each_mask
@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_descales_of_any_block_give_the_twins_bits(blocks, head_dim: int, causal: bool) -> None:
    problem = AttentionProblem(2, 4, 2, 333, 700, head_dim, dtype="e4m3", causal=causal)
    assert_bits(problem, draw(problem, blocks))


@each_head_dim
@each_mask
@pytest.mark.parametrize("promotion_interval", [0, 32, 64, 128])
@pytest.mark.parametrize("out_dtype", ["bf16", "fp16"])
def test_promotion_and_output_format_give_the_twins_bits(
    promotion_interval: int, out_dtype: str, head_dim: int, causal: bool
) -> None:
    problem = AttentionProblem(1, 4, 2, 300, 400, head_dim, dtype="e4m3", causal=causal)
    assert_bits(problem, draw(problem, (0, 128, 128)), promotion_interval=promotion_interval, out_dtype=out_dtype)


@each_head_dim
@each_mask
def test_every_tail_gives_the_twins_bits(head_dim: int, causal: bool) -> None:
    for seqlen in range(1, 301, 13):
        problem = AttentionProblem(2, 2, 1, seqlen, 301 - seqlen, head_dim, dtype="e4m3", causal=causal)
        assert_bits(problem, draw(problem, (64, 128, 128), seed=seqlen))


@each_head_dim
@each_mask
def test_nan_and_extremes_give_the_twins_bits(head_dim: int, causal: bool) -> None:
    for seed in range(4):
        problem = AttentionProblem(2, 2, 1, 400, 390, head_dim, dtype="e4m3", causal=causal)
        assert_bits(problem, draw(problem, (None, 128, 128), seed=seed, special=3e-5))


@each_head_dim
@pytest.mark.parametrize(
    ("semantics", "choices"),
    [
        ({"window": (100, 0)}, {}),
        ({"window": (64, 70)}, {}),
        ({"softcap": 5.0, "causal": True}, {}),
        ({"causal": True}, {"pack_gqa": True}),
        ({}, {"num_splits": 3}),
        ({"window": (90, -1)}, {"num_splits": 2, "pack_gqa": True}),
    ],
    ids=str,
)
def test_features_give_the_twins_bits(semantics: dict, choices: dict, head_dim: int) -> None:
    for seqlen_q, seqlen_k in ((300, 300), (129, 1023), (700, 200)):
        problem = AttentionProblem(2, 4, 2, seqlen_q, seqlen_k, head_dim, dtype="e4m3", **semantics)
        assert_bits(problem, draw(problem, (128, 128, 128)), **choices)


@each_head_dim
@each_mask
def test_packed_sequences_give_the_twins_bits(head_dim: int, causal: bool) -> None:
    sizes = {"nheads": 4, "nheads_kv": 2, "head_dim": head_dim, "dtype": "e4m3", "causal": causal}
    problem = AttentionProblem.varlen((100, 0, 1, 300, 129), (50, 20, 700, 300, 0), **sizes)
    assert_bits(problem, draw(problem, (128, 128, 128)))


@each_head_dim
@pytest.mark.parametrize(("pingpong", "overlap"), [(False, True), (True, False), (False, False)])
def test_schedule_switches_change_no_bit(head_dim: int, pingpong: bool, overlap: bool) -> None:
    problem = AttentionProblem(2, 4, 2, 700, 700, head_dim, dtype="e4m3", causal=True)
    assert_bits(problem, draw(problem), pingpong=pingpong, intra_wg_overlap=overlap)


@each_head_dim
def test_persistent_loop_wraps_and_repeats(head_dim: int) -> None:
    problem = AttentionProblem(2, 40, 8, 1024, 1024, head_dim, dtype="e4m3", causal=True)  # 640 tiles on 132 SMs
    given = draw(problem, (128, 128, 128))
    first = device_forward(problem, given)
    for _ in range(10):
        assert all(np.array_equal(a, b) for a, b in zip(first, device_forward(problem, given), strict=True))


@each_head_dim
def test_promotion_keeps_128k_keys_with_mean_one_within_three_thousandths(head_dim: int) -> None:
    """Chained accumulation loses 0.57 of the output there; bf16 rounding alone is 0.0017."""
    import torch

    from fa3_kernels.gluon.launch import forward

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, head_dim, device="cuda") for n in (128, 1 << 17, 1 << 17))
    q, k, v = (x.to(torch.float8_e4m3fn) for x in (q, k, v + 1))
    want = []
    for head in range(2):
        s = (q[0, :, head].double() @ k[0, :, head].double().T) / math.sqrt(head_dim)
        want.append(torch.softmax(s, -1) @ v[0, :, head].double())
    truth = torch.stack(want, 1)[None]

    def relative_rmse(interval: int) -> float:
        error = forward(q, k, v, choices=Choices(promotion_interval=interval))[0].double() - truth
        return float(error.square().mean().sqrt() / truth.square().mean().sqrt())

    assert relative_rmse(128) <= 0.003
    assert relative_rmse(0) > 0.5


def test_illegal_operands_and_descales_are_refused() -> None:
    import torch

    from fa3_kernels.gluon.arguments import Descales
    from fa3_kernels.gluon.launch import forward

    x = torch.zeros((1, 256, 2, 64), device="cuda").to(torch.float8_e4m3fn)
    half = torch.zeros((1, 256, 2, 64), device="cuda", dtype=torch.float16)
    one = torch.ones((1, 2), device="cuda")
    for operand, descales, choices, message in (
        (x, Descales(k=one[:, :1]), {}, r"k_descale must be \(1, 2\)"),
        (x, Descales(k=one.half()), {}, "k_descale must be float32"),
        (
            x,
            Descales(k=one[:, :, None].expand(1, 2, 4).contiguous(), blocks=(0, 64, 0)),
            {},
            "whole key tiles of 128 rows, got 64",
        ),
        (x, Descales(blocks=(0, -1, 0)), {}, "three integers >= 0"),
        (x, Descales(), {"out_dtype": "fp32"}, "out_dtype must be"),
        (x, Descales(), {"promotion_interval": 48}, "promotion_interval must be"),
        (x[..., :40], Descales(), {}, "multiple of 16"),
        (half, Descales(q=one), {}, "for float8_e4m3fn operands"),
        (half, Descales(), {"promotion_interval": 128}, "for e4m3 operands"),
    ):
        with pytest.raises(ValueError, match=message):
            forward(*[operand] * 3, choices=Choices(**choices), descales=descales)
