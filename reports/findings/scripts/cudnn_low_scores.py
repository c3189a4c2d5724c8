"""cuDNN by torch, attention's backward: gradients are NaN or Inf where every score is far below zero.

From an lse of about -88.7 on exp(-lse) overflows binary32. Expected: finite gradients, as the softmax does not change
when one number is added to every score. Exit code 1 while that is not so.
"""

import hashlib
import sys
from pathlib import Path

import torch

ATEN = torch.ops.aten


def not_finite(queries: int, keys: int, head_dim: int, shift: float) -> tuple[float, list[int]]:
    """The mean lse, and elements of dQ, dK and dV that are NaN or infinite, where scores are about ``-shift``."""
    by = (shift / head_dim**0.5) ** 0.5
    drawn = ((queries, by), (keys, -by), (keys, 0), (queries, 0))
    q, k, v, dout = ((torch.randn(1, 2, n, head_dim, device="cuda") + mean).bfloat16() for n, mean in drawn)
    out, lse, *rest = ATEN._scaled_dot_product_cudnn_attention(q, k, v, None, True)
    found = ATEN._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse, *rest[4:6], None, *rest[:4], 0.0, False
    )
    return round(float(lse.mean()), 1), [int((~x.isfinite()).sum()) for x in found]


torch.manual_seed(0)
calls = ((64, 64, 64, 0), (64, 64, 64, 100), (1, 64, 64, 100), (1, 128, 64, 100), (5, 192, 192, 50000))
found = {call: not_finite(*call) for call in calls}
mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudnn_engines" in line}
digests = [f"{Path(x).name} sha256 {hashlib.sha256(Path(x).read_bytes()).hexdigest()}" for x in sorted(mapped)]
print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, cuDNN {torch.backends.cudnn.version()}", *digests)
is_right = not any(sum(counts) for _, counts in found.values())
print(f"{'mended' if is_right else 'shows'}: mean lse, and what is not finite in dQ, dK and dV,")
print(f"by queries, keys, head_dim and how far below 0 the scores are: {found}")
sys.exit(not is_right)
