"""FlashAttention-2 of torch, one query over keys in splits: lse is finite where a key is NaN and the output is NaN.

The lse of a part with the NaN becomes that of an empty part. Expected: an lse of NaN. Exit code 1 while it is finite.
"""

import hashlib
import sys
from pathlib import Path

import torch

torch.manual_seed(0)
q, k, v = (torch.randn(1, 1, n, 128, device="cuda").half() for n in (1, 129, 129))
found = {}
for value in (0.0, torch.nan):
    k[0, 0, 0, 0] = value
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False)
    found[value] = (float(out[0, 0, 0, 0]), float(lse[0, 0, 0]))
is_right = all(out == out or lse != lse for out, lse in found.values())
library = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
digest = hashlib.sha256(library.read_bytes()).hexdigest()
print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {library.name} sha256 {digest}")
print(f"{'mended' if is_right else 'shows'}: an output and lse by one element of one of 129 keys: {found}")
sys.exit(not is_right)
