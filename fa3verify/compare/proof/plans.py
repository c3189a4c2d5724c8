"""Plans of batches, for every kernel whose launches are known: the configuration, the splits and the bits of a row.

:mod:`fa3verify.compare.proof.classes` asks for them; :mod:`fa3verify.compare.proof.row` reads the bits off a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from fa3_kernels.plan.config import Config, default_config
from fa3_kernels.plan.families import OURS, traits_of
from fa3_reference.problem import AttentionProblem
from fa3_reference.rules import require
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
