"""Classes of calls that give a row equal bits, found by enumerating statistics of batches.

A plan depends on four statistics: the number of sequences, the longest queries, the longest keys, and, where packed
sequences share the multiprocessors, the key blocks of the whole call. The rules of a plan change only at certain
lengths, here called steps. All lengths between two steps are one case, so that finitely many cases stand for all
batches within the limits. This assumption is checked: every batch of up to three sequences with lengths at steps is
planned as a whole, and must be in the class of its statistics. :mod:`fa3verify.compare.proof.answers` asks for the
classes, and :mod:`fa3verify.compare.proof.plans` makes the plans.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations_with_replacement, groupby, product
from typing import Any, NamedTuple

from fa3_kernels.plan.choose import longest
from fa3_kernels.plan.config import Config
from fa3verify.compare.proof.plans import Batch, Lengths, Planner, Rows

MOST_CASES = 6_000  # with more cases, some are left out as soon as two classes are found; a proof of one has all
_DRAWN = 300  # batches of any number of sequences that are drawn at random
_FEW = 6  # lengths of queries at steps, of which the batches of three sequences are made
_MANY = 24  # combinations of ranges that are kept for equal neighbours
_STEP = 32  # queries before and behind a row in a chunk are tried near multiples of this
_L2_BYTES = 50 << 20  # K and V of multiples of this size are steps of a rule of FlashAttention-3
_TILE_ROWS = (64, 128, 192)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The batches that a proof is about: at most so many sequences, and queries and keys of each."""

    sequences: int = 64
    queries: int = 512
    keys: int = 8192


class Stretch(NamedTuple):
    """The whole numbers from the first to the last, both included."""

    first: int
    last: int


ANY = Stretch(0, 0)  # stands for a statistic that decides nothing
PlanCase = tuple[Stretch, ...]  # ranges of the statistics over which the plan of the row is the same


@dataclass(frozen=True, slots=True)
class Enumerated:
    """Holds the classes of calls that differ in one way, such as in their neighbours.

    Parameters
    ----------
    planner : Planner
    names : tuple of str
        Names of the statistics.
    classes : mapping
        The bits of the row, as :class:`Rows`, with the cases that lead to them; those of the call alone first.
    is_complete : bool
        Whether the cases stand for all calls within the limits.
    batches : mapping
        Calls that were planned as a whole, with the bits of their row; the call alone first, then smaller ones.
    against : tuple of Batch
        Calls whose bits are other than their statistics say: they refute the enumeration.
    """

    planner: Planner
    names: tuple[str, ...]
    classes: dict[Rows, list[PlanCase]]
    is_complete: bool
    batches: dict[Batch, Rows]
    against: tuple[Batch, ...] = ()

    @property
    def alone(self) -> Batch:
        """Return the call that others are compared with."""
        return next(iter(self.batches))

    @property
    def leaves(self) -> Batch | None:
        """Return the first call whose row has other bits than in the call alone; None where none has."""
        base = self.batches[self.alone]
        return next((batch for batch, bits in self.batches.items() if bits != base), None)


def stretches(first: int, last: int, signature: Callable[[int], Any]) -> list[Stretch]:
    """Cut numbers where their signature changes.

    >>> stretches(1, 5, lambda n: n // 3)
    [Stretch(first=1, last=2), Stretch(first=3, last=5)]
    """
    groups = (list(group) for _, group in groupby(range(first, last + 1), signature))
    return [Stretch(group[0], group[-1]) for group in groups]


class Ranges(NamedTuple):
    """Holds the ranges between steps of three statistics: the number of sequences, the longest queries and keys."""

    sequences: list[Stretch]
    queries: list[Stretch]
    keys: list[Stretch]

    @classmethod
    def of(cls, planner: Planner, own: Lengths, limits: BatchLimits) -> Ranges:
        """Cut the statistics at all steps: ends of tiles, rounding of lengths, windows, L2, and the plan itself."""
        sizes = planner.sizes
        element = 1 if sizes["dtype"] == "e4m3" else 2
        row_bytes = element * (sizes["head_dim"] + sizes.get("head_dim_v", sizes["head_dim"]))
        left = sizes.get("window", (-1, -1))[0]

        def of_queries(n: int) -> tuple[Any, ...]:
            group = sizes["nheads"] // sizes["nheads_kv"]
            tiles = [-(-n * rows // tile) for rows in (1, group) for tile in _TILE_ROWS]
            return planner.config(2, (n, own[1])), longest(n), *tiles

        queries = stretches(own[0], limits.queries, of_queries)
        met = [(each.first, own[1]) for each in queries] + [(own[0], limits.keys)]
        tiles = {planner.config(2, lengths).tile_n for lengths in met}

        def of_keys(n: int) -> tuple[Any, ...]:
            return tuple(-(-n // tile) for tile in tiles), longest(n), -(-n * row_bytes // _L2_BYTES), left >= n - 1

        corners = list(product((own[0], limits.queries), (own[1], limits.keys)))
        sequences = stretches(2, limits.sequences, lambda n: [planner.config(n, corner) for corner in corners])
        if len(sequences) > 1:
            sequences = [Stretch(n, n) for n in range(2, limits.sequences + 1)]
        return cls(sequences, queries, stretches(own[1], limits.keys, of_keys))

    def thinned(self, most: int) -> Ranges:
        """Return a part of the ranges with at most ``most`` combinations; the last range of each is kept."""
        ranges = list(self)
        while len(ranges[0]) * len(ranges[1]) * len(ranges[2]) > most:
            widest = max(range(3), key=lambda i: len(ranges[i]))
            ranges[widest] = [*ranges[widest][:-1:2], ranges[widest][-1]]
        return Ranges(*ranges)

    def case(self, sequences: int, lengths: Lengths) -> tuple[int, Lengths]:
        """Return the first numbers of the ranges in which a number of sequences and the longest lengths lie."""
        first = [
            each[bisect_right(each, n, key=lambda stretch: stretch.first) - 1].first
            for each, n in zip(([Stretch(1, 1), *self[0]], *self[1:]), (sequences, *lengths), strict=True)
        ]
        return first[0], (first[1], first[2])


@dataclass(frozen=True, slots=True)
class Shares:
    """Finds the bits of a row by configuration and key blocks of the call, each once; ``known`` is the memory."""

    planner: Planner
    own: Lengths
    limits: BatchLimits
    known: dict[Config, dict[Stretch, Rows]] = field(default_factory=dict)

    def of(self, config: Config) -> dict[Stretch, Rows]:
        """Return the bits by ranges of blocks, from the blocks of the row's own sequence to the most within the limits.

        The ends of ranges are found by bisection, as the parts of the row's keys never grow with the blocks of the
        call. The batches that are planned as a whole check that.
        """
        planner = self.planner
        if config not in self.known:
            self.known[config] = {}
            first = planner.blocks(config, (self.own,))
            step = planner.blocks(config, ((1, 1),))
            most = (
                (self.limits.sequences - 1) * planner.blocks(config, ((self.limits.queries, self.limits.keys),)) // step
            )

            def splits(others: int) -> int:
                return planner.splits(config, (self.own, *([(1, others * config.tile_n)] if others else [])))

            start = 0
            while start <= most:
                now = splits(start)
                stop = bisect_right(range(most + 1), False, start, key=lambda n: splits(n) != now)
                blocks = Stretch(first + start * step, first + (stop - 1) * step)
                self.known[config][blocks] = planner.rows(config, self.own, now)
                start = stop
        return self.known[config]

    def at(self, config: Config, blocks: int) -> Rows:
        """Return the bits in a call with so many blocks."""
        return next(bits for stretch, bits in reversed(self.of(config).items()) if stretch.first <= blocks)


def enumerate_calls(planner: Planner, own: Lengths, limits: BatchLimits) -> Enumerated:
    """Return the classes of calls that differ in the way that ``planner.change`` says.

    For neighbours they are found by statistics, and only the call alone is planned as a whole; :func:`with_batches`
    adds others. For a batch or a chunk every call is planned.
    """
    if planner.change == "neighbours":
        base = planner.bits(Batch((own,)))
        ranges = Ranges.of(planner, own, limits)
        shares = Shares(planner, own, limits)
        classes: dict[Rows, list[PlanCase]] = {}
        # All cases are tried only if the thinned ones leave one class: a proof needs them, a refutation does not.
        for tried in (ranges.thinned(MOST_CASES), ranges):
            if len(classes) < 2:
                classes = {base: [], **_classes(planner, tried, shares, base)}
        names = ("sequences", "max_seqlen_q", "max_seqlen_k", "blocks")
        is_complete = len(classes) == 1 or ranges == ranges.thinned(MOST_CASES)
        return Enumerated(planner, names, classes, is_complete, {Batch((own,)): base})
    calls = [Batch((own,) * n) for n in range(1, limits.sequences + 1)]
    if planner.change == "chunk":
        chunks = sorted(_chunks(own[1], limits, planner.sizes), key=lambda call: (call.lengths, call.behind))
        calls = list(dict.fromkeys((Batch((own,)), *chunks)))
    batches = {call: planner.bits(call) for call in calls}
    classes = {}
    for call, bits in batches.items():
        count = len(call.lengths) if planner.change == "batch" else call.lengths[0][0]
        classes.setdefault(bits, []).append((Stretch(count, count), Stretch(call.behind, call.behind)))
    # Chunks between those of _chunks are covered only where keys are not cut into parts.
    is_cut = any(each.is_merged for rows in classes for row in rows for each in row)
    names = ("sequences" if planner.change == "batch" else "queries", "behind")
    return Enumerated(planner, names, classes, planner.change == "batch" or not is_cut, batches)


def _classes(planner: Planner, ranges: Ranges, shares: Shares, base: Rows) -> dict[Rows, list[PlanCase]]:
    """Return the cases of all combinations of ranges by the bits they lead to, those of ``base`` first."""
    classes: dict[Rows, list[PlanCase]] = {base: []}
    for sequences, queries, keys in product(*ranges):
        shared = shares.of(planner.config(sequences.first, (queries.first, keys.first)))
        for blocks, bits in shared.items():
            classes.setdefault(bits, []).append((sequences, queries, keys, blocks if len(shared) > 1 else ANY))
    return classes


def _chunks(keys: int, limits: BatchLimits, sizes: Any) -> Iterator[Batch]:
    """Yield calls that hold the query with so many keys: as the last, as the first, and between other queries."""
    most = min(keys, limits.queries)
    near = sorted({n for step in range(0, most + 1, _STEP) for n in (step - 1, step, step + 1)})
    ends = [(n, 0) for n in range(1, most + 1)]
    if sizes.get("causal"):
        ends += [(1, n) for n in range(1, most)]
        ends += [(n, behind) for n in near for behind in near if n > 0 and behind > 0]
    for before, behind in ends:
        if before + behind <= limits.queries:
            yield Batch(((before + behind, keys + behind),), behind)


def with_batches(found: Enumerated, own: Lengths, limits: BatchLimits) -> Enumerated:
    """Return the same classes of a packed row with batches that were planned as a whole, and those that refute them."""
    planner = found.planner
    ranges = Ranges.of(planner, own, limits)
    shares = Shares(planner, own, limits)
    batches = dict(found.batches)
    against = []
    for batch in _batches(planner, own, limits, ranges):
        bits = planner.bits(batch)
        case = planner.config(*ranges.case(len(batch.lengths), planner.longest(batch.lengths)))
        if bits != shares.at(case, planner.blocks(case, batch.lengths)):
            against.append(batch)
        batches.setdefault(batch, bits)
    known = replace(found, batches=batches, against=tuple(against))
    if call := known.leaves:
        call = _shrunk(planner, call, found.batches[found.alone])
        known = replace(known, batches={found.alone: batches[found.alone], call: planner.bits(call), **batches})
    return known


def _batches(planner: Planner, own: Lengths, limits: BatchLimits, ranges: Ranges) -> Iterator[Batch]:
    """Yield batches around a row: equal neighbours, few first; up to three sequences at steps; and drawn ones."""
    configs = {planner.config(2, (each.first, own[1])): each.first for each in reversed(ranges.queries)}
    steps = sorted(configs.values())[:_FEW]
    tile_n = planner.config(1, own).tile_n
    few = sorted({1, *steps, *(n - 1 for n in steps if n > 1), limits.queries})
    counts = sorted({*(1 << n for n in range(limits.sequences.bit_length())), limits.sequences - 1})
    for count in [n for n in counts if n < limits.sequences]:
        some = ranges if count == 1 else ranges.thinned(_MANY)
        keys = sorted({1, own[1], *(each.first for each in some.keys), limits.keys})
        for queries, n in product(few, keys):
            yield Batch((own, *((queries, max(queries, n)),) * count))
    ends = sorted({1, min(tile_n + 1, limits.keys), own[1], limits.keys})
    for rest in combinations_with_replacement(list(product(few, ends)), min(2, limits.sequences - 1)):
        yield Batch((own, *rest))
    draw = random.Random(0)
    for _ in range(_DRAWN):
        most = draw.choice((16, limits.queries))
        count = draw.randint(1, min(9, limits.sequences - 1))
        rest = tuple((draw.randint(1, most), draw.randint(1, limits.keys)) for _ in range(count))
        yield Batch((own, *rest))


def _shrunk(planner: Planner, batch: Batch, base: Rows) -> Batch:
    """Return the batch without the neighbours that it does not need to change the row's bits from ``base``.

    The neighbours that stay get the fewest keys that still change them.
    """
    lengths = list(batch.lengths)
    for i in reversed(range(1, len(lengths))):
        if planner.bits(Batch((*lengths[:i], *lengths[i + 1 :]))) != base:
            del lengths[i]
    for i in range(1, len(lengths)):

        def leaves(n: int, i: int = i) -> bool:
            return planner.bits(Batch((*lengths[:i], (lengths[i][0], n), *lengths[i + 1 :]))) != base

        lengths[i] = lengths[i][0], next(n for n in range(lengths[i][0], lengths[i][1] + 1) if leaves(n))
    return Batch(tuple(lengths))
