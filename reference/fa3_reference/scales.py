"""The kinds of scale of e4m3 operands, as data: what shares a descale, how one is rounded, and the scheme that chooses.

Quantisers, error bounds, random schemes and the claims of kernels all read these tables. A further kind of scale is
therefore one row here and, where it needs arithmetic of its own, that arithmetic in the twin and in the GPU kernel.
:mod:`fa3_reference.quantize` applies a scheme to operands.

A scheme may rotate the channels of Q and K first, by a random Hadamard rotation x -> (x * signs) H / sqrt(head_dim),
with Sylvester's matrix H. The map is orthogonal, so that q . k is unchanged when both are rotated alike, while a
channel that carries outliers is spread over all channels ("incoherent processing", FlashAttention-3 section 3.3).
:func:`fa3_reference.quantize.condition` rotates with it. Rotary embedding, which rotates by position, is in
:mod:`fa3_reference.cache`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import numpy as np

from fa3_reference.rules import is_integer, require


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


Granularity = Literal["tensor", "head", "query_head", "block", "row"]
Rounding = Literal["amax", "power_of_two"]
_BLOCK_FIELDS = ("block_rows_q", "block_rows_k", "block_rows_v")


@dataclass(frozen=True, slots=True)
class Sharing:
    """Says which elements share a descale. Descales are always stored as (batch, heads, blocks), shared ones repeated.

    Parameters
    ----------
    heads : {"one", "group", "all"}
        Which heads share one: none ("one" each), the query heads of a kv head (of Q), or all heads of a sequence.
    rows : int or "block"
        How many rows of a sequence share one; 0 is the whole sequence, "block" as many as the scheme says of the
        operand.
    all_sequences : bool
        Whether all sequences of a batch share one.
    """

    heads: Literal["one", "group", "all"] = "one"
    rows: int | Literal["block"] = 0
    all_sequences: bool = False

    def heads_per_descale(self, operand: str, nheads: int, nheads_kv: int) -> int:
        """Return how many neighbouring heads of an operand ("q", "k" or "v") share a descale."""
        if self.heads == "all":
            return nheads if operand == "q" else nheads_kv
        return nheads // nheads_kv if self.heads == "group" and operand == "q" else 1

    def claim(self, group: int) -> frozenset[str]:
        """Return the feature that a kernel must claim to be given such descales; none for one per (sequence, kv head).

        ``group`` is the number of query heads of a kv head.
        """
        if self.rows:
            return frozenset({"block_descale"})
        return frozenset({"query_head_descale"} if self.heads == "one" and group > 1 else ())


SHARING: Mapping[Granularity, Sharing] = {
    "head": Sharing("group"),
    "tensor": Sharing("all", all_sequences=True),
    "query_head": Sharing(),
    "block": Sharing(rows="block"),
    "row": Sharing(rows=1),
}


def next_power_of_two(x: np.ndarray) -> np.ndarray:
    """Return for each positive float64 number the smallest power of two that is not below it; exact."""
    fraction, exponent = np.frexp(x)
    return np.ldexp(1.0, np.where(fraction == 0.5, exponent - 1, exponent))


# How exact descales are rounded in float64, before they become float32. A power of two is never below the exact one, or
# the largest element would overflow.
ROUNDINGS: Mapping[Rounding, Callable[[np.ndarray], np.ndarray]] = {
    "amax": np.asarray,
    "power_of_two": next_power_of_two,
}


def rounding_fields(rounding: str) -> dict[str, bool]:
    """Return the fields of a :class:`QuantScheme` that give it the rounding of this name."""
    return {"power_of_two": rounding == "power_of_two"}


def num_blocks(seqlen: int, rows: int) -> int:
    """Return how many descales a sequence and head have if each is for so many rows; 0 rows are the whole sequence."""
    return max(1, -(-seqlen // rows)) if rows else 1


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """Says how q, k and v become e4m3.

    Parameters
    ----------
    granularity : {"tensor", "head", "query_head", "block", "row"}
        What shares a descale. "tensor": the whole operand, with all its sequences. "head": one (sequence, kv head), and
        for Q all query heads that share it, as in FlashAttention-3. "query_head": the same, but each query head of Q
        for itself. "block": a block of rows of one (sequence, head). "row": one row of one (sequence, head).
    block_rows_q, block_rows_k, block_rows_v : int
        Rows per block, counted from the start of each sequence; used by ``"block"`` only.
    power_of_two : bool
        Round descales up to powers of two, so that scaling itself rounds nothing.
    hadamard_seed : int, optional
        Rotate Q and K (never V) with these random signs first; head_dim must be a power of two.
    k_mean : bool
        Subtract from K its mean over the tokens of each (sequence, kv head) first. The softmax does not change, but the
        kernel's lse lacks softmax_scale * q . mean, which quantisers return as ``lse_shift``. Not with a softcap, which
        is not shift-invariant.

    Raises
    ------
    ValueError
        Whenever a value breaks its rule; the message states both.
    """

    granularity: Granularity = "head"
    block_rows_q: int = 128
    block_rows_k: int = 128
    block_rows_v: int = 128
    power_of_two: bool = False
    hadamard_seed: int | None = None
    k_mean: bool = False

    def __post_init__(self) -> None:
        require(
            self.granularity in get_args(Granularity),
            f"granularity must be one of {', '.join(get_args(Granularity))}, got {self.granularity!r}",
        )
        for name in _BLOCK_FIELDS:
            require(
                is_integer(getattr(self, name), 1), f"{name} must be a positive integer, got {getattr(self, name)!r}"
            )
        for name in ("power_of_two", "k_mean"):
            require(isinstance(getattr(self, name), bool), f"{name} must be true or false, got {getattr(self, name)!r}")
        require(
            self.hadamard_seed is None or is_integer(self.hadamard_seed, 0),
            f"hadamard_seed must be an integer >= 0 or null, got {self.hadamard_seed!r}",
        )

    @property
    def rounding(self) -> Rounding:
        """How descales are rounded, by its name in ``fa3_reference.scales.ROUNDINGS``."""
        return "power_of_two" if self.power_of_two else "amax"

    def rows_per_descale(self, operand: str) -> int:
        """Return how many rows share a descale.

        Parameters
        ----------
        operand : {"q", "k", "v"}
            Which operand.

        Returns
        -------
        int
            Rows of a sequence; 0 is the whole sequence.
        """
        rows = SHARING[self.granularity].rows
        return int(getattr(self, f"block_rows_{operand}")) if rows == "block" else rows

    def to_json(self) -> dict[str, object]:
        """Return every field as JSON types; :meth:`from_json` restores an equal scheme.

        Returns
        -------
        dict of str to object
            Every field by its name.
        """
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: object) -> QuantScheme:
        """Build a scheme from decoded JSON; absent fields take their defaults.

        Parameters
        ----------
        data : object
            What :meth:`to_json` gives.

        Returns
        -------
        QuantScheme
            An equal scheme.

        Raises
        ------
        ValueError
            If ``data`` is not an object, has an unknown field, or a field breaks its rule.
        """
        if not isinstance(data, dict):
            raise ValueError(f"a quantisation scheme must be a JSON object, got {type(data).__name__}")
        unknown = sorted(map(str, set(data) - {field.name for field in dataclasses.fields(cls)}))
        if unknown:
            raise ValueError(f"a quantisation scheme has no field {', '.join(map(repr, unknown))}")
        return cls(**cast(dict[str, Any], data))
