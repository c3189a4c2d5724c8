"""The library's face: FlashAttention-3's signature, operators torch can trace, short refusals. Needs torch, no GPU."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from tests.kernels.no_gpu import no_gpu

pytestmark = pytest.mark.optional
torch = pytest.importorskip("torch", reason="needs torch")

# Upstream's parameters, in order (hopper/flash_attn_interface.py of FlashAttention-3).
UPSTREAM = [
    *("q", "k", "v", "softmax_scale", "causal", "qv", "q_descale", "k_descale", "v_descale", "window_size"),
    *("attention_chunk", "softcap", "num_splits", "pack_gqa", "deterministic", "sm_margin", "return_attn_probs"),
]
UPSTREAM_VARLEN = [
    *UPSTREAM[:3],
    *["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_q", "seqused_k"],
    *UPSTREAM[3:],
]
FORMATS = ("float16", "bfloat16", "float8_e4m3fn")


def api():
    from fa3_kernels import api

    return api


def tensors(dtype: str = "float16", *, batch=2, seqlen_q=8, seqlen_k=16, nheads=4, nheads_kv=2, d=64, dv=64):
    kind = getattr(torch, dtype)
    shapes = ((batch, seqlen_q, nheads, d), (batch, seqlen_k, nheads_kv, d), (batch, seqlen_k, nheads_kv, dv))
    return [torch.zeros(shape, dtype=torch.float32).to(kind) for shape in shapes]


def fake(function, *args, **options):
    """Run a function on fake CUDA tensors, as torch.compile does; needs no GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def on_gpu(x):
        if not isinstance(x, torch.Tensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")

    with FakeTensorMode():
        return function(*map(on_gpu, args), **{name: on_gpu(x) for name, x in options.items()})


def test_signatures_begin_with_upstreams():
    for function, want in ((api().flash_attn_func, UPSTREAM), (api().flash_attn_varlen_func, UPSTREAM_VARLEN)):
        parameters = inspect.signature(function).parameters
        assert [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD] == want
    defaults = {n: p.default for n, p in inspect.signature(api().flash_attn_func).parameters.items()}
    assert (defaults["window_size"], defaults["num_splits"], defaults["softcap"]) == ((-1, -1), 1, 0.0)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("dv", [64, 32])
def test_fake_outputs_have_the_shapes_and_dtypes_of_real_ones(dtype, dv):
    q, k, v = tensors(dtype, dv=dv)
    out, lse = fake(api().flash_attn_func, q, k, v, return_attn_probs=True)
    assert out.shape == (2, 8, 4, dv)
    assert out.dtype == {"float8_e4m3fn": torch.bfloat16}.get(dtype, q.dtype)
    assert out.is_contiguous()
    assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((2, 4, 8), torch.float32, True)


@pytest.mark.parametrize("dtype", FORMATS)
def test_fake_outputs_of_packed_sequences(dtype):
    q, k, v = (x.flatten(0, 1) for x in tensors(dtype))
    starts = torch.tensor([0, 8, 16], dtype=torch.int32)
    out, lse = fake(api().flash_attn_varlen_func, q, k, v, starts, 2 * starts, 8, 16, return_attn_probs=True)
    assert (out.shape, lse.shape, lse.dtype) == ((16, 4, 64), (4, 16), torch.float32)


def test_outputs_are_contiguous_for_views_of_a_packed_projection():
    packed = torch.zeros(2, 8, 3, 4, 64, dtype=torch.float16)
    assert fake(api().flash_attn_func, *packed.unbind(2)).is_contiguous()


def test_operators_are_registered_with_a_functional_schema():
    api()
    for name, arguments, returns in (
        ("forward", 16, 2),
        ("forward_varlen", 20, 2),
        ("inference", 16, 2),
        ("inference_varlen", 20, 2),
        ("backward", 13, 3),
        ("backward_varlen", 17, 3),
    ):
        schema = getattr(torch.ops.fa3verify, name).default._schema
        assert len(schema.arguments) == arguments
        assert [str(r.type) for r in schema.returns] == ["Tensor"] * returns
        assert not schema.is_mutable


def test_the_functions_can_be_traced_without_a_graph_break():
    function = torch.compile(
        lambda q, k, v: api().flash_attn_func(q, k, v, causal=True), backend="eager", fullgraph=True
    )
    with torch.no_grad():
        shapes = fake(lambda *x: function(*x).shape, *tensors())
    assert shapes == (2, 8, 4, 64)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_code_has_the_operator_with_a_gradient(strict):
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return api().flash_attn_func(q, k, v)

    exported = fake(lambda *x: torch.export.export(Attention(), x, strict=strict), *tensors())
    assert "fa3verify.forward.default" in {str(x.target) for x in exported.graph.nodes}


REFUSALS = (
    ({"qv": 1}, "qv .* is not supported"),
    ({"attention_chunk": 7}, "attention_chunk is not supported and must be 0, got 7"),
    ({"sm_margin": 2}, "sm_margin is not supported and must be 0, got 2"),
    ({"softmax_scale": -1.0}, "softmax_scale must be finite and > 0, got -1"),
    ({"softcap": -1.0}, "softcap must be finite and >= 0, got -1"),
    ({"window_size": (-2, 0)}, "window must be two integers >= -1"),
    ({"num_splits": -1}, "num_splits must be 0 .* or positive, got -1"),
    ({"descale_blocks": (64, 0, 0)}, "blocks of 64 rows for q_descale, which is None"),
)


@pytest.mark.parametrize(("options", "message"), REFUSALS)
def test_an_unsupported_option_is_refused_in_one_line(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        fake(api().flash_attn_func, *tensors(), **options)
    assert "\n" not in str(caught.value)


def test_illegal_tensors_are_refused():
    def flash(*args, **options):
        return fake(api().flash_attn_func, *args, **options)

    q, k, v = tensors()
    with pytest.raises(ValueError, match="must share float16, bfloat16 or float8_e4m3fn"):
        flash(q.float(), k.float(), v.float())
    with pytest.raises(ValueError, match=r"nheads must be a multiple of nheads_kv, got 3 and 2"):
        flash(q[:, :, :3], k, v)
    with pytest.raises(ValueError, match=r"head_dim must be a multiple of 8 \(TMA\), got 60"):
        flash(*(x[..., :60] for x in (q, k, v)))
    with pytest.raises(ValueError, match="head_dim must be a multiple of 16"):
        flash(*(x[..., :56] for x in tensors("float8_e4m3fn")))
    with pytest.raises(ValueError, match="last dimension of q must be contiguous"):
        flash(q.transpose(1, 3).contiguous().transpose(1, 3), k, v)
    with pytest.raises(ValueError, match=r"strides of k must be multiples of 16 bytes"):
        flash(q, torch.zeros(2, 16, 2, 68, dtype=torch.float16)[..., :64], v)
    with pytest.raises(ValueError, match="one shape but for head_dim"):
        flash(q, k, v[:, :8])
    with pytest.raises(ValueError, match=r"must be \(batch, seqlen, nheads, head_dim\)"):
        flash(q[0], k[0], v[0])


def test_descales_must_fit():
    def flash(*args, **options):
        return fake(api().flash_attn_func, *args, **options)

    fp8, fp16 = tensors("float8_e4m3fn"), tensors()
    good = torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"v_descale is for float8_e4m3fn operands, got fp16"):
        flash(*fp16, v_descale=good)
    with pytest.raises(ValueError, match=r"q_descale must be \(2, 2\) \(batch, nheads_kv\), got \(2, 4\)"):
        flash(*fp8, q_descale=torch.ones(2, 4))
    with pytest.raises(ValueError, match="k_descale must be float32"):
        flash(*fp8, k_descale=good.double())
    with pytest.raises(ValueError, match=r"must be \(2, 2, blocks\)"):
        flash(*fp8, k_descale=good, descale_blocks=(0, 128, 0))
    assert flash(*fp8, q_descale=good, k_descale=good, v_descale=good).dtype == torch.bfloat16


def test_a_number_is_the_descale_of_every_sequence_and_head(monkeypatch):
    given = []
    monkeypatch.setattr(api(), "forward", lambda *args, descales, **more: given.append(descales) or (None, None))
    q, k, v = tensors("float8_e4m3fn")
    starts = torch.tensor([0, 8, 16, 16], dtype=torch.int32)
    api().flash_attn_func(q, k, v, k_descale=0.5, v_descale=torch.ones(2, 2))
    api().flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), starts, 2 * starts, 8, 16, q_descale=3)
    assert torch.equal(given[0].k, torch.full((2, 2), 0.5))
    assert (given[0].q, given[0].v.tolist()) == (None, [[1, 1], [1, 1]])
    assert torch.equal(given[1].q, torch.full((3, 2), 3.0))
    for x in (0.0, -1.0, float("nan"), float("inf"), "1"):
        with pytest.raises(ValueError, match="v_descale must be a float32 tensor, or a number that is finite and > 0"):
            api().flash_attn_func(q, k, v, v_descale=x)


def test_a_number_is_a_descale_for_the_traced_operators_too():
    q, k, v = tensors("float8_e4m3fn")
    assert fake(api().flash_attn_func, q, k, v, q_descale=0.5, k_descale=2).shape == q.shape
    with pytest.raises(ValueError, match="k_descale is for float8_e4m3fn operands, got fp16"):
        fake(api().flash_attn_func, *tensors(), k_descale=0.5)


def test_packed_sequences_need_sound_starts():
    q, k, v = (x.flatten(0, 1) for x in tensors())
    starts = torch.tensor([0, 8, 16], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"cu_seqlens_q must be int32 \(batch \+ 1,\), got torch.int64"):
        fake(api().flash_attn_varlen_func, q, k, v, starts.long(), starts, 8, 16)
    with pytest.raises(ValueError, match="must have one length, got 3 and 2"):
        fake(api().flash_attn_varlen_func, q, k, v, starts, starts[:2], 8, 16)
    with pytest.raises(ValueError, match="seqused_k is not supported"):
        fake(api().flash_attn_varlen_func, q, k, v, starts, starts, 8, 16, seqused_k=starts)


@pytest.mark.parametrize("one", [np.int64, np.int32, torch.tensor, lambda n: torch.tensor(n, dtype=torch.int32)])
def test_the_longest_length_may_be_any_integer(one):
    q, k, v = (x.flatten(0, 1) for x in tensors())
    starts = torch.tensor([0, 8, 16], dtype=torch.int32)
    cache = torch.zeros(2, 16, 2, 64, dtype=q.dtype)
    with no_gpu() as started:
        for longest in (8, one(8)):
            api().flash_attn_varlen_func(q, k, v, starts, 2 * starts, longest, 2 * longest)
            api().flash_attn_with_kvcache(q, cache, cache, cu_seqlens_q=starts, max_seqlen_q=longest)
            api().flash_attn_with_kvcache(q.view(2, 8, 4, 64), cache, cache, max_seqlen_k=longest)
        kernels = [x.kernel for x in started]
    assert kernels == 2 * kernels[: len(kernels) // 2] != []


@pytest.mark.parametrize("longest", [8.0, torch.tensor(8.0), torch.tensor([8, 8]), None, "8"])
def test_the_longest_length_must_be_an_integer(longest):
    q, k, v = (x.flatten(0, 1) for x in tensors())
    starts = torch.tensor([0, 8, 16], dtype=torch.int32)
    with pytest.raises(ValueError, match="max_seqlen_q must be an integer, got"):
        api().flash_attn_varlen_func(q, k, v, starts, 2 * starts, longest, 16)
    with pytest.raises(ValueError, match="max_seqlen_k must be an integer, got"):
        api().flash_attn_varlen_func(q, k, v, starts, 2 * starts, 8, longest)


@pytest.mark.parametrize("missing", ["cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize("is_traced", [False, True])
def test_starts_of_queries_and_of_keys_come_together(missing, is_traced):
    q, k, v = (x.flatten(0, 1) for x in tensors())
    starts = torch.tensor([0, 8, 16], dtype=torch.int32)
    given = {"cu_seqlens_q": starts, "cu_seqlens_k": 2 * starts} | {missing: None}
    run = api().flash_attn_varlen_func
    options = {**given, "max_seqlen_q": 8, "max_seqlen_k": 16}
    with pytest.raises(ValueError, match=f"must be given together, got None for {missing}"):
        fake(run, q, k, v, **options) if is_traced else run(q, k, v, **options)


def test_only_hopper_is_accepted():
    from fa3_kernels.gluon import launch as operators

    operators.check_capability((9, 0), "H200")
    for capability in ((8, 0), (10, 0)):
        with pytest.raises(ValueError, match=rf"compute capability 9.0\) is needed, got GPU with {capability[0]}.0"):
            operators.check_capability(capability, "GPU")


def test_cpu_tensors_are_refused():
    q, k, v = tensors()
    for operand in (q, q.detach().requires_grad_()):
        with pytest.raises(ValueError, match="must be on one Hopper GPU, got cpu"):
            api().flash_attn_func(operand, k, v)
