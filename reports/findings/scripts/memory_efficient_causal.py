"""memory-efficient-attention-pytorch, a causal mask and fewer queries than keys: its three functions disagree.

The plain one aligns the mask at the last query and key, the memory-efficient one at the first, and the flash one as
far before the first, as the sign of its offset is wrong: rows without a key get the mean of V.
Expected: one mask in all three, as each stands for another. Exit code 1 while they differ.
"""

import sys
from importlib.metadata import version

import torch
from memory_efficient_attention_pytorch.flash_attention import FlashAttentionFunction
from memory_efficient_attention_pytorch.memory_efficient_attention import attention, memory_efficient_attention

queries, keys = 3, 5
q, k = torch.zeros(1, 1, queries, 64), torch.zeros(1, 1, keys, 64)
v = torch.arange(keys, dtype=torch.float32)[:, None].expand(1, 1, keys, 64)  # a row's mean says how many keys it saw
functions = {
    "attention": lambda: attention(q, k, v, causal=True),
    "memory_efficient_attention": lambda: memory_efficient_attention(q, k, v, causal=True),
    "FlashAttentionFunction": lambda: FlashAttentionFunction.apply(q, k, v, None, True, 512, 1024),
}
rows = {name: call()[0, 0, :, 0].tolist() for name, call in functions.items()}
package = "memory-efficient-attention-pytorch"
print(f"{package} {version(package)}, {queries} queries, {keys} keys")
for name, row in rows.items():
    print(f"{name}: {[round(x, 4) for x in row]}")
sys.exit(any(abs(a - b) > 1e-4 for row in rows.values() for a, b in zip(row, rows["attention"], strict=True)))
