"""The library's functions on a Hopper GPU: the bits of the launch beneath them, operators that pass torch's checks."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu


def tensors(*, dtype: str = "float16", seqlen: int = 300, nheads: int = 4, nheads_kv: int = 2, head_dim: int = 64):
    import torch

    torch.manual_seed(0)
    shapes = [(2, seqlen, heads, head_dim) for heads in (nheads, nheads_kv, nheads_kv)]
    return [torch.randn(shape, device="cuda", dtype=getattr(torch, dtype)) for shape in shapes]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window_size": (40, 8)}, {"softcap": 15.0, "causal": True}, {"num_splits": 3}],
    ids=["dense", "causal", "window", "softcap", "splits"],
)
def test_the_function_gives_the_bits_of_the_launch(dtype: str, options: dict) -> None:
    import torch

    from fa3_kernels.api import flash_attn_func
    from fa3_kernels.gluon.launch import forward
    from fa3_kernels.plan.request import Choices, Semantics

    q, k, v = tensors(dtype=dtype)
    out, lse = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    semantics = {"window" if n == "window_size" else n: x for n, x in options.items() if n != "num_splits"}
    want = forward(q, k, v, Semantics(**semantics), Choices(options.get("num_splits", 1)))
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])
    assert torch.equal(flash_attn_func(q, k, v, **options), out)


def test_packed_sequences_give_the_bits_of_batched_ones() -> None:
    import torch

    from fa3_kernels.api import flash_attn_func, flash_attn_varlen_func

    q, k, v = tensors(seqlen=256)
    starts = torch.tensor([0, 256, 512], dtype=torch.int32, device="cuda")
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    out, lse = flash_attn_varlen_func(*packed, starts, starts, 256, 256, causal=True, return_attn_probs=True)
    want, want_lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert torch.equal(out.view_as(want), want)
    assert torch.equal(lse, want_lse.transpose(0, 1).flatten(1))
    assert torch.equal(flash_attn_varlen_func(*packed, starts, starts, 256, 256, causal=True), out)


def test_operators_pass_opcheck() -> None:
    import torch

    from fa3_kernels import operators  # noqa: F401 (registers them)

    q, k, v = tensors(seqlen=130)
    tail = (None, None, None, None, True, -1, -1, 0.0, 1, None, [0, 0, 0], 128, True, 0, 0)
    torch.library.opcheck(torch.ops.fa3verify.forward.default, (q, k, v, *tail))
    starts = torch.tensor([0, 130, 260], dtype=torch.int32, device="cuda")
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    torch.library.opcheck(torch.ops.fa3verify.forward_varlen.default, (*packed, starts, starts, 130, 130, *tail))


def test_compiled_code_gives_the_same_bits() -> None:
    import torch

    from fa3_kernels.api import flash_attn_func

    q, k, v = tensors()

    def attend(q, k, v):
        return flash_attn_func(2 * q, k, v, causal=True) + 1

    assert torch.equal(torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v), attend(q, k, v))


def test_a_decoding_loop_gives_the_bits_of_single_calls_and_plans_once_a_key_tile() -> None:
    import torch

    from fa3_kernels.api import flash_attn_func
    from fa3_kernels.gluon import launch

    torch.manual_seed(0)
    q = torch.randn(2, 1, 8, 128, device="cuda", dtype=torch.float16)
    k, v = (torch.randn(2, 400, 2, 128, device="cuda", dtype=torch.float16) for _ in "kv")
    launch._families.clear()
    for n in range(120, 400):
        out = flash_attn_func(q, k[:, :n], v[:, :n], causal=True)
        if n % 40 == 0 or n in (127, 128, 129):
            assert torch.equal(out, flash_attn_func(q, k[:, :n].contiguous(), v[:, :n].contiguous()))
    plans = sum(len(family.plans) for family in launch._families.values() if family.request.problem.causal)
    assert plans == 7  # a tail in each of four key tiles, and three numbers of whole ones


def test_a_captured_graph_survives_the_plans_that_are_dropped() -> None:
    import torch

    from fa3_kernels.api import flash_attn_func, flash_attn_varlen_func
    from fa3_kernels.gluon import launch

    q, k, v = tensors()
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    starts = torch.tensor([0, 300, 600], dtype=torch.int32, device="cuda")
    want, want_packed = flash_attn_func(q, k, v), flash_attn_varlen_func(*packed, starts, starts, 300, 300)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_func(q, k, v)
        out_packed = flash_attn_varlen_func(*packed, starts, starts, 300, 300)
    launch._families.clear()
    filler = [torch.full((1 << 20,), -1, dtype=torch.int64, device="cuda") for _ in range(8)]
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert len(filler) == 8
    assert torch.equal(out, want)
    assert torch.equal(out_packed, want_packed)


def test_calls_on_other_streams_give_the_same_bits() -> None:
    import torch

    from fa3_kernels.api import flash_attn_func

    q, k, v = tensors()
    want = flash_attn_func(q, k, v)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        got = flash_attn_func(q, k, v)
    stream.synchronize()
    assert torch.equal(got, want)
