"""The record of a kernel family: everything in which two families may differ.

Each file beside this one fills in a :class:`Traits` for its families; :func:`fa3_kernels.plan.families.traits_of` finds
them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from fa3_kernels.plan.order import OUR_ORDER, BackwardOrder, Order
from fa3_reference.problem import DTYPES, AttentionProblem, Dtype


class Cut(Protocol):
    """The fields of a configuration that decide into which parts the keys of a launch are cut."""

    @property
    def tile_m(self) -> int: ...

    @property
    def tile_n(self) -> int: ...

    @property
    def num_splits(self) -> int: ...

    @property
    def pack_gqa(self) -> bool: ...


def broken(*rules: tuple[bool, str]) -> str:
    """Return the rules that are broken, in words; empty if none is.

    A rule is whether it is broken, and its words.
    """
    return "; ".join(rule for is_broken, rule in rules if is_broken)


class Shipped(NamedTuple):
    """A tile as a family launches it: query rows, keys, and the switches that come with it."""

    tile_m: int
    tile_n: int
    pingpong: bool = True
    pv_from_registers: bool = True


@dataclass(frozen=True, slots=True)
class Size:
    """One compiled head_dim, for operands of 16 bits or for e4m3.

    Parameters
    ----------
    shipped, other : Shipped
        The tiles that are launched; :attr:`Traits.tile` chooses between the two.
    other_instructions : (int, int)
        Instructions of a step that are no arithmetic, chained and promoted: addresses and descriptors of wgmma, moves,
        predicates, branches. Assumed; those of our own kernels are counted in their accepted code, see
        :mod:`fa3_simulator.vector_work`.
    rows : tuple of int
        Query rows of tiles for which the family has registers.
    registers : (int, int), optional
        Registers of the producer and of a consumer, if this size with two consumer warpgroups has others than
        :attr:`Traits.registers` says.
    query_slots : int
        Q tiles that shared memory holds: 2, or 1 where it is short (at 256 the buffers of Q, K, V and O would need 256
        KiB).
    holds_queries : bool
        Whether two consumer warpgroups keep Q in registers. Products then read K and V alone from shared memory, and
        Q's buffer is free for the next tile as soon as it is read.
    chained_queries : (bool, bool)
        Whether chained e4m3 sums leave registers for Q, which stays in its buffer as well. The index is whether the
        launch hides keys.
    slices : int
        Slices of the channels of V and O in which promoted sums are taken, if this is their size. Registers must hold a
        partial sum of a slice.
    holds_partials : bool
        Whether O, S and a promoted partial sum fit the registers together. Otherwise a partial sum is added where it is
        awaited, and no GEMM runs under a warpgroup's own softmax.
    integer_max : ((bool, bool), (bool, bool))
        Whether row maxima are found by integer instructions. The first index is whether sums are promoted, the second
        whether the launch hides keys.
    early_exponentials : float
        Fraction of a block's exponentials that ptxas issues before it waits for the previous P V, read off the SASS.
    scales_late : bool
        Whether 16-bit kernels multiply O by a block's factor when the next scores are started, under which that takes
        no time; otherwise as soon as P V is done, which ptxas puts behind the block's exponentials.
    """

    shipped: Shipped
    other: Shipped
    other_instructions: tuple[int, int] = (0, 0)
    rows: tuple[int, ...] = (128, 192)
    registers: tuple[int, int] | None = None
    query_slots: int = 2
    holds_queries: bool = False
    chained_queries: tuple[bool, bool] = (False, False)
    slices: int = 1
    holds_partials: bool = True
    integer_max: tuple[tuple[bool, bool], tuple[bool, bool]] = ((False, False), (False, False))
    early_exponentials: float = 0.0
    scales_late: bool = False


Sizes = Mapping[tuple[bool, int], Size]  # by (is e4m3, head_dim)


@dataclass(frozen=True, slots=True)
class Backward:
    """Describes the backward of a family: its tiles, its order of operations and what the twin knows of it.

    Parameters
    ----------
    tiles : mapping
        By compiled head_dim: (query rows, keys) of a tile of dense problems, and of those with a causal mask or a
        window.
    order : BackwardOrder
    atomics : frozenset of int
        Compiled head_dims whose parts of dQ are added by atomics of single elements, which take subnormal numbers as
        zero; otherwise by bulk reductions of TMA, which keep them.
    features : frozenset of str
        As in :class:`Traits`.
    refuses : callable
        As in :class:`Traits`.
    """

    tiles: Mapping[int, tuple[tuple[int, int], tuple[int, int]]]
    order: BackwardOrder
    atomics: frozenset[int] = frozenset()
    features: frozenset[str] = frozenset()
    refuses: Callable[[AttentionProblem], str] = lambda problem: ""


@dataclass(frozen=True, slots=True)
class Traits:
    """Describes one family: its sizes and tiles, its order of operations, its schedule, and what the twin reproduces.

    Parameters
    ----------
    title, version : str
    sizes : mapping
        What is compiled, or what is known of it, by (is e4m3, head_dim).
    tile : callable
        The tile that a problem is launched with, from the problem and its size; ``shipped`` by default.
    splits : callable
        Into how many parts the family itself cuts the keys, from problem, tile_m and tile_n. Ours are chosen by
        :mod:`fa3_kernels.plan.choose` instead.
    packs : callable
        Whether the family itself packs grouped heads, from problem, tile_m and the number of parts.
    sequence_splits : callable
        Into how many parts the keys of each sequence are cut, from problem and configuration.
    splits_unasked : bool
        Whether the family splits keys if no caller asks for it.
    registers : mapping
        Registers per thread of the producer and of a consumer, by (is e4m3, consumer warpgroups); 255 is the most that
        an instruction can name. Empty if the schedule is not known, as for closed kernels.
    dtypes : tuple of str
    order : Order
        The order of operations of its forward, with every rounding.
    pads_head_dim : bool
        Whether a smaller head_dim is padded to the next compiled one; otherwise only those of ``sizes`` are known.
    builds_powers_of_two : bool
        Whether a tile must have a power of two of keys; otherwise any multiple that wgmma takes.
    promotes : bool
        Whether e4m3 kernels sum P V in parts that are added to an accumulator in fp32.
    promoted_keys : int
        Keys of such a part unless a caller chooses; a tile with fewer keys is one part.
    transposes_v : bool
        Whether the producer transposes V of e4m3, which wgmma reads along the keys alone.
    tile_order : {"longest first", "a CTA each"}
        Whether persistent CTAs take the longest tile that is left, or every tile has a CTA of its own.
    pads_group : bool
        Whether packed heads are padded to a power of two, at most 64.
    named_rings : bool
        Whether ring slots are handed back through named barriers; otherwise through mbarriers.
    joins_warps : bool
        Whether the compiler lets a warpgroup's warps meet around copies and in front of wgmma, as Triton does.
    output_in_v : bool
        Whether O leaves through the memory of V, stored by one warpgroup for all. Otherwise each warpgroup has a buffer
        of its own for it, or uses that of its Q where there is one slot for Q.
    other_registers : (int, int)
        Registers of a consumer thread for addresses, row statistics and loop state: in 16-bit kernels, in e4m3 kernels.
        Our FP8 kernel keeps scalars of a tile in local memory: at head_dim 64 its matrices fill 144 of 160 registers.
    is_serialised : bool
        Whether ptxas waits for every single wgmma where registers are short (its warning C7512).
    step_stalls : (int, int)
        Cycles that a step waits by the stall counts in its code, for the last sums (ours 49 to 119; FlashAttention-3
        21, which cannot be distinguished from 0); and how many more without overlap.
    is_built_here : bool
        Whether this package has its kernels, so that they can be compiled and launched.
    is_reproduced : bool
        Whether the twin computes its bits, as recorded outputs show.
    features : frozenset of str
        What the twin reproduces beyond dense attention of equal heads, in the terms of a candidate's features.
    serving : frozenset of str
        What the twin reproduces of :attr:`fa3_reference.problem.AttentionProblem.serving`.
    choices : frozenset of str
        Fields of a configuration that a caller of the family chooses.
    refuses : callable
        Returns in words the rules that a problem breaks: what the family does not compute, or whose bits the twin does
        not know. Empty if there are none.
    backward : Backward, optional
        The backward, for families whose gradients the twin computes.
    """

    title: str
    version: str
    sizes: Sizes
    tile: Callable[[AttentionProblem, Size], Shipped] = lambda problem, size: size.shipped
    registers: Mapping[tuple[bool, int], tuple[int, int]] = field(default_factory=dict)
    splits: Callable[[AttentionProblem, int, int], int] = lambda problem, tile_m, tile_n: 1
    packs: Callable[[AttentionProblem, int, int], bool] = lambda problem, tile_m, num_splits: False
    sequence_splits: Callable[[AttentionProblem, Cut], tuple[int, ...]] = lambda problem, config: (
        (config.num_splits,) * problem.batch
    )
    splits_unasked: bool = False
    dtypes: tuple[Dtype, ...] = DTYPES
    order: Order = OUR_ORDER
    pads_head_dim: bool = False
    builds_powers_of_two: bool = False
    promotes: bool = False
    promoted_keys: int = 128
    transposes_v: bool = True
    tile_order: Literal["longest first", "a CTA each"] = "longest first"
    pads_group: bool = False
    named_rings: bool = False
    joins_warps: bool = False
    output_in_v: bool = True
    other_registers: tuple[int, int] = (24, 24)
    is_serialised: bool = False
    step_stalls: tuple[int, int] = (0, 0)
    is_built_here: bool = False
    is_reproduced: bool = False
    features: frozenset[str] = frozenset()
    serving: frozenset[str] = frozenset()
    choices: frozenset[str] = frozenset()
    refuses: Callable[[AttentionProblem], str] = lambda problem: ""
    backward: Backward | None = None

    @property
    def splits_keys(self) -> bool:
        """Tell whether the family has a kernel for splits, for which a caller asks or which it takes by itself."""
        return self.splits_unasked or "num_splits" in self.choices

    def head_dims(self, is_fp8: bool) -> list[int]:
        """Return the compiled sizes, rising."""
        return sorted(d for fp8, d in self.sizes if fp8 == is_fp8)

    def compiled_head_dim(self, head_dim: int, is_fp8: bool = False) -> int:
        """Return the smallest compiled size that holds ``head_dim``; ValueError if there is none."""
        sizes = self.head_dims(is_fp8)
        for size in sizes:
            if head_dim <= size:
                return size
        raise ValueError(f"head_dim must be at most {sizes[-1]}, got {head_dim}")

    def compiled_head_dims(self, problem: AttentionProblem) -> tuple[int, int]:
        """Return the compiled size of Q and K, which V fits too, and that of V and O; ValueError if there is none."""
        is_fp8 = problem.dtype == "e4m3"
        widest = self.compiled_head_dim(max(problem.head_dim, problem.head_dim_v), is_fp8)
        return widest, self.compiled_head_dim(problem.head_dim_v, is_fp8)

    def shipped(self, problem: AttentionProblem) -> Shipped | None:
        """Return the tile that a problem is launched with; None if it is not known.

        ValueError for a head_dim beyond all compiled ones, in a family that pads smaller ones.
        """
        is_fp8 = problem.dtype == "e4m3"
        head_dim = max(problem.head_dim, problem.head_dim_v)
        if problem.dtype not in self.dtypes:
            return None
        if self.pads_head_dim:
            head_dim = self.compiled_head_dim(head_dim, is_fp8)
        size = self.sizes.get((is_fp8, head_dim))
        return size and self.tile(problem, size)

    def check_reproduced(self, problem: AttentionProblem) -> None:
        """Raise ValueError for a problem whose bits the twin does not know."""
        problem.check_plain(f"the twin of {self.title}", self.serving | ({self.order.diagonal} & {"top_left"}))
        rule = self.refuses(problem) if self.is_reproduced else "no bits of this family are known"
        if rule:
            raise ValueError(f"the twin of {self.title} ({self.version}) cannot run this: {rule}")

    def takes_keys(self, tile_n: int) -> bool:
        """Tell whether a tile may have so many keys, if wgmma takes that number."""
        return not self.builds_powers_of_two or tile_n in (32, 64, 128, 256)
