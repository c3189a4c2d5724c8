"""torch, SDPA on a CPU in 16 bits: a score of +Inf gives 0 over 16 keys and more, and NaN over fewer.

Expected: NaN, whatever the number of keys. Exit code 1 while that is not so.
"""

import sys

import torch
from torch.nn.functional import scaled_dot_product_attention

query = torch.ones(1, 1, 1, 64, dtype=torch.float16)
found = {}
for keys in (15, 16):
    ones = torch.ones(1, 1, keys, 64, dtype=torch.float16)
    key = ones.clone()
    key[0, 0, 0, 0] = torch.inf
    mask = torch.ones(1, keys, dtype=torch.bool)
    for name, given in (("", None), (" with a mask", mask)):
        out = scaled_dot_product_attention(query, key, ones, attn_mask=given)
        found[f"{keys} keys{name}"] = float(out[0, 0, 0, 0])
print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}: {found}")
sys.exit(any(value == value for value in found.values()))
