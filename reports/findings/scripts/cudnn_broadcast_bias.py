"""torch's SDPA of 16 bits where it takes cuDNN: a bias that is one number, or one per sequence or query, is misread.

Expected: what the same bias gives when it is written out in full. Exit code 1 while a value differs or a call ends in
"misaligned address". Each shape runs in a process of its own, as nothing runs on a GPU after such an error.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

import torch

CALL = """
import sys
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
torch.manual_seed(0)
q, k, v = (torch.randn(2, 3, n, 64, dtype=torch.bfloat16, device="cuda") for n in (5, 16, 16))
bias = torch.randn([int(n) for n in sys.argv[1:]], device="cuda").bfloat16()
with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias.expand(2, 3, 5, 16).contiguous())
    got = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias)
print(f"differs by {(got.float() - whole.float()).abs().max().item():.3g}")
"""
print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, cuDNN {torch.backends.cudnn.version()}")
binary = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
print(f"{binary.name} sha256 {hashlib.sha256(binary.read_bytes()).hexdigest()}")
wrong = []
for shape in ((1, 1, 1, 1), (2, 1, 1, 1), (1, 3, 1, 1), (1, 1, 5, 1), (1, 1, 1, 16), (2, 3, 5, 1)):
    call = [sys.executable, "-c", CALL, *map(str, shape)]
    ended = subprocess.run(call, capture_output=True, text=True, check=False)
    raised = (line for line in ended.stderr.splitlines() if "Error: " in line)
    said = ended.stdout.strip() or next(raised, "ended without a word")
    print(f"{shape}: {said}")
    wrong += [shape] if said != "differs by 0" else []
print(f"shows: {len(wrong)} of 6 shapes" if wrong else "mended: no shape differs")
sys.exit(bool(wrong))
