"""The record of a term of scores: what a call adds to its scores, or which of them it hides, beside its masks.

:mod:`fa3_reference.terms` computes with it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from fa3_reference.rules import require

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
    "mods": ("plain",),
}
AXES = "bhqk"  # batch, heads, queries, keys


@dataclass(frozen=True, slots=True)
class ScoreTerm:
    """States of a problem which term its scores have; the numbers are an operand.

    Parameters
    ----------
    kind : {"bias", "bias_fp32", "attn_mask", "key_padding", "alibi", "documents", "mods"}
        A bias in the format of the operands or in float32; a boolean mask, True where a key is visible; a boolean
        (batch, seqlen_k), True for keys that count; float32 slopes; int32 numbers of documents, where a query sees
        the keys of its own; or functions that the kernel has built in (:mod:`fa3_reference.mods`), whose operand is
        empty.
    shared : str
        Axes of "bhqk" along which there is one value for all, so that they are 1 in the shape of the operand. Of slopes
        "b" makes them (nheads,), which else are (batch, nheads). Of a padding and of documents it is empty.
    values : str
        Which values are drawn, a word of :data:`VALUES`.
    score_mod, mask_mod : str
        Of "mods", which has at least one of them: the functions, each as ``module:name``.
    score_mod_ulp : float
        By how many units in the last place of binary32 a kernel's ``score_mod`` may be off.

    Raises
    ------
    ValueError
        Whenever a value breaks its rule; the message states both.
    """

    kind: Kind | Literal["mods"]
    shared: str = ""
    values: str = "plain"
    score_mod: str = ""
    mask_mod: str = ""
    score_mod_ulp: float = 0.0

    def __post_init__(self) -> None:
        require(self.kind in VALUES, f"kind of a term must be one of {', '.join(VALUES)}, got {self.kind!r}")
        axes = AXES if self.kind in BROADCAST else "b" if self.kind == "alibi" else ""
        require(
            self.shared == "".join(axis for axis in axes if axis in str(self.shared)),
            f"shared axes of {self.kind} must be of {axes!r} in this order, got {self.shared!r}",
        )
        require(
            self.values in VALUES[self.kind],
            f"values of {self.kind} must be one of {', '.join(VALUES[self.kind])}, got {self.values!r}",
        )
        require(
            (self.kind == "mods") == bool(self.score_mod or self.mask_mod),
            f"score_mod and mask_mod are those of mods, got {self!r}",
        )
        require(
            math.isfinite(self.score_mod_ulp) and self.score_mod_ulp >= 0,
            f"score_mod_ulp must be finite and >= 0, got {self.score_mod_ulp!r}",
        )

    @property
    def assumption(self) -> str:
        """Return in words what the bound assumes of a ``score_mod``; empty without one."""
        words = f"off by at most {self.score_mod_ulp:g} ulp of binary32, monotone within a score's error but for a jump"
        return f"score_mod {self.score_mod} {words}" if self.score_mod else ""

    def describe(self) -> str:
        """Return the term in a few words, such as ``bias[1h1k] large``."""
        if self.kind == "mods":
            named = {"score_mod": self.score_mod, "mask_mod": self.mask_mod}
            return ", ".join(f"{name} {function}" for name, function in named.items() if function)
        axes = "".join("1" if axis in self.shared else axis for axis in AXES)
        of = f"[{axes}]" if self.kind in BROADCAST else "[h]" if self.shared else ""
        return f"{self.kind}{of} {self.values}"

    def check_fits(self, *, dtype: str, is_varlen: bool, has_cache: bool) -> None:
        """Raise ValueError for a problem of e4m3 or of a cache, and for a packed one unless the term is ALiBi's."""
        require(
            dtype != "e4m3" and not has_cache,
            f"a term of scores is not for e4m3 or a cache, got {dtype}, cache {has_cache}",
        )
        require(not is_varlen or self.kind == "alibi", f"of packed sequences only alibi is a term, got {self.kind}")

    def operand_shape(self, sizes: tuple[int, int, int, int]) -> tuple[int, ...]:
        """Return the shape of the operand for a batch, heads, queries and keys.

        Documents are those of the queries with those of the keys behind them.
        """
        if self.kind == "mods":
            return (0,)
        batch, nheads, seqlen_q, seqlen_k = sizes
        if self.kind in BROADCAST:
            return tuple(1 if axis in self.shared else n for axis, n in zip(AXES, sizes, strict=True))
        if self.kind == "alibi":
            return (nheads,) if self.shared else (batch, nheads)
        return batch, seqlen_k + (seqlen_q if self.kind == "documents" else 0)

    def to_json(self) -> dict[str, object]:
        """Return the fields by name; those of "mods" only where they are set."""
        always = ("kind", "shared", "values")
        return {name: value for name, value in asdict(self).items() if value or name in always}
