"""FlashAttention-2 of torch, one query over many keys: weights of its splits do not sum to 1 where scores are large.

A part of the keys is weighed by exp(lse_i - lse), and lse is rounded in binary32. V is 1 here, so that every output is
1. Expected: 1, as of weights that are divided by their sum. Exit code 1 while that is not so.
"""

import hashlib
import sys
from pathlib import Path

import torch

torch.manual_seed(0)
found = {}
for mean in (1, 38, 60):
    q, k = ((torch.rand(1, 8, n, 128, device="cuda") + mean).half() for n in (1, 1024))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, torch.ones_like(k), 0.0, False, False)
    found[round(float(lse.mean()))] = (float(out.min()), float(out.max()))
is_right = all(ends == (1, 1) for ends in found.values())
library = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
digest = hashlib.sha256(library.read_bytes()).hexdigest()
print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {library.name} sha256 {digest}")
print(f"{'mended' if is_right else 'shows'}: least and largest output of V = 1 by mean lse: {found}")
sys.exit(not is_right)
