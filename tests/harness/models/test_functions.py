"""What is watched besides torch's function: FlashAttention's functions, Transformers' interface, compiled code."""

from __future__ import annotations

import gc
import importlib
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fa3verify

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.optional
F = torch.nn.functional
SOURCE = '''
import torch

def attend(q, k, v, causal, scale, window=(-1, -1), cap=0.0, slopes=None):
    """Return out and lse of (seqlen, heads, channels), bottom-right, in binary32."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    s = q @ k.mT * (scale or q.shape[-1] ** -0.5)
    s = cap * torch.tanh(s / cap) if cap else s
    behind = torch.arange(k.shape[1])[None] - torch.arange(q.shape[1])[:, None] - (k.shape[1] - q.shape[1])
    s = s if slopes is None else s - slopes[:, None, None] * behind.abs()
    right = 0 if causal else window[1]
    hidden = behind > (right if right >= 0 else 10**9)
    hidden |= -behind > (window[0] if window[0] >= 0 else 10**9)
    s = s.masked_fill(hidden, -torch.inf)
    lse = s.logsumexp(-1)
    out = torch.where(lse[..., None].isinf(), 0.0, (s - lse[..., None]).exp()) @ v
    return out.transpose(0, 1), lse

def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                    alibi_slopes=None, deterministic=False, return_attn_probs=False):
    each = [attend(*x, causal, softmax_scale, window_size, softcap, alibi_slopes) for x in zip(q, k, v)]
    out, lse = (torch.stack(x) for x in zip(*each))
    return (out * FACTOR, lse, None) if return_attn_probs else out * FACTOR

def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                           softmax_scale=None, causal=False, block_table=None):
    cut = lambda x, starts: [x[a:b] for a, b in zip(starts.tolist(), starts.tolist()[1:])]
    each = zip(cut(q, cu_seqlens_q), cut(k, cu_seqlens_k), cut(v, cu_seqlens_k))
    return torch.cat([attend(*x, causal, softmax_scale)[0] for x in each]) * FACTOR

def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
                            block_table=None, softmax_scale=None, causal=False):
    n = torch.as_tensor(cache_seqlens).expand(len(q)).tolist()
    out = []
    for i, length in enumerate(n):
        if k is not None:
            k_cache[i, length : length + k.shape[1]] = k[i]
            v_cache[i, length : length + k.shape[1]] = v[i]
            length += k.shape[1]
        pages = k_cache if block_table is None else None
        own = [x[i] if pages is not None else x[block_table[i]].flatten(0, 1) for x in (k_cache, v_cache)]
        out.append(attend(q[i], *(x[:length] for x in own), causal, softmax_scale)[0])
    return torch.stack(out) * FACTOR

FACTOR = 1.0
'''


def drawn(*shape: int, seed: int = 0, requires_grad: bool = False) -> Any:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.requires_grad_(requires_grad)


Q = (2, 9, 4, 16)
K = (2, 13, 2, 16)
CALLS: dict[str, Any] = {
    "dense": lambda f: f.flash_attn_func(drawn(*Q), drawn(*K), drawn(*K, seed=1), causal=True),
    "scale": lambda f: f.flash_attn_func(drawn(*Q), drawn(*K), drawn(*K, seed=1), 0.0, 0.7),
    "window": lambda f: f.flash_attn_func(drawn(*Q), drawn(*K), drawn(*K, seed=1), window_size=(3, 2)),
    "softcap": lambda f: f.flash_attn_func(drawn(*Q), drawn(*K), drawn(*K, seed=1), softcap=2.0),
    "slopes": lambda f: f.flash_attn_func(
        drawn(*Q), drawn(*K), drawn(*K, seed=1), causal=True, alibi_slopes=torch.tensor([0.5, 0.25, 1, 2])
    ),
    "lse": lambda f: f.flash_attn_func(drawn(*Q), drawn(*K), drawn(*K, seed=1), return_attn_probs=True),
    "gradients": lambda f: (
        f.flash_attn_func(
            drawn(*Q, requires_grad=True), drawn(*K, requires_grad=True), drawn(*K, seed=1, requires_grad=True)
        )
        .square()
        .sum()
        .backward()
    ),
    "packed": lambda f: f.flash_attn_varlen_func(
        drawn(12, 4, 16),
        drawn(20, 2, 16),
        drawn(20, 2, 16, seed=1),
        torch.tensor([0, 5, 5, 12]).int(),
        torch.tensor([0, 8, 9, 20]).int(),
        7,
        11,
        causal=True,
    ),
    "cache": lambda f: f.flash_attn_with_kvcache(
        drawn(2, 1, 4, 16), drawn(*K), drawn(*K, seed=1), cache_seqlens=torch.tensor([5, 13]).int(), causal=True
    ),
    "appended": lambda f: f.flash_attn_with_kvcache(
        drawn(2, 1, 4, 16),
        drawn(*K),
        drawn(*K, seed=1),
        drawn(2, 1, 2, 16, seed=2),
        drawn(2, 1, 2, 16, seed=3),
        cache_seqlens=7,
    ),
    "pages": lambda f: f.flash_attn_with_kvcache(
        drawn(2, 1, 4, 16),
        drawn(6, 8, 2, 16),
        drawn(6, 8, 2, 16, seed=1),
        cache_seqlens=torch.tensor([12, 7]).int(),
        block_table=torch.tensor([[4, 0], [1, 3]]).int(),
    ),
}  # fmt: skip


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Offer a library by the name of FlashAttention-3's, which nobody has imported yet."""
    (tmp_path / "flash_attn_interface.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    return tmp_path


@pytest.mark.parametrize("factor", [1.0, 1.01])
@pytest.mark.parametrize("name", CALLS)
def test_functions_of_flash_attention_are_read_by_their_own_names(library: Path, name: str, factor: float) -> None:
    with fa3verify.watch(one_in=1, budget=math.inf, folder=library) as found:
        flash = importlib.import_module("flash_attn_interface")  # while it is watched
        flash.FACTOR = factor
        for _ in range(4):
            CALLS[name](flash)
    assert not found.reasons, str(found)
    assert {x.kind for x in found.checked} == ({"outputs", "gradients"} if name == "gradients" else {"outputs"})
    assert all(bool(x.found) == (factor == 1) for x in found.checked if x.kind == "outputs"), str(found)
    assert bool(found) == (factor == 1), str(found)
    sys.modules.pop("flash_attn_interface")


def test_all_functions_are_replaced_and_put_back_in_one_look_through_memory_each(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash = importlib.import_module("flash_attn_interface")
    other = ModuleType("flash_attn")  # has the same functions, by another name
    monkeypatch.setitem(sys.modules, other.__name__, other)
    names = [name for name in vars(flash) if name.startswith("flash_attn_")]
    vars(other).update({name: getattr(flash, name) for name in names})
    before, looked, look = [getattr(flash, name) for name in names], [], gc.get_referrers
    monkeypatch.setattr(gc, "get_referrers", lambda *functions: looked.append(len(functions)) or look(*functions))
    with fa3verify.watch(folder=library):
        during = [getattr(flash, name) for name in names]
        assert during == [getattr(other, name) for name in names]
        assert not {*during} & {*before}
    assert before == [getattr(flash, name) for name in names] == [getattr(other, name) for name in names]
    assert len(looked) == 2
    assert min(looked) >= len(names)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"dropout_p": 0.1}, "dropout_p"), ({"rotary_cos": 1}, "rotary_cos")],
)
def test_an_argument_that_is_not_understood_is_a_reason_and_never_a_finding(
    library: Path, options: dict[str, Any], reason: str
) -> None:
    with fa3verify.watch(one_in=1, budget=math.inf, folder=library) as found:
        flash = importlib.import_module("flash_attn_interface")
        function = flash.flash_attn_func if "dropout_p" in options else flash.flash_attn_with_kvcache
        given = {} if "dropout_p" in options else {"cache_seqlens": 3}
        function(drawn(*Q), drawn(*K), drawn(*K), **given, **options)
    assert found.reasons == {f"calls with the argument {reason}": 1}
    assert not found.checked
    assert "SAW NOTHING" in str(found)
    sys.modules.pop("flash_attn_interface")


def llama(implementation: str) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=32,
        attn_implementation=implementation,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.filterwarnings("ignore")
def test_a_kernel_that_is_registered_with_transformers_is_named_by_layer(tmp_path: Path) -> None:
    interface = pytest.importorskip("transformers").AttentionInterface
    wrong = {"layer": -1}

    def mine(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: Any = None, **_: Any) -> Any:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        out = out * (1.02 if module.layer_idx == wrong["layer"] else 1)
        return out.transpose(1, 2).contiguous(), None

    ids = torch.arange(24).reshape(1, 24)
    with fa3verify.watch(one_in=1, budget=math.inf, folder=tmp_path) as found:
        interface.register("mine", mine)
        model = llama("mine")
        for wrong["layer"] in (-1, 1):
            model(input_ids=ids, labels=ids).loss.backward()
    assert found.calls == {"transformers mine": 4, "scaled_dot_product_attention": 4}
    bad = [x for x in found.checked if not x.found]
    assert {x.site.layer for x in bad} == {"model.layers.1.self_attn"}
    assert {x.site.function for x in bad} == {"transformers mine"}
    assert {x.kind for x in found.checked if x.site.function == "transformers mine"} == {"outputs", "gradients"}
    assert interface()["mine"] is mine


@pytest.mark.filterwarnings("ignore")
def test_generation_with_a_cache_and_padding_has_no_finding(tmp_path: Path) -> None:
    model = llama("sdpa").eval()
    ids = torch.arange(20).reshape(2, 10)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with fa3verify.watch(one_in=1, budget=math.inf, folder=tmp_path) as found:
        model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert len(found.checked) == found.calls.total() == 8
    assert found, str(found)
    assert not found.reasons


class Layer(torch.nn.Module):
    """Attention with one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(32, 96)

    def forward(self, x: Any) -> Any:
        q, k, v = (y.unflatten(-1, (2, 16)).transpose(1, 2) for y in self.inner(x).chunk(3, -1))
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@pytest.mark.filterwarnings("ignore")
def test_compiled_code_is_looked_at_in_every_run_with_its_layers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(Layer(), Layer())
    x = drawn(2, 12, 32)
    expected = model(x)
    expected.sum().backward()
    gradient = model[0].inner.weight.grad.clone()
    model[0].inner.weight.grad = None
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with fa3verify.watch(one_in=1, budget=math.inf, folder=tmp_path) as found:
        for _ in range(3):
            model[0].inner.weight.grad = None
            got = compiled(x)
            got.sum().backward()
    assert torch.allclose(got, expected, atol=1e-6)
    assert torch.allclose(model[0].inner.weight.grad, gradient, atol=1e-5)
    assert found.calls.total() == len(found.checked) == 6, str(found)
    assert len({x.site.layer for x in found.checked}) == 2
    torch._dynamo.reset()
