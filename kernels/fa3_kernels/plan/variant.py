"""The record of what is compiled into a forward kernel, which is passed to it as a compile-time constant.

A plan (:mod:`fa3_kernels.plan.plan`) makes it from a configuration, and the kernels in :mod:`fa3_kernels.gluon` read it
as ``p.variant``. Everything in it is decided on the host, so a feature that is off costs no instruction. The backward's
record is in :mod:`fa3_kernels.plan.backward`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fa3_kernels.plan.barriers import slot_threads
from fa3_kernels.plan.call import Pages, box_channels, boxes, spare
from fa3_kernels.plan.config import WARPGROUP_ROWS, Config, require
from fa3_kernels.plan.tile_order import Shape
from fa3_kernels.plan.tiles import power_of_two
from fa3_reference.problem import AttentionProblem

SWIZZLED_BYTES = 128  # bytes of a row in the widest swizzled layout of TMA and wgmma
# Per thread of the producer's four warps and of a consumer, by consumers, where the producer gathers rows.
GATHERING_REGISTERS = {1: (96, 240), 2: (40, 232), 3: (32, 160)}
STAGED_CHANNELS = 128  # of O that a warpgroup of an e4m3 kernel stages at a time


def in_boxes(config: Config) -> list[int]:
    """Return how many channels of Q and K, and of V, shared memory holds: of ours those of whole boxes."""
    return [n + spare(n, config.bits) * config.traits.is_built_here for n in (config.head_dim, config.head_dim_v)]


def staged_channels(config: Config) -> int:
    """Return how many channels of O a warpgroup stages at a time; e4m3 kernels are short of shared memory."""
    return min(in_boxes(config)[1], STAGED_CHANNELS) if config.is_fp8 else config.head_dim_v


def buffers(config: Config) -> dict[str, tuple[int, int]]:
    """Return the buffers in shared memory of a kernel of any family, by name: how many, and the bytes of one.

    Q has one per slot and consumer warpgroup, O one per consumer warpgroup. An O that leaves through the buffer of
    another operand has none.
    """
    row, row_v = (channels * config.bits // 8 for channels in in_boxes(config))
    found = {
        "q": (config.query_slots * config.consumers, WARPGROUP_ROWS * row),
        "k": (config.num_stages, config.tile_n * row),
        "v": (config.num_stages, config.tile_n * row_v),
    }
    if config.transposes_v:
        found["v_raw"] = found["v"]  # V as loaded, beside V transposed
    if not config.pv_from_registers:
        found["p"] = config.consumers, WARPGROUP_ROWS * config.tile_n * config.bits // 8
    if not (config.traits.output_in_v or config.output_in_query_slot):
        found["out"] = config.consumers, WARPGROUP_ROWS * staged_channels(config) * 2
    return found


def smem_bytes(config: Config) -> int:
    """Return the bytes of shared memory that the tiles of a kernel take, without barriers and arguments of partitions.

    >>> from fa3_kernels.plan.config import default_config
    >>> smem_bytes(default_config(AttentionProblem(1, 1, 1, 1024, 1024, 128)))
    229376
    """
    factors = (
        2 * config.num_stages * WARPGROUP_ROWS * 4 if config.is_fp8 else 0
    )  # of blocks that have their own descales
    return sum(count * size for count, size in buffers(config).values()) + factors


def later(default: Any) -> Any:
    """Return a field of a compile-time record that was added later.

    Kernels from before have it at its default. The hash of a launch leaves it out there, so that it stays the same.
    """
    return field(default=default, metadata={"is_later": True})


@dataclass(frozen=True, slots=True)
class Variant:
    """Compile-time switches of a forward kernel. Tile shapes are those of the descriptors' blocks.

    Parameters
    ----------
    consumers : int
        Consumer warpgroups of 64 rows: 1 to 3.
    consumer_regs, producer_regs : int
        Registers per thread after the split (setmaxnreg).
    query_slots : int
        2, or 1 where shared memory is short: O is then staged in the Q buffer and tiles do not overlap.
    pack : int
        Rows of a tile per query position: 1, or with PackGQA the group padded to a power of two.
    has_key_tail : bool
        Whether the last key tile of a sequence may reach beyond it.
    is_left_limited, is_right_limited : bool
        Whether the window hides keys on that side.
    is_varlen, is_split, softcap : bool
        Whether sequences are packed; whether partial results of a split go to a workspace; whether scores are capped.
    pingpong, overlap : bool
        Schedule switches.
    producer_warps : int
        1, or 4 where the producer also transposes V.
    slices : int
        e4m3: slices of the channels in which O is kept; a single slice of several boxes is kept as all boxes but the
        last, and that.
    promotion_interval : int
        e4m3: keys summed by the tensor core before O takes the sum in fp32; 0 chains through O.
    block_descales : bool
        e4m3: whether descales of K or V differ by key tile.
    integer_max : bool
        Whether row maxima are found by integer comparisons, see :func:`fa3_kernels.gluon.softmax.advance_max`.
    holds_queries : bool
        Whether consumers keep Q in registers, see :meth:`fa3_kernels.plan.config.Config.keeps_queries`.
    qk_boxes, v_boxes, staged_boxes : int
        Boxes of channels of a tile of Q or K, of V or O, and of O as it is staged, see
        :func:`fa3_kernels.plan.call.boxes`.
    page_boxes : int
        Boxes below each other in which TMA copies a key tile: one for each page, or one where pages are tiles or
        larger; 0 where K and V are in no pages.
    qk_panels, v_panels : int
        Panels side by side in which a page's rows of a box of channels are copied, see :mod:`fa3_kernels.gluon.pages`.
    keeps_empty : bool
        Whether tiles that see no key are in the schedule.
    has_sinks : bool
        Whether every query head has a sink.
    stored_channels : int
        Channels of a row of O where threads store it themselves: of packed heads that do not fill their power of two,
        in packed sequences, where TMA would write the padding over the next group. 0 where TMA stores O.
    gathered_qk, gathered_v : int
        Channels of a row of K and of V where threads copy pages row by row, see :mod:`fa3_kernels.gluon.pages`; 0 where
        TMA copies them.
    is_chunked : bool
        Whether a row sees no key outside the chunk of its diagonal; both sides are then limited.
    qk_spare, v_spare : int
        Channels of the last box of Q and K, and of V, that hold nothing, see :func:`fa3_kernels.plan.call.spare`.
    scales_late : bool
        Whether O is multiplied under the next scores, see :class:`fa3_kernels.plan.families.record.Size`.
    stamps : int
        Steps per CTA of which a timeline is kept; 0 is a kernel without instrumentation.
    """

    consumers: int
    consumer_regs: int
    producer_regs: int
    stages: int
    query_slots: int
    pack: int
    has_key_tail: bool
    is_left_limited: bool
    is_right_limited: bool
    is_varlen: bool
    is_split: bool
    softcap: bool
    pingpong: bool
    overlap: bool
    producer_warps: int
    slices: int
    promotion_interval: int
    block_descales: bool
    integer_max: bool
    stamps: int = 0
    holds_queries: bool = later(False)
    qk_boxes: int = later(1)
    v_boxes: int = later(1)
    staged_boxes: int = later(1)
    page_boxes: int = later(0)
    qk_panels: int = later(1)
    v_panels: int = later(1)
    keeps_empty: bool = later(False)
    has_sinks: bool = later(False)
    stored_channels: int = later(0)
    gathered_qk: int = later(0)
    gathered_v: int = later(0)
    is_chunked: bool = later(False)
    qk_spare: int = later(0)
    v_spare: int = later(0)
    scales_late: bool = later(False)

    # Derived; fields rather than properties, so that they are part of the record that Triton's cache is keyed by.
    pack_log2: int = field(init=False)
    tile_positions: int = field(init=False)  # query positions of a tile
    warpgroup_positions: int = field(init=False)
    slot_threads: int = field(init=False)
    is_first_block_masked: bool = field(init=False)  # the rightmost block of a tile may hold hidden keys
    out_in_query_slot: bool = field(init=False)  # otherwise a tile's first scores are started with the last P V before

    def __post_init__(self) -> None:
        """Fill the derived fields."""
        derived = {
            "pack_log2": self.pack.bit_length() - 1,
            "tile_positions": WARPGROUP_ROWS * self.consumers // self.pack,
            "warpgroup_positions": WARPGROUP_ROWS // self.pack,
            "slot_threads": slot_threads(self.consumers, self.producer_warps),
            "is_first_block_masked": self.has_key_tail or self.is_left_limited or self.is_right_limited,
            "out_in_query_slot": not (self.holds_queries or self.query_slots > 1),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @property
    def entry_regs(self) -> int:
        """Registers per thread at launch: all partitions start equal, and together they hold the register file."""
        return {1: 168, 2: 168, 3: 128}[self.consumers]


def _panels(channels: int, config: Config, page_boxes: int) -> int:
    """Return how many panels the boxes of a tile have; a panel's rows have 128 bytes, which the swizzled layout keeps
    together.
    """
    return max(1, box_channels(channels, config.bits) * config.bits // 8 // SWIZZLED_BYTES) if page_boxes > 1 else 1


def variant_of(
    config: Config,
    problem: AttentionProblem,
    shape: Shape,
    *,
    block_descales: bool = False,
    pages: Pages | None = None,
    has_sinks: bool = False,
) -> Variant:
    """Return what is compiled for a launch.

    Raises
    ------
    ValueError
        For a configuration that no kernel is written for.
    """
    most = 4 if config.consumers == 1 else 2
    require(
        2 <= config.num_stages <= most and config.pv_from_registers,
        f"GPU kernels have num_stages 2, or up to {most}, and P in registers, "
        f"got {config.num_stages} and pv_from_registers {config.pv_from_registers}",
    )
    page_boxes = pages.boxes(config.tile_n, config.bits) if pages else 0
    is_gathered = pages is not None and not pages.are_boxes(config.tile_n, config.bits)
    producer_regs, consumer_regs = GATHERING_REGISTERS[config.consumers] if is_gathered else config.registers
    hides_keys = shape.left >= 0 or shape.right >= 0
    pack = power_of_two(problem.group) if config.pack_gqa else 1
    stores_rows = problem.is_varlen and config.num_splits == 1 and pack not in (1, problem.group)
    return Variant(
        consumers=config.consumers,
        consumer_regs=consumer_regs,
        producer_regs=producer_regs,
        stages=config.num_stages,
        query_slots=config.query_slots,
        pack=pack,
        has_key_tail=problem.is_varlen or problem.seqlen_k % config.tile_n != 0,
        is_left_limited=shape.left >= 0,
        is_right_limited=shape.right >= 0,
        is_varlen=problem.is_varlen,
        is_split=config.num_splits > 1,
        softcap=problem.softcap > 0,
        pingpong=config.pingpong,
        overlap=config.overlaps,
        producer_warps=4 if config.transposes_v or is_gathered else 1,
        slices=config.pv_parts[0],
        promotion_interval=config.promotion_interval,
        block_descales=block_descales,
        integer_max=config.takes_integer_max(hides_keys),
        holds_queries=config.keeps_queries(hides_keys),
        qk_boxes=boxes(config.head_dim, config.bits),
        v_boxes=boxes(config.head_dim_v, config.bits),
        staged_boxes=max(1, staged_channels(config) // box_channels(config.head_dim_v, config.bits)),
        page_boxes=page_boxes,
        qk_panels=_panels(config.head_dim, config, page_boxes),
        v_panels=_panels(config.head_dim_v, config, page_boxes),
        keeps_empty=page_boxes > 0 or has_sinks,
        has_sinks=has_sinks,
        stored_channels=problem.head_dim_v if stores_rows else 0,
        gathered_qk=problem.head_dim if is_gathered else 0,
        gathered_v=problem.head_dim_v if is_gathered else 0,
        is_chunked=shape.chunk > 0,
        qk_spare=spare(config.head_dim, config.bits),
        v_spare=spare(config.head_dim_v, config.bits),
        scales_late=config.size.scales_late,
    )
