"""torch's SDPA of 16 bits on a GPU: operands that begin 2 bytes behind an aligned address are misread.

Expected: what contiguous copies give, or a refusal in words. Exit code 1 while a backend gives something else, or ends
in "misaligned address". Each runs in a process of its own, as nothing runs on a GPU after such an error.
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
given = [torch.randn(2, 4, 19, 64, dtype=torch.bfloat16, device="cuda") for _ in "qkv"]
late = [torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in given]
with sdpa_kernel(getattr(SDPBackend, sys.argv[1])):
    whole = torch.nn.functional.scaled_dot_product_attention(*given)
    got = torch.nn.functional.scaled_dot_product_attention(*late)
print(f"differs by {(got.float() - whole.float()).abs().max().item():.3g}")
"""
print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, cuDNN {torch.backends.cudnn.version()}")
binary = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
print(f"{binary.name} sha256 {hashlib.sha256(binary.read_bytes()).hexdigest()}")
wrong = []
for backend in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
    ended = subprocess.run([sys.executable, "-c", CALL, backend], capture_output=True, text=True, check=False)
    raised = (line for line in ended.stderr.splitlines() if "Error: " in line)
    said = ended.stdout.strip() or next(raised, "ended without a word")
    print(f"{backend}: {said}")
    wrong += [backend] if said != "differs by 0" and "not correctly aligned" not in said else []
print(f"shows: {', '.join(wrong)}" if wrong else "mended: no backend misreads them")
sys.exit(bool(wrong))
