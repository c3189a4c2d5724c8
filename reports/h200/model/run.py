"""Run one language model with our attention, with official FlashAttention-3's and with torch's.

    python reports/h200/model/run.py OUT

A Llama of 1.1 billion random weights in bf16 (22 layers, 32 heads of 64 on 4 of keys) reads 4 texts of 4096 random
tokens. Writes OUT/model.json and OUT/README.md: how far the logits are from those of the same weights with attention
in float32, whether two runs repeat, tokens per second of reading (prefill, median of 7) and of writing (64 tokens).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask

from fa3_kernels.audit.evidence import evidence_sha256
from fa3_kernels.frameworks import register_with_transformers
from fa3_reference.problem import AttentionProblem
from fa3verify.known import launches

_BEGAN = time.perf_counter()
BATCH, SEQLEN, NEW = 4, 4096, 64
LAST = 256  # tokens of each text whose logits are compared
TITLES = {"fa3verify": "ours", "official": "FlashAttention-3", "sdpa": "torch's"}
LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
}


def flash3(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> tuple[Any, None]:
    """Official FlashAttention-3 as a model's attention; unpadded causal batches."""
    assert mask is None
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    batch, rows, heads, dim = q.shape
    problem = AttentionProblem(
        batch, heads, k.shape[2], rows, k.shape[1], dim, causal=True, dtype="bf16", softmax_scale=scaling
    )
    return launches.loaded("flash3")(problem, launches.Given(q, k, v), {})().out, None


def in_float32(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> tuple[Any, None]:
    """Attention of the same operands, computed in float32."""
    with sdpa_kernel([SDPBackend.MATH]):
        out = [
            torch.nn.functional.scaled_dot_product_attention(
                *(x[None].float() for x in each), is_causal=True, scale=scaling, enable_gqa=True
            )
            for each in zip(query, key, value, strict=True)
        ]
    return torch.cat(out).to(query.dtype).transpose(1, 2), None


def say(what: str) -> None:
    """Print what is done, and after how many seconds."""
    print(f"{time.perf_counter() - _BEGAN:5.1f} s  {what}", flush=True)


def seconds(run: Any) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(model: Any, ids: torch.Tensor, wanted: torch.Tensor | None) -> tuple[dict[str, Any], torch.Tensor]:
    """Figures of one attention, and its logits of the last tokens of each text."""

    def read() -> torch.Tensor:
        return model(ids, use_cache=False, logits_to_keep=LAST).logits.float()

    logits = read()
    facts: dict[str, Any] = {"repeats": torch.equal(logits, read())}
    if wanted is not None:
        difference = (logits - wanted).double()
        facts["logits_rms_difference"] = float(
            difference.square().mean().sqrt() / wanted.double().square().mean().sqrt()
        )
        facts["logits_largest_difference"] = float(difference.abs().max())
        facts["same_first_choice"] = float((logits.argmax(-1) == wanted.argmax(-1)).float().mean())
        facts["reading_tokens_per_s"] = ids.numel() / statistics.median(seconds(read) for _ in range(7))

        def write() -> None:
            model.generate(ids[:, :1024], max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)

        write()
        facts["writing_tokens_per_s"] = BATCH * NEW / statistics.median(seconds(write) for _ in range(3))
    return facts, logits


def page(facts: dict[str, Any]) -> str:
    """The figures as a page in Markdown."""
    versions = f"{facts['gpu']}, torch {facts['torch']}, Transformers {facts['transformers']}"
    rows = [
        f"| {title} | {x['logits_rms_difference']:.4f} | {x['logits_largest_difference']:.3f} "
        f"| {100 * x['same_first_choice']:.1f} % | {'yes' if x['repeats'] else 'no'} "
        f"| {x['reading_tokens_per_s']:,.0f} | {x['writing_tokens_per_s']:.0f} |"
        for title, x in ((TITLES[name], facts[name]) for name in TITLES)
    ]
    return f"""# A language model on these kernels

A Llama of {facts["parameters"] / 1e9:.1f} billion random weights in bf16 reads {facts["batch"]} texts of {facts["seqlen"]} tokens and writes {NEW} after 1024.
{versions}; official FlashAttention-3 is {facts["flash3"]["version"]} (`{facts["flash3"]["sha256"][:12]}`), ours are the launches `{facts["sha256"][:12]}`.
Data: [model.json](model.json); made by [run.py](run.py).

| attention | rel. RMS distance of logits | largest | same first choice | repeats | reading, tokens/s | writing, tokens/s |
|---|---:|---:|---:|---|---:|---:|
{chr(10).join(rows)}

The distance is from the logits of the same weights with attention in float32, over {facts["batch"] * LAST:,} positions. The weights are random, so that
the first choice often wins by less than a rounding of bf16. Writing waits for the host: Transformers, and for FlashAttention-3
the adapter that verifies it, which describes every call anew.
"""  # noqa: E501 (lines of the page)


@torch.inference_mode()
def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    say("imported")
    register_with_transformers()
    for name, function in (("official", flash3), ("float32", in_float32)):
        transformers.AttentionInterface.register(name, function)
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, flash_attention_mask)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**LLAMA, pad_token_id=0, attn_implementation="float32")
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    ids = torch.randint(1, LLAMA["vocab_size"], (BATCH, SEQLEN), device="cuda")
    say("weights drawn")
    _, wanted = measure(model, ids, None)
    say("read with attention in float32")
    facts: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": LLAMA,
        "batch": BATCH,
        "seqlen": SEQLEN,
        "parameters": sum(x.numel() for x in model.parameters()),
        "sha256": evidence_sha256("forward"),
        "flash3": launches.identity("flash3"),
    }
    for name in TITLES:
        model.set_attn_implementation(name)
        facts[name], _ = measure(model, ids, wanted)
        say(f"{name} {facts[name]}")
        (out / "model.json").write_text(json.dumps(facts, indent=1) + "\n")
    (out / "README.md").write_text(page(facts))


if __name__ == "__main__":
    main()
