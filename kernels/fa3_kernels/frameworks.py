"""Register the kernels with PyTorch's scaled_dot_product_attention and with Transformers' models.

Importing this module registers nothing; one of the two functions does:

    register_with_torch()
    torch.nn.attention.activate_flash_attention_impl("fa3verify")  # restore_flash_attention_impl() undoes it

    register_with_transformers()
    AutoModelForCausalLM.from_pretrained(..., attn_implementation="fa3verify", dtype=torch.bfloat16)

The private functions have the signatures that the two frameworks call, and translate their arguments. What the kernels
do not support (dropout, ALiBi, Transformers' paged caches) raises a ValueError of one line and is never ignored.
:func:`fa3_kernels.drop_in.register_as_flash_attn_3` does the same for programs that look for FlashAttention-3 itself.
"""

from __future__ import annotations

import warnings
from typing import Any, cast

import torch
from torch.library import Library

from fa3_kernels.api import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from fa3_kernels.cached import numbers
from fa3_kernels.gluon.arguments import Packed, packed_by
from fa3_kernels.gluon.launch_backward import backward
from fa3_kernels.operators import options_of
from fa3_kernels.plan.request import Semantics

__all__ = ["register_with_torch", "register_with_transformers"]

NAME = "fa3verify"
WITH_TEXT = 4  # planes of position_ids: a token's place in its text, then time, height and width
_Tensors = tuple[torch.Tensor, ...]


def register_with_torch(name: str = NAME) -> None:
    """Offer the kernels to ``torch.nn.attention.activate_flash_attention_impl``; nothing changes before that call.

    Once activated they run wherever torch would run its own FlashAttention on a GPU: in
    ``scaled_dot_product_attention`` under ``SDPBackend.FLASH_ATTENTION``, and in ``torch.nn.attention.varlen``, over
    pages as well. They take float16 and bfloat16, and e4m3 in torch's quantized attention; gradients are added in a
    fixed order under ``torch.use_deterministic_algorithms``.

    Parameters
    ----------
    name : str
        By which torch's registry knows them.

    Raises
    ------
    ImportError
        Where torch has no such registry (before 2.11).
    """
    from torch.nn.attention import register_flash_attention_impl

    register_flash_attention_impl(name, register_fn=_activate)


class _Activated:
    """Stands for the activation of the kernels: torch keeps it, and calls ``remove`` to end it."""

    def __init__(self, library: Library) -> None:
        self._library: Library | None = library

    def remove(self) -> None:
        """Give torch its own kernels back; a second call does nothing."""
        if self._library is not None:
            self._library._destroy()
        self._library = None


def _activate(key: str = "CUDA") -> _Activated:
    """Override torch's operators of FlashAttention at a dispatch key, as far as it has them, for its registry."""
    library = Library("aten", "IMPL", key)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Warning only once for all operators", UserWarning
        )  # overriding is the purpose
        for name, function in (
            ("_flash_attention_forward", _forward),
            ("_flash_attention_forward.quantized", _forward),
            ("_flash_attention_forward_no_dropout_inplace", _forward_into),
            ("_flash_attention_backward", _backward),
            ("_scaled_dot_product_flash_attention", _forward_of_heads),
            ("_scaled_dot_product_flash_attention.quantized", _forward_of_quantized_heads),
            ("_scaled_dot_product_flash_attention_backward", _backward_of_heads),
        ):
            base, _, overload = name.partition(".")
            of_torch: Any = getattr(torch.ops.aten, base, None)
            if of_torch is not None and (overload or "default") in of_torch.overloads():
                library.impl(name, function, key, allow_override=True)
    return _Activated(library)


def _forward(  # noqa: PLR0913 (torch's signature)
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    causal: bool,
    return_debug_mask: bool,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
    **others: Any,
) -> _Tensors:
    """Compute aten::_flash_attention_forward, of (batch, seqlen, nheads, head_dim) or of packed rows with starts.

    With a ``block_table`` k and v are pages. Keys from ``seqused_k`` on are not seen. Returns out, lse, and three
    values that only dropout and its debugging would fill. ValueError for a dropout, and for any further argument that
    is neither None nor False.
    """
    _refuse(dropout_p, return_debug_mask=return_debug_mask, **others)
    options: Any = {
        "softmax_scale": scale,
        "causal": causal,
        "window_size": _window((window_size_left, window_size_right)),
        "q_descale": q_descale,
        "k_descale": k_descale,
        "v_descale": v_descale,
    }
    result: Any
    with torch.no_grad():  # torch's own operator has the gradient
        if block_table is not None or (cu_seqlens_k is None and seqused_k is not None):
            splits = num_splits or int(torch.are_deterministic_algorithms_enabled())
            options |= {"page_table": block_table, "cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_q}
            options |= {"cache_seqlens": seqused_k, "num_splits": splits, "return_softmax_lse": True}
            result = flash_attn_with_kvcache(q, k, v, **options)
        else:
            options |= {"num_splits": num_splits or 1, "return_attn_probs": True}
            if cu_seqlens_q is None and cu_seqlens_k is None:
                result = flash_attn_func(q, k, v, **options)
            else:
                starts: Any = cu_seqlens_q, cu_seqlens_k, max_q, max_k
                result = flash_attn_varlen_func(q, k, v, *starts, seqused_k=seqused_k, **options)
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of a dropout that there is none of
    return *result[:2], seed, seed.new_zeros(()), q.new_empty(0)


def _forward_into(out: torch.Tensor, *operands: Any, **options: Any) -> torch.Tensor:
    """Compute aten::_flash_attention_forward_no_dropout_inplace: out as :func:`_forward` has it; returns lse."""
    found, lse, *_ = _forward(*operands, **options)
    out.copy_(found)
    return lse


def _backward(  # noqa: PLR0913 (torch's signature)
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    causal: bool,
    *_seed: torch.Tensor,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> _Tensors:
    """Compute aten::_flash_attention_backward; dq, dk and dv in the layout of q, k and v."""
    _refuse(dropout_p)
    window = _window((window_size_left, window_size_right))
    semantics: Semantics = options_of(scale, causal, (*window, 0), 0.0, 1, None, None)[0]
    packed = _packed(cu_seqlens_q, cu_seqlens_k, max_q, max_k)
    in_order = torch.are_deterministic_algorithms_enabled()
    return backward(dout, q, k, v, out, lse, semantics, packed=packed, is_deterministic=in_order)


def _forward_of_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    causal: bool = False,
    return_debug_mask: bool = False,
    *descales: torch.Tensor | None,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Compute aten::_scaled_dot_product_flash_attention, of (batch, nheads, seqlen, head_dim).

    Returns the nine values of that operator: out, which has the strides of q, lse, no starts, both lengths, and what
    :func:`_forward` returns behind lse.
    """
    max_q = q.shape[2]
    max_k = k.shape[2]
    options: tuple[Any, ...] = None, None, max_q, max_k, dropout_p, causal, return_debug_mask, *descales
    out, lse, *rest = _forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), *options, scale=scale)
    return _strided(out, q), lse, None, None, max_q, max_k, *rest


def _forward_of_quantized_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    *options: Any,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Compute the overload of :func:`_forward_of_heads` that has descales, (batch, nheads_kv)."""
    options = (*options, *(0.0, False, False)[len(options) :])
    return _forward_of_heads(q, k, v, *options, q_descale, k_descale, v_descale, scale=scale)


def _backward_of_heads(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *rest: Any,
    scale: float | None = None,
) -> _Tensors:
    """Compute aten::_scaled_dot_product_flash_attention_backward; each gradient has the strides of its operand.

    ``rest`` are the arguments of :func:`_backward` from ``cu_seqlens_q`` on: the starts of queries and of keys, which
    torch hands over as None here, both lengths, dropout_p, causal, and the two values of the random generator.
    """
    swapped: list[Any] = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
    gradients = _backward(*swapped, lse, *rest, scale=scale)
    return tuple(_strided(x, like) for x, like in zip(gradients, (q, k, v), strict=True))


def _strided(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return (batch, seqlen, nheads, head_dim) as (batch, nheads, seqlen, head_dim), with the strides of ``like``.

    Compiled code expects those strides. The data are copied only where the strides differ.
    """
    x = x.transpose(1, 2)
    wanted = torch.empty_like(like, dtype=x.dtype)
    return x if x.stride() == wanted.stride() else wanted.copy_(x)


def _window(window: tuple[int | None, int | None]) -> tuple[int, int]:
    left, right = window
    return -1 if left is None else left, -1 if right is None else right


def _packed(starts_q: torch.Tensor | None, starts_k: torch.Tensor | None, max_q: int, max_k: int) -> Packed | None:
    return None if starts_q is None and starts_k is None else packed_by(starts_q, starts_k, max_q, max_k)


def _refuse(dropout_p: float, **others: object) -> None:
    if dropout_p:
        raise ValueError(f"dropout is not supported and must be 0, got {dropout_p}")
    for name, value in others.items():
        if value is not None and value is not False:
            raise ValueError(f"{name} is not supported by these kernels")


def register_with_transformers(name: str = NAME) -> None:
    """Offer the kernels to Transformers' models as ``attn_implementation=name``.

    Causal and bidirectional models in float16 or bfloat16, with grouped heads, sliding windows, softcap, caches that
    grow, padded batches (on either side) and packed ones (by starts or position_ids). Needs Transformers 4.50 or newer.

    Parameters
    ----------
    name : str
        Of the attention implementation, and of its mask, which is that of Transformers' flash attention.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask

    AttentionInterface.register(name, _attention_of_model)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, flash_attention_mask)


def _attention_of_model(  # noqa: PLR0913 (Transformers' signature)
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    cache: object = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of a Transformers model, whose interface calls this.

    Takes (batch, nheads, seqlen, head_dim) and returns out (batch, seqlen, nheads, head_dim), and None in place of the
    weights. A mask (batch, seqlen_k) marks padding; starts or position_ids among ``others`` mark packed sequences.
    Sinks take part in the softmax. ValueError for a dropout, a position bias and a paged cache; attention with sinks
    has no gradient, and its backward raises one.
    """
    _refuse(dropout, position_bias=position_bias, paged_cache=cache)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    options: dict[str, Any] = {"softmax_scale": scaling, "causal": causal, "softcap": softcap or 0.0}
    if sliding_window is not None:  # Transformers counts the token's own key in the window
        options["window_size"] = (sliding_window - 1, 0 if causal else sliding_window - 1)
    if s_aux is not None:
        options["sinks"] = s_aux.float()
    if attention_mask is not None:
        return _unpadded(q, k, v, attention_mask, options), None
    starts = _starts(q, k, others)
    if starts is None and s_aux is not None:  # sinks are of packed sequences
        of_q, of_k = (numbers(0, x.shape[1], len(x) + 1, x.device) for x in (q, k))
        starts = (of_q, of_k, q.shape[1], k.shape[1])
    if starts is not None:
        out: Any = flash_attn_varlen_func(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), *starts, **options)
        return out.view(*q.shape[:-1], v.shape[-1]), None
    return cast(torch.Tensor, flash_attn_func(q, k, v, **options)), None


def _starts(
    q: torch.Tensor, k: torch.Tensor, others: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, int, int] | None:
    """Return the starts of packed sequences and their longest lengths, for q and for k; None if nothing is packed.

    The starts are those in ``others`` if it has all four values. Otherwise its ``position_ids`` tell them, for a batch
    of one with as many keys as queries: a sequence begins at the smallest position, as in Transformers' flash
    attention. With positions along several axes (MRoPE) every axis must be at its smallest there, since the patches of
    an image share some positions. Where the text's own positions stand in front of three axes, they alone count.
    ValueError unless there is a position for each token.
    """
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    starts_q, starts_k, max_q, max_k = (others.get(name) for name in names)
    if starts_q is not None and starts_k is not None and max_q is not None and max_k is not None:
        return starts_q.int(), starts_k.int(), int(max_q), int(max_k)
    positions = others.get("position_ids")
    rows = q.shape[1]
    if positions is None or len(q) != 1 or rows <= 1 or rows != k.shape[1]:
        return None
    if positions.shape[-1] != rows:
        raise ValueError(f"position_ids must have one position for each of {rows} tokens, got {(*positions.shape,)}")
    planes = positions.reshape(-1, rows)
    if len(planes) == WITH_TEXT:
        planes = planes[:1]
    begins = (planes == planes.amin(1, keepdim=True)).all(0)
    begins[0] = True  # tokens in front of the smallest position are a sequence, too
    starts = torch.nn.functional.pad(begins.nonzero().flatten(), (0, 1), value=rows).int()
    if len(starts) <= 2:  # one sequence: nothing is packed
        return None
    longest = int(starts.diff().max())
    return starts, starts, longest, longest


def _unpadded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    """Compute attention among the tokens that a mask (batch, seqlen_k) of 1 and 0 keeps; rows of padding are 0.

    The kept tokens are packed, and the results put back in their places. Queries are the last tokens of the mask.
    """
    keeps_k = mask.bool()
    k, v = (x[:, : mask.shape[1]] for x in (k, v))  # a cache of fixed length is longer than its mask
    keeps_q = keeps_k[:, -q.shape[1] :]
    starts_q, starts_k = (torch.nn.functional.pad(x.sum(1).cumsum(0), (1, 0)).int() for x in (keeps_q, keeps_k))
    lengths = int(starts_q.diff().max()), int(starts_k.diff().max())
    rows: Any = flash_attn_varlen_func(q[keeps_q], k[keeps_k], v[keeps_k], starts_q, starts_k, *lengths, **options)
    return q.new_zeros((*q.shape[:-1], v.shape[-1])).masked_scatter(keeps_q[..., None, None], rows)
