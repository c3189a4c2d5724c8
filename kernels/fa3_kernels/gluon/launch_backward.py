"""Host side of the Gluon backward: checked once, planned once, then its three kernels are run."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fa3_kernels.gluon.launch import Packed, check_starts, num_sms, operand
from fa3_kernels.gluon.run import BoundCall
from fa3_kernels.plan.backward_plan import BackwardPlan, backward_plan
from fa3_kernels.plan.choose import longest
from fa3_kernels.plan.request import Choices, Operand, Semantics, request_of

MAX_LAUNCHES = 256  # that are kept


class _Ready(NamedTuple):
    """A plan on a GPU: its schedule, and its kernels bound to their calls."""

    plan: BackwardPlan
    schedule: torch.Tensor
    bound: dict[str, BoundCall]


_launches: dict[tuple, _Ready] = {}


def _plan(q: Operand, k: Operand, v: Operand, semantics: Semantics, packed: tuple[int, int, int] | None,
          sms: int, is_deterministic: bool) -> BackwardPlan:  # fmt: skip
    request = request_of((q, k, v), semantics, Choices(), packed=packed)
    rows_q = q.shape[0] if packed else 0
    return backward_plan(request.problem, sms, is_deterministic=is_deterministic, rows_q=rows_q)


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    semantics: Semantics,
    *,
    packed: Packed | None = None,
    is_deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run the backward kernels.

    Parameters
    ----------
    dout : float16 or bfloat16 (batch, seqlen_q, nheads, head_dim_v) or (total_q, nheads, head_dim_v)
        Gradient of the output; copied unless contiguous.
    q, k, v : same dtype
        As of :func:`fa3_kernels.gluon.launch.forward`.
    out, lse
        As the forward returned them.
    semantics : Semantics
    packed : Packed, optional
    is_deterministic : bool
        Whether the parts of dQ are added in a fixed order; dK and dV always are.

    Returns
    -------
    dq, dk, dv : like q, k and v, contiguous
        Rows without a visible key have dq 0, keys that no row sees dk and dv 0. NaN and Inf spread as the products of
        the visited tiles carry them. In deterministic mode bits of :func:`fa3_kernels.twin.backward.backward`.

    Raises
    ------
    ValueError
        For operands the kernels do not take.
    """
    operands = tuple(map(operand, (q, k, v)))
    lengths = None
    if packed is not None:
        check_starts(q, packed)
        lengths = (packed.cu_seqlens_q.numel() - 1, longest(packed.max_seqlen_q), longest(packed.max_seqlen_k))
    sms = num_sms(q.device)
    for name, x, shape in (("dout", dout, (*q.shape[:-1], v.shape[-1])), ("out", out, (*q.shape[:-1], v.shape[-1]))):
        if tuple(x.shape) != shape or x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name} must be {q.dtype} {shape} on {q.device}, got {x.dtype} {tuple(x.shape)}")
    key = (*operands, semantics, lengths, is_deterministic)
    ready = _launches.get(key)
    if ready is None:
        plan = _plan(*operands, semantics, lengths, sms, is_deterministic)
        if len(_launches) >= MAX_LAUNCHES:
            _launches.clear()
        ready = _launches[key] = _Ready(plan, torch.from_numpy(plan.schedule).to(q.device), {})
    with torch.cuda.device(q.device):
        return _run(ready, (dout.contiguous(), q, k, v, out.contiguous(), lse.contiguous()), packed)


def _run(
    ready: _Ready, tensors: tuple[torch.Tensor, ...], packed: Packed | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients, workspace and kernels of one launch on the current device."""
    dout, q, k, v, out, lse = tensors
    device = q.device
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=device) for x in (q, k, v))
    plan = ready.plan
    rows, channels = plan.sums_shape
    if not (q.numel() and k.numel() and len(plan.schedule)):
        return dq.zero_(), dk.zero_(), dv.zero_()
    sums = torch.empty((rows, channels), dtype=torch.float32, device=device)
    stats = torch.empty(2 * rows, dtype=torch.float32, device=device)
    turns = torch.empty(rows // plan.config.tile_m, dtype=torch.int32, device=device)
    named = {"dout": dout, "out": out, "lse": lse, "stats": stats, "dq_sums": sums, "turns": turns, "dq": dq}
    named["schedule"] = ready.schedule
    named["starts_q"], named["starts_k"] = (turns, turns) if packed is None else packed[:2]
    values = {name: x.data_ptr() for name, x in named.items()}
    views = tuple(((x.data_ptr(),), x) for x in (q, k, v, dout, sums, stats, dk, dv))
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    for call in plan.kernels:
        bound = ready.bound.get(call.kernel)
        if bound is None:
            bound = ready.bound[call.kernel] = BoundCall(call, views, values)
        bound(views, values, stream)
    return dq, dk, dv
