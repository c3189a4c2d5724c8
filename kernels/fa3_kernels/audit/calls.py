"""The calls of kernels that a forward launch starts, with their arguments, made on a machine without a GPU.

:mod:`fa3_kernels.audit.compile` compiles them. The launches that ship stand in :mod:`fa3_kernels.audit.shipped`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fa3_kernels.audit.shipped import ShippedLaunch
from fa3_kernels.plan.call import Block, Call, Pointer, View
from fa3_kernels.plan.choose import H200_SMS
from fa3_kernels.plan.plan import Plan, plan_of, shared_keys, sizes_of
from fa3_kernels.plan.request import DTYPES, ONE_PAGE, Choices, Semantics, TensorLayout, request_of

# the name in torch of every format of an operand
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Descriptor(NamedTuple):
    """Holds what a TMA descriptor says of a view: type of the elements, block, extents and strides."""

    dtype: str
    block_shape: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def forward_calls(launch: ShippedLaunch) -> tuple[Call, ...]:
    """Return the calls of kernels that a forward starts on an H200, in order.

    Tables that the host makes stand in the places of their pointers, and descriptors in the places of views.

    Raises
    ------
    ValueError
        For a launch that the kernels do not take, as when it is launched.
    """
    problem = launch.problem
    plan = plan_for(launch)
    rows_q, rows_k, longest = sizes_of(problem)
    if plan.request.pages:
        rows_k = -(-problem.seqlen_k // min(plan.request.pages.keys, problem.seqlen_k))
    return with_descriptors(plan.calls(rows_q, rows_k, longest), plan.tables, tensor_shapes(launch))


def with_descriptors(
    calls: Iterable[Call], tables: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Call, ...]:
    """Return the calls of a plan with its tables in them, and with descriptors of contiguous tensors of these
    shapes.
    """

    def given(argument: Any) -> Any:
        if isinstance(argument, View | Block):
            tensor = contiguous(shapes[argument.name], argument.dtype)
            return Descriptor(argument.dtype, argument.block, *argument.of(tensor.shape, tensor.strides))
        return tables.get(argument.name, argument) if isinstance(argument, Pointer) else argument

    return tuple(call._replace(arguments=tuple(map(given, call.arguments))) for call in calls)


def tensor_shapes(launch: ShippedLaunch) -> dict[str, tuple[int, ...]]:
    """Return the shapes of q, k, v and out by name; a cache has as many pages, or rows, as the longest sequences
    need.
    """
    problem = launch.problem
    shapes = {"q": problem.q_shape, "k": problem.k_shape, "v": problem.v_shape, "out": problem.out_shape}
    if problem.cache is None:
        return shapes
    size = problem.cache.page_size or problem.seqlen_k
    cache = (problem.batch * -(-problem.seqlen_k // size), size, problem.nheads_kv)
    return shapes | {"k": (*cache, problem.head_dim), "v": (*cache, problem.head_dim_v)}


def plan_for(launch: ShippedLaunch) -> Plan:
    """Plan the forward of a launch, with contiguous operands, on an H200; ValueError as :func:`forward_calls`."""
    problem = launch.problem
    choices = dict(launch.choices)
    blocks = choices.pop("descale_blocks", None)
    lengths = (problem.seqlen_q, problem.seqlen_k, problem.seqlen_k)
    descales: tuple[TensorLayout | None, ...] = (None, None, None)
    if blocks is not None:
        heads = (problem.nheads, problem.nheads_kv, problem.nheads_kv)
        counts = [max(1, -(-n // rows)) if rows else 1 for n, rows in zip(lengths, blocks, strict=True)]
        descales = tuple(contiguous((problem.batch, h, n), "float32") for h, n in zip(heads, counts, strict=True))
    shapes = tensor_shapes(launch)
    request = request_of(
        tuple(contiguous(shapes[name], NAMES[problem.dtype]) for name in "qkv"),
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


def contiguous(shape: tuple[int, ...], dtype: str) -> TensorLayout:
    """Return the layout of a contiguous tensor on a GPU."""
    strides = [1]
    for n in reversed(shape[1:]):
        strides.append(strides[-1] * max(n, 1))
    return TensorLayout(shape, tuple(reversed(strides)), dtype, "cuda:0")
