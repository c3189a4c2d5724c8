"""The record of a kernel family: what may differ between two, as each file beside this one states it for its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from fa3_kernels.plan.order import OUR_ORDER, BackwardOrder, Order
from fa3_reference.problem import DTYPES, AttentionProblem, Dtype


class Cut(Protocol):
    """What of a configuration says into which parts the keys of a launch are cut."""

    @property
    def tile_m(self) -> int: ...

    @property
    def tile_n(self) -> int: ...

    @property
    def num_splits(self) -> int: ...

    @property
    def pack_gqa(self) -> bool: ...


def broken(*rules: tuple[bool, str]) -> str:
    """Return the rules that are broken, in words; empty where none is."""
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
        What is launched; which of the two says :attr:`Traits.tile`.
    other_instructions : (int, int)
        Instructions of a step that are no arithmetic, chained and promoted: addresses and descriptors of wgmma, moves,
        predicates, branches. Assumed; those of our own kernels are counted in their accepted code, see
        :mod:`fa3_simulator.compiled`.
    rows : tuple of int
        Query rows that registers are set aside for.
    registers : (int, int), optional
        Of the producer and of a consumer, where two warpgroups of this size differ from :attr:`Traits.registers`.
    query_slots : int
        Q tiles that are held: 2, or 1 where shared memory is short (at 256 the buffers of Q, K, V and O would need 256
        KiB).
    holds_queries : bool
        Whether two consumer warpgroups keep Q in registers. Products then read K and V alone from shared memory, and
        Q's buffer is free for the next tile as soon as it is read.
    chained_queries : (bool, bool)
        Whether chained e4m3 sums leave registers for Q, which stays in its buffer as well: [the launch hides keys].
    slices : int
        Of the channels of V and O, if this is their size, in which promoted sums are taken: what registers leave for
        partial sums.
    holds_partials : bool
        Whether O, S and a promoted partial sum fit the registers together. Otherwise a partial sum is added where it is
        awaited, and no GEMM runs under a warpgroup's own softmax.
    integer_max : ((bool, bool), (bool, bool))
        Whether row maxima are taken by integers: [promoted][the launch hides keys].
    early_exponentials : float
        Fraction of a block's exponentials that ptxas issues before it waits for the previous P V, read off the SASS.
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


Sizes = Mapping[tuple[bool, int], Size]  # by (is e4m3, head_dim)


@dataclass(frozen=True, slots=True)
class Backward:
    """Says what a family's backward is: its tiles, its order of operations and what the twin knows of it.

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
    """One family.

    Parameters
    ----------
    title, version : str
    sizes : mapping
        What is compiled, or what is known of it.
    tile : callable
        What a problem is launched with, split or not; what is shipped by default.
    splits : callable
        Into how many parts the family itself cuts the keys, from problem, tile_m and tile_n; ours see
        :mod:`fa3_kernels.plan.choose`.
    packs : callable
        Whether the family itself packs grouped heads, from problem, tile_m and the number of parts.
    sequence_splits : callable
        Into how many parts the keys of each sequence are cut, from problem and configuration.
    splits_unasked : bool
        Whether it does so where nobody asks.
    registers : mapping
        By (is e4m3, consumer warpgroups): of the producer and of a consumer, per thread; 255 is all an instruction
        names. Empty where the schedule is not known, as of closed kernels.
    dtypes : tuple of str
    order : Order
        Where its forward rounds.
    pads_head_dim : bool
        Whether a smaller head_dim is padded to the next compiled one; otherwise only those of ``sizes`` are known.
    builds_powers_of_two : bool
        Whether a tile must have a power of two of keys; otherwise any multiple that wgmma takes.
    promotes : bool
        Whether e4m3 sums P V in parts, which are added to an accumulator in fp32.
    promoted_keys : int
        Keys of such a part, or those of a smaller tile, unless a caller chooses.
    transposes_v : bool
        Whether the producer transposes V of e4m3, which wgmma reads along the keys alone.
    tile_order : {"longest first", "a CTA each"}
        Persistent CTAs take the longest tile that is left; or every tile has a CTA of its own.
    pads_group : bool
        Whether packed heads are padded to a power of two, at most 64.
    named_rings : bool
        Whether ring slots are handed back through named barriers, otherwise through mbarriers.
    joins_warps : bool
        Whether the compiler has a warpgroup's warps meet around copies and in front of wgmma, as Triton does.
    output_in_v : bool
        Whether O leaves through V's memory, stored by one warpgroup for all; otherwise through a buffer of each one's
        own, or through Q's where there is one slot for Q.
    other_registers : (int, int)
        Addresses, row statistics, loop state, of a consumer thread: with 16 bits, with e4m3. Our FP8 kernel keeps
        scalars of a tile in local memory: at head_dim 64 its matrices fill 144 of 160 registers.
    is_serialised : bool
        Whether ptxas waits for every single wgmma where registers are short (its warning C7512).
    step_stalls : (int, int)
        Cycles a step waits by the stall counts in its code: for the last sums (ours 49 to 119, FlashAttention-3 21,
        which is not told apart from 0); and more without overlap.
    is_built_here : bool
        Whether this package has its kernels, so that they can be compiled and launched.
    is_reproduced : bool
        Whether the twin computes its bits, as recorded outputs show.
    features : frozenset of str
        What the twin reproduces beyond dense attention of equal heads, in the terms of a candidate's features.
    serving : frozenset of str
        What of :attr:`fa3_reference.problem.AttentionProblem.serving` the twin reproduces; of ours, nothing of it can
        be launched yet.
    choices : frozenset of str
        Fields of a configuration that a caller of the family chooses.
    refuses : callable
        The rule that a problem breaks which the family does not compute, or of which the twin does not know the bits;
        empty where there is none.
    backward : Backward, optional
        Of families whose gradients the twin computes.
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
        """Tell whether it has a kernel for parts of the keys, which a caller asks for or it takes by itself."""
        return self.splits_unasked or "num_splits" in self.choices

    def head_dims(self, is_fp8: bool) -> list[int]:
        """Compiled sizes, rising."""
        return sorted(d for fp8, d in self.sizes if fp8 == is_fp8)

    def compiled_head_dim(self, head_dim: int, is_fp8: bool = False) -> int:
        """The smallest compiled size that holds ``head_dim``; ValueError where there is none."""
        sizes = self.head_dims(is_fp8)
        for size in sizes:
            if head_dim <= size:
                return size
        raise ValueError(f"head_dim must be at most {sizes[-1]}, got {head_dim}")

    def compiled_head_dims(self, problem: AttentionProblem) -> tuple[int, int]:
        """The compiled sizes of Q and K, which holds V as well, and of V and O; ValueError where there is none."""
        is_fp8 = problem.dtype == "e4m3"
        widest = self.compiled_head_dim(max(problem.head_dim, problem.head_dim_v), is_fp8)
        return widest, self.compiled_head_dim(problem.head_dim_v, is_fp8)

    def shipped(self, problem: AttentionProblem) -> Shipped | None:
        """The tile that a problem is launched with; None where it is not known."""
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
        """Tell whether a tile may have so many keys, of those that wgmma takes."""
        return not self.builds_powers_of_two or tile_n in (32, 64, 128, 256)
