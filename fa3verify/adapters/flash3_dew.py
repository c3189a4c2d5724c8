"""Official FlashAttention-3 in FP16 and BF16, from a library of XLA custom calls (wheel dew-flash-attn-cu13)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fa3_reference.problem import AttentionProblem
from fa3verify.adapters.libraries import library
from fa3verify.adapters.xla_call import Call, Runtime, handler
from fa3verify.gpu.bench.cells import Cell
from fa3verify.gpu.bench.graphs import GraphTimed
from fa3verify.gpu.bench.kernels import Inputs, Output, Prepare, Run

TARGET = "dew_flash3_mha_fwd"


def load(folder: Path | None) -> Prepare:
    """Load the forward and return how a cell is prepared."""
    function = forward_of(folder)

    def prepare(cell: Cell, inputs: Sequence[Inputs]) -> Run:
        made = runtime()
        launches = [call_of(function, cell.problem, (x.q, x.k, x.v), made) for x in inputs]

        def output() -> Output:
            call, out, lse = launches[0]
            call()
            return Output(out, lse)

        return Run(GraphTimed(lambda i: launches[i % len(launches)][0]()), output)

    return prepare


def forward_of(folder: Path | None) -> Any:
    """The library's forward, as :class:`fa3verify.adapters.xla_call.Call` takes it."""
    return handler(library(folder, "libdew_flash_attn3.so"), TARGET)


def call_of(
    function: Any, problem: AttentionProblem, tensors: Sequence[torch.Tensor], made: Runtime
) -> tuple[Call, torch.Tensor, torch.Tensor]:
    """Prepare a launch on q, k and v; returns it with the tensors of O and LSE that it fills."""
    out = torch.empty(problem.out_shape, dtype=tensors[0].dtype, device="cuda")
    shapes = (problem.lse_shape, (1, 1, 1, 1), (1, 1, 1))  # the last two: partials of split keys, unused
    rest = [torch.empty(shape, dtype=torch.float32, device="cuda") for shape in shapes]
    attributes = {"softmax_scale": problem.softmax_scale, "is_causal": problem.causal}
    attributes |= {"window_size_left": problem.window[0], "window_size_right": problem.window[1]}
    return Call(function, tensors, (out, *rest), attributes, made), out, rest[0]


def runtime() -> Runtime:
    """A runtime on torch's current stream and allocator; scratch memory is kept as long as the runtime."""
    scratch: list[torch.Tensor] = []

    def allocate(size: int) -> int:
        scratch.append(torch.empty(max(size, 1), dtype=torch.uint8, device="cuda"))
        return scratch[-1].data_ptr()

    return Runtime(lambda: torch.cuda.current_stream().cuda_stream, allocate)
