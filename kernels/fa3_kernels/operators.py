"""The torch operators ``fa3verify::forward``, ``fa3verify::inference`` and ``fa3verify::backward``, each also of packed
sequences (``_varlen``).

Compiled graphs and fake tensors see the calls of :mod:`fa3_kernels.api` as these operators. Each has a schema and one
implementation, which goes to :mod:`fa3_kernels.gluon.launch` and refuses tensors that are on no Hopper GPU; torch's
``custom_op`` would add two Python layers to every call. ``inference`` is the forward without a gradient, for compiled
code that wants none.

Code that is not traced calls the autograd function :class:`Attention` without the operator, which costs a few
microseconds more. The operator's own gradient is that function too; graphs that are traced through it hold
``inference`` and ``backward``, which take no further Python layer when they are run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch

from fa3_kernels.gluon.arguments import NO_DESCALES, Descales, Packed, check_starts, check_tensor
from fa3_kernels.gluon.launch import empty_outputs, forward, operand
from fa3_kernels.gluon.launch_backward import backward, check_of_forward
from fa3_kernels.plan.request import Choices, Semantics, request_of

_OPTIONS = (
    "Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, float? softmax_scale, bool causal, int window_left, "
    "int window_right, float softcap, int num_splits, bool? pack_gqa, int[] descale_blocks, int promotion_interval, "
    "bool deterministic, int sm_margin, int attention_chunk"
)
_NUM_OPTIONS = len(_OPTIONS.split(", "))
PROMOTION_INTERVAL = 128  # keys; the accumulator of FP8 wgmma loses bits over longer chains
_STARTS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, int max_seqlen_k"
_BACKWARD_TENSORS = "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse"
_SEMANTICS = (
    "float? softmax_scale, bool causal, int window_left, int window_right, float softcap, bool deterministic, "
    "int sm_margin"
)
_LIBRARY = torch.library.Library("fa3verify", "DEF")
for _of in ("forward", "inference"):
    _LIBRARY.define(f"{_of}(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)")
    _LIBRARY.define(f"{_of}_varlen(Tensor q, Tensor k, Tensor v, {_STARTS}, {_OPTIONS}) -> (Tensor, Tensor)")
_LIBRARY.define(f"backward({_BACKWARD_TENSORS}, {_SEMANTICS}) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define(f"backward_varlen({_BACKWARD_TENSORS}, {_STARTS}, {_SEMANTICS}) -> (Tensor, Tensor, Tensor)")
forward_op: Any = torch.ops.fa3verify.forward.default
forward_varlen_op: Any = torch.ops.fa3verify.forward_varlen.default
inference_op: Any = torch.ops.fa3verify.inference.default
inference_varlen_op: Any = torch.ops.fa3verify.inference_varlen.default
backward_op: Any = torch.ops.fa3verify.backward.default
backward_varlen_op: Any = torch.ops.fa3verify.backward_varlen.default
_Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_Given = TypeVar("_Given", torch.Tensor, "torch.Tensor | None")


@lru_cache(maxsize=1024)
def options_of(
    softmax_scale: float | None,
    causal: bool,
    visible: tuple[int, int, int],
    softcap: float,
    num_splits: int,
    pack_gqa: bool | None,
    promotion_interval: int | None,
    sm_margin: int = 0,
) -> tuple[Semantics, Choices]:
    """Return the options of a call as the launch takes them.

    ``visible`` are the limits of the window and the keys of a chunk. ``promotion_interval`` is None for operands of
    16 bits.

    As upstream has it, a negative limit of the window is none, and so are a negative softcap and number of splits.
    """
    left, right, chunk = visible
    scale = None if softmax_scale is None else float(softmax_scale)
    cap = 0.0 if softcap < 0 else float(softcap)
    splits = max(0, int(num_splits))
    semantics = Semantics(bool(causal), (max(-1, left), max(-1, right)), cap, scale, int(chunk))
    return semantics, Choices(splits, pack_gqa, promotion_interval=promotion_interval, sm_margin=int(sm_margin))


def descales_of(
    q: torch.Tensor | None, k: torch.Tensor | None, v: torch.Tensor | None, blocks: Sequence[int]
) -> Descales:
    """Return the descales of a call; NO_DESCALES itself where there are none, as the launch compares identities."""
    if q is None and k is None and v is None and tuple(blocks) == (0, 0, 0):
        return NO_DESCALES
    of_q, of_k, of_v = blocks
    return Descales(q, k, v, (of_q, of_k, of_v))


def factors_of(
    q: torch.Tensor | float | None,
    k: torch.Tensor | float | None,
    v: torch.Tensor | float | None,
    keys: torch.Tensor,
    starts: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return the descales of q, k and v as tensors, or three None where none is given or operands have 16 bits.

    A number becomes a tensor (batch, nheads_kv) whose elements are one element in memory. ``keys`` is k, whose shape
    gives batch and heads; for packed sequences ``starts`` gives the batch. ValueError for a number that is not finite
    and > 0.
    """
    if (q is None and k is None and v is None) or keys.dtype is not torch.float8_e4m3fn:
        return None, None, None
    shape = (len(keys) if starts is None else len(starts) - 1, keys.shape[-2])
    device = keys.device
    return _factor("q", q, shape, device), _factor("k", k, shape, device), _factor("v", v, shape, device)


def _factor(
    name: str, x: torch.Tensor | float | None, shape: tuple[int, int], device: torch.device
) -> torch.Tensor | None:
    if x is None or isinstance(x, torch.Tensor):
        return x
    if not (isinstance(x, float | int) and 0 < x < float("inf")):
        raise ValueError(f"{name}_descale must be a float32 tensor, or a number that is finite and > 0, got {x!r}")
    return torch.full((1, 1), x, dtype=torch.float32, device=device).expand(shape)


def returned(found: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Return an output, or ``out`` where a caller gives memory for it; ValueError for memory of another kind."""
    if out is None:
        return found
    check_tensor("out", out, tuple(found.shape), found.dtype, found.device, is_strided=True)
    return out.copy_(found)


def contiguous(x: _Given) -> _Given:
    """Return a tensor, or a copy if its last dimension is not contiguous, and None for None."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def wants_gradient(*operands: torch.Tensor) -> bool:
    """Tell whether autograd waits for a gradient of an operand."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in operands)


def refuse(qv: object) -> None:
    """Raise ValueError for an argument of FlashAttention-3's functions that these kernels do not support."""
    if qv is not None:
        raise ValueError("qv (a second query tensor multiplied with V) is not supported, pass None")


def of_forward(q: torch.Tensor, rest: tuple[Any, ...]) -> tuple[Semantics, Choices, Descales, Packed | None]:
    """Return what follows q, k and v in a forward's arguments, as the launch takes it: the starts of packed sequences
    if there are any, then the options in the order of the schema.

    The promotion interval counts for FP8 operands alone. ``deterministic``, the last option but two, is for the
    backward.
    """
    packed = rest[:-_NUM_OPTIONS]
    of_q, of_k, of_v, scale, causal, left, right, softcap, *choices, blocks, interval, _, sm_margin, chunk = rest[
        -_NUM_OPTIONS:
    ]
    interval = interval if q.dtype is torch.float8_e4m3fn else None
    semantics, choices = options_of(scale, causal, (left, right, chunk), softcap, *choices, interval, sm_margin)
    return semantics, choices, descales_of(of_q, of_k, of_v, blocks), Packed(*packed) if packed else None


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse; ``rest`` is what :func:`of_forward` reads."""
    semantics, choices, descales, packed = of_forward(q, rest)
    return forward(q, k, v, semantics, choices, descales=descales, packed=packed)


def _of_backward(rest: tuple[Any, ...]) -> tuple[Semantics, Packed | None, bool, int]:
    """Return what follows the tensors of the forward in the backward's arguments: semantics, starts, whether in
    order, and the multiprocessors that are left to others.
    """
    *packed, scale, causal, left, right, softcap, deterministic, sm_margin = rest
    semantics, _ = options_of(scale, causal, (left, right, 0), softcap, 1, None, None)
    return semantics, Packed(*packed) if packed else None, deterministic, sm_margin


def _backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    *rest: Any,
) -> _Gradients:
    """Return dq, dk and dv for the gradients ``dout`` of ``out`` and ``dlse`` of ``lse``.

    ``out`` and ``lse`` are as the forward returned them; ``dlse`` None means that lse has no gradient. ``rest`` is what
    :func:`_of_backward` reads.
    """
    semantics, packed, deterministic, sm_margin = _of_backward(rest)
    options = {"packed": packed, "is_deterministic": deterministic, "sm_margin": sm_margin}
    return backward(dout, q, k, v, out, lse, semantics, dlse=dlse, **options)


for _name, _function in (
    ("forward", _forward),
    ("forward_varlen", _forward),
    ("inference", _forward),
    ("inference_varlen", _forward),
    ("backward", _backward),
    ("backward_varlen", _backward),
):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")


def is_traced(x: torch.Tensor) -> bool:
    """Tell whether a graph or a mode must see an operator: torch.compile, fake tensors, dispatch modes, tensor
    subclasses.
    """
    return torch.compiler.is_compiling() or type(x) is not torch.Tensor or torch._C._len_torch_dispatch_stack() > 0


class WithoutGradient(torch.autograd.Function):
    """Hands out and lse on, which have no gradient: a backward through either raises, as leaving gradients out would
    not. lse may be None.
    """

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, lse: torch.Tensor | None, *_: torch.Tensor) -> tuple[Any, Any]:
        return out.view_as(out), lse if lse is None else lse.view_as(lse)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple:
        raise ValueError("attention over a cache, or with sinks, has no gradient: call it under torch.no_grad()")


class Attention(torch.autograd.Function):
    """The forward with its gradient; ``rest`` is what :func:`of_forward` reads."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rest: tuple[Any, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        packed, options = rest[:-_NUM_OPTIONS], rest[-_NUM_OPTIONS:]
        run = _forward
        if is_traced(q):
            run = inference_varlen_op if packed else inference_op
        output = run(q, k, v, *rest)
        ctx.save_for_backward(q, k, v, *output, *packed[:2])
        # what _of_backward reads: lengths, scale to softcap, order, margin
        ctx.numbers = (*packed[2:], *options[3:8], *options[-3:-1])
        ctx.attention_chunk = options[-1]
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> tuple:
        """Return the gradients of q, k and v, and None for the rest.

        ``grad_outputs`` are of out and lse, None for an output that nothing depends on. RuntimeError for a second
        derivative, ValueError for chunks, of which no kernel computes one.
        """
        dout, dlse = grad_outputs
        if torch.is_grad_enabled():  # otherwise terms of the second derivative would be left out without a word
            raise RuntimeError("attention is not differentiable twice: create_graph must be False")
        if ctx.attention_chunk:
            raise ValueError("attention_chunk has no gradient: call it under torch.no_grad()")
        if dout is None and dlse is None:
            return None, None, None, None
        q, k, v, out, lse, *starts = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        run = _backward
        if is_traced(dout):
            run = backward_varlen_op if starts else backward_op
        return *run(dout, q, k, v, out, lse, dlse, *starts, *ctx.numbers), None


def differentiable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse, through which autograd finds the gradients; ``rest`` is what :func:`of_forward` reads."""
    return Attention.apply(q, k, v, rest)  # pyright: ignore[reportReturnType]


for _name in ("forward", "forward_varlen"):
    _LIBRARY.impl(_name, differentiable, "Autograd")


def _check(
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    semantics: Semantics,
    choices: Choices,
    descales: Descales,
    packed: Packed | None,
) -> None:
    """Check a launch as the launch itself does, its sizes only where a traced call has no symbolic ones."""
    lengths = None
    if packed is not None:
        check_starts(operands[0], packed)
        lengths = (packed.cu_seqlens_q.shape[0] - 1, packed.max_seqlen_q, packed.max_seqlen_k)
    seen = tuple(map(operand, operands))
    given = tuple(None if x is None else operand(x) for x in descales[:3])
    sizes = [n for x in (*seen, *filter(None, given)) for n in (*x.shape, *x.strides)]
    if all(type(n) is int for n in (*sizes, *(lengths or ()))) and all(seen[0].shape):
        request_of(seen, semantics, choices, descales=given, descale_blocks=descales.blocks, packed=lengths)


@torch.library.register_fake("fa3verify::forward")
@torch.library.register_fake("fa3verify::forward_varlen")
@torch.library.register_fake("fa3verify::inference")
@torch.library.register_fake("fa3verify::inference_varlen")
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse as empty tensors, after the checks that a traced call allows."""
    semantics, choices, descales, packed = of_forward(q, rest)
    _check((q, k, v), semantics, choices, descales, packed)
    return empty_outputs(q, v, choices)


@torch.library.register_fake("fa3verify::backward")
@torch.library.register_fake("fa3verify::backward_varlen")
def _(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    *rest: Any,
) -> _Gradients:
    """Return the gradients as empty tensors, after the checks that a traced call allows."""
    semantics, packed, _, _ = _of_backward(rest)
    _check((q, k, v), semantics, Choices(), NO_DESCALES, packed)
    check_of_forward(dout, out, lse, dlse, q, v)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def recorded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_packed: bool) -> Any:
    """Return the function through which a graph or autograd sees the call; None where the launch is called directly.

    torch.compile may use the operator without a gradient for operands that want none, as it traces again for those that
    do. All other graphs, such as exported ones, are run for operands of both kinds and have the one with a gradient.
    """
    wants = wants_gradient(q, k, v)
    if is_traced(q):
        # is_exporting() is True in all that torch 2.11 traces
        is_inference = torch.compiler.is_dynamo_compiling() and not wants and not torch.compiler._is_exporting_flag
        if is_inference:
            return inference_varlen_op if is_packed else inference_op
        return forward_varlen_op if is_packed else forward_op
    return differentiable if wants else None
