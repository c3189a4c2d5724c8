"""FlashAttention-3 of vLLM, a cache without pages: NaN behind a sequence's keys makes its output NaN.

V is read in whole tiles, and what lies behind the sequence is multiplied by a weight of 0. Expected: of a cache only
the first seqused_k keys count. Exit code 1 while that is not so. An argument names the library; without one it is
vLLM's.
"""

import hashlib
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

installed = "vllm_flash_attn/_vllm_fa3_C.abi3.so"
library = Path(sys.argv[1]) if sys.argv[1:] else Path(find_spec("vllm").origin).parent / installed
torch.ops.load_library(str(library))
operator = torch.ops._vllm_fa3_C.fwd.default
given = {"cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32, device="cuda"), "max_seqlen_q": 1, "max_seqlen_k": 300}
given |= {"seqused_k": torch.tensor([100], dtype=torch.int32, device="cuda"), "softmax_scale": 128**-0.5}
given |= {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "num_splits": 1, "sm_margin": 0}
given |= {"is_causal": False, "is_rotary_interleaved": False, "cp_world_size": 1, "cp_rank": 0}
found = {}
for dtype in (torch.bfloat16, torch.float8_e4m3fn):
    one = torch.ones(1, 8, device="cuda") if dtype == torch.float8_e4m3fn else None
    for behind in (0.0, torch.nan):
        rows = torch.ones(1, 300, 8, 128, device="cuda")
        rows[:, 100:] = behind
        given |= {"q": torch.ones(1, 32, 128, device="cuda").to(dtype), "k": rows.to(dtype), "v": rows.to(dtype)}
        given |= {"q_descale": one, "k_descale": one, "v_descale": one}
        out = operator(*(given.get(x.name) for x in operator._schema.arguments))[0]
        found[f"{dtype} before {behind}"] = float(out[0, 0, 0])
is_right = all(out == 1 for out in found.values())
digest = hashlib.sha256(library.read_bytes()).hexdigest()
print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {library.name} sha256 {digest}")
print(f"{'mended' if is_right else 'shows'}: output of 100 keys of V = 1 in a row of 300: {found}")
sys.exit(not is_right)
