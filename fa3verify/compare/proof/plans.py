"""The plans of batches, of every kernel whose launches are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from fa3_kernels.plan.config import Config, default_config
from fa3_kernels.plan.families import OURS, traits_of
from fa3_reference.problem import AttentionProblem
from fa3verify.compare.proof.row import Rows, bits_of_rows
from fa3verify.kernels import twins
from fa3verify.kernels.names import KernelName
from fa3verify.kernels.record import Kernel
from fa3verify.known import registry
from fa3verify.operations import FORWARD

Change = Literal["neighbours", "batch", "chunk"]
Lengths = tuple[int, int]  # queries and keys of a sequence


@dataclass(frozen=True, slots=True)
class Batch:
    """A call around a row.

    Parameters
    ----------
    lengths : tuple of (int, int)
        Queries and keys of every sequence, the row's own first.
    behind : int
        Queries of the row's sequence behind it, each of which sees one more key.
    """

    lengths: tuple[Lengths, ...]
    behind: int = 0


@dataclass(frozen=True, slots=True)
class Planner:
    """Says what a kernel launches for a batch.

    Parameters
    ----------
    name : str
    configure : callable
        The configuration of a problem.
    sizes : mapping
        Fields of the problem that no batch changes: heads, head_dim, dtype, mask, and the cache of one over pages.
    kernel : Kernel
        What is run to confirm it.
    change : {"neighbours", "batch", "chunk"}
        What changes between calls.
    declared : (int, int)
        What the caller gives as the longest at least: max_seqlen_q, and max_seqlen_k or the capacity of a page table.
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
        """Whether sequences are packed, each with its lengths; otherwise all have the own ones."""
        return self.change != "batch" and "varlen" in self.kernel.features

    def around(self, own: Lengths, others: Sequence[Lengths]) -> tuple[Lengths, ...]:
        """Return the lengths of a call with so many others beside the own sequence."""
        return (own, *(others if self.is_packed else [own] * len(others)))

    def asked(self, behind: int, own: Lengths) -> range:
        """Return the queries that are asked about, of which so many are behind: one where its chunk changes, or all."""
        stop = own[0] - behind
        return range(stop - 1 if self.change == "chunk" else 0, stop)

    def problem(self, lengths: tuple[Lengths, ...]) -> AttentionProblem:
        """Return the call of these sequences; over pages it is one of packed ones."""
        if self.is_packed or "cache" in self.sizes:
            return AttentionProblem.varlen(*zip(*lengths, strict=True), **self.sizes)
        return AttentionProblem(len(lengths), seqlen_q=lengths[0][0], seqlen_k=lengths[0][1], **self.sizes)

    def longest(self, lengths: tuple[Lengths, ...]) -> Lengths:
        """Return the longest queries and keys, as the host knows them."""
        queries, keys = zip(self.declared, *lengths, strict=True)
        return max(queries), max(keys)

    def config(self, sequences: int, longest: Lengths) -> Config:
        """Return what is launched where the longest lengths decide, and how many sequences there are."""
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
        """Return what decides the bits of the row, or rows, of a batch whose lengths are all at hand."""
        config = self.config(len(batch.lengths), self.longest(batch.lengths))
        if self.declared == (0, 0):
            config = self.configure(self.problem(batch.lengths))
        return self.rows(config, batch.lengths[0], self.splits(config, batch.lengths), batch.behind)

    def rows(self, config: Config, own: Lengths, num_splits: int, behind: int = 0) -> Rows:
        """Return what decides the bits of a sequence whose keys are cut into so many parts."""
        return bits_of_rows(self.problem((own,)), config, own, num_splits, self.asked(behind, own))

    def blocks(self, config: Config, lengths: tuple[Lengths, ...]) -> int:
        """Return the key blocks that the row tiles of one head visit where nothing is masked."""
        group = self.sizes["nheads"] // self.sizes["nheads_kv"] if config.pack_gqa else 1
        return sum(-(-k // config.tile_n) * -(-q * group // config.tile_m) for q, k in lengths)

    def chosen(self, name: str, value: int | bool) -> Planner:
        """Return the same kernel with a choice of a caller changed."""
        asked = KernelName.parse(self.name)
        changed = replace(asked, changes={**asked.changes, name: value})
        return planner(str(changed), self.sizes, self.change)


def planner(name: str, sizes: Mapping[str, Any], change: Change = "neighbours") -> Planner:
    """Return the planner of a kernel by its name, of which ``twin.`` may be left out.

    Raises
    ------
    ValueError
        For an unknown kernel, one that is no forward, and one whose plan nobody knows.
    """
    try:
        asked = registry.find(name)
    except ValueError:
        if not twins.is_twin(f"twin.{name}"):
            raise
        asked = registry.find(f"twin.{name}")
    if asked.operation != FORWARD:
        raise ValueError(f"only forward kernels are asked, {name} computes {asked.operation}")
    twin = asked.twin or asked  # which knows choices that a launch resolves, such as num_splits=0
    if not isinstance(twin.code, twins.Twin):
        raise ValueError(f"nobody knows how {name} is launched: without --prove pairs of its calls run")
    changes = dict(twin.code.changes)
    traits = traits_of(twin.code.family)
    if "cache" in sizes and "paged" not in traits.serving:
        raise ValueError(f"nobody knows how {name} is launched over pages")
    if traits.order.key_tiles == "from_window" and sizes.get("window", (-1, -1))[0] >= 0:
        raise ValueError(f"key tiles of {name} begin where the window of a row tile does: only calls without are asked")
    configure = asked.code.configure
    if twin.code.family != OURS:  # whose plan is known where its bits are not
        configure = partial(default_config, **changes)
    elif changes.get("num_splits") == 0:
        configure = twin.code.configure
    return Planner(name, configure, {**sizes, "dtype": asked.dtype}, twin if asked.unavailable else asked, change)
