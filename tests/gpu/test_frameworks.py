"""The kernels behind PyTorch's and Transformers' own functions, on a GPU."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="needs torch")
if not torch.cuda.is_available():
    pytest.skip("needs a Hopper GPU", allow_module_level=True)


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
