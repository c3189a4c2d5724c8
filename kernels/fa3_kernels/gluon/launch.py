"""Host side of the Gluon forward: a request is looked up or checked, planned once, and its calls are run."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from fa3_kernels.gluon.run import BoundCall, Layout
from fa3_kernels.plan.choose import longest
from fa3_kernels.plan.plan import Call, Plan, Sizes, plan_of, shared_keys, stamps_shape
from fa3_kernels.plan.request import Choices, Operand, Request, Semantics, request_of
from fa3_reference.problem import AttentionProblem

MAX_REQUESTS = 1024  # that are kept, and plans of each
_TORCH_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Descales(NamedTuple):
    """Factors of e4m3 operands: float32 (batch, heads) or (batch, heads, blocks), and rows per block of q, k and v.

    They multiply the stored operand to give its value; finite and > 0, which is not checked: it would wait for the GPU.
    """

    q: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    blocks: tuple[int, int, int] = (0, 0, 0)


class Packed(NamedTuple):
    """Starts of packed sequences, int32 (batch + 1,) beside q, and the longest lengths there may be.

    The starts are read on the GPU alone. They must rise from 0 to the number of rows, and no sequence may be longer than said:
    neither can be checked without a wait. Starts that break this read and write nothing outside the tensors, but rows
    beyond the longest length are not computed.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def packed_of(problem: AttentionProblem, device: str | torch.device = "cuda") -> Packed | None:
    """The starts of a problem's packed sequences on a GPU, or None if it has none."""
    if not problem.is_varlen:
        return None
    of_q, of_k = (torch.from_numpy(x).to(device) for x in (problem.cu_seqlens_q, problem.cu_seqlens_k))
    return Packed(of_q, of_k, problem.seqlen_q, problem.seqlen_k)


NO_DESCALES = Descales()
_DEFAULT_SEMANTICS, _DEFAULT_CHOICES = Semantics(), Choices()


def operand(x: torch.Tensor) -> Operand:
    """A tensor as the checks see it."""
    return Operand(tuple(x.shape), tuple(x.stride()), str(x.dtype).removeprefix("torch."), str(x.device))


@lru_cache(maxsize=8)
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU; ValueError unless it is Hopper."""
    found = torch.cuda.get_device_properties(device)
    check_capability((found.major, found.minor), found.name)
    return found.multi_processor_count


def check_capability(capability: tuple[int, int], name: str) -> None:
    """Raise ValueError unless a GPU is Hopper: the instructions of these kernels exist on compute capability 9.0 alone."""
    if capability[0] != 9:
        major, minor = capability
        raise ValueError(f"a Hopper GPU (compute capability 9.0) is needed, got {name} with {major}.{minor}")


@lru_cache(maxsize=8)
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones((1, 1, 1), dtype=torch.float32, device=device)


class _PlanOnGpu:
    """A plan with what it needs on a GPU: tables, and kernels bound to its calls."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        if plan.tables and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a launch whose plan is not on the GPU cannot be captured: run it once before")
        self.plan = plan
        self.tables = {name: torch.from_numpy(table).to(device) for name, table in plan.tables.items()}
        self.addresses = {name: table.data_ptr() for name, table in self.tables.items()}
        self.stream = torch.cuda.current_stream(device).cuda_stream  # on which the tables were made
        self.bound: dict[str, BoundCall] = {}
        self.last: tuple[Sizes, tuple[Call, ...], tuple[int, int]] = (Sizes(-1, -1), (), (0, 0))

    def launch(self, sizes: Sizes) -> tuple[tuple[Call, ...], tuple[int, int]]:
        """The calls of a launch and the shape of its schedule: those of the launch before, if it had the same sizes.

        They are kept as one tuple, since threads may launch at once.
        """
        last = self.last
        if sizes != last[0]:
            last = self.last = (sizes, *self.plan.launch(sizes))
        return last[1], last[2]

    def run(
        self, calls: tuple[Call, ...], layouts: dict[str, Layout], addresses: dict[str, int], device: torch.device
    ) -> None:
        """Start the kernels of a launch on the current stream."""
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        if self.tables:
            addresses |= self.addresses
            if stream != self.stream:
                for table in self.tables.values():
                    table.record_stream(torch.cuda.current_stream(device))
        for call in calls:
            bound = self.bound.get(call.kernel)
            if bound is None:
                bound = self.bound[call.kernel] = BoundCall(call, layouts, addresses)
            bound(call, layouts, addresses, stream)


class _Family:
    """All launches that differ in addresses and in the number of keys, or in the lengths of packed sequences, alone."""

    def __init__(self, request: Request, device: torch.device) -> None:
        self.request, self.device = request, device
        self.sms = num_sms(device)
        first = plan_of(request, self.sms)
        self.tile_n, self.out_dtype = first.config.tile_n, _TORCH_DTYPES[first.config.out_dtype]
        self.is_e4m3 = request.problem.dtype == "e4m3"
        self.is_packed = request.problem.is_varlen
        self.plans: dict[int, _PlanOnGpu] = {}

    def plan(self, seqlen_k: int) -> _PlanOnGpu:
        """The plan for a number of keys, on the GPU."""
        keys = 0 if self.is_packed else shared_keys(self.request, seqlen_k, self.tile_n)
        found = self.plans.get(keys)
        if found is None:
            is_other = not self.is_packed and keys != self.request.problem.seqlen_k
            request = self.request.with_keys(keys) if is_other else self.request
            if len(self.plans) >= MAX_REQUESTS:
                self.plans.clear()
            found = self.plans[keys] = _PlanOnGpu(plan_of(request, self.sms), self.device)
        if torch._C._cuda_isCurrentStreamCapturing() and found not in _captured:
            _captured.append(found)
        return found

    def descales(self, given: Descales) -> dict[str, torch.Tensor]:
        """The descales as the kernel reads them; those that it has for fewer heads or larger blocks are repeated."""
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


_families: dict[tuple, _Family] = {}
_captured: list[_PlanOnGpu] = []  # a graph reads their tables whenever it is replayed, so they are never dropped


def forget() -> None:
    """Drop all requests and plans, but for those that a CUDA graph has captured."""
    _families.clear()


def _family(
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor], layouts: dict[str, Layout], semantics: Semantics,
    choices: Choices, descales: Descales, packed: Packed | None,
) -> _Family:  # fmt: skip
    """Look a request up, or check it; the key leaves out how many keys there are, and of packed rows how many."""
    q, k, v = operands
    (_, q_shape, q_strides), (_, k_shape, k_strides), (_, v_shape, v_strides) = layouts.values()
    lengths = None
    if packed is None:
        sizes = (q_shape, k_shape[0], v_shape[0], q_strides, k_strides[1:], v_strides[1:])
    else:
        check_starts(q, packed)
        lengths = (packed.cu_seqlens_q.numel() - 1, longest(packed.max_seqlen_q), longest(packed.max_seqlen_k))
        sizes = (q_shape[1:], q_strides, k_strides, v_strides, lengths)
    key = (
        semantics,
        choices,
        q.dtype,
        k.dtype,
        v.dtype,
        q.device,
        k.device,
        v.device,
        k_shape[-2:],
        v_shape[-2:],
        sizes,
    )
    if descales is not NO_DESCALES:
        factors = (x if x is None else (x.shape, x.stride(), x.data_ptr() % 16, x.dtype) for x in descales[:3])
        if packed is not None:  # their blocks are of the longest lengths as given
            lengths = (packed.cu_seqlens_q.numel() - 1, packed.max_seqlen_q, packed.max_seqlen_k)
        key += (descales.blocks, lengths, *factors)
    found = _families.get(key)
    if found is None or k_shape[:-1] != v_shape[:-1]:
        given = tuple(None if x is None else operand(x) for x in descales[:3])
        request = request_of(
            (operand(q), operand(k), operand(v)), semantics, choices, descales=given, descale_blocks=descales.blocks,
            packed=lengths,
        )  # fmt: skip
        found = _Family(request, q.device)
        if q.numel() and k.numel() and v.numel():  # the strides of an empty tensor were not checked
            if len(_families) >= MAX_REQUESTS:
                forget()
            _families[key] = found
    return found


def check_starts(q: torch.Tensor, packed: Packed) -> None:
    for name, x in (("cu_seqlens_q", packed.cu_seqlens_q), ("cu_seqlens_k", packed.cu_seqlens_k)):
        if x.ndim != 1 or x.dtype != torch.int32 or x.numel() < 2 or not x.is_contiguous():
            raise ValueError(f"{name} must be int32 (batch + 1,), got {x.dtype} {tuple(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on the GPU of q, {q.device}, got {x.device}")
    a, b = packed.cu_seqlens_q.numel(), packed.cu_seqlens_k.numel()
    if a != b:
        raise ValueError(f"cu_seqlens_q and cu_seqlens_k must have one length, got {a} and {b}")


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    semantics: Semantics = _DEFAULT_SEMANTICS,
    choices: Choices = _DEFAULT_CHOICES,
    *,
    descales: Descales = NO_DESCALES,
    packed: Packed | None = None,
    stamps: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the forward kernel.

    Parameters
    ----------
    q : float16, bfloat16 or float8_e4m3fn (batch, seqlen_q, nheads, head_dim), on a Hopper GPU
        head_dim a multiple of 16 bytes, at most 256; TMA pads it with zeros to 64, 128 or 256. Last dimension
        contiguous, other strides multiples of 16 bytes. Packed: (total_q, nheads, head_dim).
    k : same dtype (batch, seqlen_k, nheads_kv, head_dim) or (total_k, nheads_kv, head_dim)
        Likewise; seqlen_k may be 0.
    v : like k, with its own head_dim
    semantics : Semantics
        Mask, cap and scale.
    choices : Choices
        Splits, packed heads, schedule switches.
    descales : Descales
        e4m3 only.
    packed : Packed, optional
        Starts and longest lengths of packed sequences.
    stamps : int32 (ctas, consumer warpgroups + 1, steps, 8), zeros, optional
        Filled by an instrumented kernel, see :mod:`fa3_kernels.plan.stamps`; ``ctas`` at least that of the launch.

    Returns
    -------
    out : like q (e4m3: choices.out_dtype), with the head_dim of v; contiguous
    lse : float32 (batch, nheads, seqlen_q), or (nheads, total_q)
        Bits of :func:`fa3_kernels.twin.forward.forward` for the configuration of the plan
        (:meth:`fa3_kernels.plan.request.Choices.config`); it states what NaN, Inf and rows without a key become.

    Raises
    ------
    ValueError
        For shapes, dtypes, strides or options the kernel does not take.
    """
    if stamps is not None:
        choices = choices._replace(stamps=stamps.shape[2] if stamps.ndim == 4 else 1)
    layouts: dict[str, Layout] = {
        "q": (q.data_ptr(), q.shape, q.stride()),
        "k": (k.data_ptr(), k.shape, k.stride()),
        "v": (v.data_ptr(), v.shape, v.stride()),
    }
    family = _family((q, k, v), layouts, semantics, choices, descales, packed)
    strides = 0 if family.is_packed else layouts["k"][2][0] | layouts["v"][2][0]
    if (layouts["q"][0] | layouts["k"][0] | layouts["v"][0] | strides * q.element_size()) % 16 and k.numel():
        raise ValueError("addresses and outer strides must be multiples of 16 bytes (TMA)")
    if torch._C._cuda_getDevice() == family.device.index:
        return _run(family, layouts, descales, packed, stamps)
    with torch.cuda.device(family.device):
        return _run(family, layouts, descales, packed, stamps)


def _run(
    family: _Family, layouts: dict[str, Layout], descales: Descales, packed: Packed | None, stamps: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs, workspace and kernels of one launch on the current device."""
    device, shape, keys = family.device, layouts["q"][1], layouts["k"][1]
    if packed is None:
        batch, seqlen_q, nheads, _ = shape
        sizes, lse_shape = Sizes(seqlen_q, keys[1]), (batch, nheads, seqlen_q)
    else:
        sizes, lse_shape = Sizes(shape[0], keys[0], packed[2:]), (shape[1], shape[0])
    ready = family.plan(sizes.rows_k)
    calls, table_shape = ready.launch(sizes)
    plan = ready.plan
    out = torch.empty((*shape[:-1], layouts["v"][1][-1]), dtype=family.out_dtype, device=device)
    lse = torch.empty(lse_shape, dtype=torch.float32, device=device)
    layouts["out"] = (out.data_ptr(), out.shape, out.stride())
    if packed is not None:  # a ragged view is the same however many rows there are
        layouts = {name: (address, (0, *x[1:]), strides) for name, (address, x, strides) in layouts.items()}
    addresses = {"out": layouts["out"][0], "lse": lse.data_ptr()}
    kept: list[Any] = []  # tensors whose addresses the kernels get must live until they are launched
    if family.is_e4m3:
        factors = family.descales(descales)
        kept.append(factors)
        for name, x in factors.items():
            addresses[name] = x.data_ptr()
    if packed is not None:
        kept.append(_packed_workspace(plan, table_shape, packed, addresses, device))
    if plan.num_splits > 1:
        kept.append(_partials(plan, sizes, addresses, device))
    elif not (plan.is_complete and sizes.rows_k):
        out.zero_()
        lse.fill_(-math.inf)
    if stamps is not None:
        _check_stamps(plan, stamps)
        addresses["stamps"] = stamps.data_ptr()
    ready.run(calls, layouts, addresses, device)
    return out, lse


def _packed_workspace(
    plan: Plan, table_shape: tuple[int, int], packed: Packed, addresses: dict[str, int], device: torch.device
) -> torch.Tensor:
    """One tensor for the schedule, and behind it four int32 per sequence."""
    ctas, width = table_shape
    workspace = torch.empty(ctas * width + 2 * plan.problem.batch, dtype=torch.int64, device=device)
    addresses["schedule"] = workspace.data_ptr()
    addresses["sequences"] = addresses["schedule"] + 8 * ctas * width
    addresses["cu_seqlens_q"] = packed.cu_seqlens_q.data_ptr()
    addresses["cu_seqlens_k"] = packed.cu_seqlens_k.data_ptr()
    return workspace


def _partials(plan: Plan, sizes: Sizes, addresses: dict[str, int], device: torch.device) -> list[torch.Tensor]:
    """Workspace of the splits; those without a key block keep (0, -inf)."""
    rows = plan.num_rows(sizes)
    partial = torch.empty((plan.num_splits, rows, plan.config.head_dim), dtype=torch.float32, device=device)
    partial_lse = torch.empty((plan.num_splits, rows), dtype=torch.float32, device=device)
    if not (plan.is_complete and sizes.rows_k):
        partial.zero_()
        partial_lse.fill_(-math.inf)
    addresses["partial"], addresses["partial_lse"] = partial.data_ptr(), partial_lse.data_ptr()
    return [partial, partial_lse]


def _check_stamps(plan: Plan, stamps: torch.Tensor) -> None:
    ctas = len(plan.tables["schedule"]) if plan.tables else plan.num_sms
    wanted = stamps_shape(plan, ctas)
    fits = stamps.ndim == 4 and stamps.shape[0] >= ctas and tuple(stamps.shape[1:]) == wanted[1:]
    if not fits or stamps.dtype != torch.int32 or not stamps.is_contiguous():
        raise ValueError(
            f"stamps must be contiguous int32 ({ctas} or more, {wanted[1]}, steps, {wanted[3]}), "
            f"got {stamps.dtype} {tuple(stamps.shape)}"
        )
