"""Official FlashAttention-3 in BF16 and FP8, from the operator library of wheel fa3-fwd."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from fa3verify.adapters.libraries import library
from fa3verify.gpu.bench.cells import Cell
from fa3verify.gpu.bench.kernels import Inputs, Output, Prepare, Run, descales, graph_run


def load(folder: Path | None) -> Prepare:
    """Load the library's operators."""
    torch.ops.load_library(str(library(folder, "fa3_fwd_C.so")))
    return prepare


def prepare(cell: Cell, inputs: Sequence[Inputs]) -> Run:
    """Prepare a cell; for decoding FlashAttention-3 chooses the number of splits."""
    splits = 0 if cell.grid == "decode" else 1
    factors = {id(x): descales(cell, x) for x in inputs}

    def launch(x: Inputs) -> tuple[torch.Tensor, ...]:
        return torch.ops.fa3_fwd.fwd(x.q, x.k, x.v, is_causal=cell.causal, num_splits=splits, **factors[id(x)])

    return graph_run(launch, inputs, lambda result: Output(result[0]))
