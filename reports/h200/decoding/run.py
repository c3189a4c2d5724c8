"""Decode with a language model whose keys lie in pages, and with the same model whose keys lie in one piece.

    python reports/h200/decoding/run.py OUT

A Llama of 1.1 billion random weights in bf16 (22 layers, 32 heads of 64 on 4 of keys) reads 4 texts of 65 to 1500
random tokens and writes 256 tokens behind each. One run calls ``flash_attn_with_kvcache``, which rotates Q and the new
keys, appends them to pages in random order, and attends to them; its steps are one CUDA graph. The other rotates in
torch and concatenates the keys of every text for ``flash_attn_varlen_func``, or for torch's attention. Writes
OUT/decoding.json.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from fa3_kernels.api import flash_attn_varlen_func, flash_attn_with_kvcache
from fa3_kernels.audit.evidence import evidence_facts

LAYERS, HIDDEN, INNER, VOCABULARY = 22, 2048, 5632, 32000
HEADS, HEADS_KV, HEAD_DIM = 32, 4, 64
LENGTHS, NEW, PAGE = (1024, 777, 1500, 65), 256, 16
ENTRIES = -(-(max(LENGTHS) + NEW) // PAGE)
Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Model:
    """A Llama without its attention; hidden states are (tokens, HIDDEN), of all texts one after the other."""

    def __init__(self) -> None:
        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * shape[-1] ** -0.5

        rows = (HEADS + 2 * HEADS_KV) * HEAD_DIM
        self.embedding = drawn(VOCABULARY, HIDDEN) * HIDDEN**0.5
        self.head = drawn(VOCABULARY, HIDDEN)
        self.layers = [
            (drawn(rows, HIDDEN), drawn(HIDDEN, HEADS * HEAD_DIM), drawn(2 * INNER, HIDDEN), drawn(HIDDEN, INNER))
            for _ in range(LAYERS)
        ]

    def hidden(self, tokens: torch.Tensor, attention: Attention) -> torch.Tensor:
        x = self.embedding[tokens]
        for i, (qkv, out, wide, narrow) in enumerate(self.layers):
            projected = F.linear(F.rms_norm(x, (HIDDEN,)), qkv).view(-1, HEADS + 2 * HEADS_KV, HEAD_DIM)
            q, k, v = projected.split((HEADS, HEADS_KV, HEADS_KV), dim=1)
            x = x + F.linear(attention(i, q, k, v).flatten(1), out)
            gate, up = F.linear(F.rms_norm(x, (HIDDEN,)), wide).chunk(2, dim=1)
            x = x + F.linear(F.silu(gate) * up, narrow)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(F.rms_norm(hidden, (HIDDEN,)), self.head).float()


def angles() -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of every position, bf16 (positions, HEAD_DIM / 2)."""
    frequencies = 10000 ** -(torch.arange(0, HEAD_DIM, 2, device="cuda").float() / HEAD_DIM)
    turns = torch.arange(ENTRIES * PAGE, device="cuda").float()[:, None] * frequencies
    return turns.cos().bfloat16(), turns.sin().bfloat16()


def rotated(x: torch.Tensor, positions: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate channels i and i + HEAD_DIM / 2 of (tokens, heads, HEAD_DIM), every product and sum rounded to fp32."""
    cos, sin = (table[positions][:, None].float() for table in tables)
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


def starts(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


class InPages:
    """Attention of a model whose keys lie in pages; lengths are on the GPU alone."""

    def __init__(self, **options: Any) -> None:
        shape = (LAYERS, len(LENGTHS) * ENTRIES, PAGE, HEADS_KV, HEAD_DIM)
        self.k, self.v = (torch.full(shape, float("nan"), device="cuda", dtype=torch.bfloat16) for _ in "kv")
        self.table = torch.randperm(shape[1], device="cuda").int().view(len(LENGTHS), ENTRIES)
        self.used = torch.zeros(len(LENGTHS), device="cuda", dtype=torch.int32)
        self.cos, self.sin = angles()
        self.options = options
        self.cu_new, self.longest = starts(*LENGTHS), max(LENGTHS)

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attn_with_kvcache(
            q,
            self.k[layer],
            self.v[layer],
            k.contiguous(),
            v.contiguous(),
            rotary_cos=self.cos,
            rotary_sin=self.sin,
            cache_seqlens=self.used,
            page_table=self.table,
            cu_seqlens_q=self.cu_new,
            cu_seqlens_k_new=self.cu_new,
            max_seqlen_q=self.longest,
            causal=True,
            rotary_interleaved=False,
            **self.options,
        )

    def advance(self, lengths: tuple[int, ...]) -> None:
        """What comes next are single tokens, behind as many as ``lengths`` says."""
        self.used += torch.tensor(lengths, device="cuda", dtype=torch.int32)
        self.cu_new, self.longest = starts(*(1,) * len(LENGTHS)), 1


class InOnePiece:
    """Attention of a model that keeps the keys of every text in a tensor of its own."""

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        empty = torch.empty(0, HEADS_KV, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        self.keys = [[(empty, empty)] * len(LENGTHS) for _ in range(LAYERS)]
        self.new, self.used = LENGTHS, (0,) * len(LENGTHS)
        self.tables, self.attend = angles(), attend

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        positions = torch.cat([torch.arange(n, n + m, device="cuda") for n, m in zip(self.used, self.new)])
        q, k = (rotated(x, positions, self.tables) for x in (q, k))
        new = zip(k.split(self.new), v.split(self.new))
        pairs = zip(self.keys[layer], new)
        self.keys[layer] = [(torch.cat([k0, k1]), torch.cat([v0, v1])) for (k0, v0), (k1, v1) in pairs]
        return self.attend(q, self.keys[layer], self.new)

    def advance(self, lengths: tuple[int, ...]) -> None:
        self.used = tuple(n + m for n, m in zip(self.used, lengths))
        self.new = (1,) * len(LENGTHS)


def packed(q: torch.Tensor, keys: list[tuple[torch.Tensor, torch.Tensor]], new: tuple[int, ...]) -> torch.Tensor:
    """Our packed sequences."""
    k, v = (torch.cat(x) for x in zip(*keys))
    lengths = [len(k) for k, _ in keys]
    given = (starts(*new), starts(*lengths), max(new), max(lengths))
    return flash_attn_varlen_func(q, k, v, *given, causal=True, num_splits=1)


def torchs(q: torch.Tensor, keys: list[tuple[torch.Tensor, torch.Tensor]], new: tuple[int, ...]) -> torch.Tensor:
    """Torch's own attention, a text at a time."""
    out = []
    for each, (k, v) in zip(q.split(new), keys):
        given = (x.transpose(0, 1)[None] for x in (each, k, v))
        found = F.scaled_dot_product_attention(*given, is_causal=len(each) > 1, enable_gqa=True)
        out.append(found[0].transpose(0, 1))
    return torch.cat(out)


def write(model: Model, prompts: torch.Tensor, attention: Any) -> dict[str, Any]:
    """Read the prompts and write greedily; the logits of every step, (NEW, texts, VOCABULARY), and seconds a step."""
    last = starts(*LENGTHS)[1:] - 1
    logits = model.logits(model.hidden(prompts, attention)[last])
    attention.advance(LENGTHS)
    tokens = logits.argmax(-1)
    found = [logits]
    is_captured = isinstance(attention, InPages)

    def step() -> torch.Tensor:
        logits = model.logits(model.hidden(tokens, attention))
        tokens.copy_(logits.argmax(-1))
        if is_captured:
            attention.used += 1
        else:
            attention.advance((1,) * len(LENGTHS))
        return logits

    took = []
    graph, of_graph = None, None
    for i in range(NEW - 1):
        if is_captured and i == 1:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                of_graph = step()
        torch.cuda.synchronize()
        start = time.perf_counter()
        if graph is None:
            logits = step()
        else:
            graph.replay()
            logits = of_graph
        torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
        found.append(logits.clone())
    return {"logits": torch.stack(found), "seconds": sorted(took)[len(took) // 2]}


def page(facts: dict[str, Any], runs: list[str]) -> str:
    """The figures as a page in Markdown."""
    total = len(LENGTHS) * NEW
    rows = [
        f"| {name} | {facts[name]['same_tokens']:,} of {total:,} | {'yes' if facts[name]['same_bits'] else 'no'} "
        f"| {facts[name]['largest_distance_of_logits']:.3f} | {facts[name]['ms_a_step']:.2f} |"
        for name in runs
    ]
    return f"""# A language model decodes over pages

A Llama of 1.1 billion random weights in bf16 reads {len(LENGTHS)} texts of {min(LENGTHS)} to {max(LENGTHS):,} tokens and writes {NEW} behind each, greedily.
{facts["gpu"]}, torch {facts["torch"]}; the launches are `{facts["launches_sha256"][:12]}`. Data: [decoding.json](decoding.json); made by [run.py](run.py).

`flash_attn_with_kvcache` rotates Q and the new keys, appends them to pages of {PAGE} keys in random order and attends to them; a step is one
CUDA graph. In one piece, torch rotates and concatenates. With one part of the keys every logit of every step has the same bits. Parts are
merged in another order, so that their logits differ by roundings; the weights are random, the first choice often wins by less than
that, and behind the first other token a text goes on with other tokens. Distances are of the steps up to there.

| keys | same tokens as ours in one piece | same bits of all logits | largest distance of logits | ms a step |
|---|---:|---|---:|---:|
{chr(10).join(rows)}
"""  # noqa: E501 (lines of the page)


@torch.inference_mode()
def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = Model()
    prompts = torch.randint(1, VOCABULARY, (sum(LENGTHS),), device="cuda")
    runs = {
        "pages, one part": lambda: InPages(num_splits=1),
        "pages, by default": lambda: InPages(),
        "one piece, ours": lambda: InOnePiece(packed),
        "one piece, torch's": lambda: InOnePiece(torchs),
    }
    found = {name: write(model, prompts, make()) for name, make in runs.items()}
    wanted = found["one piece, ours"]["logits"]
    facts: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        **evidence_facts("paged"),
        "lengths": LENGTHS,
        "tokens": NEW,
        "page_size": PAGE,
    }
    for name, x in found.items():
        same = x["logits"].argmax(-1) == wanted.argmax(-1)
        # A text whose token differs goes on with another text: only steps up to there can be compared.
        steps = [int(column.logical_not().int().argmax()) if not column.all() else NEW for column in same.T]
        together = torch.arange(NEW, device="cuda")[:, None] <= torch.tensor(steps, device="cuda")
        distance = (x["logits"] - wanted).abs().amax(-1)[together]
        facts[name] = {
            "same_bits": bool(torch.equal(x["logits"], wanted)),
            "same_tokens": int(same.sum()),
            "first_other_token": steps,
            "largest_distance_of_logits": float(distance.max()),
            "ms_a_step": 1e3 * x["seconds"],
            "finite": bool(x["logits"].isfinite().all()),
        }
        print(name, facts[name], flush=True)
    (out / "decoding.json").write_text(json.dumps(facts, indent=1) + "\n")
    (out / "README.md").write_text(page(facts, list(runs)))


if __name__ == "__main__":
    main()
