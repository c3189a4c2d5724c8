"""Official FlashAttention-3 in FP16 and BF16, from a library of XLA custom calls (wheel dew-flash-attn-cu13)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from fa3verify.adapters.libraries import library
from fa3verify.adapters.xla_call import Call, Runtime, handler
from fa3verify.gpu.bench.cells import Cell
from fa3verify.gpu.bench.graphs import GraphTimed
from fa3verify.gpu.bench.kernels import Inputs, Output, Prepare, Run

TARGET = "dew_flash3_mha_fwd"


def load(folder: Path | None) -> Prepare:
    """Load the forward and return how a cell is prepared."""
    function = handler(library(folder, "libdew_flash_attn3.so"), TARGET)

    def prepare(cell: Cell, inputs: Sequence[Inputs]) -> Run:
        made, problem = runtime(), cell.problem
        attributes = {"softmax_scale": problem.softmax_scale, "is_causal": cell.causal}
        attributes |= {"window_size_left": -1, "window_size_right": -1}
        calls, outputs = [], []
        for x in inputs:
            out = torch.empty(problem.out_shape, dtype=x.q.dtype, device="cuda")
            shapes = (problem.lse_shape, (1, 1, 1, 1), (1, 1, 1))  # the last two: partials of split keys, unused
            rest = [torch.empty(shape, dtype=torch.float32, device="cuda") for shape in shapes]
            calls.append(Call(function, (x.q, x.k, x.v), (out, *rest), attributes, made))
            outputs.append(Output(out, rest[0]))

        def output() -> Output:
            calls[0]()
            return outputs[0]

        return Run(GraphTimed(lambda i: calls[i % len(calls)]()), output)

    return prepare


def runtime() -> Runtime:
    """A runtime on torch's current stream and allocator; scratch memory is kept as long as the runtime."""
    scratch: list[torch.Tensor] = []

    def allocate(size: int) -> int:
        scratch.append(torch.empty(max(size, 1), dtype=torch.uint8, device="cuda"))
        return scratch[-1].data_ptr()

    return Runtime(lambda: torch.cuda.current_stream().cuda_stream, allocate)
