"""Which forward schedule: tile shape, switches, and what a compiler made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from fa3_kernels.plan.config import kernel_head_dim

Kernel = Literal["gluon", "flash3"]
WARPGROUP, WARP = 128, 32  # threads
BITS = {"fp16": 16, "bf16": 16, "e4m3": 8}
OTHER_REGISTERS = 24  # addresses, row statistics, loop state: what our kernels need beside the matrices
# Of our FP8 kernel, which keeps scalars of a tile in local memory: at head_dim 64 its matrices fill 144 of 160 registers, and no
# loop over key blocks loads any of them (fa3_kernels/audit/audit.json, e4m3_d64_dense).
OTHER_REGISTERS_FP8 = 16
# Where ptxas puts, among a block's exponentials, what the source has in front of or behind all of them; shares of them, read off
# the SASS. Maxima by integers are behind a branch, which keeps the order of the source.
EARLY_EXPONENTIALS = 0.38  # in front of the wait for P V: 26 of 66, 12 of 34, 8 of 18 (fp16_d128)
EARLY_EXPONENTIALS_CHAINED = 0.24  # 16 of 66 (e4m3_d64_dense_chained)
# FlashAttention-3 (fa3-fwd 0.0.3), by (bits, head_dim): 17 of 90 and 25 of 66; 17 of 42; 35 of 114; 8 of 66; at 64 none
EARLY_EXPONENTIALS_FLASH3 = {(16, 128): 0.28, (16, 256): 0.4, (8, 128): 0.31, (8, 256): 0.12}
LATE_TURN = 0.5  # without overlap, in front of handing on the turn: 35 of 66, 14 of 34 (fp16_d128_no_overlap)


class Tile(NamedTuple):
    """Key blocks of one row tile, and how many of them are masked element by element."""

    blocks: int
    masked: int = 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Tile shape and switches of one forward kernel.

    Parameters
    ----------
    dtype : {"fp16", "bf16", "e4m3"}
    head_dim : int
        Multiple of 8 (16 for e4m3), at most 256.
    tile_m, tile_n : int
        64 rows per consumer warpgroup; keys, a multiple of 8 (32 for e4m3).
    num_stages : int
        Slots of the K and V rings.
    pingpong, intra_wg_overlap, warp_specialized, pv_from_registers : bool
    promotion_interval : int
        e4m3: keys after which P V is added to the fp32 accumulator; 0 chains.
    v_transpose : bool
        e4m3: V transposed in the kernel.
    kernel : {"gluon", "flash3"}
    softmax_stages : {2, 3}
        With intra_wg_overlap: 2, the softmax of block j waits for its own Q K^T and runs over P V of block j - 1; 3, Q K^T of
        block j + 1 is under way as well, so that two S tiles are alive (arXiv 2407.08608, appendix B.3).
    integer_max : bool, optional
        Whether row maxima are taken by 3-input integer instructions; by default what ships for a launch without a mask, see
        :func:`ships_integer_max`.
    persistent : bool
        Whether a CTA stays on its SM for all its tiles, or every tile has a CTA of its own.

    Raises
    ------
    ValueError
        When a field breaks its rule.
    """

    dtype: str = "fp16"
    head_dim: int = 128
    tile_m: int = 128
    tile_n: int = 128
    num_stages: int = 2
    pingpong: bool = True
    intra_wg_overlap: bool = True
    warp_specialized: bool = True
    pv_from_registers: bool = True
    promotion_interval: int = 0
    v_transpose: bool = False
    kernel: Kernel = "gluon"
    softmax_stages: int = 2
    integer_max: bool | None = None
    persistent: bool = True

    def __post_init__(self) -> None:
        fp8 = self.dtype == "e4m3"
        rules = (
            (self.dtype in BITS, f"dtype must be one of {', '.join(BITS)}, got {self.dtype!r}"),
            (
                0 < self.head_dim <= 256 and self.head_dim % (16 if fp8 else 8) == 0,
                f"head_dim must be a multiple of {16 if fp8 else 8} in [1, 256], got {self.head_dim}",
            ),
            (
                self.tile_m in (64, 128, 192),
                f"tile_m must be 64, 128 or 192 (64 rows per warpgroup), got {self.tile_m}",
            ),
            (
                self.tile_n % (32 if fp8 else 16) == 0 and 16 <= self.tile_n <= 256,
                f"tile_n must be a multiple of {32 if fp8 else 16} in [16, 256] (k of wgmma), got {self.tile_n}",
            ),
            (1 <= self.num_stages <= 8, f"num_stages must lie in [1, 8], got {self.num_stages}"),
            (fp8 or not (self.promotion_interval or self.v_transpose), "promotion and V transpose are for e4m3"),
            (
                self.warp_specialized
                or not (self.pingpong or self.v_transpose or self.kernel != "gluon" or self.num_stages != 2),
                "without warp specialisation there is one schedule: gluon, two stages, no pingpong, no V transpose",
            ),
            (
                self.promotion_interval == 0 or self.tile_n % self.promotion_interval == 0,
                f"promotion_interval must divide tile_n {self.tile_n}, got {self.promotion_interval}",
            ),
            (self.kernel in ("gluon", "flash3"), f"kernel must be gluon or flash3, got {self.kernel!r}"),
            (self.softmax_stages in (2, 3), f"softmax_stages must be 2 or 3, got {self.softmax_stages}"),
            (
                self.softmax_stages == 2 or (self.intra_wg_overlap and self.warp_specialized and self.num_stages >= 2),
                "three softmax stages need intra_wg_overlap, warp specialisation and two stages of K",
            ),
        )
        for ok, rule in rules:
            if not ok:
                raise ValueError(rule)

    @property
    def consumers(self) -> int:
        return self.tile_m // 64

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of the producer and of a consumer after setmaxnreg; 255 is all that an instruction can name.

        Of our kernels those of :func:`fa3_kernels.plan.config.default_config`.
        """
        if self.v_transpose and self.consumers == 2 and not (self.is_gluon_fp8 and self.head_dim > 128):
            return 40, 232  # the producer's warpgroup transposes V as well
        loads_only = self.kernel == "gluon" and not self.v_transpose  # by a single warp
        return {1: (56, 255), 2: (24, 240), 3: (24 if loads_only else 32, 160)}[self.consumers]

    @property
    def bits(self) -> int:
        return BITS[self.dtype]

    @property
    def is_gluon_fp8(self) -> bool:
        return self.kernel == "gluon" and self.dtype == "e4m3"

    @property
    def overlaps(self) -> bool:
        """Whether a warpgroup's GEMMs run under its own other work: with promotion at head_dim 256, O, S and a part of P V
        do not fit the registers together, whatever the switch says (:mod:`fa3_kernels.plan.variant`)."""
        is_large = self.is_gluon_fp8 and self.promotion_interval > 0 and self.head_dim > 128
        return self.intra_wg_overlap and not is_large

    @property
    def starts_both(self) -> bool:
        """Whether Q K^T of the next block is issued first and P V, in one part, behind it; our FP8 kernel does not always."""
        return not self.is_gluon_fp8 or (self.overlaps and pv_parts(self) == (1, 1) and self.head_dim <= 128)

    @property
    def stages_output_in_q(self) -> bool:
        """Where shared memory is short our kernel stages O in the Q buffer; FlashAttention-3 always in V's."""
        return self.kernel == "gluon" and (self.head_dim > 128 or not self.warp_specialized)

    @property
    def masks_every_block(self) -> bool:
        """Whether a launch that hides keys compares every block's: with promotion at head_dim 256 a branch would cost spills."""
        return self.is_gluon_fp8 and self.head_dim > 128 and self.promotion_interval > 0

    @property
    def max_by_integers(self) -> bool:
        return ships_integer_max(self, False) if self.integer_max is None else self.integer_max

    @property
    def early_exponentials(self) -> float:
        """Share of a block's exponentials in front of the wait for P V of the block before; -1, the maxima are behind it too."""
        if self.kernel == "flash3":
            return EARLY_EXPONENTIALS_FLASH3.get((self.bits, kernel_head_dim(self.head_dim)), 0.0)
        if self.max_by_integers:
            return 0.0
        if self.promotion_interval:
            return -1.0
        return EARLY_EXPONENTIALS_CHAINED if self.is_gluon_fp8 else EARLY_EXPONENTIALS

    @property
    def late_turn(self) -> float:
        """Share of a block's exponentials in front of handing on the turn, without overlap."""
        return 0.0 if self.max_by_integers or self.dtype == "e4m3" else LATE_TURN

    @property
    def serializes(self) -> bool:
        """Whether ptxas, short of registers, waits for every single wgmma (its warning C7512)."""
        return self.kernel == "gluon" and registers_needed(self) > self.registers[1]

    @property
    def switches(self) -> str:
        """The schedule's name, which :func:`read_switches` reads.

        >>> Schedule(softmax_stages=3).switches
        'pingpong+overlap3'
        """
        fields = {
            "pingpong": self.pingpong,
            "intra_wg_overlap": self.intra_wg_overlap,
            "softmax_stages": self.softmax_stages,
        }
        names = [name for name, values in SWITCHES.items() if values.items() <= fields.items()]
        return "+".join(names) or "none"


SWITCHES: dict[str, dict[str, int]] = {
    "pingpong": {"pingpong": True},
    "overlap": {"intra_wg_overlap": True, "softmax_stages": 2},
    "overlap3": {"intra_wg_overlap": True, "softmax_stages": 3},
}


def read_switches(text: str) -> dict[str, int]:
    """Fields of a schedule named by switches joined with ``+``, or ``none``.

    Raises
    ------
    ValueError
        For an unknown switch, or for both overlaps.

    >>> read_switches("overlap3")
    {'pingpong': False, 'intra_wg_overlap': True, 'softmax_stages': 3}
    """
    names = [] if text == "none" else text.split("+")
    if unknown := sorted(set(names) - set(SWITCHES)):
        raise ValueError(f"schedule is made of {', '.join(SWITCHES)}, or none, got {', '.join(unknown)}")
    if {"overlap", "overlap3"} <= set(names):
        raise ValueError(f"schedule takes overlap (two stages) or overlap3 (three), got {text}")
    fields: dict[str, int] = {"pingpong": False, "intra_wg_overlap": False, "softmax_stages": 2}
    for name in names:
        fields |= SWITCHES[name]
    return fields


def ships_integer_max(schedule: Schedule, is_masked: bool) -> bool:
    """Whether our kernel takes row maxima by integers, as :mod:`fa3_kernels.plan.variant` chooses by launch.

    ``is_masked``: the launch hides keys, causal or by a window.
    """
    s, head_dim = schedule, kernel_head_dim(schedule.head_dim)
    if s.kernel != "gluon" or not s.warp_specialized:
        return False
    if s.dtype != "e4m3":
        return head_dim != 128
    promotes = s.promotion_interval > 0
    return {64: promotes != is_masked, 128: True, 256: not promotes}[head_dim]


def adds_in_place(schedule: Schedule) -> bool:
    """Whether promoted partial sums are added where they are awaited, as registers are short, and not in the softmax."""
    return schedule.is_gluon_fp8 and schedule.promotion_interval > 0 and schedule.head_dim > 128


def registers_needed(schedule: Schedule) -> int:
    """Registers of a consumer thread: S (two in three stages), O, P as operand, a partial of P V when promoted, the rest."""
    s = schedule
    scores, output = (s.softmax_stages - 1) * s.tile_n // 2, s.head_dim // 2
    p = s.tile_n * s.bits // 64 if s.pv_from_registers else 0
    partial = output // pv_parts(s)[0] if s.promotion_interval else 0
    held = scores + p + partial if s.overlaps else max(scores, p + partial)
    return held + output + (OTHER_REGISTERS_FP8 if s.is_gluon_fp8 else OTHER_REGISTERS)


def pv_parts(schedule: Schedule) -> tuple[int, int]:
    """Slices of the channels and chunks of the keys in which a kernel sums P V, as :mod:`fa3_kernels.plan.variant` chooses.

    >>> pv_parts(Schedule("e4m3", promotion_interval=64))
    (2, 2)
    """
    s = schedule
    if s.dtype != "e4m3" or s.kernel != "gluon":
        return 1, 1
    slices = 2 if s.promotion_interval and s.head_dim > 64 else 1
    return slices, s.tile_n // s.promotion_interval if s.promotion_interval else 1
