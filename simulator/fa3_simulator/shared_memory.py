"""The buffers of a program in shared memory, and which bytes several of them share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class Slot(NamedTuple):
    """A buffer in shared memory, or an accumulator (bytes 0).

    It has memory of its own, or it lies in a named ``memory`` that other slots share: in equal parts, which begin at
    the bytes ``at`` of that memory. ``readers`` is how many actors read each content of it at least; 0 stands for all
    that read any.
    """

    name: str
    bytes: int
    memory: str = ""
    at: tuple[int, ...] = (0,)
    readers: int = 0


def regions(slots: Sequence[Slot]) -> dict[tuple[int, ...], int]:
    """Cut shared memory into regions by the slots that cover them; return the bytes of each region.

    A key holds the indices of the slots that cover the region: two slots overlap if one key holds both. A slot with
    memory of its own is one region, and so is an accumulator, of 0 bytes.

    Raises
    ------
    ValueError
        If a slot in a named memory has no bytes, or its bytes cannot be cut into equal parts.

    >>> regions([Slot("v[0]", 96, "v"), Slot("v[1]", 96, "v", (96,)), Slot("out", 128, "v", (0, 64))])
    {(0, 2): 96, (1, 2): 32, (1,): 64}
    """
    sizes: dict[tuple[int, ...], int] = {(i,): slot.bytes for i, slot in enumerate(slots) if not slot.memory}
    memories: dict[str, list[tuple[int, int, int]]] = {}  # by memory, of each part: slot, first byte, end
    for i, slot in enumerate(slots):
        if not slot.memory:
            continue
        parts = len(slot.at)
        if not parts or not slot.bytes or slot.bytes % parts:
            raise ValueError(f"a slot in {slot.memory} must have equal parts of a byte or more, got {slot}")
        size = slot.bytes // parts
        memories.setdefault(slot.memory, []).extend((i, first, first + size) for first in slot.at)
    for spans in memories.values():
        edges = sorted({edge for _, *ends in spans for edge in ends})
        for first, end in pairwise(edges):
            holders = tuple(dict.fromkeys(i for i, low, high in spans if low <= first < high))
            if holders:
                sizes[holders] = sizes.get(holders, 0) + end - first
    return sizes
