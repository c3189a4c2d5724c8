"""Attention of other libraries on a CPU, each called as its users call it.

torch's and Transformers' functions take tensors, the others numpy arrays, all (batch, heads, seqlen, head_dim). A
forward returns out, with lse if the library gives one; a backward takes dout, out and lse as well and returns dq, dk
and dv. :mod:`fa3verify.known.cpu_kernels` declares them as kernels, and imports this module when one runs.
"""

from __future__ import annotations

import warnings
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fa3_reference.rules import require


def torch_math(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, softmax_scale: float, causal: bool
) -> torch.Tensor:
    """torch's ``scaled_dot_product_attention``, backend MATH, which autograd differentiates."""
    with sdpa_kernel([SDPBackend.MATH]):
        return scaled_dot_product_attention(query, key, value, is_causal=causal, scale=softmax_scale, enable_gqa=True)


def torch_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what ``scaled_dot_product_attention`` runs on a CPU by default, with its lse; kv heads are repeated.

    ValueError for channels apart from each other, where that runs something else.
    """
    k, v = _repeated(q, k, v)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=softmax_scale)


def torch_flash_gradients(*tensors: torch.Tensor, softmax_scale: float, causal: bool) -> tuple[torch.Tensor, ...]:
    """Return dq, dk and dv of ``torch_flash``, from q, k, v, dout, out and lse; dk and dv of a group are added."""
    q, k, v, dout, out, lse = tensors
    group = q.shape[1] // k.shape[1]
    k, v = _repeated(q, k, v)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = backward(dout, q, k, v, out, lse, 0.0, causal, scale=softmax_scale)
    return dq, *(x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))


def _repeated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """Return K and V with a head for each of Q; ValueError for operands with which SDPA leaves this path."""
    require(q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "SDPA takes MATH for channels apart from each other")
    return [x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v)]


def _flex(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call FlexAttention without compilation, and return out and lse."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow without torch.compile
        out, aux = flex_attention(q, k, v, enable_gqa=True, return_aux=AuxRequest(lse=True), **options)
    return out, aux.lse  # type: ignore[return-value]  # a tensor and its companion, as asked for


def torch_flex(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run torch's FlexAttention without compilation, with masks aligned bottom-right; a window side of -1 is open."""
    offset = k.shape[2] - q.shape[2]
    left = window[0]
    right = 0 if causal else window[1]

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        s = softcap * torch.tanh(s / softcap) if softcap else s
        seen = (j <= i + (offset + right)) if right >= 0 else (j >= 0)
        seen = seen & (j >= i + (offset - left)) if left >= 0 else seen
        return torch.where(seen, s, -torch.inf)

    return _flex(q, k, v, score_mod=score, scale=softmax_scale)


def torch_sdpa_masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    softmax_scale: float,
    bias: torch.Tensor | None,
    attn_mask: torch.Tensor | None,
) -> torch.Tensor:
    """What torch's ``scaled_dot_product_attention`` runs by default with ``attn_mask``, boolean or added.

    A call without either has a mask that hides nothing; without a mask it would be ``torch_flash``.
    """
    mask = bias if attn_mask is None else attn_mask
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
    return scaled_dot_product_attention(query, key, value, mask, scale=softmax_scale, enable_gqa=True)


def torch_flex_modified(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float,
    alibi_slopes: torch.Tensor | None,
    document_ids_q: torch.Tensor | None,
    document_ids_k: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run torch's FlexAttention without compilation, with ALiBi as a ``score_mod`` or documents as a ``block_mask``."""
    from torch.nn.attention.flex_attention import create_block_mask

    batch, nheads, rows, _ = q.shape
    keys = k.shape[2]
    slopes = None if alibi_slopes is None else alibi_slopes.broadcast_to(batch, nheads)

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s if slopes is None else s - slopes[b, h] * (i + (keys - rows) - j).abs()

    def same_document(b: Any, h: Any, i: Any, j: Any) -> Any:
        return document_ids_q[b, i] == document_ids_k[b, j]  # type: ignore[index]

    blocks = None if document_ids_q is None else create_block_mask(same_document, batch, None, rows, keys, device="cpu")
    return _flex(q, k, v, score_mod=score, block_mask=blocks, scale=softmax_scale)


def transformers_eager(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, softmax_scale: float, causal: bool
) -> torch.Tensor:
    """Hugging Face Transformers' eager attention of Llama, with the additive mask that models pass it."""
    from transformers.models.llama.modeling_llama import eager_attention_forward

    mask = _causal_mask(query.shape[2], key.shape[2], query.dtype) if causal else None
    module = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], training=False)
    out, _ = eager_attention_forward(module, query, key, value, mask, softmax_scale)  # type: ignore[arg-type]
    return out.transpose(1, 2)


def _causal_mask(rows: int, keys: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the additive mask that Transformers' models make, aligned bottom-right."""
    return _added_mask(torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows), dtype)


def _added_mask(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def transformers_t5(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    softmax_scale: float,
    bias: torch.Tensor | None,
    attn_mask: torch.Tensor | None,
) -> torch.Tensor:
    """Transformers' eager attention of T5, with a position bias or the additive mask that models pass it."""
    from transformers.models.t5.modeling_t5 import eager_attention_forward

    mask = None if attn_mask is None else _added_mask(attn_mask, query.dtype)
    module: Any = SimpleNamespace(training=False)
    out, _ = eager_attention_forward(module, query, key, value, mask, softmax_scale, position_bias=bias)
    return out.transpose(1, 2)


def transformers_bloom(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    alibi_slopes: Any,
) -> torch.Tensor:
    """Transformers' attention of BLOOM behind its projections, whose ALiBi is the slope times the number of a key.

    Keys and values come from the cache of a layer, as they do when tokens are generated.
    """
    from transformers.models.bloom.modeling_bloom import BloomAttention

    batch, nheads, rows, dim = query.shape
    keys = key.shape[2]
    slopes = torch.zeros(1) if alibi_slopes is None else alibi_slopes
    alibi = slopes.broadcast_to(batch, nheads)[..., None] * torch.arange(keys)
    module: Any = SimpleNamespace(
        num_heads=nheads,
        head_dim=dim,
        inv_norm_factor=softmax_scale,
        beta=1.0,
        layer_idx=0,
        pretraining_tp=1,
        slow_but_exact=False,
        hidden_dropout=0.0,
        training=False,
        query_key_value=lambda x: x,
        attention_dropout=lambda x: x,
        dense=lambda x: x,
    )
    module._reshape = partial(BloomAttention._reshape, module)
    module._merge_heads = partial(BloomAttention._merge_heads, module)
    projected = torch.stack([query.transpose(1, 2)] * 3, dim=3).flatten(2)
    layer: Any = SimpleNamespace(update=lambda *_: (key, value))
    residual = torch.zeros(batch, rows, nheads * dim, dtype=query.dtype)
    mask: Any = _causal_mask(rows, keys, query.dtype) if causal else None
    alibi = alibi.reshape(batch * nheads, 1, keys).to(query.dtype)
    out, _ = BloomAttention.forward(module, projected, residual, alibi, mask, layer_past=layer)
    return out.unflatten(-1, (nheads, dim)).transpose(1, 2)


def _jax_attention(*arrays: Any, softmax_scale: float, causal: bool) -> Any:
    """Call the library, whose heads come behind the sequence."""
    import jax

    return jax.nn.dot_product_attention(*arrays, scale=softmax_scale, is_causal=causal, implementation="xla")


def jax_attention(*arrays: np.ndarray, softmax_scale: float, causal: bool) -> np.ndarray:
    """``jax.nn.dot_product_attention``, implementation xla, without its lse, which has the operands' format."""
    heads_last = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays)
    return np.asarray(_jax_attention(*heads_last, softmax_scale=softmax_scale, causal=causal)).swapaxes(1, 2)


def jax_gradients(*arrays: np.ndarray, softmax_scale: float, causal: bool) -> tuple[np.ndarray, ...]:
    """The vector-Jacobian product of ``jax.nn.dot_product_attention``, implementation xla."""
    import jax

    *inputs, dout = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays[:4])
    _, pull = jax.vjp(partial(_jax_attention, softmax_scale=softmax_scale, causal=causal), *inputs)
    return tuple(np.asarray(x).swapaxes(1, 2) for x in pull(dout))


@lru_cache(maxsize=64)
def _onnx_session(softmax_scale: float, causal: bool) -> Any:
    """Return an ONNX Runtime session of one Attention node for FP16 arrays of any size, on one thread."""
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper

    names = ("q", "k", "v")
    node = helper.make_node("Attention", names, ("out",), is_causal=int(causal), scale=softmax_scale)
    sizes = [f"{name}{i}" for name in "qkvo" for i in range(4)]
    tensors = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT16, sizes[4 * i : 4 * i + 4])
        for i, name in enumerate((*names, "out"))
    ]
    graph = helper.make_graph([node], "attention", tensors[:3], tensors[3:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def onnxruntime_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, softmax_scale: float, causal: bool
) -> np.ndarray:
    """ONNX's operator Attention, version 23, by ONNX Runtime."""
    (out,) = _onnx_session(softmax_scale, causal).run(None, {"q": q, "k": k, "v": v})
    return out
