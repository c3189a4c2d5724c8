"""FlashAttention-3: lse is +inf where no sequence of a call has a key.

A sequence without a key has -inf where another one of the call has some. Expected: -inf, the log of an empty sum.
Exit code 1 while that is not so. An argument names the library; without one it is fa3-fwd's.
"""

import hashlib
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

library = sys.argv[1] if sys.argv[1:] else find_spec("fa3_fwd._C").origin
torch.ops.load_library(library)
found = {}
for keys in (1, 0):  # of the first of two sequences; the second has none
    q = torch.ones(2, 1, 64, dtype=torch.bfloat16, device="cuda")
    k = torch.ones(keys, 1, 64, dtype=torch.bfloat16, device="cuda")
    starts = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in ((0, 1, 2), (0, keys, keys))]
    packed = {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1], "max_seqlen_q": 1, "max_seqlen_k": 1}
    found[keys] = float(torch.ops.fa3_fwd.fwd(q, k, k, **packed, num_splits=1)[1][0, 1])
is_right = all(lse == -torch.inf for lse in found.values())
digest = hashlib.sha256(Path(library).read_bytes()).hexdigest()
print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {Path(library).name} sha256 {digest}")
print(f"{'mended' if is_right else 'shows'}: lse of a sequence without keys, by how many keys another one has: {found}")
sys.exit(not is_right)
