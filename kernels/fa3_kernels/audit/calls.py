"""The calls of kernels that a launch starts, with their arguments, made on a machine without a GPU.

:mod:`fa3_kernels.audit.compile` compiles them; the reports and ``fa3verify`` read them too. The launches that ship
stand in :mod:`fa3_kernels.audit.shipped`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fa3_kernels.audit.shipped import Launch
from fa3_kernels.plan.append import Append, append_call
from fa3_kernels.plan.backward import backward_plan
from fa3_kernels.plan.call import Block, Call, Pointer, View
from fa3_kernels.plan.choose import H200_SMS, without_lengths
from fa3_kernels.plan.plan import Plan, plan_of, shared_keys, sizes_of
from fa3_kernels.plan.request import DTYPES, ONE_PAGE, Choices, Semantics, TensorLayout, request_of

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Descriptor(NamedTuple):
    """Holds what a TMA descriptor says of a view: type of the elements, block, extents and strides."""

    dtype: str
    block_shape: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def calls_of(launch: Launch) -> tuple[Call, ...]:
    """Return the calls of kernels that a launch starts on an H200, in order; the quantiser's need torch and Triton.

    Tables that the host makes stand in the places of their pointers, and descriptors in the places of views. The
    quantiser's arguments are tensors without storage.

    Raises
    ------
    ValueError
        For a launch that the kernels do not take, as when it is launched.
    """
    if launch.function == "quantize_qkv":
        return _quantizer_calls(launch)
    problem = launch.problem
    shapes = dict(zip("qkv", _shapes(launch), strict=True)) | {"out": problem.out_shape}
    if launch.function == "backward":
        return _backward_calls(launch, shapes)
    if launch.function == "append":
        return _append_calls(launch, shapes)
    plan = plan_for(launch)
    rows_q, rows_k, longest = sizes_of(problem)
    if plan.request.pages:
        rows_k = -(-problem.seqlen_k // min(plan.request.pages.keys, problem.seqlen_k))
    return _given(plan.calls(rows_q, rows_k, longest), plan.tables, shapes)


def _given(
    calls: Iterable[Call], tables: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Call, ...]:
    """Return the calls of a plan with its tables in them, and with descriptors of contiguous tensors of these
    shapes.
    """

    def given(argument: Any) -> Any:
        if isinstance(argument, View | Block):
            tensor = _contiguous(shapes[argument.name], argument.dtype)
            return Descriptor(argument.dtype, argument.block, *argument.of(tensor.shape, tensor.strides))
        return tables.get(argument.name, argument) if isinstance(argument, Pointer) else argument

    return tuple(call._replace(arguments=tuple(map(given, call.arguments))) for call in calls)


def _backward_calls(launch: Launch, shapes: dict[str, tuple[int, ...]]) -> tuple[Call, ...]:
    """Return the calls of a backward; ``shapes`` are those of q, k, v and out."""
    problem = launch.problem
    plan = backward_plan(without_lengths(problem), H200_SMS, **launch.choices)
    rows_q = problem.q_shape[0] if problem.is_varlen else 0
    rows, channels = plan.sums_shape(plan.numbers(rows_q)["num_blocks"])
    shapes |= {"dout": problem.out_shape, "dk": problem.k_shape, "dv": problem.v_shape}
    return _given(plan.calls(rows_q), plan.tables, shapes | {"dq_sums": (rows, channels), "stats": (2 * rows,)})


def _append_calls(launch: Launch, shapes: dict[str, tuple[int, ...]]) -> tuple[Call, ...]:
    """Return the call that writes to a cache, for a cache that has room for the longest sequence."""
    problem = launch.problem
    cache = problem.cache
    assert cache is not None
    new = sum(cache.new)
    dtype = _NAMES[problem.dtype]
    k, v = (_contiguous((new, *shapes[name][2:]), dtype) for name in "kv")
    caches = (_contiguous(shapes["k"], dtype), _contiguous(shapes["v"], dtype))
    rotary = (cache.rotary_dim, cache.interleaved, problem.causal)
    page_size = cache.page_size or ONE_PAGE
    of = Append(_contiguous(shapes["q"], dtype), k, v, *caches, page_size, problem.batch, *rotary)
    room = problem.seqlen_k
    rows_q = shapes["q"][0]
    rows = {"rows_q": rows_q, "rows_k": new, "rows": max(rows_q, new), "angles": room}
    return (append_call(of).of(rows | {"room": room, "table_row": -(-room // (cache.page_size or room))}),)


def _shapes(launch: Launch) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of q, k and v; a cache has as many pages, or rows, as the longest sequences need."""
    problem = launch.problem
    if problem.cache is None:
        return problem.q_shape, problem.k_shape, problem.v_shape
    size = problem.cache.page_size or problem.seqlen_k
    cache = (problem.batch * -(-problem.seqlen_k // size), size, problem.nheads_kv)
    return problem.q_shape, (*cache, problem.head_dim), (*cache, problem.head_dim_v)


def plan_for(launch: Launch) -> Plan:
    """Plan the forward of a launch, with contiguous operands, on an H200; ValueError as :func:`calls_of`."""
    problem = launch.problem
    choices = dict(launch.choices)
    blocks = choices.pop("descale_blocks", None)
    lengths = (problem.seqlen_q, problem.seqlen_k, problem.seqlen_k)
    descales: tuple[TensorLayout | None, ...] = (None, None, None)
    if blocks is not None:
        heads = (problem.nheads, problem.nheads_kv, problem.nheads_kv)
        counts = [max(1, -(-n // rows)) if rows else 1 for n, rows in zip(lengths, blocks, strict=True)]
        descales = tuple(_contiguous((problem.batch, h, n), "float32") for h, n in zip(heads, counts, strict=True))
    request = request_of(
        tuple(_contiguous(x, _NAMES[problem.dtype]) for x in _shapes(launch)),
        Semantics.of(problem),
        Choices(**choices, stamps=launch.stamps),
        descales=descales,
        descale_blocks=blocks or (0, 0, 0),
        packed=(problem.batch, *lengths[:2]) if problem.is_varlen else None,
        page_size=problem.cache.page_size or ONE_PAGE if problem.cache else 0,
        has_sinks=problem.sinks,
    )
    plan = plan_of(request, H200_SMS)
    keys = problem.seqlen_k if problem.is_varlen else shared_keys(request, problem.seqlen_k, plan.config.tile_n)
    return plan if keys == problem.seqlen_k else plan_of(request.with_keys(keys), H200_SMS)


def _contiguous(shape: tuple[int, ...], dtype: str) -> TensorLayout:
    """Return the layout of a contiguous tensor on a GPU."""
    strides = [1]
    for n in reversed(shape[1:]):
        strides.append(strides[-1] * max(n, 1))
    return TensorLayout(shape, tuple(reversed(strides)), dtype, "cuda:0")


def _quantizer_calls(launch: Launch) -> tuple[Call, ...]:
    """Return the calls of the quantiser; torch and Triton are imported here, as only these calls need them."""
    import torch

    from fa3_kernels.gluon.quantize import plan_quantize
    from fa3_kernels.plan.quantizer import QuantizeOptions

    problem = launch.problem
    dtype = getattr(torch, _NAMES[problem.dtype])
    shapes = (problem.q_shape, problem.k_shape, problem.v_shape)
    q, k, v = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    _, calls = plan_quantize(q, k, v, QuantizeOptions(**launch.choices), num_sms=H200_SMS)
    return tuple(calls)
