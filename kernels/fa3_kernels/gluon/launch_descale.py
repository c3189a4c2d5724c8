"""Descales of a launch: checked, and brought to one factor per (batch, head, block) with strides."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from fa3_reference.problem import AttentionProblem

ONE_BLOCK = 1 << 30  # rows: every sequence is one block

DescaleBlocks = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Descales:
    """``arguments`` of the kernel: values and strides (batch, head, block) of Q, K and V, then the block rows of Q."""

    arguments: tuple


@lru_cache(maxsize=8)
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones((1, 1, 1), dtype=torch.float32, device=device)


def _check(name: str, x: torch.Tensor, problem: AttentionProblem, block_rows: int, device: torch.device) -> None:
    seqlen = problem.seqlen_q if name == "q" else problem.seqlen_k
    heads = {problem.nheads, problem.nheads_kv} if name == "q" else {problem.nheads_kv}
    blocks = max(1, -(-seqlen // block_rows)) if block_rows else 1
    shapes = {(problem.batch, n, blocks) for n in heads} | (
        {(problem.batch, n) for n in heads} if blocks == 1 else set()
    )
    if tuple(x.shape) not in shapes or x.dtype != torch.float32 or x.device != device:
        expected = " or ".join(map(str, sorted(shapes)))
        raise ValueError(
            f"{name}_descale must be float32 {expected} on {device}, got {x.dtype} {tuple(x.shape)} on {x.device}"
        )


def differ_by_tile(values: tuple[torch.Tensor | None, ...], blocks: DescaleBlocks) -> bool:
    """Whether descales of K or V differ by key tile; ValueError unless ``blocks`` are three integers >= 0."""
    if len(blocks) != 3 or any(not isinstance(n, int) or n < 0 for n in blocks):
        raise ValueError(f"descale_blocks must be three integers >= 0, got {blocks!r}")
    return any(x is not None and rows for x, rows in zip(values[1:], blocks[1:], strict=True))


def descales_of(
    problem: AttentionProblem,
    values: tuple[torch.Tensor | None, ...],
    blocks: DescaleBlocks,
    tile_n: int,
    device: torch.device,
) -> Descales:
    """Check the descales of a launch and bring them to the kernel's form.

    Parameters
    ----------
    values : three tensors float32 (batch, heads) or (batch, heads, blocks), or None for 1
    blocks : (int, int, int)
        Rows per block of q, k and v; 0 is one block.
    tile_n : int
        Keys of a tile, which blocks of k and v are made of.

    Raises
    ------
    ValueError
        For descales of 16-bit operands, or shapes, dtypes, devices and block sizes the kernel does not take.
    """
    arguments: list = []
    for name, x, block_rows in zip("qkv", values, blocks, strict=True):
        if name != "q" and block_rows % tile_n:
            raise ValueError(f"{name}_descale blocks must be whole key tiles of {tile_n} rows, got {block_rows}")
        if x is None:
            arguments += [_one(device), 0, 0, 0]
            continue
        if problem.dtype != "e4m3":
            raise ValueError(f"{name}_descale is for e4m3 operands, got dtype {problem.dtype}")
        _check(name, x, problem, block_rows, device)
        x = x[:, :, None] if x.ndim == 2 else x
        if name == "q" and x.shape[1] != problem.nheads:
            x = x.repeat_interleave(problem.group, dim=1)
        if name != "q" and block_rows > tile_n:
            x = x.repeat_interleave(block_rows // tile_n, dim=2)
        arguments += [x, x.stride(0), x.stride(1), x.stride(2) if block_rows else 0]
    return Descales((*arguments, blocks[0] or ONE_BLOCK))
