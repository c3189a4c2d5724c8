"""cuDNN by torch, attention's backward of one query and one key: refused once, the second call ends the process.

Expected: gradients, or the same error every time. Exit code 1 while a signal ends it. The calls run in a process of
their own.
"""

import subprocess
import sys

import torch

CALL = """
import contextlib
import torch
q = torch.ones(1, 1, 1, 64, dtype=torch.float16, device="cuda")
out, lse, *rest = torch.ops.aten._scaled_dot_product_cudnn_attention(q, q, q, None, True)
for _ in range(2):
    with contextlib.suppress(RuntimeError):
        torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            q, q, q, q, out, lse, *rest[4:6], None, *rest[:4], 0.0, False
        )
"""
ended = subprocess.run([sys.executable, "-c", CALL], capture_output=True, text=True, check=False)
assert ended.returncode <= 0, ended.stderr
print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, cuDNN {torch.backends.cudnn.version()}")
print(f"shows: ended by signal {-ended.returncode}" if ended.returncode else "mended: no signal ended the two calls")
sys.exit(ended.returncode < 0)
