"""Programs that fill in a folder of cases by its files alone, right ones and wrong ones; nothing of the harness."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

FORMATS = {"fp16": np.float16, "fp32": np.float32}
Heads = tuple[np.ndarray, np.ndarray]  # out (heads, seqlen_q, head_dim) and lse (heads, seqlen_q) of a sequence
Program = Callable[..., Heads]


def read(folder: Path, name: str, said: str) -> np.ndarray:
    dtype, *shape = said.split()
    return np.fromfile(folder / f"{name}.bin", FORMATS[dtype]).reshape(list(map(int, shape)))


RIGHT: dict[str, Any] = {
    "order": 1,  # -1 adds keys from the last to the first
    "scale": 1.0,
    "by_remainder": False,  # whether a head takes the kv head of its remainder
    "shift": 0,  # keys by which the causal mask is late
    "left": 0,  # keys by which a window is short
    "hides": lambda keys, seqlen_k: keys < 0,
    "base": np.e,
    "sums": np.float32,
    "weights": np.float32,
    "drops_nan": False,
    "adds_mask": False,
}


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, case: Any, **wrong: Any) -> Heads:
    """Attention of one sequence, one row after the other; ``wrong`` are other values of :data:`RIGHT`."""
    does = SimpleNamespace(**RIGHT | wrong)
    nheads, seqlen_q, _ = q.shape
    nheads_kv, seqlen_k, head_dim = v.shape
    out = np.zeros((nheads, seqlen_q, head_dim), np.float32)
    lse = np.full((nheads, seqlen_q), -np.inf, np.float32)
    keys = np.arange(seqlen_k)[:: does.order]
    heads = np.arange(nheads)
    of_kv = heads % nheads_kv if does.by_remainder else heads * nheads_kv // nheads
    for row in range(seqlen_q):
        middle = row + seqlen_k - seqlen_q
        before, behind = case.get("window", (-1, -1))
        sees = np.ones(seqlen_k, bool)
        sees &= (keys <= middle + does.shift) | (not case["causal"])
        sees &= (keys >= middle - before + does.left) | (before < 0)
        sees &= (keys <= middle + behind) | (behind < 0)
        sees &= ~does.hides(keys, seqlen_k)
        if not sees.any():
            continue
        chosen = keys if does.adds_mask else keys[sees]
        s = np.einsum("hd,hjd->hj", q[:, row], k[of_kv][:, chosen]) * np.float32(case["softmax_scale"] * does.scale)
        s = np.where(sees, s, s - np.float32(1e30)) if does.adds_mask else s
        largest = s.max(axis=1, keepdims=True)
        p = np.exp(s - largest)
        values = v[of_kv][:, chosen]
        values = np.nan_to_num(values) if does.drops_nan else values
        total = p.sum(axis=1)
        p = p.astype(does.weights).astype(np.float32)
        if does.sums is np.float32:
            out[:, row] = np.einsum("hj,hjd->hd", p, values) / total[:, None]
        else:
            added = np.zeros((nheads, head_dim), does.sums)
            for j in range(len(chosen)):
                added = added + (p[:, j, None] * values[:, j]).astype(does.sums)
            out[:, row] = added.astype(np.float32) / total[:, None]
        lse[:, row] = (largest[:, 0] + np.log(total)) / np.log(does.base)
    return out, lse


def fill(folder: Path, program: Program = attention, wrong: Callable[[Any, Any], np.ndarray] | None = None) -> None:
    """Fill in every case; ``wrong(out, before)`` changes an output, given the one of its shape before."""
    before: dict[Any, np.ndarray] = {}
    with np.errstate(all="ignore"):
        for line in (folder / "cases.jsonl").read_text().splitlines():
            case = json.loads(line)
            own = folder / case["case"]
            q, k, v = (read(own, name, case[name]).astype(np.float32).swapaxes(1, 2) for name in "qkv")
            parts = [program(*each, case) for each in zip(q, k, v, strict=True)]
            out = np.stack([each for each, _ in parts]).swapaxes(1, 2).astype(FORMATS[case["out"].split()[0]])
            lse = np.stack([each for _, each in parts])
            written = out if wrong is None else wrong(out, before.get(out.shape, out))
            before[out.shape] = out
            written.tofile(own / "out.bin")
            lse.tofile(own / "lse.bin")
