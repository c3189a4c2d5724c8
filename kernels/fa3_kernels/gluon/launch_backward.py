"""Host side of the backward: a launch is checked once, planned once, and its three kernels are run at every call.

:mod:`fa3_kernels.operators` and :mod:`fa3_kernels.frameworks` call :func:`backward`; its plan stands in
:mod:`fa3_kernels.plan.backward`, the forward's host side in :mod:`fa3_kernels.gluon.launch`.
"""

from __future__ import annotations

from functools import partial

import torch

from fa3_kernels.gluon import launch
from fa3_kernels.gluon.arguments import Packed, check_starts, check_tensor
from fa3_kernels.gluon.run import Kept, Operands, PlanOnGpu
from fa3_kernels.plan.backward import BackwardPlan, backward_plan
from fa3_kernels.plan.choose import longest
from fa3_kernels.plan.request import Choices, Semantics, request_of

MAX_GRID = 65535  # CUDA's limit of a grid's second and third axis: row blocks of a sequence, and sequences
_Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_Ready = tuple[BackwardPlan, PlanOnGpu]  # what launches share that differ in addresses and the number of packed rows
_launches = Kept()
_empty_like = partial(torch.empty_like, memory_format=torch.contiguous_format)


def check_differentiable(dtype: torch.dtype) -> None:
    """Raise ValueError for operands of a format whose gradients no kernel computes."""
    if dtype is torch.float8_e4m3fn:
        raise ValueError("gradients are of float16 and bfloat16 operands: call under torch.no_grad() or detach them")


def check_of_forward(
    dout: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """Raise ValueError unless dout and dlse, and the out and lse that the forward returned, fit q and v.

    Without a ``dlse`` (None) it is not checked. ValueError also for a q whose gradient no kernel computes.
    """
    check_differentiable(q.dtype)
    of_out = (*q.shape[:-1], v.shape[-1])
    of_lse = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    for name, x, shape, dtype in (
        ("dout", dout, of_out, q.dtype),
        ("out", out, of_out, q.dtype),
        ("lse", lse, of_lse, torch.float32),
        ("dlse", lse if dlse is None else dlse, of_lse, torch.float32),
    ):
        check_tensor(name, x, shape, dtype, q.device, is_strided=True)


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    semantics: Semantics,
    *,
    dlse: torch.Tensor | None = None,
    packed: Packed | None = None,
    is_deterministic: bool = False,
    sm_margin: int = 0,
) -> _Gradients:
    """Run the backward kernels.

    Parameters
    ----------
    dout : float16 or bfloat16 (batch, seqlen_q, nheads, head_dim_v) or (total_q, nheads, head_dim_v)
        Gradient of the output.
    q, k, v : same dtype
        As of :func:`fa3_kernels.gluon.launch.forward`.
    out : same dtype and shape as dout
    lse : float32 (batch, nheads, seqlen_q) or (nheads, total_q)
        As the forward returned them. These and dout are copied unless contiguous at a multiple of 16 bytes.
    semantics : Semantics
    dlse : float32, of the shape of lse, optional
        Gradient of lse. That of rows without a key is not read: their lse is -inf whatever q and k are.
    packed : Packed, optional
        As of the forward, which says what the starts must hold.
    is_deterministic : bool
        Whether the parts of dQ are added in a fixed order; dK and dV always are. Its CTAs wait for each other, so all
        of them must find room on the GPU at once: a kernel of another stream may delay, but not hold them up for good.
    sm_margin : int
        Multiprocessors that the main kernel leaves to others.

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
    if not q.numel():
        check_of_forward(dout, out, lse, dlse, q, v)
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    ready = _ready((q, k, v), (dout, out, lse, dlse), semantics, packed, is_deterministic, sm_margin)
    if not (k.numel() and len(ready[0].schedule)):
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
        raise ValueError("addresses of q, k and v must be multiples of 16 bytes (TMA)")
    if torch._C._cuda_getDevice() == q.device.index:
        return _run(ready, (dout, q, k, v, out, lse), packed, dlse)
    with torch.cuda.device(q.device):
        return _run(ready, (dout, q, k, v, out, lse), packed, dlse)


def _ready(
    operands: _Gradients,
    of_forward: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
    semantics: Semantics,
    packed: Packed | None,
    is_deterministic: bool,
    sm_margin: int,
) -> _Ready:
    """Look up the plan of a launch, or check and make it; ValueError for what the kernels do not take.

    The key leaves out the numbers of packed rows. A launch whose tensors differ in those numbers is therefore checked
    even if its plan is known; the check then raises.
    """
    q, k, v = operands
    dout, out, lse, dlse = of_forward
    lengths, first, starts = None, 0, ()
    if packed is not None:
        a, b, longest_q, longest_k = packed
        lengths = (a.numel() - 1, longest(longest_q), longest(longest_k))
        first = 1
        starts = (a.shape, b.shape, a.stride(), b.stride(), a.dtype, b.dtype, a.device, b.device, lengths)
    key = (
        semantics,
        is_deterministic,
        sm_margin,
        q.dtype,
        k.dtype,
        v.dtype,
        q.device,
        k.device,
        v.device,
        q.shape[first:],
        k.shape[first:],
        v.shape[first:],
        q.stride(),
        k.stride(),
        v.stride(),
        starts,
        out.shape[first:],
        lse.shape[:-1],
        out.dtype,
        dout.dtype,
        lse.dtype,
        out.device,
        dout.device,
        lse.device,
        dlse is None or (dlse.dtype, dlse.device),
    )
    found: _Ready | None = _launches.get(key)
    if (
        found is None
        or k.shape[-3] != v.shape[-3]
        or not (q.shape[-3] == out.shape[-3] == lse.shape[-1] and dout.shape == out.shape)
        or (dlse is not None and dlse.shape != lse.shape)
    ):
        check_of_forward(dout, out, lse, dlse, q, v)
        if packed is not None:
            check_starts(q, packed)
        num_sms = max(1, launch.num_sms(q.device) - sm_margin)
        found = _planned(operands, semantics, lengths, num_sms, is_deterministic)
        if k.numel():  # the strides of an empty tensor were not checked
            _launches.keep(key, found)
    return found


def _planned(
    operands: _Gradients,
    semantics: Semantics,
    lengths: tuple[int, int, int] | None,
    num_sms: int,
    is_deterministic: bool,
) -> _Ready:
    """Check a launch and plan it."""
    q, k, v = (launch.operand(x) for x in operands)
    problem = request_of((q, k, v), semantics, Choices(), packed=lengths).problem
    plan = backward_plan(problem, num_sms, is_deterministic=is_deterministic)
    blocks = -(-problem.seqlen_q // plan.config.tile_m)
    if max(problem.batch, blocks) > MAX_GRID:
        raise ValueError(
            f"gradients are of at most {MAX_GRID} sequences and {MAX_GRID * plan.config.tile_m} query rows of each, "
            f"got {problem.batch} and {problem.seqlen_q}"
        )
    return plan, PlanOnGpu(plan.tables, operands[0].device)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy that kernels can read 16 bytes at a time: a caller cannot choose where a gradient
    lies.
    """
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def _run(
    ready: _Ready, tensors: tuple[torch.Tensor, ...], packed: Packed | None, dlse: torch.Tensor | None
) -> _Gradients:
    """Make the gradients and the workspace of one launch on the current device, and start its kernels.

    ``tensors`` are dout, q, k, v, out and lse.
    """
    plan, on_gpu = ready
    dout, q, k, v, out, lse = tensors
    dout, out, lse = _aligned(dout), _aligned(out), _aligned(lse)
    dq, dk, dv = _empty_like(q), _empty_like(k), _empty_like(v)
    values = plan.numbers(0 if packed is None else q.shape[0])
    rows, channels = plan.sums_shape(values["num_blocks"])
    # sums and statistics in float32, turns in int32; rows are in whole tiles
    num_sums = rows * channels
    workspace = torch.empty(num_sums + 2 * rows + rows // plan.config.tile_m, dtype=torch.float32, device=q.device)
    stats = workspace.as_strided((2 * rows,), (1,), num_sums)
    of_sums = workspace.data_ptr()
    of_stats = of_sums + 4 * num_sums
    of_turns = of_stats + 8 * rows
    values |= {"dq_sums": of_sums, "stats": of_stats, "turns": of_turns, "starts_q": of_turns, "starts_k": of_turns}
    values |= {"dout": dout.data_ptr(), "out": out.data_ptr(), "lse": lse.data_ptr(), "dq": dq.data_ptr()}
    if packed is not None:
        values |= {"starts_q": packed.cu_seqlens_q.data_ptr(), "starts_k": packed.cu_seqlens_k.data_ptr()}
    views: Operands = (
        ((q.data_ptr(),), q),
        ((k.data_ptr(),), k),
        ((v.data_ptr(),), v),
        ((values["dout"],), dout),
        ((of_sums, rows), workspace.as_strided((rows, channels), (channels, 1))),
        ((of_stats, rows), stats),
        ((dk.data_ptr(),), dk),
        ((dv.data_ptr(),), dv),
    )
    if dlse is None:
        on_gpu.run(plan.kernels, views, values, q.device)
    else:  # lse grows by P with each score, which is what D takes from dS
        on_gpu.run(plan.kernels[:1], views, values, q.device)
        subtract_from_dots(stats, torch.where(lse.isneginf(), 0.0, dlse), plan, values["num_blocks"], packed)
        on_gpu.run(plan.kernels[1:], views, values, q.device)
    return dq, dk, dv


def subtract_from_dots(
    stats: torch.Tensor, dlse: torch.Tensor, plan: BackwardPlan, num_blocks: int, packed: Packed | None
) -> None:
    """Take the gradient of lse from D of every row, in place and rounded once.

    Parameters
    ----------
    stats : float32 (2 * rows,)
        As :func:`fa3_kernels.gluon.backward_ends.backward_start` fills it.
    dlse : float32 (batch, nheads, seqlen_q) or (nheads, total_q)
    plan : BackwardPlan
    num_blocks : int
        Row blocks of one head of all sequences.
    packed : Packed, optional
        Rows of no sequence, and those beyond the longest length, are left alone.
    """
    tile_m = plan.config.tile_m
    nheads = plan.problem.nheads
    dots = stats.view(nheads, num_blocks, 2, tile_m)[:, :, 1]
    if packed is None:
        batch, _, seqlen = dlse.shape
        rows = torch.nn.functional.pad(dlse.transpose(0, 1), (0, -seqlen % tile_m))
        dots.view(nheads, batch, -1, tile_m).sub_(rows.reshape(nheads, batch, -1, tile_m))
        return
    starts = packed.cu_seqlens_q
    row = torch.arange(dlse.shape[1], device=dlse.device)
    sequence = torch.searchsorted(starts, row, right=True).clamp_(1, len(starts) - 1) - 1
    start = starts[sequence]
    length = (starts[sequence + 1] - start).clamp_(max=packed.max_seqlen_q)
    row -= start
    block = start // tile_m + sequence + row // tile_m
    kept = torch.where(row < length, dlse, 0.0)
    dots[:, block, row % tile_m] -= kept
