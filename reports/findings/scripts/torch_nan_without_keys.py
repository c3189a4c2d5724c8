"""torch, SDPA without keys: one NaN in one query makes the output of every query NaN; so does finite Q of 6e4.

Expected: 0 for every row, as without the NaN, or NaN for the row that has it. Exit code 1 while that is not so.
"""

import sys

import torch
from torch.nn.functional import scaled_dot_product_attention

keys = torch.ones(1, 1, 0, 64, dtype=torch.float16)
queries = {name: torch.ones(1, 1, 3, 64, dtype=torch.float16) for name in ("ones", "one NaN", "6e4")}
queries["one NaN"][0, 0, 1, 5] = torch.nan
queries["6e4"] *= 6e4
found = {name: scaled_dot_product_attention(q, keys, keys)[0, 0, :, 0].tolist() for name, q in queries.items()}
print(f"torch {torch.__version__}: {found}")
others = found["ones"] + found["6e4"] + found["one NaN"][::2]
sys.exit(any(value != 0 for value in others))
