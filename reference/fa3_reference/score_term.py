"""The record of a term of scores: what a call adds to its scores, or which of them it hides, beside its masks.

:mod:`fa3_reference.terms` computes with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["bias", "bias_fp32", "attn_mask", "key_padding", "alibi", "documents"]
KINDS: tuple[Kind, ...] = get_args(Kind)  # the names of what a kernel must have to take one
BROADCAST = ("bias", "bias_fp32", "attn_mask")
_OF_MASKS = ("plain", "large", "one visible", "none visible", "neutral")
_OF_BIASES = ("plain", "large", "cancelling", "lowest", "one visible", "none visible", "neutral")
# What may be drawn of each kind; fa3verify.inputs.terms says what the words mean.
VALUES: dict[str, tuple[str, ...]] = {
    "bias": _OF_BIASES,
    "bias_fp32": _OF_BIASES,
    "attn_mask": _OF_MASKS,
    "key_padding": _OF_MASKS,
    "alibi": ("plain", "large", "neutral"),
    "documents": _OF_MASKS,
}
AXES = "bhqk"  # batch, heads, queries, keys


@dataclass(frozen=True, slots=True)
class ScoreTerm:
    """States of a problem which term its scores have; the numbers are an operand.

    Parameters
    ----------
    kind : {"bias", "bias_fp32", "attn_mask", "key_padding", "alibi", "documents"}
        A bias in the format of the operands or in float32; a boolean mask, True where a key is visible; a boolean
        (batch, seqlen_k), True for keys that count; float32 slopes; or int32 numbers of documents, where a query sees
        the keys of its own.
    shared : str
        Axes of "bhqk" along which there is one value for all, so that they are 1 in the shape of the operand. Of slopes
        "b" makes them (nheads,), which else are (batch, nheads). Of a padding and of documents it is empty.
    values : str
        Which values are drawn, a word of :data:`VALUES`.

    Raises
    ------
    ValueError
        Whenever a value breaks its rule; the message states both.
    """

    kind: Kind
    shared: str = ""
    values: str = "plain"

    def __post_init__(self) -> None:
        if self.kind not in VALUES:
            raise ValueError(f"kind of a term must be one of {', '.join(VALUES)}, got {self.kind!r}")
        axes = AXES if self.kind in BROADCAST else "b" if self.kind == "alibi" else ""
        if self.shared != "".join(axis for axis in axes if axis in str(self.shared)):
            raise ValueError(f"shared axes of {self.kind} must be of {axes!r} in this order, got {self.shared!r}")
        if self.values not in VALUES[self.kind]:
            raise ValueError(
                f"values of {self.kind} must be one of {', '.join(VALUES[self.kind])}, got {self.values!r}"
            )

    def describe(self) -> str:
        """Return the term in a few words, such as ``bias[1h1k] large``."""
        axes = "".join("1" if axis in self.shared else axis for axis in AXES)
        of = f"[{axes}]" if self.kind in BROADCAST else "[h]" if self.shared else ""
        return f"{self.kind}{of} {self.values}"

    def check_fits(self, *, dtype: str, is_varlen: bool, has_cache: bool) -> None:
        """Raise ValueError for a problem of e4m3 or of a cache, and for a packed one unless the term is ALiBi's."""
        if dtype == "e4m3" or has_cache:
            raise ValueError(f"a term of scores is not for e4m3 or a cache, got {dtype}, cache {has_cache}")
        if is_varlen and self.kind != "alibi":
            raise ValueError(f"of packed sequences only alibi is a term, got {self.kind}")

    def operand_shape(self, sizes: tuple[int, int, int, int]) -> tuple[int, ...]:
        """Return the shape of the operand for a batch, heads, queries and keys.

        Documents are those of the queries with those of the keys behind them.
        """
        batch, nheads, seqlen_q, seqlen_k = sizes
        if self.kind in BROADCAST:
            return tuple(1 if axis in self.shared else n for axis, n in zip(AXES, sizes, strict=True))
        if self.kind == "alibi":
            return (nheads,) if self.shared else (batch, nheads)
        return batch, seqlen_k + (seqlen_q if self.kind == "documents" else 0)
