"""Official FlashAttention-3 in FP16 and BF16, from a library of XLA custom calls (wheel dew-flash-attn-cu13)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from fa3verify.adapters.xla_call import Call, handler, torch_runtime
from fa3verify.gpu.bench.cells import Cell
from fa3verify.gpu.bench.kernels import Inputs, Output, Run
from fa3verify.gpu.bench.timing import GraphTimed

TARGET = "dew_flash3_mha_fwd"


def load(path: Path) -> Callable[[Cell, Sequence[Inputs]], Run]:
    """Load the forward and return how a cell is prepared."""
    function = handler(path, TARGET)

    def prepare(cell: Cell, inputs: Sequence[Inputs]) -> Run:
        torch = import_module("torch")
        runtime, problem = torch_runtime(), cell.problem
        attributes = {"softmax_scale": problem.softmax_scale, "is_causal": cell.causal}
        attributes |= {"window_size_left": -1, "window_size_right": -1}
        calls, outputs = [], []
        for x in inputs:
            out = torch.empty(problem.out_shape, dtype=x.q.dtype, device="cuda")
            shapes = (problem.lse_shape, (1, 1, 1, 1), (1, 1, 1))  # the last two: partials of split keys, unused
            rest = [torch.empty(shape, dtype=torch.float32, device="cuda") for shape in shapes]
            calls.append(Call(function, (x.q, x.k, x.v), (out, *rest), attributes, runtime))
            outputs.append(Output(out, rest[0]))

        def output() -> Output:
            calls[0]()
            return outputs[0]

        return Run(GraphTimed(lambda i: calls[i % len(calls)]()), output)

    return prepare
