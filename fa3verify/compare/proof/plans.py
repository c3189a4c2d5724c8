"""Plans of batches, for every kernel whose launches are known: the configuration, the splits and the bits of a row.

:mod:`fa3verify.compare.proof.classes` asks for them.

The bits of a row are a value, the part of a plan that decides them: if it is equal in two calls, so are the bits. The
row has the same operands in both calls, so that neighbours, batch and schedule act on it through this value alone. That
holds for finite operands: a key block that only other rows of the tile see adds 0 times V to this row, which is NaN
where V is NaN or Inf.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import groupby
from typing import Any, Literal

import numpy as np

from fa3_kernels.plan.config import Config, default_config
from fa3_kernels.plan.families import OURS, traits_of
from fa3_kernels.plan.tiles import Mask, mask_of, row_tiles, split_ranges
from fa3_reference.problem import AttentionProblem
from fa3_reference.rules import require
from fa3verify.kernels import twins
from fa3verify.kernels.names import KernelName
from fa3verify.kernels.record import Kernel
from fa3verify.known import registry
from fa3verify.operations import FORWARD

Change = Literal["neighbours", "batch", "chunk"]
Lengths = tuple[int, int]  # queries and keys of a sequence


@dataclass(frozen=True, slots=True)
class Batch:
    """The lengths of a call that holds the row in question.

    Parameters
    ----------
    lengths : tuple of (int, int)
        Queries and keys of every sequence, the row's own first.
    behind : int
        Queries of the row's own sequence after the row, each of which sees one more key.
    """

    lengths: tuple[Lengths, ...]
    behind: int = 0


@dataclass(frozen=True, slots=True)
class Planner:
    """Knows what a kernel launches for a batch.

    Parameters
    ----------
    name : str
    configure : callable
        Returns the configuration of a problem.
    sizes : mapping
        Fields of the problem that no batch changes: heads, head_dim, dtype, mask, and a cache with pages.
    kernel : Kernel
        The kernel that is run to confirm the plan.
    change : {"neighbours", "batch", "chunk"}
        What changes between calls.
    declared : (int, int)
        Least longest lengths that a caller states: max_seqlen_q, and max_seqlen_k or the capacity of a page table.
    known : dict
        Configurations that were found, by number of sequences and longest lengths.
    """

    name: str
    configure: Callable[[AttentionProblem], Any]
    sizes: Mapping[str, Any]
    kernel: Kernel
    change: Change = "neighbours"
    declared: Lengths = (0, 0)
    known: dict[tuple[int, Lengths], Config] = field(default_factory=dict)

    @property
    def is_packed(self) -> bool:
        """Tell whether sequences are packed, each with its lengths; otherwise all have those of the row's sequence."""
        return self.change != "batch" and "varlen" in self.kernel.features

    def around(self, own: Lengths, others: Sequence[Lengths]) -> tuple[Lengths, ...]:
        """Return the lengths of a call of the row's own sequence and the others."""
        return (own, *(others if self.is_packed else [own] * len(others)))

    def asked(self, behind: int, own: Lengths) -> range:
        """Return the queries whose bits are in question: the row where its chunk changes, else all of its sequence."""
        stop = own[0] - behind
        return range(stop - 1 if self.change == "chunk" else 0, stop)

    def problem(self, lengths: tuple[Lengths, ...]) -> AttentionProblem:
        """Return the call of these sequences; over pages it is one of packed ones."""
        if self.is_packed or "cache" in self.sizes:
            return AttentionProblem.varlen(*zip(*lengths, strict=True), **self.sizes)
        return AttentionProblem(len(lengths), seqlen_q=lengths[0][0], seqlen_k=lengths[0][1], **self.sizes)

    def longest(self, lengths: tuple[Lengths, ...]) -> Lengths:
        """Return the longest queries and keys, at least those that the caller declares."""
        queries, keys = zip(self.declared, *lengths, strict=True)
        return max(queries), max(keys)

    def config(self, sequences: int, longest: Lengths) -> Config:
        """Return the configuration for a number of sequences and their longest queries and keys."""
        key = sequences, self.longest((longest,))
        if key not in self.known:
            self.known[key] = self.configure(self.problem((key[1],) * sequences))
        return self.known[key]

    def splits(self, config: Config, lengths: tuple[Lengths, ...]) -> int:
        """Return the parts into which the keys of the first sequence are cut."""
        if config.num_splits == 1 or not (problem := self.problem(lengths)).is_varlen:
            return config.num_splits
        return config.traits.sequence_splits(problem, config)[0]

    def bits(self, batch: Batch) -> Rows:
        """Return the bits of the row, or rows, in a batch of which all lengths are known."""
        config = self.config(len(batch.lengths), self.longest(batch.lengths))
        if self.declared == (0, 0):
            config = self.configure(self.problem(batch.lengths))
        return self.rows(config, batch.lengths[0], self.splits(config, batch.lengths), batch.behind)

    def rows(self, config: Config, own: Lengths, num_splits: int, behind: int = 0) -> Rows:
        """Return the bits of a sequence whose keys are cut into so many parts."""
        return bits_of_rows(self.problem((own,)), config, own, num_splits, self.asked(behind, own))

    def blocks(self, config: Config, lengths: tuple[Lengths, ...]) -> int:
        """Return the key blocks that the row tiles of one head visit where nothing is masked."""
        group = self.sizes["nheads"] // self.sizes["nheads_kv"] if config.pack_gqa else 1
        return sum(-(-k // config.tile_n) * -(-q * group // config.tile_m) for q, k in lengths)

    def chosen(self, name: str, value: int | bool) -> Planner:
        """Return the planner of the same kernel with one choice of a caller changed."""
        parts = KernelName.parse(self.name)
        changed = replace(parts, changes={**parts.changes, name: value})
        return planner(str(changed), self.sizes, self.change)


def planner(name: str, sizes: Mapping[str, Any], change: Change = "neighbours") -> Planner:
    """Return the planner of a kernel by its name; ``twin.`` in front of it may be left out.

    Raises
    ------
    ValueError
        For an unknown kernel, one that is no forward, and one whose plan is not known.
    """
    try:
        kernel = registry.find(name)
    except ValueError:
        if not twins.is_twin(f"twin.{name}"):
            raise
        kernel = registry.find(f"twin.{name}")
    require(kernel.operation == FORWARD, f"only forward kernels are asked, {name} computes {kernel.operation}")
    twin = kernel.twin or kernel  # the twin knows the choices that a launch resolves, such as num_splits=0
    if not isinstance(twin.code, twins.Twin):
        raise ValueError(f"nobody knows how {name} is launched: without --prove pairs of its calls run")
    changes = dict(twin.code.changes)
    traits = traits_of(twin.code.family)
    require("cache" not in sizes or "paged" in traits.serving, f"nobody knows how {name} is launched over pages")
    require(
        traits.order.key_tiles != "from_window" or sizes.get("window", (-1, -1))[0] < 0,
        f"key tiles of {name} begin where the window of a row tile does: only calls without are asked",
    )
    configure = kernel.code.configure
    if twin.code.family != OURS:  # a twin refuses problems whose bits are not known, but their plan is
        configure = partial(default_config, **changes)
    elif changes.get("num_splits") == 0:
        configure = twin.code.configure
    return Planner(name, configure, {**sizes, "dtype": kernel.dtype}, twin if kernel.unavailable else kernel, change)


Part = tuple[int, int, int]  # number of a part of the keys, its first key block, and the one behind its last


@dataclass(frozen=True, slots=True)
class RowBits:
    """Holds what decides the bits of a row of one kernel and one head_dim.

    Parameters
    ----------
    tile_n : int
        Keys of a tile, counted from the first key of the sequence; 0 where all keys that the row sees are in one.
    promotion_interval : int
        Keys after which e4m3 sums of P V are promoted; 0 where they are chained, or one sum takes all keys.
    parts : tuple of (int, int, int)
        The parts of the keys in which the row sees any key, in order.
    is_merged : bool
        Whether parts are merged. Which thread adds a part follows from its number alone. The merge of a single part
        changes the sign of a zero at most.
    """

    tile_n: int
    promotion_interval: int
    parts: tuple[Part, ...]
    is_merged: bool = False

    def told(self) -> str:
        """Return in words how the row's keys are cut into tiles and parts.

        >>> RowBits(128, 0, ((0, 0, 8), (1, 8, 15)), True).told()
        '8 + 7 tiles of 128 keys'
        >>> RowBits(96, 96, ((0, 0, 21),)).told()
        '21 tiles of 96 keys, promoted every 96'
        >>> RowBits(0, 0, ((0, 0, 1),)).told()
        'one tile'
        """
        promoted = f", promoted every {self.promotion_interval}" if self.promotion_interval else ""
        if not self.tile_n:
            return f"one tile{promoted}"
        counts = [stop - first for _, first, stop in self.parts]
        runs = [(size, len(list(group))) for size, group in groupby(counts)]
        parts = " + ".join(f"{n} x {size}" if n > 1 else str(size) for size, n in runs)
        return f"{parts} tiles of {self.tile_n} keys{promoted}"


Rows = tuple[frozenset[RowBits], ...]  # one set for each query, with the different values of a group's heads


def bits_of_rows(
    problem: AttentionProblem, config: Config, lengths: tuple[int, int], num_splits: int, rows: range
) -> Rows:
    """Return what decides the bits of some queries of a sequence.

    Parameters
    ----------
    problem : AttentionProblem
        Only its mask and heads are used, not its lengths.
    config : Config
        Configuration of the launch.
    lengths : (int, int)
        Queries and keys of the sequence.
    num_splits : int
        Parts into which the keys of this sequence are cut.
    rows : range
        The queries, as places in the sequence.
    """
    mask = mask_of(problem, *lengths)
    if config.traits.order.diagonal == "top_left":
        mask = Mask(mask.seqlen_k, 0, mask.left, mask.right)
    return _bits(mask, config, lengths[0], problem.group, num_splits, rows)


@lru_cache(maxsize=1 << 12)
def _bits(mask: Mask, config: Config, seqlen_q: int, group: int, num_splits: int, rows: range) -> Rows:
    if num_splits == 1:
        return tuple(frozenset({_row(mask, config, n)}) for n in rows)
    values: dict[int, set[RowBits]] = {n: set() for n in rows}
    packing = {"tile_m": config.tile_m, "pack_gqa": config.pack_gqa, "pads_group": config.traits.pads_group}
    every = range(-(-mask.seqlen_k // config.tile_n))
    for tile in row_tiles(seqlen_q, group, **packing):
        cut = mask.blocks(tile.positions, config.tile_n) if config.traits.order.splits_visible else every
        for n in set(tile.positions.tolist()) & values.keys():
            values[n].add(_row(mask, config, n, split_ranges(cut, num_splits)))
    return tuple(map(frozenset, values.values()))


def _row(mask: Mask, config: Config, position: int, parts: list[range] | None = None) -> RowBits:
    """Return the value of one query whose tile has these parts of the keys; None means that keys are not cut."""
    own = mask.blocks(np.array([position]), config.tile_n)
    cut = [range(max(x.start, own.start), min(x.stop, own.stop)) for x in parts or [own]]
    seen = tuple((number, part.start, part.stop) for number, part in enumerate(cut) if part)
    diagonal = position + mask.offset
    stop = min(mask.seqlen_k, diagonal + mask.right + 1) if mask.right >= 0 else mask.seqlen_k
    first = max(0, diagonal - mask.left) if mask.left >= 0 else 0
    is_one = len(own) <= 1
    interval = config.promotion_interval
    # All keys that the row sees are promoted together: their sum is one chain.
    is_chain = is_one and interval > 0 and first // interval == max(first, stop - 1) // interval
    where = tuple((number, 0, 1) for number, _, _ in seen) if is_one else seen
    return RowBits(0 if is_one else config.tile_n, 0 if is_chain else interval, where, parts is not None)
