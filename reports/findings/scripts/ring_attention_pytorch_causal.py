"""ring-attention-pytorch, causal, fewer queries than keys, and more keys than a bucket of 1,024: the last are hidden.

Within a bucket the mask is aligned at the last query and key; buckets are compared as if both began together.
Expected: the last query sees every key, as it does up to 1,024. Exit code 1 while it does not.
"""

import sys
from importlib.metadata import version

import torch
from ring_attention_pytorch.ring_flash_attention import ring_flash_attn


def seen(keys: int) -> int:
    """Return how many keys the last query sees: all have one score, and the last one has V = 1."""
    q, k, v = (torch.zeros(1, n, 1, 64) for n in (1, keys, keys))
    v[:, -1] = 1.0
    weight = float(ring_flash_attn(q, k, v, causal=True)[0, 0, 0, 0])
    return round(1 / weight) if weight else 0


found = {keys: seen(keys) for keys in (1000, 1024, 1030, 4000)}
print(f"ring-attention-pytorch {version('ring-attention-pytorch')}: one query behind all keys, causal")
for keys, count in found.items():
    print(f"{keys:,} keys: {f'it sees {count:,}' if count else 'it does not see the last one'}")
sys.exit(any(count != keys for keys, count in found.items()))
