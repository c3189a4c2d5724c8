"""What tells one family of kernels from another: the table that configurations, simulator, tuner and error bound read.

A family is a kernel of a stated version. Ours is the only one that is built here; of the others stand what their sources
say and what ptxas made of the binaries that they ship.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from fa3_reference.bounds.model import KernelModel, SoftmaxOrder
from fa3_reference.problem import DTYPES, AttentionProblem, Dtype

if TYPE_CHECKING:
    from fa3_kernels.plan.config import Config


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
        What is launched; ``other`` where :attr:`Traits.takes_other` says so.
    rows : tuple of int
        Query rows that registers are set aside for.
    registers : (int, int), optional
        Of the producer and of a consumer, where two warpgroups of this size differ from :attr:`Traits.registers`.
    query_slots : int
        Q tiles that are held: 2, or 1 where shared memory is short (at 256 the buffers of Q, K, V and O would need 256 KiB).
    slices : int
        Of the channels, in which promoted sums are taken: what registers leave for partial sums.
    holds_partials : bool
        Whether O, S and a promoted partial sum fit the registers together. Otherwise a partial sum is added where it is
        awaited, no GEMM runs under a warpgroup's own softmax, and a launch that hides keys masks every block.
    integer_max : ((bool, bool), (bool, bool))
        Whether row maxima are taken by integers: [promoted][the launch hides keys].
    early_exponentials : float
        Share of a block's exponentials that ptxas puts in front of the wait for P V of the block before, read off the SASS.
    other_instructions : (int, int)
        Instructions of a step that are no arithmetic, chained and promoted: addresses and descriptors of wgmma, moves,
        predicates, branches. Counted in the accepted code of our kernels; of the others it is assumed to be as much.
    """

    shipped: Shipped
    other: Shipped
    rows: tuple[int, ...] = (128, 192)
    registers: tuple[int, int] | None = None
    query_slots: int = 2
    slices: int = 1
    holds_partials: bool = True
    integer_max: tuple[tuple[bool, bool], tuple[bool, bool]] = ((False, False), (False, False))
    early_exponentials: float = 0.0
    other_instructions: tuple[int, int] = (0, 0)


Sizes = Mapping[tuple[bool, int], Size]  # by (is e4m3, head_dim)


@dataclass(frozen=True, slots=True)
class Traits:
    """One family.

    Parameters
    ----------
    title, version : str
    sizes : mapping
        What is compiled, or what is known of it.
    takes_other : callable
        Whether a problem is launched with :attr:`Size.other`.
    registers : mapping
        By (is e4m3, consumer warpgroups): of the producer and of a consumer, per thread; 255 is all an instruction names.
    dtypes : tuple of str
    order : SoftmaxOrder
    pads_head_dim : bool
        Whether a smaller head_dim is padded to the next compiled one; otherwise only those of ``sizes`` are known.
    builds_powers_of_two : bool
        Whether a tile must have a power of two of keys; otherwise any multiple that wgmma takes.
    promotes : bool
        Whether e4m3 sums P V in parts, which are added to an accumulator in fp32.
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
        Whether O leaves through V's memory, stored by one warpgroup for all; otherwise through a buffer of each one's own, or
        through Q's where there is one slot for Q.
    other_registers : (int, int)
        Addresses, row statistics, loop state, of a consumer thread: with 16 bits, with e4m3. Our FP8 kernel keeps scalars of
        a tile in local memory: at head_dim 64 its matrices fill 144 of 160 registers.
    is_serialised : bool
        Whether ptxas waits for every single wgmma where registers are short (its warning C7512).
    step_stalls : (int, int)
        Cycles a step waits by the stall counts in its code: for the last sums (ours 49 to 119, FlashAttention-3 21, which is
        not told apart from 0); and more without overlap.
    has_lockstep : bool
        Whether there is a kernel without warp specialisation.
    is_built_here : bool
        Whether this package has its kernels, so that they can be compiled, launched and run on the twin.
    """

    title: str
    version: str
    sizes: Sizes
    takes_other: Callable[[AttentionProblem], bool]
    registers: Mapping[tuple[bool, int], tuple[int, int]]
    dtypes: tuple[Dtype, ...] = DTYPES
    order: SoftmaxOrder = field(default_factory=SoftmaxOrder)
    pads_head_dim: bool = False
    builds_powers_of_two: bool = False
    promotes: bool = False
    transposes_v: bool = True
    tile_order: Literal["longest first", "a CTA each"] = "longest first"
    pads_group: bool = False
    named_rings: bool = False
    joins_warps: bool = False
    output_in_v: bool = True
    other_registers: tuple[int, int] = (24, 24)
    is_serialised: bool = False
    step_stalls: tuple[int, int] = (0, 0)
    has_lockstep: bool = False
    is_built_here: bool = False

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

    def shipped(self, problem: AttentionProblem) -> Shipped | None:
        """The tile that a problem is launched with; None where it is not known."""
        is_fp8, head_dim = problem.dtype == "e4m3", max(problem.head_dim, problem.head_dim_v)
        if self.pads_head_dim:
            head_dim = self.compiled_head_dim(head_dim, is_fp8)
        size = self.sizes.get((is_fp8, head_dim))
        return size and (size.other if self.takes_other(problem) else size.shipped)

    def takes_keys(self, tile_n: int) -> bool:
        """Whether a tile may have so many keys, of those that wgmma takes.

        >>> [FAMILIES[name].takes_keys(176) for name in ("gluon", "flash3")]
        [False, True]
        """
        return not self.builds_powers_of_two or tile_n in (32, 64, 128, 256)

    def kernel_model(self, config: Config) -> KernelModel:
        """What the error bound must know of a configuration of this family."""
        c = config
        switches = (c.promotion_interval, c.num_splits, c.pack_gqa)
        return KernelModel(c.dtype, c.out_dtype, c.tile_m, c.tile_n, *switches, self.order)


def _prefers_128_rows(problem: AttentionProblem) -> bool:
    """Whether tiles of 192 rows do not pay, where registers would allow them.

    With 160 registers a window, or a causal mask with varlen, spills. Causal, since a taller tile visits more hidden keys:
    on an H200 192 rows take 1.31 x the time at 1k, 1.00 x at 4k and 0.94 x at 16k, in e4m3 0.97 x at 2k and 0.86 x at 16k.
    """
    needs_registers = problem.window != (-1, -1) or (problem.is_varlen and problem.causal)
    pays_from = 2048 if problem.dtype == "e4m3" else 4096
    return needs_registers or problem.seqlen_q <= 128 or (problem.causal and problem.seqlen_q < pays_from)


_WIDE, _SQUARE, _NARROW = Shipped(192, 128), Shipped(128, 128), Shipped(128, 64)
_ALWAYS, _NEVER = (True, True), (False, False)
# Integer maxima take fewer instructions, but ptxas orders the rest of a step differently. On an H200 at 2k and 16k keys, against
# floats: fp16 head_dim 64 +2 %, 128 -2 %, 256 +1 to 5 %; e4m3 head_dim 64 promoted +9 % dense and -5 % masked, chained -7 % and
# +4 %; 128 +1 to 3 %; 256 chained +7 to 10 %, promoted not to be had (its wgmma are serialised for want of registers).
# Exponentials in front of the wait for P V: 26 of 66, 12 of 34, 8 of 18 (fp16_d128), 16 of 66 (e4m3_d64_dense_chained). The e4m3
# producer is a whole warpgroup, which transposes V; at head_dim 256 the consumers need what it could use.
_OURS: Sizes = MappingProxyType({
    (False, 64): Size(_WIDE, _SQUARE, integer_max=(_ALWAYS, _ALWAYS), early_exponentials=0.38, other_instructions=(71, 0)),
    (False, 128): Size(_SQUARE, _SQUARE, early_exponentials=0.38, other_instructions=(69, 0)),
    (False, 256): Size(_NARROW, _NARROW, query_slots=1, integer_max=(_ALWAYS, _ALWAYS), early_exponentials=0.38,
                       other_instructions=(119, 0)),
    (True, 64): Size(_WIDE, _SQUARE, integer_max=((False, True), (True, False)), early_exponentials=0.24,
                     other_instructions=(61, 73)),
    (True, 128): Size(_SQUARE, _SQUARE, rows=(128,), slices=2, integer_max=(_ALWAYS, _ALWAYS), early_exponentials=0.24,
                      other_instructions=(80, 84)),
    (True, 256): Size(_SQUARE, _SQUARE, rows=(128,), registers=(24, 240), query_slots=1, slices=2, holds_partials=False,
                      integer_max=(_ALWAYS, _NEVER), early_exponentials=0.24, other_instructions=(100, 77)),
})  # fmt: skip


def _flash3(
    is_fp8: bool, head_dim: int, dense: Shipped, causal: Shipped, early: float
) -> tuple[tuple[bool, int], Size]:
    counted = _OURS[is_fp8, head_dim].other_instructions
    return (is_fp8, head_dim), Size(dense, causal, query_slots=1, early_exponentials=early, other_instructions=counted)


# Tiles, P through shared memory and turns (UseSchedulerBarrier): upstream hopper/tile_size.h. Exponentials in front of the wait,
# in fa3-fwd 0.0.3: 17 of 90 and 25 of 66; 17 of 42; 35 of 114; 8 of 66; at 64 none.
_FLASH3: Sizes = MappingProxyType(dict((
    _flash3(False, 64, Shipped(192, 192, pv_from_registers=False), Shipped(192, 128), 0.0),
    _flash3(False, 128, Shipped(128, 176), Shipped(128, 128), 0.28),
    _flash3(False, 256, Shipped(128, 80, pingpong=False), Shipped(128, 80, pingpong=False), 0.4),
    _flash3(True, 64, Shipped(192, 160, pingpong=False), Shipped(192, 160, pingpong=False), 0.0),
    _flash3(True, 128, Shipped(128, 224), Shipped(128, 224), 0.31),
    _flash3(True, 256, Shipped(128, 128), Shipped(128, 128), 0.12),
)))  # fmt: skip
# flash_attn/cute/interface.py. What ptxas made of it was not read: its step is FlashAttention-3's, exponentials included.
_FLASH4_TILES = {64: _WIDE, 128: _SQUARE, 256: Shipped(128, 80, pingpong=False)}
_FLASH4: Sizes = MappingProxyType(
    {(False, d): replace(_FLASH3[False, d], shipped=tile, other=tile) for d, tile in _FLASH4_TILES.items()}
)
# A producer that transposes V is a warpgroup; otherwise it is a single warp in ours.
_REGISTERS = {(False, 1): (56, 255), (False, 2): (24, 240), (False, 3): (32, 160),
              (True, 1): (56, 255), (True, 2): (40, 232), (True, 3): (32, 160)}  # fmt: skip

_FLASH3_TRAITS = Traits(
    "FlashAttention-3",
    "fa3-fwd 0.0.3",
    _FLASH3,
    takes_other=lambda problem: problem.causal,
    registers=MappingProxyType(_REGISTERS),
    order=SoftmaxOrder(maxima="unscaled"),
)
OURS = "gluon"
FAMILIES: Mapping[str, Traits] = MappingProxyType({
    OURS: Traits(
        "Gluon",
        "this package",
        _OURS,
        _prefers_128_rows,
        MappingProxyType(_REGISTERS | {(False, 3): (24, 160)}),
        pads_head_dim=True,
        builds_powers_of_two=True,
        promotes=True,
        pads_group=True,
        named_rings=True,
        joins_warps=True,
        output_in_v=False,
        other_registers=(24, 16),
        is_serialised=True,
        step_stalls=(50, 60),
        has_lockstep=True,
        is_built_here=True,
    ),
    "flash3": _FLASH3_TRAITS,
    "flash4": replace(
        _FLASH3_TRAITS, title="FlashAttention-4", version="flash-attn 4.0.0b36", sizes=_FLASH4, dtypes=("fp16", "bf16"),
        tile_order="a CTA each",
    ),
})  # fmt: skip


def traits_of(family: str) -> Traits:
    """Return the traits of a family; ValueError for an unknown one."""
    if family not in FAMILIES:
        raise ValueError(f"kernel family must be one of {', '.join(FAMILIES)}, got {family!r}")
    return FAMILIES[family]
