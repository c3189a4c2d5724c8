"""FlashAttention-3: one query of a causal call has other bits than as the last row of several.

One query alone runs another kernel, with another tile of keys. Expected: the same bits, or a sentence of the
documentation. Exit code 1 while the bits differ. An argument names the library; without one it is fa3-fwd's.
"""

import hashlib
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

library = sys.argv[1] if sys.argv[1:] else find_spec("fa3_fwd._C").origin
torch.ops.load_library(library)
torch.manual_seed(0)
q, k, v = (torch.randn(1, n, 8, 128, device="cuda").bfloat16() for n in (4, 2048, 2048))
of_four = torch.ops.fa3_fwd.fwd(q, k, v, is_causal=True, num_splits=1)
of_one = torch.ops.fa3_fwd.fwd(q[:, 3:].contiguous(), k, v, is_causal=True, num_splits=1)
differ = int((of_four[0][:, 3] != of_one[0][:, 0]).sum())
lse_differ = int((of_four[1][:, :, 3] != of_one[1][:, :, 0]).sum())
is_right = differ + lse_differ == 0
digest = hashlib.sha256(Path(library).read_bytes()).hexdigest()
print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {Path(library).name} sha256 {digest}")
print(f"{'mended' if is_right else 'shows'}: {differ} of 1024 outputs and {lse_differ} of 8 lse of the last row differ")
sys.exit(not is_right)
