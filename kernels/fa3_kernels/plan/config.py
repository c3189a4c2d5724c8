"""The configuration of a forward kernel of any family: tile shape, schedule switches and number formats.

Twin, error bound, simulator and launches all read it. :func:`default_config` gives what a family ships;
:mod:`fa3_kernels.plan.choose` says what a launch of our own uses, and :mod:`fa3_kernels.plan.variant` what is then
compiled. The backward has a configuration of its own (:mod:`fa3_kernels.plan.backward`).

Fields that change bits: dtype, out_dtype, tile_n, promotion_interval, num_splits (and tile_m where infinities or NaN
meet masked tiles). The rest is schedule only and must never change a bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, get_args

from fa3_kernels.plan.families import FAMILIES, OURS, traits_of
from fa3_kernels.plan.families.record import Size, Traits
from fa3_kernels.plan.order import Order
from fa3_reference.bounds.device import TANH_REL
from fa3_reference.bounds.model import KernelModel
from fa3_reference.problem import AttentionProblem, Dtype
from fa3_reference.rules import Filled, require as require

OutDtype = Literal["fp16", "bf16"]
Setting = bool | int | float | str | tuple[int, ...] | None  # of a field of a configuration
KERNEL_HEAD_DIMS = tuple(FAMILIES[OURS].head_dims(False))
K_STEP = {"fp16": 16, "bf16": 16, "e4m3": 32}  # keys or channels per wgmma instruction
MAX_HEAD_DIM = 256
HELD_REGISTERS = 192  # that O, S, P and Q may take, of the 240 of a thread of two consumer warpgroups
WARPGROUP_ROWS = 64  # rows of the M dimension of one wgmma (PTX ISA, wgmma shapes)
# The switches of a schedule. A configuration makes one choice of each: the name of the choice, empty where the switch
# is off, and the fields that it sets. The option --schedule, the names of schedules and the candidates of tune are read
# from here.
SWITCHES: tuple[Mapping[str, Mapping[str, Setting]], ...] = (
    {"pingpong": {"pingpong": True}, "": {"pingpong": False}},
    {
        "overlap": {"intra_wg_overlap": True, "softmax_stages": 2},
        "overlap3": {"intra_wg_overlap": True, "softmax_stages": 3},
        "": {"intra_wg_overlap": False, "softmax_stages": 2},
    },
)


@cache
def _size(family: str, is_fp8: bool, head_dim: int) -> Size:
    traits = traits_of(family)
    return traits.sizes[is_fp8, traits.compiled_head_dim(head_dim, is_fp8)]


@dataclass(frozen=True, slots=True)
class Config:
    """One kernel of some family: any that wgmma and the family's program allow, whether or not somebody compiles it.

    :func:`fa3_kernels.plan.choose.check_tile` says which ones of our own family can be built.

    Parameters
    ----------
    dtype : {"fp16", "bf16", "e4m3"}
        Format of the operands.
    head_dim : int
        A multiple of 8 (16 for e4m3), at most 256.
    tile_m, tile_n : int
        Query rows, 64 per consumer warpgroup; keys, a multiple of 16 (32 for e4m3).
    out_dtype : {"", "fp16", "bf16"}
        Format of the output. Kernels of 16 bits write their own; e4m3 kernels write bf16 by default.
    promotion_interval : int
        e4m3 only: keys after which the P V partial is added to the fp32 accumulator; divides tile_n, multiple of 32.
        0 chains through the tensor core's 13-bit accumulator, as FlashAttention-3 does.
    num_splits : int
        Parts the key blocks are cut into, merged by the deterministic combine; 1 where the family has no splits.
    pack_gqa : bool
        Fold the query heads of one kv head into the rows of a tile, head fastest.
    num_stages : int
        Slots of the K and V rings.
    num_consumer_warpgroups : int
        What tile_m makes necessary, or 0 for that; see :attr:`consumers`.
    pingpong, intra_wg_overlap, pv_from_registers : bool
        Schedule only.
    producer_regs, consumer_regs : int
        Registers of a thread; 0 takes those of the family's traits, see :attr:`registers`.
    warp_specialized : bool
        Schedule only.
    softmax_stages : {2, 3}
        With intra_wg_overlap: 2, the softmax of block j waits for its own Q K^T and runs over P V of block j - 1; 3, Q
        K^T of block j + 1 is under way as well, so that two S tiles are alive (arXiv 2407.08608, appendix B.3).
    integer_max : bool, optional
        Whether row maxima are taken by 3-input integer instructions; by default what ships, see
        :meth:`takes_integer_max`.
    head_dim_v : int
        Channels of V and of the output, at most head_dim; by default as many. No bit depends on it.
    family : str
        A key of :data:`fa3_kernels.plan.families.FAMILIES`, or the file of a learned order.

    Raises
    ------
    ValueError
        Whenever a field breaks its rule.
    """

    dtype: Dtype = "fp16"
    head_dim: int = 128
    tile_m: int = 128
    tile_n: int = 128
    out_dtype: Filled[OutDtype | Literal[""], OutDtype] = ""  # type: ignore[assignment]
    promotion_interval: int = 0
    num_splits: int = 1
    pack_gqa: bool = False
    num_stages: int = 2
    num_consumer_warpgroups: int = 0
    pingpong: bool = True
    intra_wg_overlap: bool = True
    pv_from_registers: bool = True
    producer_regs: int = 0
    consumer_regs: int = 0
    warp_specialized: bool = True
    softmax_stages: int = 2
    integer_max: bool | None = None
    head_dim_v: Filled[int, int] = 0  # type: ignore[assignment]
    family: str = OURS

    def __post_init__(self) -> None:
        if not self.out_dtype:
            object.__setattr__(self, "out_dtype", "fp16" if self.dtype == "fp16" else "bf16")
        if not self.head_dim_v:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        dtypes = self.traits.dtypes
        require(self.dtype in dtypes, f"dtype must be one of {', '.join(dtypes)}, got {self.dtype!r}")
        for ok, rule in self._rules():
            require(ok, rule)

    def _rules(self) -> tuple[tuple[bool, str], ...]:
        """Return every rule of a configuration: whether it is kept, and its words with the value."""
        c = self
        traits = c.traits
        channels = 16 if c.is_fp8 else 8
        step = K_STEP[c.dtype]
        most = traits.head_dims(c.is_fp8)[-1]
        interval = c.promotion_interval
        is_part = c.is_fp8 and interval > 0 and interval % 32 == 0 and c.tile_n % interval == 0
        is_lockstep = traits.is_built_here and c.num_stages == 2 and not (c.pingpong or c.is_fp8)
        has_ring = c.intra_wg_overlap and c.warp_specialized and c.num_stages >= 2
        return (
            (c.out_dtype in get_args(OutDtype), f"out_dtype must be fp16 or bf16, got {c.out_dtype!r}"),
            (
                c.is_fp8 or c.out_dtype == c.dtype,
                f"a {c.dtype} kernel writes {c.dtype}, got out_dtype {c.out_dtype!r}",
            ),
            (
                0 < c.head_dim <= most and c.head_dim % channels == 0,
                f"head_dim must be a multiple of {channels} in [1, {most}], got {c.head_dim}",
            ),
            (
                0 < c.head_dim_v <= c.head_dim and c.head_dim_v % channels == 0,
                f"head_dim_v must be a multiple of {channels} in [1, {c.head_dim}], got {c.head_dim_v}",
            ),
            (c.tile_m in (64, 128, 192), f"tile_m must be 64, 128 or 192 (64 rows per warpgroup), got {c.tile_m}"),
            (
                c.num_consumer_warpgroups in (0, c.consumers),
                f"num_consumer_warpgroups must be {c.consumers} for tile_m {c.tile_m}, got {c.num_consumer_warpgroups}",
            ),
            (
                c.tile_n % step == 0 and 16 <= c.tile_n <= 256,
                f"tile_n must be a multiple of {step} in [16, 256] (k of wgmma), got {c.tile_n}",
            ),
            (
                interval == 0 or is_part,
                "promotion_interval must be 0, or for e4m3 a multiple of 32 that divides tile_n, "
                f"got {interval} with dtype {c.dtype} and tile_n {c.tile_n}",
            ),
            (1 <= c.num_splits <= 256, f"num_splits must lie in [1, 256], got {c.num_splits}"),
            (
                c.num_splits == 1 or traits.splits_keys,
                f"{traits.title} does not split keys, got num_splits {c.num_splits}",
            ),
            (1 <= c.num_stages <= 8, f"num_stages must lie in [1, 8], got {c.num_stages}"),
            (
                c.warp_specialized or is_lockstep,
                "without warp specialisation there is one schedule: our own, 16 bits, two stages, no pingpong",
            ),
            (c.softmax_stages in (2, 3), f"softmax_stages must be 2 or 3, got {c.softmax_stages}"),
            (
                c.softmax_stages == 2 or has_ring,
                "three softmax stages need intra_wg_overlap, warp specialisation and two stages of K",
            ),
        )

    @property
    def traits(self) -> Traits:
        """Return what tells the kernel's family from the others."""
        return traits_of(self.family)

    @property
    def size(self) -> Size:
        """Return what the family compiles for this head_dim, or for the next larger one."""
        return _size(self.family, self.is_fp8, self.head_dim)

    @property
    def size_v(self) -> Size:
        """Return :attr:`size` for head_dim_v: O has so many channels, which decides how P V is summed."""
        return _size(self.family, self.is_fp8, self.head_dim_v)

    @property
    def is_fp8(self) -> bool:
        """Tell whether operands have 8 bits."""
        return self.dtype == "e4m3"

    @property
    def bits(self) -> int:
        """Return the bits of an operand's element."""
        return 8 if self.is_fp8 else 16

    @property
    def p_offset_log2(self) -> int:
        """Base-2 logarithm of the factor on P: 8 for e4m3, so that P spans [0, 256] and small weights survive."""
        return 8 if self.is_fp8 else 0

    @property
    def consumers(self) -> int:
        """Consumer warpgroups."""
        return self.tile_m // WARPGROUP_ROWS

    @property
    def registers(self) -> tuple[int, int]:
        """Return the registers per thread of the producer and of a consumer, after setmaxnreg.

        ValueError for a family whose schedule is not known.
        """
        require(bool(self.traits.registers), f"the schedule of {self.family} is not known")
        own = self.size.registers if self.consumers == 2 else None
        producer, consumer = own or self.traits.registers[self.is_fp8, self.consumers]
        return self.producer_regs or producer, self.consumer_regs or consumer

    @property
    def transposes_v(self) -> bool:
        """Tell whether the producer, then a whole warpgroup, transposes V."""
        return self.is_fp8 and self.traits.transposes_v

    @property
    def holds_queries(self) -> bool:
        """Tell whether a warpgroup keeps its Q in registers beside O, S and P, see :attr:`Size.holds_queries`."""
        if not self.size.holds_queries or self.consumers != 2 or not self.warp_specialized:
            return False
        held = self.head_dim_v // 2 + 3 * self.tile_n // 4 + self.head_dim // 4  # O, S and P, Q
        return held <= HELD_REGISTERS

    def keeps_queries(self, hides_keys: bool) -> bool:
        """Tell whether the products of a tile's steps take Q from registers.

        Parameters
        ----------
        hides_keys : bool
            Whether the launch is causal or has a window.

        Returns
        -------
        bool
            For 16 bits :attr:`holds_queries`; for e4m3 what :attr:`Size.chained_queries` says, if sums are chained.
        """
        if not self.is_fp8:
            return self.holds_queries
        is_chained = self.warp_specialized and self.intra_wg_overlap and not self.promotes
        return is_chained and self.tile_n <= 128 and self.size.chained_queries[hides_keys]

    @property
    def query_slots(self) -> int:
        """Return how many Q tiles shared memory holds; with two, the tiles of a CTA overlap."""
        return self.size.query_slots if self.warp_specialized and not self.holds_queries else 1

    @property
    def crosses_tiles(self) -> bool:
        """Tell whether the first scores of a tile are started with the last P V of the one before."""
        return self.holds_queries or self.query_slots > 1

    @property
    def output_in_query_slot(self) -> bool:
        """Tell whether O is staged in the Q buffer, as shared memory is short."""
        return not (self.crosses_tiles or self.traits.output_in_v)

    @property
    def promotes(self) -> bool:
        """Tell whether O takes the sums of P V in fp32."""
        return self.traits.promotes and self.promotion_interval > 0

    @property
    def adds_in_place(self) -> bool:
        """Tell whether promoted sums are added where they are awaited, see :attr:`Size.holds_partials`."""
        return self.promotes and not self.size_v.holds_partials

    @property
    def sums_in_flight(self) -> int:
        """Return how many partial sums, or pieces of the next scores, are under way at a time, as registers allow."""
        return 2 if self.pv_parts[0] == 4 else 3

    @property
    def overlaps(self) -> bool:
        """Tell whether a warpgroup's GEMMs run under its own softmax, which the switch alone does not decide."""
        return self.intra_wg_overlap and not self.adds_in_place

    @property
    def pv_parts(self) -> tuple[int, int]:
        """Slices of the channels and chunks of the keys in which P V is summed.

        >>> Config("e4m3", promotion_interval=64).pv_parts
        (2, 2)
        """
        if not self.promotes:
            return 1, 1
        return self.size_v.slices, self.tile_n // self.promotion_interval

    @property
    def holds_turn(self) -> bool:
        """Tell whether a warpgroup passes its turn when it knows its maxima, not as soon as its GEMMs are started.

        Our e4m3 kernels do where Q K^T is started first and P V of all keys behind it, except chained ones at head_dim
        64, which were slower so.
        """
        is_ours = self.is_fp8 and self.traits.is_built_here and self.overlaps
        return is_ours and self.pv_parts[1] == 1 and (self.promotes or self.head_dim > 64)

    def takes_integer_max(self, hides_keys: bool) -> bool:
        """Tell whether row maxima are found by integer instructions, see :func:`fa3_kernels.gluon.softmax.advance_max`.

        Parameters
        ----------
        hides_keys : bool
            Whether the launch is causal or has a window.

        Returns
        -------
        bool
            What :attr:`integer_max` says; where that is None, what ships for this size.
        """
        if self.integer_max is not None or not self.warp_specialized:
            return bool(self.integer_max)
        return self.size.integer_max[self.promotion_interval > 0][hides_keys]

    def kernel_model(self, order: Order | None = None) -> KernelModel:
        """Return what the error bound must know of a kernel in this configuration.

        Parameters
        ----------
        order : Order, optional
            Its order of operations; by default that of its family.

        Returns
        -------
        KernelModel
            Its formats, tiles and switches, and the order of its softmax.

        Raises
        ------
        ValueError
            If no bound is proved for a step of the order.
        """
        order = order or self.traits.order
        require(not order.unproved, f"no bound is proved for {order.unproved}, which {self.traits.title} has")
        return KernelModel(
            self.dtype,
            self.out_dtype,
            self.tile_m,
            self.tile_n,
            self.promotion_interval,
            self.num_splits,
            self.pack_gqa,
            order.softmax,
            keeps_subnormals=order.keeps_subnormals,
            pads_group=self.traits.pads_group,
            probabilities=order.probabilities,
            accumulator=order.accumulator,
            tanh_error=TANH_REL if order.softcap == "tanh" else 0.0,
        )


def default_config(
    problem: AttentionProblem,
    *,
    family: str = OURS,
    tile: tuple[int, int] | None = None,
    num_splits: int | None = None,
    **changes: Setting,
) -> Config:
    """Return what a family ships for a problem, with some fields changed.

    Our e4m3 kernels promote every 128 keys, or every tile if it has fewer, because the chained accumulator loses 10 %
    of the output at 8k keys when V has mean 1.

    Parameters
    ----------
    problem : AttentionProblem
        What is computed.
    family : str
        A key of :data:`fa3_kernels.plan.families.FAMILIES`; ours by default.
    tile : (int, int), optional
        Query rows and keys; by default those that ship.
    num_splits : int, optional
        Parts of the keys; 0 takes what the family chooses. By default 1, or 0 for a family that splits unasked.
    **changes : bool, int or str
        Other fields of :class:`Config`.

    Returns
    -------
    Config
        The configuration of the launch.

    Raises
    ------
    ValueError
        For a family that ships nothing known for the problem, rows without registers, or a field that breaks its rule.

    Examples
    --------
    >>> config = default_config(AttentionProblem(1, 16, 16, 8192, 8192, 128, dtype="e4m3"))
    >>> config.tile_m, config.tile_n, config.promotion_interval
    (128, 128, 128)
    """
    traits = traits_of(family)
    problem.check_plain(family, traits.serving | {"top_left"})
    is_fp8 = problem.dtype == "e4m3"
    shipped = traits.shipped(problem)
    if shipped is None:
        raise ValueError(f"{family} has no known tile for {problem.dtype} at head_dim {problem.head_dim}")
    tile_m, tile_n = tile or shipped[:2]
    head_dim, head_dim_v = traits.compiled_head_dims(problem)
    rows = traits.sizes[is_fp8, head_dim].rows
    rule = f"tile_m must be {' or '.join(map(str, rows))} for {problem.dtype} at head_dim {head_dim}, got {tile_m}"
    require(tile_m in rows, rule)
    if num_splits is None:
        num_splits = 0 if traits.splits_unasked else 1
    num_splits = num_splits or traits.splits(problem, tile_m, tile_n)
    config = Config(
        problem.dtype,
        head_dim,
        tile_m,
        tile_n,
        promotion_interval=min(traits.promoted_keys, tile_n) if is_fp8 and traits.promotes else 0,
        num_splits=num_splits,
        pack_gqa=traits.packs(problem, tile_m, num_splits),
        pingpong=shipped.pingpong,
        pv_from_registers=shipped.pv_from_registers,
        head_dim_v=head_dim_v,
        family=family,
    )
    return replace(config, **changes) if changes else config
