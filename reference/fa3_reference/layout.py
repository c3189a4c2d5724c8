"""Where the keys and values of a problem lie when a kernel serves from a cache: the record ``Cache``.

It is a field of :class:`~fa3_reference.problem.AttentionProblem`, which is why it has a module of its own below that
one. :mod:`fa3_reference.cache` moves operands to the places that it states, and back.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, Protocol

from fa3_reference.rules import is_integer, require

_FP8 = ("", "tensor", "head", "row")


class HasKeys(Protocol):
    """Any problem whose key lengths can be read: :class:`Cache` stands below the module of the problem."""

    @property
    def seqlens_k(self) -> tuple[int, ...] | None: ...


@dataclass(frozen=True, slots=True)
class Cache:
    """Says where the keys and values of packed sequences lie when a kernel is called.

    Parameters
    ----------
    page_size : int
        Keys of a page; 0 stands for no pages: every sequence then has a row of the cache.
    spare : int
        How many pages, and entries of every row of the table, belong to no sequence; in a cache of rows, how many keys
        of every row. Where ``indexed`` also how many rows, of the table or of the cache.
    new : tuple of int
        How many of each sequence's last keys the call itself appends; () appends none.
    rotary_dim : int
        How many leading channels of Q and of appended keys the call rotates, a multiple of 16; 0 rotates none.
    interleaved : bool
        Whether a rotated pair is two neighbouring channels, or two channels half of ``rotary_dim`` apart.
    leftpad : tuple of int
        How many keys of others lie in front of each sequence's own, in its row or its pages; () is none. They count in
        the positions by which a call rotates.
    indexed : bool
        Whether rows, of the cache or of the page table, are in another order than sequences, which the call's
        ``cache_batch_idx`` states.
    behind : {"random", "nan"}
        What fills the places where no key of a sequence lies.
    seed : int
        Seed of the order of pages and rows, and of the random numbers that fill other places.
    shared : bool
        Whether full pages of equal bytes are stored once.
    fp8 : {"", "tensor", "head", "row"}
        Which keys share a descale where K and V are stored in e4m3 beside a Q of 16 bits: all of them, those of a
        sequence and kv head, or none. Such a call dequantises K and V to 16 bits before it attends. Empty where they
        are stored in Q's own format. (A call that quantises Q too is a problem whose dtype is e4m3.)

    Raises
    ------
    ValueError
        Whenever a value breaks its rule; the message states both.
    """

    page_size: int = 0
    spare: int = 1
    new: tuple[int, ...] = ()
    rotary_dim: int = 0
    interleaved: bool = False
    leftpad: tuple[int, ...] = ()
    indexed: bool = False
    behind: Literal["random", "nan"] = "random"
    seed: int = 0
    shared: bool = True
    fp8: Literal["", "tensor", "head", "row"] = ""

    def __post_init__(self) -> None:
        for name in ("new", "leftpad"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("page_size", "spare", "rotary_dim", "seed"):
            value = getattr(self, name)
            require(is_integer(value, 0), f"cache: {name} must be an integer >= 0, got {value!r}")
        for name in ("interleaved", "indexed", "shared"):
            value = getattr(self, name)
            require(isinstance(value, bool), f"cache: {name} must be a bool, got {value!r}")
        require(self.behind in ("random", "nan"), f"cache: behind must be random or nan, got {self.behind!r}")
        require(self.fp8 in _FP8, f"cache: fp8 must be one of {_FP8}, got {self.fp8!r}")
        require(
            not (self.fp8 and self.new), "cache: keys that are appended are of Q's format, and those of fp8 are not"
        )
        dim = self.rotary_dim
        require(dim % 16 == 0, f"cache: rotary_dim must be a multiple of 16, got {dim}")
        require(not dim or bool(self.new), "cache: rotary_dim needs keys that are appended")

    def check_fits(self, keys: tuple[int, ...] | None, head_dim: int, *, is_fp8: bool, qv: bool) -> None:
        """Check that a cache fits a problem.

        Parameters
        ----------
        keys : tuple of int or None
            Length of each sequence; None where the problem is not packed, which a cache does not fit.
        head_dim : int
            Channels of Q and K that may be rotated.
        is_fp8, qv : bool
            Whether the problem's dtype is e4m3, and whether its V are the last channels of K (absorbed MLA).

        Raises
        ------
        ValueError
            If the cache does not fit; the message states the rule.
        """
        if keys is None:
            raise ValueError("a cache needs seqlens_q and seqlens_k: the lengths that its sequences attend to")
        for name in ("new", "leftpad"):
            value = getattr(self, name)
            is_whole = not value or (len(value) == len(keys) and all(is_integer(x, 0) for x in value))
            require(is_whole, f"cache: {name} must hold batch = {len(keys)} integers >= 0, got {value!r}")
        fits = all(n <= m for n, m in zip(self.new, keys, strict=False))
        require(fits, f"cache: new must be at most seqlens_k, got {self.new} and {keys}")
        is_rotated = self.rotary_dim <= head_dim and not (self.rotary_dim and is_fp8)
        require(not (self.fp8 and (is_fp8 or qv)), "cache: fp8 is of 16-bit Q, without qv")
        require(is_rotated, f"cache: rotary_dim must be at most {head_dim}, of 16 bits, got {self.rotary_dim}")

    def describe(self) -> str:
        """Return the fields that differ from their defaults.

        Returns
        -------
        str
            One readable line, ``cache(page_size=16, seed=3)``.
        """
        said = (f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default)
        return f"cache({', '.join(said)})"

    def before(self, problem: HasKeys) -> tuple[int, ...]:
        """Return how many keys of each sequence the cache holds before the call.

        Parameters
        ----------
        problem : AttentionProblem
            The problem whose keys lie in it.

        Returns
        -------
        tuple of int
            One number for each sequence; () where the problem is not packed and nothing is appended.
        """
        keys = problem.seqlens_k or ()
        return tuple(n - m for n, m in zip(keys, self.new or (0,) * len(keys), strict=True))

    def pads(self, problem: HasKeys) -> tuple[int, ...]:
        """Return how many keys of others lie in front of each sequence's own.

        Parameters
        ----------
        problem : AttentionProblem
            The problem whose keys lie in it.

        Returns
        -------
        tuple of int
            One number for each sequence.
        """
        return self.leftpad or (0,) * len(problem.seqlens_k or ())

    def seqlens(self, problem: HasKeys) -> tuple[int, ...]:
        """Return the lengths that a call states: keys of each sequence before it, with those of others in front.

        Parameters
        ----------
        problem : AttentionProblem
            The problem whose keys lie in it.

        Returns
        -------
        tuple of int
            One number for each sequence, which is also the position of the first key that it appends.
        """
        return tuple(n + pad for n, pad in zip(self.before(problem), self.pads(problem), strict=True))
