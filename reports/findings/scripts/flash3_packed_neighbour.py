"""FlashAttention-3, packed sequences: NaN in one sequence makes the output of the one before it NaN.

The last tile of a sequence reads on into the next one, and NaN times a weight of 0 is NaN. Expected: sequences that do
not touch each other. Exit code 1 while that is not so. An argument names the library; without one it is fa3-fwd's.
"""

import hashlib
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

library = sys.argv[1] if sys.argv[1:] else find_spec("fa3_fwd._C").origin
torch.ops.load_library(library)
one = torch.ones(2, 1, device="cuda")
starts = torch.tensor([0, 1, 2], dtype=torch.int32, device="cuda")
packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 1, "max_seqlen_k": 1, "num_splits": 1}
found = {}
for dtype in (torch.bfloat16, torch.float8_e4m3fn):
    is_fp8 = dtype == torch.float8_e4m3fn
    descales = {"q_descale": one, "k_descale": one, "v_descale": one} if is_fp8 else {}
    for second in (1.0, torch.nan):
        x = torch.tensor([1.0, second], device="cuda").reshape(2, 1, 1).expand(2, 1, 64).contiguous().to(dtype)
        found[f"{dtype} beside {second}"] = float(torch.ops.fa3_fwd.fwd(x, x, x, **packed, **descales)[0][0, 0, 0])
is_right = all(out == 1 for out in found.values())
digest = hashlib.sha256(Path(library).read_bytes()).hexdigest()
print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {Path(library).name} sha256 {digest}")
print(f"{'mended' if is_right else 'shows'}: output of a sequence of one key of V = 1: {found}")
sys.exit(not is_right)
