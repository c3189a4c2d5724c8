"""The kernels behind PyTorch's and Transformers' own functions, on a GPU."""

from __future__ import annotations

import inspect
from contextlib import contextmanager

import pytest

from tests.kernels.plain_attention import packed_attention

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="needs torch")
if not torch.cuda.is_available():
    pytest.skip("needs a Hopper GPU", allow_module_level=True)
DEVICE = "cuda"
CLOSE = 2.0**-5  # of values of magnitude 1, or of the largest one; a mask or a start that is wrong is tenths and more
COMPILED = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch.compile's own


def assert_close(found, wanted, name=""):
    wanted = wanted.to(found.device).float()
    error = (found.float() - wanted).abs().max() if wanted.numel() else 0.0
    assert torch.isfinite(found).all(), name
    assert float(error) <= CLOSE * max(1.0, float(wanted.abs().max()) if wanted.numel() else 0.0), (name, float(error))


@pytest.fixture
def activated():
    from torch.nn import attention

    from fa3_kernels.frameworks import register_with_torch

    register_with_torch()
    attention.activate_flash_attention_impl("fa3verify")
    yield
    attention.restore_flash_attention_impl()


def draw(seqlen, nheads, *, is_contiguous=True):
    x = torch.randn(2, seqlen, nheads, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    return (x.contiguous() if is_contiguous else x).requires_grad_()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # torch.compile's own
@pytest.mark.parametrize("is_contiguous", [False, True])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_scaled_dot_product_attention_runs_our_kernels_bit_for_bit(activated, is_contiguous, is_compiled):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from fa3_kernels.api import flash_attn_func

    torch.manual_seed(0)
    q, k, v = draw(384, 8, is_contiguous=is_contiguous), draw(384, 2), draw(384, 2)
    run = torch.nn.functional.scaled_dot_product_attention
    run = torch.compile(run) if is_compiled else run
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        out = run(q, k, v, is_causal=True, enable_gqa=True)
    ours = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True).transpose(1, 2)
    assert torch.equal(out, ours)
    dout = torch.randn_like(out)
    found, wanted = (torch.autograd.grad(x, (q, k, v), dout) for x in (out, ours))
    assert all(map(torch.equal, found[1:], wanted[1:]))  # dQ is added in any order
    assert torch.allclose(found[0].float(), wanted[0].float(), atol=2e-2)


def test_torch_has_its_own_kernels_again_afterwards():
    from torch.nn import attention

    from fa3_kernels.frameworks import register_with_torch

    q = draw(384, 8)
    with torch.no_grad(), attention.sdpa_kernel([attention.SDPBackend.FLASH_ATTENTION]):
        before = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        register_with_torch()
        attention.activate_flash_attention_impl("fa3verify")
        within = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        attention.restore_flash_attention_impl()
        after = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert torch.equal(before, after)
    assert not torch.equal(before, within)


@contextmanager
def in_order():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def in_float32(run, leaves, dout):
    """Output and gradients of a function of float32 copies."""
    copies = [x.detach().float().requires_grad_() for x in leaves]
    out = run(*copies)
    return out.detach(), *torch.autograd.grad(out, copies, dout.float())


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float16, 64), (torch.bfloat16, 128)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("nheads_kv", [4, 1])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_sdpa_is_that_of_the_mathematics_in_float32(activated, dtype, head_dim, causal, nheads_kv, scale):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.manual_seed(0)
    shapes = [(2, heads, 200, head_dim) for heads in (4, nheads_kv, nheads_kv)]
    scale = scale if scale is None else scale * 8 / head_dim  # scores of one magnitude
    leaves = [torch.randn(x, device=DEVICE, dtype=dtype).requires_grad_() for x in shapes]
    run = torch.nn.functional.scaled_dot_product_attention
    options = {"is_causal": causal, "scale": scale, "enable_gqa": nheads_kv != 4}
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        out = run(*leaves, **options)
    dout = torch.randn_like(out)
    found = out.detach(), *torch.autograd.grad(out, leaves, dout)
    with sdpa_kernel([SDPBackend.MATH]):
        wanted = in_float32(lambda *x: run(*x, **options), leaves, dout)
    rounding = 1 if dtype is torch.float16 else 4
    for x, want, name in zip(found, wanted, ("out", "dq", "dk", "dv"), strict=True):
        assert_close(x / rounding, want / rounding, name)


def test_sdpa_repeats_its_gradients_bit_for_bit_in_a_fixed_order(activated):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = draw(384, 8), draw(384, 2), draw(384, 2)
    with in_order(), sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        dout = torch.randn_like(out)
        first, *others = (torch.autograd.grad(out, (q, k, v), dout, retain_graph=True) for _ in range(5))
    assert all(torch.equal(x, y) for again in others for x, y in zip(first, again, strict=True))


LENGTHS = {
    "some": ((130, 130), (1, 1), (200, 200)),
    "empty": ((0, 0), (130, 130), (0, 0), (0, 0), (70, 70), (0, 0)),
    "other keys": ((130, 200), (1, 90), (64, 0), (0, 17), (100, 30)),
    "one": ((300, 300),),
    "no key": ((130, 0), (70, 0)),
}


def packed(name, nheads_kv=4, dtype=torch.float16, head_dim=64):
    """Operands, starts and longest lengths."""
    torch.manual_seed(0)
    of_q, of_k = (list(x) for x in zip(*LENGTHS[name], strict=True))
    starts = [torch.tensor([0, *x], device=DEVICE).cumsum(0).int() for x in (of_q, of_k)]
    shapes = ((sum(of_q), 4, head_dim), *((sum(of_k), nheads_kv, head_dim),) * 2)
    leaves = [torch.randn(x, device=DEVICE, dtype=dtype).requires_grad_() for x in shapes]
    return leaves, (*starts, max(of_q), max(of_k))


def varlen():
    return pytest.importorskip("torch.nn.attention.varlen", reason="needs torch's varlen attention").varlen_attn


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (40, 0), (40, 8)], ids=["dense", "causal", "left", "both"])
@pytest.mark.parametrize("scale", [None, 0.05])
@pytest.mark.parametrize("nheads_kv", [4, 2])
@pytest.mark.parametrize("name", LENGTHS)
def test_varlen_attention_is_that_of_each_sequence_in_float32(activated, name, nheads_kv, scale, window):
    run = varlen()
    has = inspect.signature(run).parameters
    if "window_size" not in has and window != (-1, -1):
        pytest.skip("this torch has no window_size here")
    grouped = {"enable_gqa": True} if "enable_gqa" in has and nheads_kv != 4 else {}
    masks = {"window_size": window} if "window_size" in has else {}
    leaves, starts = packed(name, nheads_kv)
    out = run(*leaves, *starts, scale=scale, **masks, **grouped)
    dout = torch.randn_like(out)
    found = out.detach(), *torch.autograd.grad(out, leaves, dout)
    options = {"softmax_scale": scale, "window_size": window}
    wanted = in_float32(lambda *x: packed_attention(*x, *starts, **options)[0], leaves, dout)
    for x, want, of in zip(found, wanted, ("out", "dq", "dk", "dv"), strict=True):
        assert_close(x, want, of)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (40, 0)], ids=["dense", "causal", "left"])
@pytest.mark.parametrize("name", LENGTHS)
def test_varlen_attention_repeats_its_gradients_in_a_fixed_order_and_without_keys(activated, name, window):
    run = varlen()
    if "window_size" not in inspect.signature(run).parameters:
        pytest.skip("this torch has no window_size here")
    leaves, starts = packed(name)
    with in_order():
        out = run(*leaves, *starts, window_size=window)
        dout = torch.randn_like(out)
        first, *others = (torch.autograd.grad(out, leaves, dout, retain_graph=True) for _ in range(4))
    assert all(torch.equal(x, y) for again in others for x, y in zip(first, again, strict=True))
    wanted = in_float32(lambda *x: packed_attention(*x, *starts, window_size=window)[0], leaves, dout)
    for x, want in zip(first, wanted[1:], strict=True):
        assert_close(x, want)


@COMPILED
def test_compiled_varlen_attention_has_the_bits_of_the_call(activated):
    run = varlen()
    leaves, starts = packed("some")

    def attend(q, k, v):
        return 2 * run(q, k, v, *starts) + 1

    out = torch.compile(attend, fullgraph=True)(*leaves)
    want = attend(*leaves)
    dout = torch.randn_like(out)
    assert torch.equal(out, want)
    found, wanted = (torch.autograd.grad(x, leaves, dout) for x in (out, want))
    assert all(map(torch.equal, found[1:], wanted[1:]))  # dQ is added in any order
    assert_close(found[0], wanted[0])


def test_starts_of_queries_alone_are_refused(activated):
    (q, k, v), (starts, _, longest, _) = packed("some")
    with pytest.raises(ValueError, match="must be given together, got None for cu_seqlens_k"):
        torch.ops.aten._flash_attention_forward(q, k, v, starts, None, longest, longest, 0.0, False, False)
