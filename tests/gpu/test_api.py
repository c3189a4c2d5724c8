"""The library's functions on a Hopper GPU: the bits of the launch beneath them, and operators that pass torch's own checks."""

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

    q, k, v = tensors(dtype=dtype)
    out, lse = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    want = forward(q, k, v, **{"window" if n == "window_size" else n: x for n, x in options.items()})
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
    with pytest.raises(ValueError, match="max_seqlen_k must be at least the longest sequence, 256, got 255"):
        flash_attn_varlen_func(*packed, starts, starts, 256, 255)


def test_operators_pass_opcheck() -> None:
    import torch

    from fa3_kernels import operators  # noqa: F401 (registers them)

    q, k, v = tensors(seqlen=130)
    tail = (None, None, None, None, True, -1, -1, 0.0, 1, None, [0, 0, 0], 128)
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
