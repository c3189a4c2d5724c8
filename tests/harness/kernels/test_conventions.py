"""A function that is called as a public one is a kernel as it stands, and is called with nothing that it lacks."""

from __future__ import annotations

import numpy as np
import pytest

import fa3verify
from fa3_reference.problem import AttentionProblem
from fa3_reference.score_term import ScoreTerm
from fa3verify import Case, Recipe
from fa3verify.judging.judgement import judge, passes
from fa3verify.kernels.loading import MADE

torch = pytest.importorskip("torch")


def exact(q, k, v, scale, causal=False, top_left=False, window=(-1, -1)):
    """Float64 attention of (batch, heads, tokens, channels), and its lse."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    n, m = q.shape[2], k.shape[2]
    apart = torch.arange(m)[None] - torch.arange(n)[:, None] - (0 if top_left else m - n)
    seen = (
        ~((apart > 0) & causal) & ((apart >= -window[0]) | (window[0] < 0)) & ((apart <= window[1]) | (window[1] < 0))
    )
    scores = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse.clamp(min=-1e300)[..., None]) @ v, lse.float()


def of_tokens(q, k, v, *args, **options):
    out, lse = exact(*(x.transpose(1, 2) for x in (q, k, v)), *args, **options)
    return out.transpose(1, 2).to(q.dtype), lse


@fa3verify.kernel(like="sdpa", head_dims=(64,))
def sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    assert dropout_p == 0
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert attn_mask is None or not is_causal
    if attn_mask is not None:
        args = (x.double() for x in (query, key, value))
        mask = attn_mask if attn_mask.dtype == torch.bool else attn_mask.double()
        sdpa_of_torch = torch.nn.functional.scaled_dot_product_attention
        return sdpa_of_torch(*args, mask, scale=scale, enable_gqa=enable_gqa).to(query.dtype)
    return exact(query, key, value, scale, is_causal, top_left=True)[0].to(query.dtype)


@fa3verify.kernel(like="sdpa", head_dims=(64,))
def short_sdpa(q, k, v, is_causal, scale):
    return exact(q, k, v, scale, is_causal, top_left=True)[0].to(q.dtype)


@fa3verify.kernel(like="sdpa", head_dims=(64,))
def sdpa_bottom_right(q, k, v, is_causal=False, scale=None):
    return exact(q, k, v, scale, is_causal)[0].to(q.dtype)


@fa3verify.kernel(like="flash_attn", head_dims=(64,))
def flash(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), return_attn_probs=False):
    out, lse = of_tokens(q, k, v, softmax_scale, causal, window=window_size)
    return (out, lse, None) if return_attn_probs else out


@fa3verify.kernel(like="flash_attn", head_dims=(64,))
def flash_without_window(q, k, v, softmax_scale=None, causal=False):
    return of_tokens(q, k, v, softmax_scale, causal)


@fa3verify.kernel(like="flash_attn", head_dims=(64,))
def flash_with_a_window_of_none(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
    return of_tokens(q, k, v, softmax_scale, causal, window=tuple(x or -1 for x in window_size))


@fa3verify.kernel(like="flash_attn_varlen", head_dims=(64,))
def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False):  # noqa: PLR0913
    out = torch.zeros_like(q)
    for a, b, c, d in zip(cu_seqlens_q, cu_seqlens_q[1:], cu_seqlens_k, cu_seqlens_k[1:]):
        out[a:b] = of_tokens(q[None, a:b], k[None, c:d], v[None, c:d], softmax_scale, causal)[0][0]
    return out


@fa3verify.kernel(like="flash_attn_kvcache", head_dims=(64,), page_sizes=(16,))
def kvcache(q, k_cache, v_cache, cache_seqlens=None, block_table=None, softmax_scale=None, causal=False):
    out = torch.zeros_like(q)
    for i, n in enumerate(cache_seqlens.tolist()):
        pages = slice(i, i + 1) if block_table is None else block_table[i].long()
        k, v = (x[pages].reshape(1, -1, *x.shape[2:])[:, :n] for x in (k_cache, v_cache))
        out[i : i + 1] = of_tokens(q[i : i + 1], k, v, softmax_scale, causal)[0]
    return out


@fa3verify.kernel(like="flex", head_dims=(64,))
def flex(query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False):
    out, lse = exact(query, key, value, scale)
    return (out.to(query.dtype), lse) if return_lse else out.to(query.dtype)


@fa3verify.kernel(like="sdpa", head_dims=(64,))
def of_other_names(q, k, v, causal, sm_scale, dropout, mask=None):
    """Required arguments get what says nothing; of two outputs the second is its weights."""
    assert causal in (True, False)
    assert dropout == 0
    out = exact(q, k, v, sm_scale, causal, top_left=True)[0]
    return (out if mask is None else out * torch.nan).to(q.dtype), torch.zeros(1, 1, *q.shape[2:])


class Applied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, sm_scale):
        return exact(q, k, v, sm_scale, causal, top_left=True)[0].to(q.dtype)


applied = fa3verify.kernel(like="sdpa", head_dims=(64,))(Applied.apply)
applied.__name__ = "applied"


@fa3verify.kernel(like="sdpa", head_dims=(64,), always=("causal",))
def always_causal(q, k, v):
    return exact(q, k, v, 0.125, causal=True, top_left=True)[0].to(q.dtype)


CAUSAL = {"causal": True}
RIGHT = {
    sdpa: (frozenset({"causal", "gqa", "bias", "attn_mask"}), {"causal": True, "top_left": True}),
    short_sdpa: (frozenset({"causal"}), {"causal": True, "top_left": True, "nheads_kv": 4}),
    of_other_names: (frozenset({"causal", "attn_mask", "bias"}), {"causal": True, "top_left": True, "nheads_kv": 4}),
    applied: (frozenset({"causal"}), {"causal": True, "top_left": True, "nheads_kv": 4}),
    always_causal: (frozenset({"causal"}), {"causal": True, "top_left": True, "nheads_kv": 4}),
    flash: (frozenset({"causal", "gqa", "window"}), {"window": (3, 2)}),
    flash_without_window: (frozenset({"causal", "gqa"}), CAUSAL),
    varlen: (frozenset({"causal", "gqa", "varlen"}), CAUSAL | {"seqlens_q": (5, 9), "seqlens_k": (30, 20)}),
    kvcache: (frozenset({"causal", "gqa", "paged", "seqused_k"}), CAUSAL),
    flex: (frozenset({"gqa"}), {}),
}


def judged(function, **changes):
    (kernel,) = getattr(function, MADE)
    sizes = {"batch": 2, "nheads": 4, "nheads_kv": 2, "seqlen_q": 9, "seqlen_k": 30, "head_dim": 64} | changes
    return kernel, judge(kernel, Case(kernel.name, AttentionProblem(**sizes), Recipe("normal")))


@pytest.mark.parametrize("function", RIGHT, ids=lambda function: function.__name__)
def test_a_function_of_a_public_convention_is_a_kernel(function):
    features, changes = RIGHT[function]
    kernel, judgement = judged(function, **changes)
    assert kernel.features == features
    assert passes(kernel, judgement.measures)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["bias", "attn_mask"])
def test_a_mask_or_a_bias_is_given_as_the_public_function_takes_it(kind, causal):
    term = ScoreTerm(kind, "bh")
    kernel, judgement = judged(sdpa, causal=causal, top_left=causal, term=term)
    assert passes(kernel, judgement.measures)


def test_lse_is_asked_for_where_the_function_can_return_it():
    names = {f.__name__: set(judged(f, **RIGHT[f][1])[1].outputs) for f in (flash, flex, sdpa)}
    assert names == {"flash": {"out", "lse"}, "flex": {"out", "lse"}, "sdpa": {"out"}}


@pytest.mark.parametrize(
    ("function", "changes"),
    [
        (sdpa_bottom_right, {"causal": True, "top_left": True, "nheads_kv": 4}),
        (flash_with_a_window_of_none, {"window": (0, 2)}),
    ],
    ids=["another alignment", "a window of 0"],
)
def test_what_the_public_function_does_otherwise_is_found(function, changes):
    kernel, judgement = judged(function, **changes)
    assert not passes(kernel, judgement.measures)


def test_a_function_without_a_scale_is_asked_for_the_default_alone():
    (kernel,) = getattr(always_causal, MADE)
    assert kernel.misfit(AttentionProblem(1, 1, 1, 4, 4, 64, causal=True, top_left=True, softmax_scale=0.3))
    assert kernel.sizes.said == {"always": ("causal",), "softmax_scale": "default"}


def test_an_unknown_convention_is_refused_with_the_list():
    with pytest.raises(ValueError, match=r"like must be among sdpa, flash_attn, .* got 'fa9'"):
        fa3verify.kernel(like="fa9")(np.add)


def test_a_kernel_that_torch_compiles_is_compiled_for_each_shape_of_a_campaign(tmp_path):
    """It may import what compiles in its first call: the second one is compiled for more shapes than torch's 8."""
    import torch._dynamo.config as dynamo

    file = tmp_path / "compiled_for_shapes.py"
    declared = 'import fa3verify\n@fa3verify.kernel(library="torch", features=(), head_dims=(64,))\n'
    file.write_text(f"{declared}def f(q, k, v, *, softmax_scale):\n    import torch._dynamo.config\n    return q\n")
    kernel = fa3verify.find_kernel(f"{file}:f")
    problem = AttentionProblem(1, 1, 1, 4, 4, 64)
    with dynamo.patch(recompile_limit=8):
        judge(kernel, Case(kernel.name, problem, Recipe("normal")))
        assert dynamo.recompile_limit >= 1024
