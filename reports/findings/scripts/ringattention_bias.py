"""ringattention (JAX), a bias of each query: later chunks of queries read that of the first, and causal calls cut it.

The slice of the bias begins at query 0 whatever the chunk, and min(bias, mask) makes 0 of what is above 0.
Expected: softmax(scores + bias). Exit code 1 while it differs.
"""

import sys
from importlib.metadata import version

import jax
import jax.numpy as jnp
from ringattention import ring_attention

rows, keys = 4, 4
zeros = jnp.zeros((1, 1, rows, 1, 8))
values = jnp.broadcast_to(jnp.arange(float(keys))[:, None, None], (1, 1, keys, 1, 8))
options = {"query_chunk_size": 2, "key_chunk_size": 4, "deterministic": True, "dropout_rng": None, "attn_pdrop": 0.0}
options |= {"dtype": jnp.float32, "policy": None, "precision": None, "prevent_cse": True}


def rows_of(bias: jax.Array, causal_block_size: int | None) -> list[float]:
    """Run on one device; without a bias a row gets the mean of the keys that it sees, which are numbered."""
    kwargs = options | {"causal_block_size": causal_block_size}
    call = jax.vmap(lambda q, k, v: ring_attention(q, k, v, bias, None, None, "sp", True, kwargs), axis_name="sp")
    return [round(float(x), 3) for x in call(zeros, zeros, values)[0, 0, :, 0, 0]]


diagonal = jnp.where(jnp.eye(rows, dtype=bool), 0.0, -1e9)[None, None]
first = jnp.zeros((1, 1, rows, keys)).at[..., 0].set(50.0)
found = [(rows_of(diagonal, None), [0.0, 1.0, 2.0, 3.0]), (rows_of(first, 1), [0.0] * 4)]
print(f"ringattention {version('ringattention')}, 4 rows in chunks of 2")
for words, (got, due) in zip(("row i sees key i by its bias", "causal, key 0 outweighs by 50"), found, strict=True):
    print(f"{words}: due {due}, got {got}")
sys.exit(any(got != due for got, due in found))
