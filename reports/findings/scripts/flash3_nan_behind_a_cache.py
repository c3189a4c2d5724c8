"""FlashAttention-3, a cache without pages: NaN behind a sequence's keys makes its output NaN.

V is read in whole tiles, and what lies behind the sequence is multiplied by a weight of 0. Expected: of a cache only
the first seqused_k keys count. Exit code 1 while that is not so. An argument names the library; without one it is
fa3-fwd's.
"""

import hashlib
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

library = sys.argv[1] if sys.argv[1:] else find_spec("fa3_fwd._C").origin
torch.ops.load_library(library)
one = torch.ones(1, 8, device="cuda")
used = torch.tensor([100], dtype=torch.int32, device="cuda")
found = {}
for dtype in (torch.bfloat16, torch.float8_e4m3fn):
    descales = {"q_descale": one, "k_descale": one, "v_descale": one} if dtype == torch.float8_e4m3fn else {}
    for behind in (0.0, torch.nan):
        q = torch.ones(1, 1, 32, 128, device="cuda").to(dtype)
        rows = torch.ones(1, 300, 8, 128, device="cuda")
        rows[:, 100:] = behind
        out = torch.ops.fa3_fwd.fwd(q, rows.to(dtype), rows.to(dtype), seqused_k=used, **descales, num_splits=1)[0]
        found[f"{dtype} before {behind}"] = float(out[0, 0, 0, 0])
is_right = all(out == 1 for out in found.values())
digest = hashlib.sha256(Path(library).read_bytes()).hexdigest()
print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {Path(library).name} sha256 {digest}")
print(f"{'mended' if is_right else 'shows'}: output of 100 keys of V = 1 in a row of 300: {found}")
sys.exit(not is_right)
