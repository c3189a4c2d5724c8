"""FlexAttention of torch, compiled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from fa3verify.gpu.bench.cells import Cell
from fa3verify.gpu.bench.kernels import Inputs, Output, Run, graph_run


def prepare(cell: Cell, inputs: Sequence[Inputs]) -> Run:
    """Prepare a cell; the mask's blocks are made once."""
    mask = None
    if cell.causal:
        offset = cell.seqlen_k - cell.seqlen_q
        mask = create_block_mask(
            lambda b, h, i, j: j <= i + offset, None, None, cell.seqlen_q, cell.seqlen_k, device="cuda"
        )
    compiled = torch.compile(flex_attention, dynamic=False)

    def launch(x: Inputs) -> torch.Tensor:
        q, k, v = (y.transpose(1, 2) for y in (x.q, x.k, x.v))
        return compiled(q, k, v, block_mask=mask, enable_gqa=cell.nheads != cell.nheads_kv).transpose(1, 2)

    return graph_run(launch, inputs, Output)
