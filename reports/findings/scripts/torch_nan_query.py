"""torch, SDPA on a CPU: a query whose scores are all NaN gives 0 over fewer than 16 keys, and NaN over 16.

Expected: NaN, whatever the number of keys. Exit code 1 while that is not so.
"""

import sys

import torch
from torch.nn.functional import scaled_dot_product_attention

query = torch.full((1, 1, 1, 64), torch.nan, dtype=torch.float16)
found = {}
for keys in (15, 16):
    ones = torch.ones(1, 1, keys, 64, dtype=torch.float16)
    found[keys] = float(scaled_dot_product_attention(query, ones, ones)[0, 0, 0, 0])
print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}: {found}")
sys.exit(any(value == value for value in found.values()))
