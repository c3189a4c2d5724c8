"""Which kernels a launch starts, with which arguments, without a GPU: the host code runs on tensors without storage."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from triton.runtime.jit import JITFunction

from fa3_kernels.audit.shipped import Launch
from fa3_kernels.gluon import launch, quantize
from fa3_kernels.plan.choose import H200_SMS, config_of
from fa3_kernels.plan.stamps import COLUMNS

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}


class Call(NamedTuple):
    """One kernel launch as the host code makes it."""

    kernel: Any
    args: tuple
    options: dict[str, Any]
    grid: tuple[int, ...]


def record(shipped: Launch) -> tuple[Call, ...]:
    """Run the host code of a launch on meta tensors and return the kernels it would start, in order.

    Only the kernels themselves and questions to the GPU are replaced: what is compiled from these arguments is what
    :func:`fa3_kernels.gluon.launch.forward` and :func:`fa3_kernels.gluon.quantize.quantize_qkv` compile. Tensors that the
    host fills and brings to the device, such as the tile schedule, have what they hold as their attribute ``content``.

    Raises
    ------
    ValueError
        As the launch itself.
    """
    calls: list[Call] = []

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        calls.append(Call(kernel, args, options, tuple(grid)))

    def bring(x: torch.Tensor, *to: Any, **more: Any) -> torch.Tensor:
        moved = move(x, *to, **more)
        if moved.is_meta and not x.is_meta:
            moved.content = x
        return moved

    move = torch.Tensor.to

    with ExitStack() as replaced:
        replaced.enter_context(patch.object(JITFunction, "run", note))
        replaced.enter_context(patch.object(torch.Tensor, "to", bring))
        properties = SimpleNamespace(multi_processor_count=H200_SMS)
        replaced.enter_context(patch.object(torch.cuda, "get_device_properties", lambda device: properties))
        replaced.enter_context(patch.object(torch.cuda, "device", nullcontext))
        for module in (launch, quantize):
            replaced.enter_context(patch.object(module, "_check", lambda *_: None))  # of addresses and devices
        if shipped.function == "forward":
            launch.forward(*_operands(shipped), **_options(shipped), **_stamps(shipped))
        else:
            quantize.quantize_qkv(*_operands(shipped), **shipped.choices)
    return tuple(calls)


def _operands(shipped: Launch) -> list[torch.Tensor]:
    problem = shipped.problem
    shapes = (problem.q_shape, problem.k_shape, problem.v_shape)
    return [torch.empty(shape, dtype=_DTYPES[problem.dtype], device="meta") for shape in shapes]


def _options(shipped: Launch) -> dict[str, Any]:
    problem = shipped.problem
    options: dict[str, Any] = {"causal": problem.causal, "window": problem.window, "softcap": problem.softcap}
    options["softmax_scale"] = problem.softmax_scale
    if problem.is_varlen:
        options |= {name: torch.from_numpy(getattr(problem, name)) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    options |= shipped.choices
    for name, rows, seqlen in zip(
        "qkv", options.get("descale_blocks", ()), (problem.seqlen_q, *(problem.seqlen_k,) * 2)
    ):
        heads = problem.nheads if name == "q" else problem.nheads_kv
        blocks = max(1, -(-seqlen // rows)) if rows else 1
        options[f"{name}_descale"] = torch.empty((problem.batch, heads, blocks), dtype=torch.float32, device="meta")
    return options


def _stamps(shipped: Launch) -> dict[str, torch.Tensor]:
    if not shipped.stamps:
        return {}
    choices = {name: x for name, x in shipped.choices.items() if name != "descale_blocks"}
    actors = config_of(shipped.problem, **choices).num_consumer_warpgroups + 1
    shape = (H200_SMS, actors, shipped.stamps, COLUMNS)
    return {"stamps": torch.empty(shape, dtype=torch.int32, device="meta")}
