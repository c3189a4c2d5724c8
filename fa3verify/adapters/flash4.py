"""FlashAttention-4, written in the CuTe DSL, on SM90."""

from __future__ import annotations

import site
from collections.abc import Sequence
from pathlib import Path

import torch

from fa3verify.gpu.bench.cells import Cell
from fa3verify.gpu.bench.kernels import Inputs, Output, Prepare, Run, graph_run


def load(folder: Path | None) -> Prepare:
    """Import the package, installed or from ``fa4`` in the peers' folder."""
    if folder is not None and (folder / "fa4").is_dir():
        site.addsitedir(str(folder / "fa4"))  # with its .pth files: the DSL lies in a folder of its own
    from flash_attn.cute.interface import _flash_attn_fwd  # pyright: ignore[reportMissingImports]

    def prepare(cell: Cell, inputs: Sequence[Inputs]) -> Run:
        def launch(x: Inputs) -> torch.Tensor:
            return _flash_attn_fwd(x.q, x.k, x.v, causal=cell.causal)[0]

        return graph_run(launch, inputs, Output)

    return prepare
