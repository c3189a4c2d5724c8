"""Which forward schedule: tile shape, switches, and the vector work of one key block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from fa3_simulator.program import Work

Kernel = Literal["gluon", "flash3"]
WARPGROUP, WARP = 128, 32
BITS = {"fp16": 16, "bf16": 16, "e4m3": 8}
ELEMENTS_PER_CHUNK = 8  # of a lane: granularity at which two warpgroups share a pipe


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
        """Registers per thread of the producer and of a consumer after setmaxnreg; 255 is all that an instruction can name."""
        if self.v_transpose and self.consumers == 2:
            return 40, 232  # the producer's warpgroup transposes V as well
        return {1: (56, 255), 2: (24, 240), 3: (32, 160)}[self.consumers]

    @property
    def bits(self) -> int:
        return BITS[self.dtype]

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


def softmax_work(schedule: Schedule) -> dict[str, Work]:
    """Vector work of one key block and one warp of a consumer (16 rows)."""
    s = schedule
    scores, outputs = s.tile_n // 2, s.head_dim // 2  # per lane
    parts = s.tile_n // s.promotion_interval if s.promotion_interval else 1
    return {
        "mask": _work("mask", scores, alu=2),
        "max": _work("row max", scores, alu=1),
        "exp": _work("exp2 and row sum", scores, fma=2, mufu=1),
        "convert": _work("convert P", scores, convert=0.5),
        "rescale": _work("rescale O", outputs * parts, fma=1),
        "epilogue": _work("normalise O", outputs, fma=1, convert=0.5),
        "store": Work(
            "O to shared memory", max(1, s.head_dim // 16), alu=s.head_dim // 16, smem_bytes=64 * s.head_dim * 2
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
    slices = 1 if s.head_dim <= 64 or (s.head_dim <= 128 and not s.promotion_interval) else 2
    return slices, s.tile_n // s.promotion_interval if s.promotion_interval else 1


def transpose_work(schedule: Schedule) -> Work:
    """V transpose of one key block by four warps: 8 KiB per 16 LDSM / STSM of each warp, two PRMT per eight bytes."""
    size = schedule.tile_n * schedule.head_dim
    words = size // (4 * WARPGROUP)  # 32-bit registers per lane
    return Work("transpose V", max(1, words // 8), alu=words, fma=words // 2, smem_bytes=2 * size)
