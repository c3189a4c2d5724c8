"""Which forward schedule: tile shape, switches, and the vector work of one key block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from fa3_kernels.config import kernel_head_dim
from fa3_simulator.program import Work

Kernel = Literal["gluon", "flash3"]
WARPGROUP, WARP = 128, 32  # threads
WARPGROUP_ROWS = 64
BITS = {"fp16": 16, "bf16": 16, "e4m3": 8}
ELEMENTS_PER_CHUNK = 8  # of a lane: granularity at which two warpgroups share a pipe
# Per key block and warp, of what each lane keeps of its two rows: the running maximum and the factor that rescales the sums.
STATISTICS_FMA, STATISTICS_ALU, STATISTICS_MUFU, STATISTICS_SHUFFLES = 6, 6, 2, 4
# Instructions of a step that are in no class of Work, by (is e4m3, head_dim, promotes): addresses and descriptors of wgmma
# (uniform datapath), moves, predicates, branches. "instructions" of the first loop of each dense kernel in
# fa3_kernels/audit.json less the classes, the wgmma, the barriers and the branch that takes maxima the other way.
OTHER_INSTRUCTIONS: dict[tuple[bool, int, bool], int] = {
    (False, 64, False): 71, (False, 128, False): 69, (False, 256, False): 119,
    (True, 64, True): 73, (True, 128, True): 84, (True, 256, True): 77,
    (True, 64, False): 61, (True, 128, False): 80, (True, 256, False): 100,
}  # fmt: skip
OTHER_INSTRUCTIONS_LOCKSTEP = 114  # of fp16_d128_lockstep, whose consumers load as well


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

        Of our kernels those of :func:`fa3_kernels.config.default_config`.
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
        do not fit the registers together, whatever the switch says (:mod:`fa3_kernels.gluon.variant`)."""
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


def _work(name: str, per_lane: int, chunk: int = ELEMENTS_PER_CHUNK, **pipes: float) -> Work:
    """Work on ``per_lane`` elements; ``pipes`` in warp instructions per element."""
    return Work(name, -(-per_lane // chunk), **{pipe: round(count * per_lane) for pipe, count in pipes.items()})


def ships_integer_max(schedule: Schedule, is_masked: bool) -> bool:
    """Whether our kernel takes row maxima by integers, as :mod:`fa3_kernels.gluon.variant` chooses by launch.

    ``is_masked``: the launch hides keys, causal or by a window.
    """
    s, head_dim = schedule, kernel_head_dim(schedule.head_dim)
    if s.kernel != "gluon" or not s.warp_specialized:
        return False
    if s.dtype != "e4m3":
        return head_dim != 128
    promotes = s.promotion_interval > 0
    return {64: promotes != is_masked, 128: True, 256: not promotes}[head_dim]


def _row_max(schedule: Schedule, by_integers: bool) -> Work:
    """One comparison per score, of integers half as many (VIMNMX3 takes two); the quad's and the running maximum."""
    scores = schedule.tile_n // 2
    return Work(
        "row max", -(-scores // ELEMENTS_PER_CHUNK), alu=(scores // 2 if by_integers else scores - 2) + STATISTICS_ALU
    )


def other_work(schedule: Schedule) -> Work:
    """What a step executes beside the classes of Work, one dispatch cycle each; of flash3 it is assumed to be as much."""
    s = schedule
    key = (s.dtype == "e4m3", kernel_head_dim(s.head_dim), s.promotion_interval > 0)
    count = OTHER_INSTRUCTIONS[key] if s.warp_specialized else OTHER_INSTRUCTIONS_LOCKSTEP
    return Work("addresses", -(-count // ELEMENTS_PER_CHUNK), other=count)


def softmax_work(schedule: Schedule) -> dict[str, Work]:
    """Vector work of one key block and one warp of a consumer (16 rows)."""
    s = schedule
    scores, outputs = s.tile_n // 2, s.head_dim // 2  # per lane
    chunks = -(-scores // ELEMENTS_PER_CHUNK)
    width = s.head_dim // (16 // s.bits if s.stages_output_in_q else 1)  # of O at a time
    parts = s.tile_n // s.promotion_interval if s.promotion_interval else 1
    return {
        "mask": _work("mask", scores, alu=2),
        "first max": _row_max(s, False),  # no sign is known before a tile's first block
        "max": _row_max(s, s.max_by_integers),
        "quad": Work("row reduction", 1, shuffle=STATISTICS_SHUFFLES),  # two rows, two exchanges in the quad
        "exp": Work("exp2 and row sum", chunks, fma=2 * scores + STATISTICS_FMA, mufu=scores + STATISTICS_MUFU),
        "other": other_work(s),
        "convert": _work("convert P", scores, convert=0.5),
        "rescale": _work("rescale O", outputs * parts, fma=1),
        "epilogue": _work("normalise O", outputs, fma=1, convert=0.5),
        "store": Work(
            "O to shared memory", max(1, width // 16), alu=width // 16, smem_bytes=WARPGROUP_ROWS * width * 2
        ),
    }


def pv_parts(schedule: Schedule) -> tuple[int, int]:
    """Slices of the channels and chunks of the keys in which a kernel sums P V, as :mod:`fa3_kernels.gluon.variant` chooses.

    >>> pv_parts(Schedule("e4m3", promotion_interval=64))
    (2, 2)
    """
    s = schedule
    if s.dtype != "e4m3" or s.kernel != "gluon":
        return 1, 1
    slices = 2 if s.promotion_interval and s.head_dim > 64 else 1
    return slices, s.tile_n // s.promotion_interval if s.promotion_interval else 1


def transpose_work(schedule: Schedule) -> Work:
    """V transpose of one key block by four warps: 8 KiB per 16 LDSM / STSM of each warp, two PRMT per eight bytes."""
    size = schedule.tile_n * schedule.head_dim
    words = size // (4 * WARPGROUP)  # 32-bit registers per lane
    return Work("transpose V", max(1, words // 8), alu=words, other=words // 2, smem_bytes=2 * size)
