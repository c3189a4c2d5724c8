"""The calls of kernels that any launch of ours starts, made on a machine without a GPU.

The package has those of a forward; those of the others only the audit and the sanitizer ask for.
"""

from __future__ import annotations

from fa3_kernels.audit.calls import NAMES, contiguous, forward_calls, tensor_shapes, with_descriptors
from fa3_kernels.audit.shipped import ShippedLaunch
from fa3_kernels.plan.append import Append, append_call
from fa3_kernels.plan.backward import backward_plan
from fa3_kernels.plan.call import Call
from fa3_kernels.plan.choose import H200_SMS, without_lengths
from fa3_kernels.plan.request import ONE_PAGE


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
    shapes = tensor_shapes(launch) | {"dout": problem.out_shape, "dk": problem.k_shape, "dv": problem.v_shape}
    return with_descriptors(
        plan.calls(rows_q), plan.tables, shapes | {"dq_sums": (rows, channels), "stats": (2 * rows,)}
    )


def _append_calls(launch: ShippedLaunch) -> tuple[Call, ...]:
    """Return the call that writes to a cache, for a cache that has room for the longest sequence."""
    problem = launch.problem
    cache = problem.cache
    assert cache is not None
    shapes = tensor_shapes(launch)
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
