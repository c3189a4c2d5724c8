"""Attention of other libraries on a CPU, each as its users call it, from numpy arrays to numpy arrays.

Arrays are (batch, heads, seqlen, head_dim); every function returns out, and lse where the library gives one, or takes
dout, out and lse as well and returns dq, dk and dv.
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

from fa3verify.tensors.convert import gradients_of, to_numpy, to_torch


def math_of(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, softmax_scale: float, causal: bool
) -> torch.Tensor:
    """torch's ``scaled_dot_product_attention``, backend MATH, which autograd differentiates."""
    with sdpa_kernel([SDPBackend.MATH]):
        return scaled_dot_product_attention(query, key, value, is_causal=causal, scale=softmax_scale, enable_gqa=True)


def torch_math(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, softmax_scale: float, causal: bool) -> np.ndarray:
    """The same of arrays."""
    return to_numpy(math_of(*map(to_torch, (q, k, v)), softmax_scale=softmax_scale, causal=causal))


def torch_flash(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, softmax_scale: float, causal: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return what ``scaled_dot_product_attention`` runs on a CPU by default, with its lse; kv heads are repeated."""
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
    left = window[0]
    right = 0 if causal else window[1]

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


def eager_of(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, softmax_scale: float, causal: bool
) -> torch.Tensor:
    """Hugging Face Transformers' eager attention of Llama, with the additive mask that models pass it."""
    from transformers.models.llama.modeling_llama import eager_attention_forward

    rows = query.shape[2]
    keys = key.shape[2]
    mask = None
    if causal:
        hidden = torch.ones(rows, keys, dtype=torch.bool).triu(1 + keys - rows)
        mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill(hidden, torch.finfo(query.dtype).min)
    module = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], training=False)
    out, _ = eager_attention_forward(module, query, key, value, mask, softmax_scale)  # type: ignore[arg-type]
    return out.transpose(1, 2)


def transformers_eager(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, softmax_scale: float, causal: bool
) -> np.ndarray:
    """The same of arrays."""
    return to_numpy(eager_of(*map(to_torch, (q, k, v)), softmax_scale=softmax_scale, causal=causal))


Three = tuple[np.ndarray, np.ndarray, np.ndarray]


def torch_math_gradients(*arrays: np.ndarray, softmax_scale: float, causal: bool) -> Three:
    """torch's autograd of backend MATH."""
    return _differentiated(math_of, arrays, softmax_scale, causal)


def transformers_eager_gradients(*arrays: np.ndarray, softmax_scale: float, causal: bool) -> Three:
    """torch's autograd of Transformers' eager attention."""
    return _differentiated(eager_of, arrays, softmax_scale, causal)


def _differentiated(function: Any, arrays: tuple[np.ndarray, ...], softmax_scale: float, causal: bool) -> Three:
    *inputs, dout = map(to_torch, arrays[:4])
    dq, dk, dv = gradients_of(function, tuple(inputs), dout, softmax_scale=softmax_scale, causal=causal)
    return to_numpy(dq), to_numpy(dk), to_numpy(dv)


def torch_flash_gradients(*arrays: np.ndarray, softmax_scale: float, causal: bool) -> Three:
    """The backward of what ``scaled_dot_product_attention`` runs on a CPU by default; heads of a group are added."""
    q, k, v, dout, out, lse = map(to_torch, arrays)
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = backward(dout, q, k, v, out, lse, 0.0, causal, scale=softmax_scale)
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    return to_numpy(dq), to_numpy(dk), to_numpy(dv)


def jax_gradients(*arrays: np.ndarray, softmax_scale: float, causal: bool) -> Three:
    """The vector-Jacobian product of ``jax.nn.dot_product_attention``, implementation xla."""
    import jax

    q, k, v, dout = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays[:4])

    def forward(*inputs: Any) -> Any:
        return jax.nn.dot_product_attention(*inputs, scale=softmax_scale, is_causal=causal, implementation="xla")

    _, pull = jax.vjp(forward, q, k, v)
    dq, dk, dv = (np.asarray(x).swapaxes(1, 2) for x in pull(dout))
    return dq, dk, dv
