"""torch's SDPA of 16 bits where it takes cuDNN: gradients of a dO with gaps, or that repeats a row, are wrong.

Expected: the gradients of a contiguous copy of dO. Exit code 1 while they differ: what lies between the elements of dO
is read, and a mean over tokens, whose dO repeats one row, gives other gradients than the same numbers written out.
"""

import hashlib
import sys
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, cuDNN {torch.backends.cudnn.version()}")
binary = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
print(f"{binary.name} sha256 {hashlib.sha256(binary.read_bytes()).hexdigest()}")
torch.manual_seed(0)
shape = (2, 4, 19, 64)
q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in "qkv")
room = torch.full((2 * shape[0], *shape[1:]), float("nan"), dtype=torch.bfloat16, device="cuda")
room[::2] = torch.randn(shape)
ways = {"every second sequence": room[::2]}
for name, axes in {"tokens": (2,), "heads": (1,), "sequences": (0,), "all but channels": (0, 1, 2)}.items():
    sizes = [1 if axis in axes else n for axis, n in enumerate(shape)]
    ways[f"repeated along {name}"] = torch.randn(sizes, device="cuda").bfloat16().expand(shape)
wrong = []
with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    for name, dout in ways.items():
        got = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        due = torch.autograd.grad(out, (q, k, v), dout.contiguous(), retain_graph=True)
        off = max((x.float() - y.float()).abs().max().item() for x, y in zip(got, due, strict=True))
        print(f"{name}: differs by {off:.3g}")
        wrong += [name] if off != 0 else []
print(f"shows: {len(wrong)} of {len(ways)} layouts" if wrong else "mended: no layout differs")
sys.exit(bool(wrong))
