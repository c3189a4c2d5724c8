"""JAX, dot_product_attention(return_residual=True): lse is rounded to the format of the operands.

In fp16 it is -inf below -65,504, in bf16 it keeps 8 bits. Expected: float32. Exit code 1 while that is not so.
"""

import sys

import jax
import jax.numpy as jnp

q = jnp.full((1, 1, 1, 64), 400, jnp.float16)
k = jnp.full((1, 2, 1, 64), -400, jnp.float16)
_, lse = jax.nn.dot_product_attention(q, k, k, scale=0.0125, return_residual=True)
print(f"jax {jax.__version__}: lse is {lse.dtype}, {float(lse[0, 0, 0])} where -127999.3 is exact")
sys.exit(lse.dtype != jnp.float32)
