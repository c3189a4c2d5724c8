"""FlashAttention-2 of torch, packed sequences of at most one query, one of none, grouped heads: RuntimeError.

The heads of a group take the place of the one query, for as many rows as there are sequences. Expected: the outputs of
the sequences that have a query. Exit code 1 while that is not so. The call runs in a process of its own.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

import torch

CALL = """
import torch
q, k = (torch.ones(*shape, 64, dtype=torch.float16, device="cuda") for shape in ((1, 2), (2, 1)))
starts = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in ((0, 1, 1), (0, 1, 2))]
out = torch.ops.aten._flash_attention_forward(q, k, k, *starts, 1, 1, 0.0, False, False)[0]
assert out.tolist() == torch.ones_like(q).tolist(), out
"""
ended = subprocess.run([sys.executable, "-c", CALL], capture_output=True, text=True, check=False)
said = ended.stderr.strip().rpartition("\n")[2]
assert not ended.returncode or "is invalid for input of size" in said, ended.stderr
library = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
digest = hashlib.sha256(library.read_bytes()).hexdigest()
print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {library.name} sha256 {digest}")
print(f"shows: {said}" if ended.returncode else "mended: the output of the one query is V")
sys.exit(ended.returncode)
