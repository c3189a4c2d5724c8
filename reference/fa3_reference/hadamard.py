"""Random Hadamard rotation of the channels: x -> (x * signs) H / sqrt(head_dim), H Sylvester's matrix.

The map is orthogonal, so that q . k is unchanged when both are rotated alike, while a channel that carries outliers is
spread over all channels ("incoherent processing", FlashAttention-3 section 3.3).
:func:`fa3_reference.quantize.condition` rotates Q and K with it before they are quantised. Rotary embedding, which
rotates by position, is in :mod:`fa3_reference.cache`.
"""

from __future__ import annotations

import math

import numpy as np

from fa3_reference.rules import require


def can_rotate(head_dim: int) -> bool:
    """Tell whether there is a rotation of so many channels: their number must be a power of two."""
    return head_dim >= 1 and head_dim & (head_dim - 1) == 0


def _check_power_of_two(head_dim: int) -> None:
    require(can_rotate(head_dim), f"head_dim must be a power of two for a Hadamard rotation, got {head_dim}")


def random_signs(head_dim: int, seed: int) -> np.ndarray:
    """Draw ``head_dim`` random signs, float64 +-1 (head_dim,), from the raw stream of PCG64.

    The raw stream is stable across numpy versions, so that a seed means the same rotation everywhere.

    Raises
    ------
    ValueError
        If ``head_dim`` is not a power of two or ``seed`` is negative.
    """
    _check_power_of_two(head_dim)
    require(seed >= 0, f"seed must be >= 0, got {seed}")
    top_bits = np.random.PCG64(seed).random_raw(head_dim) >> np.uint64(63)
    return 1.0 - 2.0 * top_bits.astype(np.float64)


def _walsh_hadamard(x: np.ndarray) -> np.ndarray:
    """Return x H / sqrt(n) along the last axis by log2(n) butterflies."""
    shape = x.shape
    n = x.shape[-1]
    half = 1
    while half < n:
        pairs = x.reshape(-1, n // (2 * half), 2, half)
        x = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2)
        half *= 2
    return x.reshape(shape) / math.sqrt(n)


def _operands(x: np.ndarray, signs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    x = np.asarray(x).astype(np.float64, copy=False)
    signs = np.asarray(signs, np.float64)
    require(x.ndim != 0 and signs.shape == x.shape[-1:], f"signs must have shape {x.shape[-1:]}, got {signs.shape}")
    require(np.all(np.abs(signs) == 1.0), "signs must all be +1 or -1")
    _check_power_of_two(x.shape[-1])
    return x, signs


@np.errstate(invalid="ignore")
def rotate(x: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Rotate the last axis: (x * signs) H / sqrt(head_dim).

    Parameters
    ----------
    x : float array (..., head_dim)
        ``head_dim`` a power of two.
    signs : float64 (head_dim,)
        +-1, from :func:`random_signs`.

    Returns
    -------
    float64 array like ``x``
        Error <= (log2(head_dim) + 2) 2^-53 |x| in the 2-norm of a row; exact where ``head_dim`` is a power of
        4 and all sums fit (small integers). A NaN or Inf anywhere makes its whole row non-finite.

    Raises
    ------
    ValueError
        If ``head_dim`` is not a power of two or ``signs`` does not fit.

    >>> rotate(np.array([1.0, 0.0, 0.0, 2.0]), np.ones(4))
    array([ 1.5, -0.5, -0.5,  1.5])
    """
    x, signs = _operands(x, signs)
    return _walsh_hadamard(x * signs)
