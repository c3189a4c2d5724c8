"""Speed of the quantiser beside torch's copy and an eager quantiser: cool bursts, interleaved."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch

from fa3_kernels.gluon.quantize import quantize_qkv
from fa3_reports.bits.quantise_cases import HIDDEN
from fa3_reports.bits.table import CaseTable
from fa3verify.bench.graphs import GraphTimed
from fa3verify.timed.timing import Pace, measure

SEQLEN = 4096
PACE = Pace(rounds=7, pause_s=0.03)
COLUMNS = ("tokens", "head_dim", "quantiser", "ms", "bytes", "tb_per_s", "share_of_copy_bandwidth")
OURS: dict[str, dict[str, Any]] = {
    "block": {},
    "block rotated": {"rotate": True},
    "block 64 rotated": {"block_rows": 64, "rotate": True},
    "block power of two rotated": {"scale": "power_of_two", "rotate": True},
    "head": {"scope": "head"},
    "head rotated": {"scope": "head", "rotate": True},
    "block K mean": {"subtract_k_mean": True},
    "block K mean rotated": {"rotate": True, "subtract_k_mean": True},
}


def eager(tensors: list[torch.Tensor], *, rotate: bool, rows: int = 128) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same task in torch operations: q, k, v to e4m3 with one descale per block of rows and head."""
    dim = tensors[0].shape[-1]
    hadamard = torch.ones(1, 1, device="cuda")
    while hadamard.shape[0] < dim:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    hadamard = (hadamard / math.sqrt(dim)).to(tensors[0].dtype)
    results = []
    for x, is_turned in zip(tensors, (rotate, rotate, False)):
        y = (x @ hadamard if is_turned else x).float()
        blocks = y.view(y.shape[0], -1, rows, *y.shape[2:])
        descale = blocks.abs().amax((2, 4), keepdim=True) / 448
        results.append(((blocks / descale).to(torch.float8_e4m3fn).view(x.shape), descale))
    return results


def quantisers(tensors: list[torch.Tensor]) -> dict[str, Callable[[int], object]]:
    """What is timed, by name, all on the same q, k and v."""
    q, k, v = tensors
    whole = torch.cat([x.view(-1) for x in tensors])
    into = torch.empty_like(whole)
    found: dict[str, Callable[[int], object]] = {"copy": lambda _: into.copy_(whole)}
    for name, options in OURS.items():
        found[name] = lambda _, options=options: quantize_qkv(q, k, v, **options)
    if q.shape[0] * SEQLEN == 16384:
        found["torch eager block"] = lambda _: eager(tensors, rotate=False)
        found["torch eager block rotated"] = lambda _: eager(tensors, rotate=True)
    return found


def bytes_moved(name: str, elements: int) -> int:
    """Bytes that have to move: 2 in and 1 out per element; 2 more where data are read twice, by k alone for a mean."""
    if name == "copy":
        return 4 * elements
    twice = elements if name.startswith("head") else elements // 3 if "mean" in name else 0
    return 3 * elements + 2 * twice


def rows(case: tuple[int, int]) -> list[list[Any]]:
    """Time every quantiser on so many tokens of one head_dim."""
    tokens, dim = case
    shape = (tokens // SEQLEN, SEQLEN, HIDDEN // dim, dim)
    tensors = [torch.randn(shape, device="cuda", dtype=torch.float16) for _ in range(3)]
    runs = {name: GraphTimed(launch) for name, launch in quantisers(tensors).items()}
    bursts = measure(runs, PACE)
    elements = 3 * math.prod(shape)
    median = {name: statistics.median(burst.ms for burst in found) for name, found in bursts.items()}
    found = []
    for name, ms in median.items():
        moved = bytes_moved(name, elements)
        share = moved / ms * median["copy"] / bytes_moved("copy", elements)
        found.append([tokens, dim, name, round(ms, 5), moved, round(moved / ms / 1e9, 3), round(share, 3)])
    return found


SPEED = CaseTable(
    "quantize_speed.csv",
    COLUMNS,
    lambda: [(tokens, dim) for tokens in (16384, 65536) for dim in (64, 128, 256)],
    lambda case: case,
    rows,
    rule="none",
    is_alone=True,
)
