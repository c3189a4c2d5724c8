"""Defects of torch and JAX on a CPU, each in a few lines; needs torch and jax."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention


def torch_hides_a_nan_query() -> None:
    for keys in (15, 16):
        q = torch.full((1, 1, 1, 64), torch.nan, dtype=torch.float16)
        k = v = torch.ones(1, 1, keys, 64, dtype=torch.float16)
        print(f"torch: an all-NaN query over {keys} keys gives {scaled_dot_product_attention(q, k, v)[0, 0, 0, 0]}")


def torch_spreads_a_nan_over_rows_without_keys() -> None:
    q, empty = torch.ones(1, 1, 3, 64, dtype=torch.float16), torch.ones(1, 1, 0, 64, dtype=torch.float16)
    print(f"torch: without keys {scaled_dot_product_attention(q, empty, empty)[0, 0, :, 0].tolist()}", end=", ")
    q[0, 0, 1, 5] = torch.nan
    found = scaled_dot_product_attention(q, empty, empty)[0, 0, :, 0].tolist()
    print(f"with one NaN in the second query {found}")


def torch_exponential_is_approximate() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 64, 64, generator=generator).half() for _ in range(2))
    _, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, k)
    exact = torch.logsumexp(q.double() @ k.double().mT / 8, -1)
    print(f"torch: lse of 64 keys is off by up to {float((lse - exact).abs().max()):.1e}")


def jax_rounds_the_lse() -> None:
    q = jnp.full((1, 1, 1, 64), 400, jnp.float16)
    k = jnp.full((1, 2, 1, 64), -400, jnp.float16)
    _, lse = jax.nn.dot_product_attention(q, k, k, scale=0.0125, return_residual=True)
    print(f"jax: lse is {lse.dtype}, {float(lse[0, 0, 0])} where {0.0125 * 64 * -160000 + np.log(2):.1f} is exact")


def jax_averages_rows_without_keys() -> None:
    q = k = jnp.ones((1, 2, 1, 64), jnp.float16)
    v = jnp.array([1.0, 3.0], jnp.float16)[None, :, None, None] * jnp.ones((1, 2, 1, 64), jnp.float16)
    mask = jnp.array([[True, False], [False, False]])[None, None]
    out = jax.nn.dot_product_attention(q, k, v, mask=mask)
    print(f"jax: a row that sees no key of V = 1, 3 gives {float(out[0, 1, 0, 0])}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(f"torch {torch.__version__}, jax {jax.__version__}, CPU capability {torch.backends.cpu.get_cpu_capability()}")
    torch_hides_a_nan_query()
    torch_spreads_a_nan_over_rows_without_keys()
    torch_exponential_is_approximate()
    jax_rounds_the_lse()
    jax_averages_rows_without_keys()
