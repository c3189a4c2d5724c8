"""A kernel's launch as a value: the kernel's name, its arguments, its grid and its options.

Plans are made of these calls. :mod:`fa3_kernels.gluon.run` runs them on a GPU, and the audit compiles them without one.
Among the arguments are the views through which TMA sees q, k, v and out: dense, ragged (packed sequences), or with
folded heads (PackGQA).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

PAGE_ROWS = 8  # a page that TMA copies is a multiple of it: so many rows lie together in the swizzled layout
SMALL_PAGE = 32  # the same for 8-bit elements
RAGGED_ROWS = 1 << 30
_RAGGED_EXTENT = 0x7FFF0000  # of the two leading dimensions: every coordinate is inside
_WRAP = 1 << 34  # a stride in elements; RAGGED_ROWS times it is a multiple of 2^64 bytes


LEAST_BOX_BYTES = 64  # of a row: with 32 a step of e4m3 at head_dim 96 takes as long as one at 128 (H200)


def box_channels(channels: int, bits: int = 16) -> int:
    """Return the channels of the boxes in which TMA copies a tile: a power of two that divides those of the tile, or
    more where a row of a box would be short.

    >>> [box_channels(96, bits) for bits in (16, 8)]
    [32, 64]
    """
    return max(channels & -channels, 8 * LEAST_BOX_BYTES // bits)


def boxes(channels: int, bits: int = 16) -> int:
    """Return how many boxes side by side hold the channels of a tile.

    >>> [boxes(n) for n in (64, 96, 128, 160, 192)]
    [1, 3, 1, 5, 3]
    """
    return -(-channels // box_channels(channels, bits))


def spare(channels: int, bits: int = 16) -> int:
    """Return how many channels of the last box hold nothing.

    >>> [spare(n, 8) for n in (64, 96, 128, 160, 192)]
    [0, 32, 0, 32, 0]
    """
    return boxes(channels, bits) * box_channels(channels, bits) - channels


def slices_of(channels: int, box: int, slices: int) -> tuple[tuple[int, int], ...]:
    """Return the slices of a sum of P V as pairs (first channel, channels), where a box has ``box`` channels.

    They are powers of two, as wide as their number allows. A single one of several boxes is what its products take: all
    boxes but the last, and that.

    >>> slices_of(160, 64, 1), slices_of(160, 64, 3)
    (((0, 128), (128, 32)), ((0, 64), (64, 64), (128, 32)))
    """
    width = (-(-channels // box) - 1) * box or channels
    if slices > 1:
        width = 1 << (-(-channels // slices) - 1).bit_length()
    return tuple((first, min(width, channels - first)) for first in range(0, channels, width))


class View(NamedTuple):
    """A tensor as TMA sees it: in blocks of rows of a head.

    Beyond the sequence and head_dim TMA reads zeros and writes nothing.

    Parameters
    ----------
    name, dtype : str
        Name of the tensor in a launch, and the type of its elements.
    rows, channels : int
        Size of a block.
    group, pack : int
        With ``pack`` > 1 a row of a block is (position, head in group), and the group's heads are padded to ``pack``.
    is_packed : bool
        Whether the tensor is (total, nheads, dim), or a cache (pages, page_size, nheads, dim). The ragged view ends
        every sequence for the hardware's bounds check, wherever it lies in the tensor: two leading dimensions, whose
        strides add up to a multiple of 2^64 bytes, shift the rows so that the sequence ends where the row dimension
        ends (at RAGGED_ROWS). The idea is Triton's (triton/tools/ragged_tma.py).
    """

    name: str
    dtype: str
    rows: int
    channels: int
    group: int = 1
    pack: int = 1
    is_packed: bool = False

    @property
    def block(self) -> tuple[int, ...]:
        """Return the shape of a block.

        >>> View("k", "float16", 128, 64).block
        (1, 1, 128, 64)
        """
        if self.pack > 1:
            return (1, 1, self.rows // self.pack, self.pack, self.channels)
        return (*(1,) * (3 if self.is_packed else 2), self.rows, self.channels)

    def of(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return shape and strides of the view of a tensor, in elements.

        >>> View("k", "float16", 128, 64).of((2, 300, 4, 64), (76800, 256, 64, 1))
        ((2, 4, 300, 64), (76800, 64, 256, 1))
        """
        if self.is_packed:
            nheads, dim = shape[-2:]
            row, head = strides[-3:-1]
            if self.pack > 1:
                return (_RAGGED_EXTENT, _RAGGED_EXTENT, RAGGED_ROWS, nheads, dim), (_WRAP - row, row, row, head, 1)
            return (_RAGGED_EXTENT, _RAGGED_EXTENT, nheads, RAGGED_ROWS, dim), (_WRAP - row, row, head, row, 1)
        batch, seqlen, nheads, dim = shape
        sequence, row, head, _ = strides
        if self.pack > 1:
            return (batch, nheads // self.group, seqlen, self.group, dim), (sequence, self.group * head, row, head, 1)
        return (batch, nheads, seqlen, dim), (sequence, head, row, 1)


class Pages(NamedTuple):
    """Says how K and V lie in a cache.

    That is the keys of a page, rows from one page to the next, how far apart rows and heads of K and of V lie, in
    elements, and whether rows are gathered whatever the size of a page.
    """

    keys: int
    rows: int
    of_k: tuple[int, ...]
    of_v: tuple[int, ...]
    gathers: bool = False

    def are_boxes(self, tile_n: int, bits: int = 16) -> bool:
        """Tell whether TMA puts pages together into a tile of keys; otherwise their rows are gathered.

        Rows of 8-bit elements are so short that small pages are gathered sooner than TMA copies them: over pages of 16
        keys at head_dim 128 steps of decoding take 0.88 to 0.92 times as long (H200).

        >>> [Pages(n, n, (), ()).are_boxes(128) for n in (1, 16, 48, 256)]
        [False, True, False, True]
        """
        fits = self.keys % tile_n == 0 or tile_n % self.keys == 0
        return not self.gathers and fits and self.keys % (PAGE_ROWS if bits == 16 else SMALL_PAGE) == 0

    def boxes(self, tile_n: int, bits: int = 16) -> int:
        """Return in how many boxes a key tile is copied: one a page, and one of all rows that are gathered.

        >>> [Pages(n, n, (), ()).boxes(128) for n in (1, 16, 256)]
        [1, 8, 1]
        """
        return max(1, tile_n // self.keys) if self.are_boxes(tile_n, bits) else 1


class Block(NamedTuple):
    """A workspace as TMA sees it: in blocks of contiguous rows, or of numbers in a row."""

    name: str
    dtype: str
    block: tuple[int, ...]

    def of(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return shape and strides of the workspace itself."""
        return shape, strides


class Pointer(NamedTuple):
    """The address of a tensor that a kernel gets; ``name`` says which, ``dtype`` is of its elements."""

    name: str
    dtype: str


class LaunchNumber(NamedTuple):
    """A number that differs between launches of a plan; ``name`` says which."""

    name: str


class Call(NamedTuple):
    """One kernel launch: the kernel's name, its arguments in order, the grid, and launch options.

    Arguments are numbers, the kernel's compile-time record, :class:`Pointer` and :class:`View`; in the calls of a plan,
    and in their grids, also :class:`LaunchNumber`.
    """

    kernel: str
    arguments: tuple[Any, ...]
    grid: tuple[Any, ...]
    options: dict[str, int]

    def of(self, numbers: Mapping[str, int]) -> Call:
        """Return the call with the numbers of a launch in it; KeyError for a number that is not given."""

        def given(x: Any) -> Any:
            return numbers[x.name] if isinstance(x, LaunchNumber) else x

        return self._replace(arguments=tuple(map(given, self.arguments)), grid=tuple(map(given, self.grid)))
