"""Rotary positions of queries and new keys, bit for bit as :mod:`fa3_kernels.gluon.append` computes them."""

from __future__ import annotations

import numpy as np


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, *, is_interleaved: bool) -> np.ndarray:
    """Rotate pairs (a, b) of channels: a cos - b sin and a sin + b cos, in fp32, every product and sum rounded.

    Parameters
    ----------
    x : float16 or bfloat16 (..., head_dim)
    cos, sin : the same dtype (..., rotary_dim / 2)
        Channels from rotary_dim on stay as they are.
    is_interleaved : bool
        Whether channels 2 i and 2 i + 1 are a pair, else i and i + rotary_dim / 2.

    Returns
    -------
    like x
        Rounded to nearest even once at the end.

    >>> rotated(np.float16([1, 0, 5]), np.float16([0.5]), np.float16([0.25]), is_interleaved=True).tolist()
    [0.5, 0.25, 5.0]
    """
    half = cos.shape[-1]
    first = slice(0, 2 * half, 2) if is_interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if is_interleaved else slice(half, 2 * half)
    a, b, c, s = (part.astype(np.float32) for part in (x[..., first], x[..., second], cos, sin))
    found = x.copy()
    with np.errstate(over="ignore", invalid="ignore"):
        found[..., first] = (a * c - b * s).astype(x.dtype)
        found[..., second] = (a * s + b * c).astype(x.dtype)
    return found
