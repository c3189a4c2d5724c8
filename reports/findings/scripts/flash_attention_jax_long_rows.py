"""flash-attention-jax, more than 1,024 keys or queries and no multiple of it: keys count twice, rows are made up.

The last chunk of 1,024 begins where it still fits, so that keys of the chunk before count again.
Expected: the softmax over every key once, and as many rows as queries. Exit code 1 while it differs.
"""

import sys
from importlib.metadata import version

import jax.numpy as jnp
from flash_attention_jax import flash_attention

keys = 1500
zeros = jnp.zeros((1, 1, keys, 64), jnp.float32)
marked = zeros.at[:, :, 476:1024].set(1.0)  # what the second chunk of keys reads again
row = float(flash_attention(zeros[:, :, :1], zeros, marked, jnp.ones((1, keys), bool))[0, 0, 0, 0])
due = (1024 - 476) / keys
rows = flash_attention(zeros, zeros[:, :, :1], zeros[:, :, :1], jnp.ones((1, 1), bool)).shape[2]
print(f"flash-attention-jax {version('flash-attention-jax')}: 548 of 1,500 keys have V = 1, the mean is {due:.4f}")
print(f"a query gets {row:.4f}; {keys:,} queries get {rows:,} rows")
sys.exit(abs(row - due) > 1e-4 or rows != keys)
