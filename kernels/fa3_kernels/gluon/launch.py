"""Host side of the forward: a request is checked once, planned once, and its calls are run at every launch.

:mod:`fa3_kernels.api`, :mod:`fa3_kernels.cached` and :mod:`fa3_kernels.operators` call :func:`forward`. The checks
stand in :mod:`fa3_kernels.plan.request`, the plan in :mod:`fa3_kernels.plan.plan`, and :mod:`fa3_kernels.gluon.run`
starts kernels; :mod:`fa3_kernels.gluon.launch_backward` does the same for gradients. The work of a launch is looking up
its family by what the checks depend on, so that a repeated launch checks nothing again.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch

from fa3_kernels.gluon.arguments import NO_DESCALES, Descales, Packed, Paged, check_starts, check_tensor, has_schedule
from fa3_kernels.gluon.run import Kept, Operands, PlanOnGpu
from fa3_kernels.plan.choose import longest
from fa3_kernels.plan.plan import Plan, plan_of, shared_keys, shares_plans, stamps_shape
from fa3_kernels.plan.request import Choices, Request, Semantics, TensorLayout, request_of
from fa3_kernels.plan.tiles import power_of_two

_TORCH_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_DEFAULT_SEMANTICS = Semantics()
_DEFAULT_CHOICES = Choices()


def operand(x: torch.Tensor) -> TensorLayout:
    """Return the layout of a tensor, which is all that the checks read of it."""
    return TensorLayout(tuple(x.shape), tuple(x.stride()), str(x.dtype).removeprefix("torch."), str(x.device))


@lru_cache(maxsize=8)
def num_sms(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; ValueError unless it is Hopper."""
    found = torch.cuda.get_device_properties(device)
    check_capability((found.major, found.minor), found.name)
    return found.multi_processor_count


def check_capability(capability: tuple[int, int], name: str) -> None:
    """Raise ValueError unless a GPU is Hopper.

    The instructions of these kernels exist on compute capability 9.0 alone.
    """
    if capability[0] != 9:
        major, minor = capability
        raise ValueError(f"a Hopper GPU (compute capability 9.0) is needed, got {name} with {major}.{minor}")


@lru_cache(maxsize=8)
def _one(device: torch.device) -> torch.Tensor:
    """Return a descale of 1, float32 (1, 1, 1), on a device."""
    return torch.ones((1, 1, 1), dtype=torch.float32, device=device)


class _Family:
    """Holds what launches share that differ only in addresses, in the number of keys, or in the lengths of packed
    sequences.
    """

    def __init__(self, request: Request, device: torch.device) -> None:
        """Plan a first launch, for what all launches of the family have in common."""
        self.request = request
        self.device = device
        self.sms = max(1, num_sms(device) - request.choices.sm_margin)
        first = plan_of(request, self.sms)
        self.tile_n = first.config.tile_n
        self.out_dtype = _TORCH_DTYPES[first.config.out_dtype]
        self.index = device.index
        self.element_size = 1 if request.problem.dtype == "e4m3" else 2
        self.is_e4m3 = request.problem.dtype == "e4m3"
        self.is_packed = request.problem.is_varlen
        self.shares_plans = not self.is_packed and shares_plans(request)
        # int32 counts rows, and elements that threads store, see fa3_kernels.plan.choose.check_outputs
        splits = first.config.num_splits
        is_stored = splits > 1 or first.variant.stored_channels > 0
        of_a_row = max(splits, power_of_two(first.config.head_dim)) if is_stored else 1
        self.rows_at_most = ((1 << 31) - 1) // (request.problem.nheads * of_a_row)  # of queries of all sequences
        self.plans = Kept()  # by the number of keys
        self.last: tuple = (None, (), {})  # what the last launch was of, its calls and numbers

    def plan(self, seqlen_k: int) -> tuple[Plan, PlanOnGpu]:
        """Return the plan for a number of keys, made at its first use, and what it needs on the GPU.

        Numbers of keys that share a plan are rounded up to one of them; with packed sequences the plan does not depend
        on the number.
        """
        keys = 0 if self.is_packed else seqlen_k
        if self.shares_plans:
            keys = shared_keys(self.request, seqlen_k, self.tile_n)
        found: tuple[Plan, PlanOnGpu] | None = self.plans.get(keys)
        if found is None:
            is_other = not self.is_packed and keys != self.request.problem.seqlen_k
            request = self.request.with_keys(keys) if is_other else self.request
            plan = plan_of(request, self.sms)
            return self.plans.keep(keys, (plan, PlanOnGpu(plan.tables, self.device, plan.numbers)))
        return found

    def descales(self, given: Descales) -> dict[str, torch.Tensor]:
        """Return the descales as the kernel reads them, by its names for them.

        None becomes 1. A descale that is given for fewer heads or larger blocks than the kernel reads is repeated.
        """
        found = {}
        for name, x, layout in zip(("q_descale", "k_descale", "v_descale"), given[:3], self.request.descales):
            if x is None or layout is None:
                x = _one(self.device)
            elif layout.repeats != (1, 1):
                x = x[:, :, None] if x.ndim == 2 else x
                heads, blocks = layout.repeats
                x = x.repeat_interleave(heads, dim=1) if heads > 1 else x.repeat_interleave(blocks, dim=2)
            found[name] = x
        return found


_families = Kept()
_Sizes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # of q, k and v


def _family(
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    shapes: _Sizes,
    strides: _Sizes,
    semantics: Semantics,
    choices: Choices,
    descales: Descales,
    packed: Packed | Paged | None,
    sinks: torch.Tensor | None,
) -> _Family:
    """Look up the family of a launch, or check the launch and make one; ValueError for what the kernels do not take.

    The key leaves out the number of keys, and for packed sequences the numbers of rows. A launch whose k and v differ
    in that number is therefore checked even if its family is known, and so is one with too many rows of packed queries;
    the check then raises.
    """
    q, k, v = operands
    q_shape, k_shape, v_shape = shapes
    q_strides, k_strides, v_strides = strides
    lengths = None
    sizes = shapes
    if packed is not None:
        a, b, longest_q, longest_k, *_ = packed
        lengths = (a.numel() - 1, longest(longest_q), longest(longest_k))
        starts = (a.shape, b.shape, a.stride(), b.stride(), a.dtype, b.dtype, a.device, b.device)
        if type(packed) is Paged:
            table, first = packed[4:6]
            entries = (table.shape[0], table.shape[1] > 0, table.stride(1), table.dtype, table.device)
            firsts = (first.shape, first.stride(), first.dtype, first.device)
            sizes = (q_shape[1:], k_shape, v_shape, k_strides, v_strides, lengths, starts, packed[6], entries, firsts)
        else:
            sizes = (q_shape[1:], k_shape[1:], v_shape[1:], k_strides, v_strides, lengths, starts)
    elif len(k_shape) == len(v_shape) == 4:  # read one by one, for slices of shapes take five times as long
        batch_k, _, heads_k, dim_k = k_shape
        batch_v, _, heads_v, dim_v = v_shape
        sizes = (q_shape, batch_k, heads_k, dim_k, k_strides[1:], batch_v, heads_v, dim_v, v_strides[1:])
    if sinks is not None:
        sizes += (sinks.shape, sinks.stride(), sinks.dtype, sinks.device)
    key = (semantics, choices, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, q_strides, sizes)
    if descales is not NO_DESCALES:
        factors = (x if x is None else (x.shape, x.stride(), x.data_ptr() % 16, x.dtype) for x in descales[:3])
        if packed is not None:  # their blocks are of the longest lengths as given
            lengths = (packed.cu_seqlens_q.numel() - 1, packed.max_seqlen_q, packed.max_seqlen_k)
        key += (descales.blocks, lengths, *factors)
    found: _Family | None = _families.get(key)
    if found is None or k_shape[-3] != v_shape[-3] or q_shape[0] > found.rows_at_most:
        if packed is not None:
            check_starts(q, packed)
        if sinks is not None:
            check_tensor("sinks", sinks, (q.shape[-2],), torch.float32, q.device)
        given = tuple(None if x is None else operand(x) for x in descales[:3])
        request = request_of(
            (operand(q), operand(k), operand(v)),
            semantics,
            choices,
            descales=given,
            descale_blocks=descales.blocks,
            packed=lengths,
            page_size=packed.page_size if isinstance(packed, Paged) else 0,
            has_sinks=sinks is not None,
        )
        found = _Family(request, q.device)
        rows = math.prod(q_shape[:-2])
        if rows > found.rows_at_most:
            raise ValueError(f"at most {found.rows_at_most} queries of so many heads and splits, got {rows}")
        if q.numel() and k.numel() and v.numel():  # the strides of an empty tensor were not checked
            _families.keep(key, found)
    return found


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    semantics: Semantics = _DEFAULT_SEMANTICS,
    choices: Choices = _DEFAULT_CHOICES,
    *,
    descales: Descales = NO_DESCALES,
    packed: Packed | Paged | None = None,
    sinks: torch.Tensor | None = None,
    stamps: torch.Tensor | None = None,
    needs_lse: bool = True,
) -> tuple[torch.Tensor, Any]:
    """Run the forward kernel.

    Parameters
    ----------
    q : float16, bfloat16 or float8_e4m3fn (batch, seqlen_q, nheads, head_dim), on a Hopper GPU
        head_dim a multiple of 16 bytes, at most 256; TMA pads it with zeros to 64, 96, 128, 160, 192 or 256. The last
        dimension contiguous, other strides multiples of 16 bytes. Packed: (total_q, nheads, head_dim).
    k : same dtype (batch, seqlen_k, nheads_kv, head_dim) or (total_k, nheads_kv, head_dim)
        Likewise; seqlen_k may be 0.
    v : like k, with its own head_dim
    semantics : Semantics
        Mask, cap and scale.
    choices : Choices
        Splits, packed heads, schedule switches.
    descales : Descales
        e4m3 only.
    packed : Packed or Paged, optional
        Starts and longest lengths of packed sequences; of a cache, whose k and v are (pages, page_size, nheads_kv,
        head_dim), where its keys are.
    sinks : float32 (nheads,), optional
        A score of every head, in nats, that is one more term of each row's sum and has no value; lse includes it. For
        packed queries alone.
    stamps : int32 (ctas, consumer warpgroups + 1, steps, 8), zeros, optional
        Filled by an instrumented kernel, see :mod:`fa3_kernels.plan.stamps`; ``ctas`` at least that of the launch.
    needs_lse : bool
        Without it the launch of packed sequences allocates a tensor less.

    Returns
    -------
    out : like q (e4m3: choices.out_dtype), with the head_dim of v; contiguous
    lse : float32 (batch, nheads, seqlen_q), or (nheads, total_q)
        None for packed sequences without ``needs_lse``. Bits of :func:`fa3_kernels.twin.forward.forward` for the
        configuration of the plan (:meth:`fa3_kernels.plan.request.Choices.config`); it states what NaN, Inf and rows
        without a key become.

    Raises
    ------
    ValueError
        For shapes, dtypes, strides or options the kernel does not take.
    """
    if stamps is not None:
        choices = choices._replace(stamps=stamps.shape[2] if stamps.ndim == 4 else 1)
    shapes = (q.shape, k.shape, v.shape)
    strides = (q.stride(), k.stride(), v.stride())
    if not q.numel():
        return empty_outputs(q, v, choices)
    family = _family((q, k, v), shapes, strides, semantics, choices, descales, packed, sinks)
    of_q = q.data_ptr()
    of_k = k.data_ptr()
    of_v = v.data_ptr()
    addresses = of_q | of_k | of_v
    if packed is None:  # launches of a family differ in the number of keys, too, and in the strides of their sequences
        rows_k = shapes[1][1]
        outer_k = strides[1][0]
        outer_v = strides[2][0]
        inputs: Operands = (((of_q,), q), ((of_k, rows_k, outer_k), k), ((of_v, rows_k, outer_v), v))
        addresses |= (outer_k | outer_v) * family.element_size
    else:
        inputs = (((of_q,), q), ((of_k,), k), ((of_v,), v))
    if addresses % 16 and k.numel():
        raise ValueError("addresses and outer strides must be multiples of 16 bytes (TMA)")
    if torch._C._cuda_getDevice() == family.index:
        return _run(family, inputs, shapes, descales, packed, sinks, stamps, needs_lse)
    with torch.cuda.device(family.device):
        return _run(family, inputs, shapes, descales, packed, sinks, stamps, needs_lse)


def empty_outputs(q: torch.Tensor, v: torch.Tensor, choices: Choices) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse of a launch, not filled: of one without a query or a sequence, or of a traced one."""
    *batch, rows, nheads, _ = q.shape
    dtype = _TORCH_DTYPES[choices.out_dtype or "bf16"] if q.dtype is torch.float8_e4m3fn else q.dtype
    return q.new_empty((*batch, rows, nheads, v.shape[-1]), dtype=dtype), q.new_empty(
        (*batch, nheads, rows), dtype=torch.float32
    )


def _run(
    family: _Family,
    inputs: Operands,
    shapes: _Sizes,
    descales: Descales,
    packed: Packed | Paged | None,
    sinks: torch.Tensor | None,
    stamps: torch.Tensor | None,
    needs_lse: bool,
) -> tuple[torch.Tensor, Any]:
    """Make the outputs and the workspace of one launch on the current device, and start its kernels.

    ``shapes`` are those of q, k and v. lse is None for packed sequences unless ``needs_lse``, or a schedule is given.
    """
    device = family.device
    *batch, rows_q, nheads, _ = shapes[0]
    rows_k = shapes[1][-3]
    dim_v = shapes[2][-1]
    lengths = (0, 0) if packed is None else packed[2:4]
    if type(packed) is Paged:
        needs_lse = needs_lse or packed.schedule is not None  # which has no room for lse
        entries = packed.page_table.shape[1]
        lengths = (packed.max_seqlen_q, min(packed.max_seqlen_k, entries * rows_k))
        rows_k = entries
    plan, on_gpu = family.plan(rows_k)
    of = (rows_q, rows_k, *lengths)
    last = family.last  # one tuple, since threads may launch at once
    if last[0] != of:
        last = family.last = (of, *plan.launch(rows_q, rows_k, lengths))
    calls = last[1]
    values = last[2].copy()
    out = torch.empty(*batch, rows_q, nheads, dim_v, dtype=family.out_dtype, device=device)
    values["out"] = of_out = out.data_ptr()
    lse = None
    if needs_lse or packed is None:
        lse = torch.empty(*batch, nheads, rows_q, dtype=torch.float32, device=device)
        values["lse"] = lse.data_ptr()
    kept: list[Any] = []  # tensors whose addresses the kernels get must live until they are launched
    if family.is_e4m3:
        factors = family.descales(descales)
        kept.append(factors)
        for name, x in factors.items():
            values[name] = x.data_ptr()
    if packed is not None:
        workspace = _packed_workspace(plan, packed, values, device)
        kept.append(workspace)
        if type(packed) is Paged and workspace is packed.schedule:
            calls = calls[1:]  # all but the kernel that makes the schedule
    if plan.variant.gathered_v:
        values["k_cache"], values["v_cache"] = inputs[1][0][0], inputs[2][0][0]
    if sinks is not None:
        values["sinks"] = sinks.data_ptr()
    if plan.config.num_splits > 1:
        kept.append(_partials(plan, values, device))
    elif not (plan.is_complete and rows_k):
        out.zero_()
        if lse is not None:
            lse.fill_(-math.inf)
    if stamps is not None:
        _check_stamps(plan, stamps)
        values["stamps"] = stamps.data_ptr()
    on_gpu.run(calls, (*inputs, ((of_out,), out)), values, device)
    return out, lse


def _packed_workspace(plan: Plan, packed: Packed | Paged, values: dict[str, int], device: torch.device) -> torch.Tensor:
    """Make one tensor for lse, if the caller wants none, for four int32 per sequence and for the schedule.

    Each part is aligned to 16 bytes. The addresses are put into ``values``. The caller's own schedule is returned if it
    is for this launch.
    """
    values["cu_seqlens_q"] = packed.cu_seqlens_q.data_ptr()
    values["cu_seqlens_k"] = packed[1].data_ptr()
    of_lse = 0 if "lse" in values else 2 * -(-values["num_rows"] // 4)  # in int64
    workspace: torch.Tensor | None = None
    if type(packed) is Paged:
        values["page_table"] = packed.page_table.data_ptr()
        values["first_keys"] = packed.first_keys.data_ptr()
        values["table_row"] = packed.page_table.stride(0)
        if has_schedule(packed, values["schedule_size"]):
            workspace = packed.schedule
    if workspace is None:
        count = of_lse + 2 * plan.problem.batch + values["ctas"] * values["width"]
        workspace = torch.empty(count, dtype=torch.int64, device=device)
    address = workspace.data_ptr()
    values.setdefault("lse", address)
    values["sequences"] = address + 8 * of_lse
    values["schedule"] = address + 8 * (of_lse + 2 * plan.problem.batch)
    return workspace


def _partials(plan: Plan, values: dict[str, int], device: torch.device) -> torch.Tensor:
    """Make the workspace of the splits, partial outputs and behind them their lse, and put the addresses into
    ``values``.

    Splits without a key block are not written by the kernel and keep (0, -inf).
    """
    rows = (plan.numbers or values)["num_rows"]
    splits = plan.config.num_splits
    num_partial = splits * rows * power_of_two(plan.config.head_dim_v)
    workspace = torch.empty(num_partial + splits * rows, dtype=torch.float32, device=device)
    if not (plan.is_complete and values["rows_k"]):
        workspace[:num_partial].zero_()
        workspace[num_partial:].fill_(-math.inf)
    values["partial"] = address = workspace.data_ptr()
    values["partial_lse"] = address + 4 * num_partial
    return workspace


def _check_stamps(plan: Plan, stamps: torch.Tensor) -> None:
    """Raise ValueError unless the array of stamps fits the launch."""
    ctas = len(plan.tables["schedule"]) if plan.tables else plan.num_sms
    wanted = stamps_shape(plan, ctas)
    fits = stamps.ndim == 4 and stamps.shape[0] >= ctas and tuple(stamps.shape[1:]) == wanted[1:]
    if not fits or stamps.dtype != torch.int32 or not stamps.is_contiguous():
        raise ValueError(
            f"stamps must be contiguous int32 ({ctas} or more, {wanted[1]}, steps, {wanted[3]}), "
            f"got {stamps.dtype} {tuple(stamps.shape)}"
        )
