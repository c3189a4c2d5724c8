"""Measured log-probabilities over predicted ones, of small models with random weights and several architectures.

``python -m fa3_reports.measured.predicted_logprobs FILE.csv`` writes a row for each model, format and kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from fa3_reference.problem import Dtype
from fa3verify import files
from fa3verify.models.logprobs import LogprobsRun, logprobs

SIZES = {
    **{"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "initializer_range": 0.08},
}
KINDS: dict[str, tuple[str, str, dict[str, int]]] = {  # Transformers' names of configuration and model, and own sizes
    "llama": ("Llama", "Llama", {}),
    "norms of Q and K": ("Qwen3", "Qwen3", {}),
    "windows and softcap": ("Gemma2", "Gemma2", {"sliding_window": 32, "query_pre_attn_scalar": 64}),
    "windows": ("Gemma3Text", "Gemma3", {"sliding_window": 32}),
    "head_dim 192": ("Llama", "Llama", {"head_dim": 192}),
}
KERNELS: dict[Dtype, tuple[str, ...]] = {
    "fp32": ("twin.bf16", "twin.fp16", "twin.e4m3"),
    "bf16": ("eager", "sdpa", "twin.flash3.bf16"),
    "fp16": ("eager", "twin.fp16", "twin.flash3.fp16"),
}
COLUMNS = ("model", "seed", "rest", "kernel", "measured_nats", "predicted_nats", "ratio", "calls", "wrong")


def made(kind: str = "llama", seed: int = 0, **sizes: int) -> Any:
    """Return a model with random weights of bf16."""
    config, model, own = KINDS[kind]
    torch.manual_seed(seed)
    record = getattr(transformers, f"{config}Config")(**SIZES | own | sizes)
    return getattr(transformers, f"{model}ForCausalLM")(record).to(torch.bfloat16).eval()


def text(tokens: int = 160, seed: int = 1) -> torch.Tensor:
    """Return random token ids."""
    return torch.randint(0, SIZES["vocab_size"], (tokens,), generator=torch.Generator().manual_seed(seed))


def run(kind: str, rest: Dtype, seed: int = 0) -> LogprobsRun:
    """Measure all kernels of a format in a model; Gemma 2 has no ``sdpa``."""
    kernels = [name for name in KERNELS[rest] if (kind, name) != ("windows and softcap", "sdpa")]
    return logprobs(made(kind, seed), [text(seed=seed + 1), text(seed=seed + 101)], kernels, rest)


def rows(seeds: Sequence[int] = (0, 1)) -> Iterator[tuple[object, ...]]:
    """Yield the rows of the table."""
    for kind in KINDS:
        for seed in seeds:
            for rest in KERNELS:
                for found in run(kind, rest, seed).kernels:
                    figures = (found.found.rms, found.predicted, found.found.rms / found.predicted)
                    said = (f"{x:.4g}" for x in figures)
                    yield kind, seed, rest, found.name, *said, found.calls, len(found.wrong)


def main(file: str) -> None:
    """Write the table, and print its range."""
    table = list(rows())
    files.write_text(Path(file), files.csv_text(COLUMNS, table))
    ratios = sorted(float(str(row[6])) for row in table)
    print(f"{len(ratios)} runs, measured over predicted {ratios[0]} to {ratios[-1]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
