"""The calls of kernels that any launch of ours starts, with their arguments, made on a machine without a GPU.

:mod:`fa3_reports.audit.compile` compiles them; the launches that ship are listed in :mod:`fa3_reports.audit.launches`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from fa3_kernels.plan.append import Append, append_call
from fa3_kernels.plan.backward import backward_plan
from fa3_kernels.plan.call import Block, Call, Pointer, View
from fa3_kernels.plan.choose import H200_SMS, without_lengths
from fa3_kernels.plan.plan import Plan, plan_of, shared_keys
from fa3_kernels.plan.request import NAMES, ONE_PAGE, Choices, contiguous, request_for, tensor_shapes
from fa3_reference.problem import AttentionProblem


@dataclass(frozen=True, slots=True)
class ShippedLaunch:
    """One launch: a problem, the choices of a caller, the function called, and the steps of a timeline (0 keeps none).

    Of a shipped launch only the kind of its problem matters, not the sizes.
    """

    name: str
    problem: AttentionProblem
    choices: Mapping[str, Any] = field(default_factory=dict)
    function: Literal["forward", "quantize_qkv", "backward", "append"] = "forward"
    stamps: int = 0


class Descriptor(NamedTuple):
    """Holds what a TMA descriptor says of a view: type of the elements, block, extents and strides."""

    dtype: str
    block_shape: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def sizes_of(problem: AttentionProblem) -> tuple[int, int, tuple[int, int]]:
    """Return what :meth:`Plan.launch` takes for a problem whose lengths are known."""
    if problem.seqlens_q is None or problem.seqlens_k is None:
        return problem.seqlen_q, problem.seqlen_k, (0, 0)
    return sum(problem.seqlens_q), sum(problem.seqlens_k), (problem.seqlen_q, problem.seqlen_k)


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
    return with_descriptors(plan.calls(rows_q, rows_k, longest), plan.tables, tensor_shapes(problem))


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


def plan_for(launch: ShippedLaunch) -> Plan:
    """Plan the forward of a launch, with contiguous operands, on an H200; ValueError as :func:`forward_calls`."""
    problem = launch.problem
    choices = dict(launch.choices)
    blocks = choices.pop("descale_blocks", None)
    request = request_for(problem, Choices(**choices, stamps=launch.stamps), blocks)
    plan = plan_of(request, H200_SMS)
    keys = problem.seqlen_k if problem.is_varlen else shared_keys(request, problem.seqlen_k, plan.config.tile_n)
    return plan if keys == problem.seqlen_k else plan_of(request.with_keys(keys), H200_SMS)


def calls_of(launch: ShippedLaunch) -> tuple[Call, ...]:
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
    if launch.function == "backward":
        return _backward_calls(launch)
    if launch.function == "append":
        return _append_calls(launch)
    return forward_calls(launch)


def _backward_calls(launch: ShippedLaunch) -> tuple[Call, ...]:
    """Return the calls of a backward."""
    problem = launch.problem
    plan = backward_plan(without_lengths(problem), H200_SMS, **launch.choices)
    rows_q = problem.q_shape[0] if problem.is_varlen else 0
    rows, channels = plan.sums_shape(plan.numbers(rows_q)["num_blocks"])
    shapes = tensor_shapes(problem) | {"dout": problem.out_shape, "dk": problem.k_shape, "dv": problem.v_shape}
    return with_descriptors(
        plan.calls(rows_q), plan.tables, shapes | {"dq_sums": (rows, channels), "stats": (2 * rows,)}
    )


def _append_calls(launch: ShippedLaunch) -> tuple[Call, ...]:
    """Return the call that writes to a cache, for a cache that has room for the longest sequence."""
    problem = launch.problem
    cache = problem.cache
    assert cache is not None
    shapes = tensor_shapes(problem)
    new = sum(cache.new)
    dtype = NAMES[problem.dtype]
    k, v = (contiguous((new, *shapes[name][2:]), dtype) for name in "kv")
    caches = (contiguous(shapes["k"], dtype), contiguous(shapes["v"], dtype))
    rotary = (cache.rotary_dim, cache.interleaved, problem.causal)
    page_size = cache.page_size or ONE_PAGE
    of = Append(contiguous(shapes["q"], dtype), k, v, *caches, page_size, problem.batch, *rotary)
    room = problem.seqlen_k
    rows_q = shapes["q"][0]
    rows = {"rows_q": rows_q, "rows_k": new, "rows": max(rows_q, new), "angles": room}
    return (append_call(of).of(rows | {"room": room, "table_row": -(-room // (cache.page_size or room))}),)


def _quantizer_calls(launch: ShippedLaunch) -> tuple[Call, ...]:
    """Return the calls of the quantiser; torch and Triton are imported here, as only these calls need them."""
    import torch

    from fa3_kernels.gluon.quantize import plan_quantize
    from fa3_kernels.plan.quantizer import QuantizeOptions

    problem = launch.problem
    dtype = getattr(torch, NAMES[problem.dtype])
    shapes = (problem.q_shape, problem.k_shape, problem.v_shape)
    q, k, v = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    _, calls = plan_quantize(q, k, v, QuantizeOptions(**launch.choices), num_sms=H200_SMS)
    return tuple(calls)
