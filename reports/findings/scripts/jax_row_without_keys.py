"""JAX, dot_product_attention with a mask that hides every key of a row: the row is the mean of V.

Expected: 0, as torch, cuDNN and FlashAttention give, or a sentence of the documentation. Exit code 1 while it is no 0.
"""

import sys

import jax
import jax.numpy as jnp

ones = jnp.ones((1, 2, 1, 64), jnp.float16)
values = ones * jnp.array([1, 3], jnp.float16)[None, :, None, None]
mask = jnp.array([[True, False], [False, False]])[None, None]
row = float(jax.nn.dot_product_attention(ones, ones, values, mask=mask)[0, 1, 0, 0])
print(f"jax {jax.__version__}: a row that sees no key of V = 1, 3 gives {row}")
sys.exit(row != 0)
