"""torch, _scaled_dot_product_flash_attention_for_cpu without keys: the process ends by SIGFPE.

Expected: an error of Python, or zeros. Exit code 1 while that is not so. The call runs in a process of its own.
"""

import subprocess
import sys

import torch

CALL = """
import torch
q, k = (torch.zeros(1, 1, n, 64, dtype=torch.float16) for n in (3, 0))
torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, k)
"""
ended = subprocess.run([sys.executable, "-c", CALL], capture_output=True, check=False).returncode
print(f"torch {torch.__version__}: ended by {f'signal {-ended}' if ended < 0 else f'exit code {ended}'}")
sys.exit(ended < 0)
