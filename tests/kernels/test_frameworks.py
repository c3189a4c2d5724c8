"""PyTorch and Transformers hand their problems over as they are meant. The kernels are replaced by plain float32 sums
here, so that no GPU is needed; tests/gpu/test_frameworks.py runs the kernels."""

from __future__ import annotations

import inspect
import math
from itertools import pairwise

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.kernels.plain_attention import POSITIONS, QWEN2_VL, attention, packed_attention, probabilities

pytestmark = pytest.mark.optional
torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("torch.nn.attention", reason="needs torch's registry")


def options_of(semantics):
    return {
        "softmax_scale": semantics.softmax_scale,
        "causal": semantics.causal,
        "window_size": semantics.window,
    }


def dequantized(x, descale):
    """(batch, seqlen, nheads_kv, head_dim) times the factors of sequences and kv heads; those of q are of groups."""
    return (
        x
        if descale is None
        else x.float() * descale.repeat_interleave(x.shape[2] // descale.shape[1], 1)[:, None, :, None]
    )


def dense(q, k, v, *, num_splits=1, return_attn_probs=False, q_descale=None, k_descale=None, v_descale=None, **options):
    """Stands for flash_attn_func."""
    assert num_splits > 0
    operands = (dequantized(x, y) for x, y in ((q, q_descale), (k, k_descale), (v, v_descale)))
    out, lse = attention(*operands, **options)
    return (out, lse) if return_attn_probs else out


def packed(q, k, v, *starts, seqused_k=None, num_splits=1, return_attn_probs=False, **options):
    """Stands for flash_attn_varlen_func."""
    options = {name: x for name, x in options.items() if not name.endswith("_descale")}
    starts_q, starts_k, max_q, max_k = starts
    if seqused_k is not None:
        keeps = torch.cat([torch.arange(n) < m for n, m in zip(starts_k.diff(), seqused_k, strict=True)])
        k, v = k[keeps], v[keeps]
        starts_k = torch.nn.functional.pad(seqused_k.cumsum(0), (1, 0)).int()
    out, lse = packed_attention(q, k, v, starts_q, starts_k, max_q, max_k, **options)
    return (out, lse) if return_attn_probs else out


def cached(q, k, v, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, return_softmax_lse, **options):
    """Stands for flash_attn_with_kvcache."""
    assert return_softmax_lse
    rows = [
        tuple((x[i] if page_table is None else x[page_table[i]].flatten(0, 1))[:n] for x in (k, v))
        for i, n in enumerate(cache_seqlens)
    ]
    of_k, of_v = (torch.cat(x) for x in zip(*rows, strict=True))
    starts_k = torch.nn.functional.pad(cache_seqlens.cumsum(0), (1, 0)).int()
    del options["num_splits"]
    if cu_seqlens_q is not None:
        return (
            *packed(q, of_k, of_v, cu_seqlens_q, starts_k, max_seqlen_q, 1000, return_attn_probs=True, **options),
            0,
            0,
        )
    starts_q = torch.arange(len(q) + 1).int() * q.shape[1]
    out, lse = packed(
        q.flatten(0, 1), of_k, of_v, starts_q, starts_k, q.shape[1], 1000, return_attn_probs=True, **options
    )
    return out.view(q.shape), lse.view(q.shape[2], len(q), -1).transpose(0, 1), 0, 0


def backward(dout, q, k, v, out, lse, semantics, *, packed, is_deterministic):  # noqa: PLR0913 (its signature)
    """Stands for fa3_kernels.gluon.launch_backward.backward, by the formulas."""
    assert is_deterministic == torch.are_deterministic_algorithms_enabled()
    if packed is None:
        return gradients(dout, q, k, v, out, lse, semantics)
    found = []
    for a, b, c, d in zip(*(x for y in packed[:2] for x in (y[:-1], y[1:])), strict=True):
        of_rows = (dout[a:b], q[a:b], k[c:d], v[c:d], out[a:b], lse[:, a:b])
        found.append(gradients(*(x[None] for x in of_rows), semantics))
    return tuple(torch.cat(x, 1)[0] for x in zip(*found, strict=True))


def gradients(dout, q, k, v, out, lse, semantics):
    """Of one batch of sequences that are all as long."""
    group = q.shape[2] // k.shape[2]
    all_k, all_v = (x.repeat_interleave(group, 2) for x in (k, v))
    p, again = probabilities(q, all_k, **options_of(semantics))
    assert torch.allclose(again, lse, atol=1e-6)
    dots = (dout * out).sum(-1).transpose(1, 2)[..., None]
    scale = semantics.softmax_scale or 1 / math.sqrt(q.shape[-1])
    ds = p * (torch.einsum("bqhd,bkhd->bhqk", dout, all_v) - dots) * scale
    dk, dv = torch.einsum("bhqk,bqhd->bkhd", ds, q), torch.einsum("bhqk,bqhd->bkhd", p, dout)
    grouped = (x.unflatten(2, (-1, group)).sum(3) for x in (dk, dv))
    return torch.einsum("bhqk,bkhd->bqhd", ds, all_k), *grouped


@pytest.fixture
def frameworks(monkeypatch):
    from fa3_kernels import frameworks

    monkeypatch.setattr(frameworks, "backward", backward)
    for name, function in (("func", dense), ("varlen_func", packed), ("with_kvcache", cached)):
        monkeypatch.setattr(frameworks, f"flash_attn_{name}", function)
    return frameworks


@pytest.fixture
def on_cpu(frameworks):
    """The kernels in the place of torch's on a CPU, where torch has none under these names."""
    activated = frameworks._activate("CPU")
    yield
    activated.remove()


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- PyTorch --


def test_importing_registers_nothing():
    import subprocess
    import sys

    code = (
        "import fa3_kernels.frameworks, torch.nn.attention as a;"
        "assert 'fa3verify' not in a.list_flash_attention_impls() and a.current_flash_attention_impl() is None;"
        "fa3_kernels.frameworks.register_with_torch();"
        "assert 'fa3verify' in a.list_flash_attention_impls() and a.current_flash_attention_impl() is None;"
        "a.activate_flash_attention_impl('fa3verify'); assert a.current_flash_attention_impl() == 'fa3verify';"
        "a.restore_flash_attention_impl(); assert a.current_flash_attention_impl() is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("is_contiguous", [False, True])
def test_scaled_dot_product_attention_and_its_gradients_are_those_of_the_mathematics(on_cpu, causal, is_contiguous):
    leaves = [draw(2, 9, 4, 8, seed=0), draw(2, 9, 2, 8, seed=1), draw(2, 9, 2, 8, seed=2)]
    q, k, v = (x.transpose(1, 2).contiguous() if is_contiguous else x.transpose(1, 2) for x in leaves)
    for x in (q, k, v):
        x.requires_grad_()
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=0.3)
    assert out.stride() == torch.empty_like(q).stride()
    dout = draw(*out.shape, seed=3)
    found = torch.autograd.grad(out, (q, k, v), dout)
    math_out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3, enable_gqa=True)
    wanted = torch.autograd.grad(math_out, (q, k, v), dout)
    assert torch.allclose(out, math_out, atol=1e-6)
    for a, b, x in zip(found, wanted, (q, k, v), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
        assert a.stride() == torch.empty_like(x).stride()
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k.repeat_interleave(2, 1)) * 0.3
    if causal:
        scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf)
    assert torch.allclose(lse, scores.logsumexp(-1), atol=1e-6)


@pytest.mark.parametrize("window", [(-1, -1), (2, 0)])
def test_varlen_attention_of_torch_passes_starts_and_window(on_cpu, window):
    q, k, v = draw(12, 4, 8), draw(12, 2, 8, seed=1), draw(12, 2, 8, seed=2)
    starts = torch.tensor([0, 5, 12], dtype=torch.int32)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, starts, starts, 7, 7, 0.0, False, False, window_size_left=window[0], window_size_right=window[1]
    )
    for a, b in ((0, 5), (5, 12)):
        wanted, of_lse = attention(*(x[None, a:b] for x in (q, k, v)), window_size=window)
        assert torch.allclose(out[a:b], wanted[0])
        assert torch.allclose(lse[:, a:b], of_lse[0])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0)])
def test_gradients_of_varlen_attention_of_torch_are_those_of_the_mathematics(on_cpu, window, deterministic):
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="needs torch's varlen attention")
    lengths = [(5, 5), (0, 0), (3, 7), (4, 0)]  # of queries and of keys
    starts_q, starts_k = (torch.tensor([0, *x]).cumsum(0).int() for x in zip(*lengths, strict=True))
    q, k, v = (draw(n, 2, 8, seed=i).requires_grad_() for i, n in enumerate((12, 12, 12)))
    torch.use_deterministic_algorithms(deterministic)
    try:
        out = varlen.varlen_attn(q, k, v, starts_q, starts_k, 5, 7, window_size=window)
        dout = draw(*out.shape, seed=4)
        found = torch.autograd.grad(out, (q, k, v), dout)
    finally:
        torch.use_deterministic_algorithms(False)
    plain, _ = packed_attention(q, k, v, starts_q, starts_k, 5, 7, window_size=window)
    wanted = torch.autograd.grad(plain, (q, k, v), dout)
    assert torch.allclose(out, plain, atol=1e-6)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, wanted, strict=True))


def test_what_the_kernels_do_not_do_is_refused(on_cpu, frameworks):
    q = draw(1, 2, 4, 8)
    with pytest.raises(ValueError, match="dropout"):
        torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, 0.1)
    with pytest.raises(ValueError, match="alibi_slopes"):
        torch.ops.aten._flash_attention_forward(q, q, q, None, None, 2, 2, 0.0, False, False, alibi_slopes=q[0, 0, 0])
    with pytest.raises(ValueError, match="position_bias"):
        frameworks._attention_of_model(torch.nn.Module(), q, q, q, None, position_bias=q)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0)])
def test_varlen_attention_of_torch_sees_the_keys_that_are_used_in_rows_and_in_pages(on_cpu, window):
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="needs torch's varlen attention")
    if "block_table" not in inspect.signature(varlen.varlen_attn).parameters:
        pytest.skip("needs pages in torch's varlen attention")
    starts, used = torch.tensor([0, 3, 7], dtype=torch.int32), torch.tensor([6, 4], dtype=torch.int32)
    q, pool = draw(7, 4, 8), [draw(6, 2, 4, 8, seed=i) for i in (1, 2)]
    table = torch.tensor([[4, 1, 0], [2, 5, 3]], dtype=torch.int32)
    rows = [x[table.flatten()].flatten(0, 1) for x in pool]
    starts_k = torch.tensor([0, 6, 12], dtype=torch.int32)
    wanted = torch.cat(
        [
            attention(q[None, a:b], *(x[None, c : c + n] for x in rows), window_size=window)[0][0]
            for a, b, c, n in ((0, 3, 0, 6), (3, 7, 6, 4))
        ]
    )
    given = {"window_size": window, "seqused_k": used}
    in_rows = varlen.varlen_attn(q, *rows, starts, starts_k, 4, 6, **given)
    in_pages = varlen.varlen_attn(q, *pool, starts, None, 4, 6, block_table=table, **given)
    memory = torch.full_like(q, torch.nan)
    varlen.varlen_attn_out(memory, q, *pool, starts, None, 4, 6, block_table=table, **given)
    for found in (in_rows, in_pages, memory):
        assert torch.allclose(found, wanted, atol=1e-6)


def test_batches_of_torch_see_the_keys_that_are_used(on_cpu):
    q, k, v = draw(2, 3, 4, 8), draw(2, 6, 2, 8, seed=1), draw(2, 6, 2, 8, seed=2)
    used = torch.tensor([6, 2], dtype=torch.int32)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, None, None, 3, 6, 0.0, True, False, seqused_k=used)
    for i, n in enumerate(used):
        wanted, of_lse = attention(q[i : i + 1], k[i : i + 1, :n], v[i : i + 1, :n], causal=True)
        assert torch.allclose(out[i], wanted[0], atol=1e-6)
        assert torch.allclose(lse[i], of_lse[0], atol=1e-6)


def test_quantized_attention_of_torch_passes_its_descales(on_cpu):
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    if "quantized" not in flash.overloads():
        pytest.skip("needs torch's quantized attention")
    q, k, v = (draw(2, 5, 4, 8, seed=i).transpose(1, 2) for i in range(3))
    scales = [draw(2, 4, seed=i).abs() for i in (5, 6, 7)]
    out, *_ = flash.quantized(q, k, v, *scales, 0.0, True, scale=0.3)
    dequantised = (x * y[..., None, None] for x, y in zip((q, k, v), scales, strict=True))
    wanted = torch.nn.functional.scaled_dot_product_attention(*dequantised, is_causal=True, scale=0.3)
    assert torch.allclose(out, wanted, atol=1e-6)
    out, *_ = flash.quantized(q, k, v, None, None, None)
    assert torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(q, k, v), atol=1e-6)


# -- Transformers --

LLAMA = {"num_key_value_heads": 2}
MODELS = {
    "llama": ("LlamaConfig", {**LLAMA}),
    "window": ("MistralConfig", {**LLAMA, "sliding_window": 4}),
    "softcap": ("Gemma2Config", {**LLAMA, "head_dim": 8, "attn_logit_softcapping": 3.0, "sliding_window": 4}),
    "bidirectional": ("BertConfig", {}),
    "sinks": (
        "GptOssConfig",
        {**LLAMA, "head_dim": 8, "sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
}


def model(name: str, implementation: str):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    kind, facts = MODELS[name]
    config = getattr(transformers, kind)(
        vocab_size=31,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        attn_implementation=implementation,
        pad_token_id=0,
        **facts,
    )
    torch.manual_seed(0)
    auto = transformers.AutoModel if name == "bidirectional" else transformers.AutoModelForCausalLM
    found = auto.from_config(config).eval()
    for name, x in found.named_parameters():
        if name.endswith("sinks"):  # which are drawn so small that they say little
            torch.nn.init.normal_(x, 0.0, 2.0)
    assert found.config._attn_implementation == implementation
    return found


def outputs(of, **inputs):
    with torch.no_grad():
        found = of(**inputs)
    return found.logits if "logits" in found else found.last_hidden_state


def tokens(*shape):
    return torch.randint(1, 31, shape, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def registered(frameworks):
    pytest.importorskip("transformers", reason="needs transformers")
    frameworks.register_with_transformers()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_a_model_gives_the_same_logits_as_with_eager_attention(registered, name, padding):
    ids, mask = tokens(2, 11), torch.ones(2, 11, dtype=torch.long)
    if padding == "left":
        mask[1, :5] = 0
    elif padding == "right":
        mask[1, -5:] = 0
    given = {"input_ids": ids} if padding == "none" else {"input_ids": ids, "attention_mask": mask}
    ours, eager = (outputs(model(name, kind), **given) for kind in ("fa3verify", "eager"))
    kept = mask.bool()
    assert torch.allclose(ours[kept], eager[kept], atol=2e-5)


@pytest.mark.parametrize("name", ["llama", "window", "sinks"])
def test_generation_with_a_cache_gives_the_same_tokens(registered, name):
    ids, mask = tokens(2, 7), torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    ours, eager = (model(name, kind).generate(ids, **options) for kind in ("fa3verify", "eager"))
    assert torch.equal(ours, eager)


@pytest.mark.parametrize("is_told", [False, True])
def test_packed_sequences_do_not_see_each_other(registered, is_told):
    of = model("llama", "fa3verify")
    ids = tokens(1, 12)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    starts = torch.tensor([0, 5, 12], dtype=torch.int32)
    told = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 7, "max_length_k": 7} if is_told else {}
    both = outputs(of, input_ids=ids, position_ids=positions, use_cache=False, **told)
    each = [outputs(of, input_ids=part) for part in (ids[:, :5], ids[:, 5:])]
    assert torch.allclose(both, torch.cat(each, 1), atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("name", POSITIONS)
def test_positions_say_where_sequences_start(name, dtype):
    from fa3_kernels.frameworks import _starts

    given, want = POSITIONS[name]
    positions = None if given is None else torch.tensor(given, dtype=dtype)
    q = torch.zeros(1, 3 if positions is None else positions.shape[-1], 1, 8)
    found = _starts(q, q, {"position_ids": positions})
    assert (found and found[0].tolist()) == want
    assert _starts(torch.cat([q, q]), torch.cat([q, q]), {"position_ids": positions}) is None
    assert _starts(q[:, :1], q, {"position_ids": positions}) is None
    if found:
        assert found[0].dtype == found[1].dtype == torch.int32
        assert found[2] == found[3] == max(b - a for a, b in pairwise(want))


def test_positions_of_another_number_of_tokens_are_refused():
    from fa3_kernels.frameworks import _starts

    q = torch.zeros(1, 4, 1, 8)
    with pytest.raises(ValueError, match=r"one position for each of 4 tokens, got \(1, 4, 2\)"):
        _starts(q, q, {"position_ids": torch.zeros(1, 4, 2, dtype=torch.int64)})


@hypothesis.given(st.lists(st.integers(0, 3), min_size=2, max_size=9), st.integers(0, 5))
def test_starts_are_those_of_transformers_own_flash_attention(positions, first):
    theirs = pytest.importorskip("transformers.modeling_flash_attention_utils", reason="needs transformers")
    from fa3_kernels.frameworks import _starts

    given = torch.tensor([[first, *(first + n for n in positions)]])
    q = torch.zeros(1, given.shape[1], 1, 8)
    found = _starts(q, q, {"position_ids": given})
    (want, _), (longest, _) = theirs.prepare_fa_kwargs_from_position_ids(given)
    if found is None:
        assert want.tolist() == [0, given.shape[1]]
    else:
        assert theirs._is_packed_sequence(given, 1)
        assert found[0].tolist() == want.tolist()
        assert found[2] == int(longest)


@pytest.mark.parametrize("name", [name for name in POSITIONS if name != "none"])
def test_gradients_of_packed_sequences_are_those_of_each_alone(frameworks, name):
    given, starts = POSITIONS[name]
    positions = torch.tensor(given)
    rows = positions.shape[-1]
    leaves = [draw(1, heads, rows, 8, seed=heads).requires_grad_() for heads in (4, 2, 2)]
    dout = draw(1, rows, 4, 8, seed=9)

    def run(leaves, dout, **more):
        out, _ = frameworks._attention_of_model(torch.nn.Module(), *leaves, None, is_causal=True, **more)
        return out, *torch.autograd.grad(out, leaves, dout)

    found = run(leaves, dout, position_ids=positions)
    parts = [run([x[:, :, a:b] for x in leaves], dout[:, a:b]) for a, b in pairwise(starts or [0, rows])]
    for x, alone, axis in zip(found, zip(*parts, strict=True), (1, 2, 2, 2), strict=True):
        assert torch.allclose(x, torch.cat(alone, axis), atol=1e-6)


def test_packed_images_and_text_do_not_see_each_other(registered):
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Qwen2VLConfig"):
        pytest.skip("needs Qwen2-VL")
    ids = torch.tensor([[5, 33, 35, 35, 35, 35, 34, 6, 7, 8]])
    grid = torch.tensor([[1, 4, 4]])
    types = (ids == 35).int()
    image = draw(16, 24)
    logits = {}
    for kind in ("fa3verify", "eager"):
        config = transformers.Qwen2VLConfig(**QWEN2_VL)
        config._attn_implementation = kind
        torch.manual_seed(0)
        of = transformers.Qwen2VLForConditionalGeneration(config).eval()
        axes, _ = of.model.get_rope_index(ids, types, grid)
        planes = torch.cat([torch.arange(10).expand(1, 1, -1), axes])
        for n in (1, 2):
            given = {"input_ids": ids.repeat(1, n), "position_ids": planes.repeat(1, 1, n)}
            given |= {"pixel_values": image.repeat(n, 1), "image_grid_thw": grid.repeat(n, 1)}
            logits[kind, n] = outputs(of, **given, mm_token_type_ids=types.repeat(1, n), use_cache=False)
    for n in (1, 2):
        assert torch.allclose(logits["fa3verify", n], logits["eager", n], atol=2e-5)
    assert torch.allclose(logits["fa3verify", 2], logits["fa3verify", 1].repeat(1, 2, 1), atol=2e-5)
