"""EFFICIENT of torch, a row whose only key has a score of minus infinity: lse is 0, which is that of a sum of 1.

Whoever merges the row with other keys by lse, as ring attention does, gives it the weight of exp(0). Expected: an lse
of -inf, or NaN. Exit code 1 while it is finite.
"""

import hashlib
import math
import sys
from pathlib import Path

import torch

found = {}
for score in (-1000.0, -math.inf):
    q = torch.ones(1, 1, 1, 64, dtype=torch.float16, device="cuda")
    k = torch.zeros_like(q)
    k[..., 0] = score * 8  # the scale is 1 / 8
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, q, None, True, 0.0, False)
    found[score] = (float(out[0, 0, 0, 0]), float(lse.flatten()[0]))
is_right = not math.isfinite(found[-math.inf][1])
library = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
digest = hashlib.sha256(library.read_bytes()).hexdigest()
print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {library.name} sha256 {digest}")
print(f"{'mended' if is_right else 'shows'}: an output and lse by the score of the only key: {found}")
sys.exit(not is_right)
