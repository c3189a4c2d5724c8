"""``scaled_dot_product_attention`` of torch with one backend: cuDNN, or FLASH, which is FlashAttention-2."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fa3verify.gpu.bench.cells import Cell
from fa3verify.gpu.bench.kernels import Inputs, Output, Prepare, Run, graph_run


def prepare_with(backend: SDPBackend) -> Prepare:
    """Return how a cell is prepared for a backend."""

    def prepare(cell: Cell, inputs: Sequence[Inputs]) -> Run:
        is_gqa = cell.nheads != cell.nheads_kv

        def launch(x: Inputs) -> torch.Tensor:
            q, k, v = (y.transpose(1, 2) for y in (x.q, x.k, x.v))
            with sdpa_kernel([backend]):
                out = scaled_dot_product_attention(q, k, v, is_causal=cell.causal, enable_gqa=is_gqa)
            return out.transpose(1, 2)

        return graph_run(launch, inputs, Output)

    return prepare
