"""Attention of other libraries on a CPU, each as its users call it, from numpy arrays to numpy arrays.

Arrays are (batch, heads, seqlen, head_dim); every function returns out, and lse where the library gives one.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fa3verify.adapters.tensors import to_numpy, to_torch


def torch_math(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, softmax_scale: float, causal: bool) -> np.ndarray:
    """torch's ``scaled_dot_product_attention``, backend MATH."""
    query, key, value = map(to_torch, (q, k, v))
    with sdpa_kernel([SDPBackend.MATH]):
        out = scaled_dot_product_attention(query, key, value, is_causal=causal, scale=softmax_scale, enable_gqa=True)
    return to_numpy(out)


def torch_flash(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, softmax_scale: float, causal: bool
) -> tuple[np.ndarray, np.ndarray]:
    """What ``scaled_dot_product_attention`` runs on a CPU by default, with its lse; kv heads are repeated."""
    group = q.shape[1] // k.shape[1]
    tensors = (to_torch(q), *(to_torch(x).repeat_interleave(group, 1) for x in (k, v)))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*tensors, 0.0, causal, scale=softmax_scale)
    return to_numpy(out), to_numpy(lse)


def torch_flex(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    softmax_scale: float,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
) -> tuple[np.ndarray, np.ndarray]:
    """torch's FlexAttention without compilation, masks aligned bottom-right."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    offset = k.shape[2] - q.shape[2]
    left, right = window[0], 0 if causal else window[1]

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        s = softcap * torch.tanh(s / softcap) if softcap else s
        seen = (j <= i + (offset + right)) if right >= 0 else (j >= 0)
        seen = seen & (j >= i + (offset - left)) if left >= 0 else seen
        return torch.where(seen, s, -torch.inf)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow without torch.compile
        out, aux = flex_attention(
            *map(to_torch, (q, k, v)),
            score_mod=score,
            scale=softmax_scale,
            enable_gqa=True,
            return_aux=AuxRequest(lse=True),
        )
    return to_numpy(out), to_numpy(aux.lse)  # type: ignore[arg-type]  # asked for above


def jax_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, softmax_scale: float, causal: bool) -> np.ndarray:
    """``jax.nn.dot_product_attention``, implementation xla, without its lse, which has the operands' format."""
    import jax

    heads_last = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v))
    out = jax.nn.dot_product_attention(*heads_last, scale=softmax_scale, is_causal=causal, implementation="xla")
    return np.asarray(out).swapaxes(1, 2)


@lru_cache(maxsize=64)
def _onnx_session(softmax_scale: float, causal: bool) -> Any:
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


def transformers_eager(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, softmax_scale: float, causal: bool
) -> np.ndarray:
    """Hugging Face Transformers' eager attention of Llama, with the additive mask that models pass it."""
    from transformers.models.llama.modeling_llama import eager_attention_forward

    query, key, value = map(to_torch, (q, k, v))
    mask = None
    if causal:
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
        mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill(hidden, torch.finfo(query.dtype).min)
    module = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], training=False)
    out, _ = eager_attention_forward(module, query, key, value, mask, softmax_scale)  # type: ignore[arg-type]
    return to_numpy(out).swapaxes(1, 2)
