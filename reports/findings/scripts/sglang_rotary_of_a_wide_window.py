"""FlashAttention-3 of SGLang, rotary: a window that hides no key changes by which positions queries are rotated.

The operator takes a right side of at least seqlen_q - 1 for none, and then rotates every query by the position of the
first. Expected: under a window query i has position seqused_k + i, as the interface says and as the same call with a
narrower right side does. Exit code 1 while that is not so. An argument names the library; without one it is SGLang's.
"""

import hashlib
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

library = Path(sys.argv[1]) if sys.argv[1:] else Path(find_spec("sgl_kernel").origin).parent / "flash_ops.abi3.so"
torch.ops.load_library(str(library))
operator = torch.ops.sgl_kernel.fwd.default
torch.manual_seed(0)
stored, new, dim = 3, 5, 128
q, k, v = torch.randn(3, stored + new, 1, dim, device="cuda").bfloat16()
angles = torch.arange(stored + new, device="cuda")[:, None] * 0.3 ** torch.arange(dim // 2, device="cuda")
given = {"q": q[stored:], "k_new": k[None, stored:], "v_new": v[None, stored:], "rotary_cos": angles.cos().bfloat16()}
given |= {"rotary_sin": angles.sin().bfloat16(), "max_seqlen_q": new, "max_seqlen_k": stored + new, "num_splits": 1}
given |= {"cu_seqlens_q": torch.tensor([0, new], dtype=torch.int32, device="cuda"), "softmax_scale": dim**-0.5}
given |= {"seqused_k": torch.tensor([stored], dtype=torch.int32, device="cuda"), "is_rotary_interleaved": False}
given |= {"window_size_left": -1, "softcap": 0.0, "is_causal": False, "attention_chunk": 0, "only_qv": False}
found = {}
for right in (new - 2, new - 1, 38):
    given |= {"window_size_right": right, "sm_margin": 0, "k": k[None].clone(), "v": v[None].clone()}
    found[right] = operator(*(given.get(x.name) for x in operator._schema.arguments))[0][1:].double()
moved = {right: float((found[right] - found[new - 2]).abs().max()) for right in (new - 1, 38)}  # rows that see all keys
is_right = max(moved.values()) < 0.02
digest = hashlib.sha256(library.read_bytes()).hexdigest()
print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {library.name} sha256 {digest}")
print(f"{'mended' if is_right else 'shows'}: how far rows that see all keys move beside right side {new - 2}: {moved}")
sys.exit(not is_right)
