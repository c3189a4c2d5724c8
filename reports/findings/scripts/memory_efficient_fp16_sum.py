"""memory-efficient-attention-pytorch in fp16: the weighted sum of V is divided too late and overflows.

Over 1,024 keys of equal scores V = 70 sums to 71,680, beyond the largest number of fp16.
Expected: 70, as the plain function of the same package gives. Exit code 1 while it is another number.
"""

import sys
from importlib.metadata import version

import torch
from memory_efficient_attention_pytorch.memory_efficient_attention import attention, memory_efficient_attention

q, k = torch.zeros(1, 1, 1, 64).half(), torch.zeros(1, 1, 1024, 64).half()
v = torch.full((1, 1, 1024, 64), 70.0).half()
plain, efficient = (float(f(q, k, v)[0, 0, 0, 0]) for f in (attention, memory_efficient_attention))
package = "memory-efficient-attention-pytorch"
print(f"{package} {version(package)}, V = 70 over 1,024 keys, fp16:")
print(f"attention {plain}, memory_efficient_attention {efficient}")
sys.exit(efficient != 70)
