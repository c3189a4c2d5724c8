"""Train a small language model with our attention, with official FlashAttention-3's and with torch's MATH.

    python reports/h200/training/train.py OUT

A byte-level transformer of 2 layers (model width 256, 4 heads of 64, grouped in pairs) reads this project's own pages;
200 steps of AdamW in bf16 from one seed. Writes OUT/losses.csv, one column per attention, and
OUT/training_provenance.json with the launches and the hash of the weights at the end: the deterministic mode runs
twice, and must end with the same bits.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from fa3_kernels.api import flash_attn_func
from fa3_kernels.audit.evidence import evidence_facts
from fa3_reference.problem import AttentionProblem
from fa3verify.known import launches

STEPS, BATCH, SEQLEN, WIDTH, HEADS, KV_HEADS = 200, 16, 512, 256, 4, 2
ROOT = Path(__file__).parents[3]
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def text() -> torch.Tensor:
    """Bytes of the project's pages."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "reference").rglob("*.md"))]
    return torch.frombuffer(bytearray(b"\n".join(p.read_bytes() for p in pages)), dtype=torch.uint8).long()


class _Flash3(torch.autograd.Function):
    """Official FlashAttention-3, forward and backward."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        batch, seqlen, heads, dim = q.shape
        ctx.problem = AttentionProblem(batch, heads, k.shape[2], seqlen, seqlen, dim, causal=True, dtype="bf16")
        found = launches.loaded("flash3.dew")(ctx.problem, launches.Given(q, k, v), {})()
        ctx.save_for_backward(q, k, v, found.out, found.lse)
        return found.out

    @staticmethod
    def backward(ctx: Any, *dout: torch.Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        given = launches.GivenBackward(q, k, v, dout[0].contiguous(), out, lse)
        return tuple(launches.loaded("flash3.dew", "backward")(ctx.problem, given, {})())


def _math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel([SDPBackend.MATH]):
        heads = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)


def _ours(deterministic: bool) -> Attention:
    return lambda q, k, v: flash_attn_func(q, k, v, causal=True, deterministic=deterministic)  # type: ignore


ATTENTION: dict[str, Attention] = {
    "gluon": _ours(False),
    "gluon.deterministic": _ours(True),
    "gluon.deterministic again": _ours(True),
    "flash3.dew": _Flash3.apply,
    "torch.math": _math,
}


class Layer(nn.Module):
    """Attention and a feed-forward network, each behind a normalisation."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention, dim = attention, WIDTH // HEADS
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, WIDTH + 2 * KV_HEADS * dim, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seqlen, _ = x.shape
        qkv = self.qkv(self.first(x)).unflatten(-1, (HEADS + 2 * KV_HEADS, WIDTH // HEADS))
        q, k, v = (y.contiguous() for y in qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=2))
        x = x + self.out(self.attention(q, k, v).reshape(batch, seqlen, WIDTH))
        return x + self.feed(self.second(x))


class Model(nn.Module):
    """Two layers over bytes."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(SEQLEN, WIDTH)
        self.layers = nn.Sequential(Layer(attention), Layer(attention))
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        return self.head(self.layers(self.bytes(x) + self.positions(positions)))


def train(attention: Attention, data: torch.Tensor) -> tuple[list[float], str]:
    """Losses of every step, and the hash of the weights at the end."""
    torch.manual_seed(0)
    model = Model(attention).to("cuda", torch.bfloat16)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(STEPS):
        starts = torch.randint(len(data) - SEQLEN - 1, (BATCH,), generator=draw)
        rows = torch.stack([data[s : s + SEQLEN + 1] for s in starts.tolist()]).cuda()
        loss = cross_entropy(model(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss))
    found = hashlib.sha256()
    for weight in model.parameters():
        found.update(weight.detach().view(torch.int16).cpu().numpy().tobytes())
    return losses, found.hexdigest()


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    torch.use_deterministic_algorithms(True)
    data = text()
    found = {name: train(attention, data) for name, attention in ATTENTION.items()}
    with (out / "losses.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", *found])
        writer.writerows([i, *(f"{losses[i]:.6f}" for losses, _ in found.values())] for i in range(STEPS))
    facts: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "steps": STEPS}
    facts |= evidence_facts("forward+backward")
    facts["weights_sha256"] = {name: digest for name, (_, digest) in found.items()}
    facts["mean_loss_of_the_last_20"] = {name: sum(x[-20:]) / 20 for name, (x, _) in found.items()}
    (out / "training_provenance.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
