"""The shapes that are timed: a cell is one shape, and a grid is a named list of cells.

bench measures them (:mod:`fa3_reports.bench.run`), and :mod:`fa3_reports.bench.results` stores what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from fa3_reference.problem import AttentionProblem, Dtype
from fa3_reports.bench.grids import GRIDS
from fa3_simulator.launch import flops
from fa3verify.cases.lines import read_line
from fa3verify.cases.practice import models
from fa3verify.records import OLDER

# The paper's grid (arXiv 2407.08608, section 4.1): heads times head_dim, tokens of a batch, lengths and head dims.
HIDDEN = 2048
TOKENS = 16384
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128, 256)
SCHEDULE_SEQLENS = (1024, 4096, 16384)
DRAWN = Path(__file__).parents[2] / "h200" / "speed" / "drawn" / "problems.txt"
ELEMENT_BYTES = {"fp16": 2, "bf16": 2, "e4m3": 1}


@dataclass(frozen=True, slots=True)
class Cell:
    """One shape of a grid.

    Parameters
    ----------
    grid : str
        One of :data:`~fa3_reports.bench.grids.GRIDS`; all other sizes are those of
        :class:`fa3_reference.problem.AttentionProblem`.
    v_mean : float
        Mean of V's distribution; everything else is N(0, 1).
    head_dim_v : int
        Channels of V; 0 for as many as head_dim.
    line : str
        The problem in words (:mod:`fa3verify.cases.lines`), where sequences have lengths of their own or keys lie in
        pages; the sizes are then the longest. Empty for other cells.
    """

    grid: str
    dtype: Dtype
    batch: int
    seqlen_q: int
    seqlen_k: int
    nheads: int
    nheads_kv: int
    head_dim: int
    causal: bool
    v_mean: float = 0.0
    head_dim_v: int = field(default=0, metadata=OLDER)
    line: str = field(default="", metadata=OLDER)

    @classmethod
    def of(cls, grid: str, line: str) -> Cell:
        """Return the cell of a line; that of a plain batch is as if its sizes had been given."""
        p, _ = read_line(line)
        is_plain = p.cache is None and p.seqlens_q is None
        return cls(
            grid,
            p.dtype,
            batch=p.batch,
            seqlen_q=p.seqlen_q,
            seqlen_k=p.seqlen_k,
            nheads=p.nheads,
            nheads_kv=p.nheads_kv,
            head_dim=p.head_dim,
            causal=p.causal,
            head_dim_v=p.head_dim_v if p.head_dim_v != p.head_dim else 0,
            line="" if is_plain else line,
        )

    @property
    def value_dim(self) -> int:
        """Return the channels of V."""
        return self.head_dim_v or self.head_dim

    @property
    def key(self) -> str:
        """Name of the cell, unique within all grids.

        >>> paper(["fp16"], [128], [512], [True])[0].key
        'paper fp16 b32 h16/16 512x512 d128 causal'
        """
        if self.line:
            return f"{self.grid} {self.line}"
        text = f"{self.grid} {self.dtype} b{self.batch} h{self.nheads}/{self.nheads_kv} {self.seqlen_q}x{self.seqlen_k}"
        mean = f" vmean{self.v_mean:g}" if self.v_mean else ""
        width = f"d{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v else "")
        return f"{text} {width}{' causal' if self.causal else ''}{mean}"

    @property
    def operation(self) -> str:
        """Return what is timed, "forward" or "backward"."""
        return "backward" if self.grid.startswith("backward") else "forward"

    @property
    def flops(self) -> int:
        """Count floating-point operations as the paper does: 4 seqlen^2 head_dim nheads batch, half when causal.

        Where V has another head_dim the mean of both counts. A backward counts 2.5 times as many. Sequences with
        lengths of their own are added up.
        """
        if self.line:
            return int(flops(self.problem, (self.head_dim + self.value_dim) / 2))
        full = 2 * self.seqlen_q * self.seqlen_k * (self.head_dim + self.value_dim) * self.nheads * self.batch
        full = full * 5 // 2 if self.operation == "backward" else full
        return full // 2 if self.causal else full

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V, each read once: what decoding must move."""
        rows = math.prod(self.problem.k_shape[:-1])
        return rows * (self.head_dim + self.value_dim) * ELEMENT_BYTES[self.dtype]

    @property
    def io_bytes(self) -> int:
        """Bytes of q, k, v and of the output (two bytes an element whatever the operands)."""
        rows = math.prod(self.problem.q_shape[:-1])
        return rows * (self.head_dim * ELEMENT_BYTES[self.dtype] + self.value_dim * 2) + self.kv_bytes

    @property
    def problem(self) -> AttentionProblem:
        if self.line:
            return read_line(self.line)[0]
        return AttentionProblem(
            self.batch,
            self.nheads,
            self.nheads_kv,
            self.seqlen_q,
            self.seqlen_k,
            self.head_dim,
            self.value_dim,
            dtype=self.dtype,
            causal=self.causal,
        )


# The columns that say what was timed, in every table; only tables of grids with two head dims have head_dim_v as well.
CELL_FIELDS = tuple(each.name for each in fields(Cell) if each.name not in ("head_dim_v", "line"))
SIZES = CELL_FIELDS[2:8]  # from batch to head_dim: the columns that an attention problem takes as numbers


# Head dims that are no power of two, and those of multi-head latent attention: of Q and K, and of V where it differs.
_WIDTHS = ((80, 0), (96, 0), (160, 0), (192, 0), (192, 128))
# Shapes of the grids that are no product of sizes: sequences, queries, keys, heads, heads of K and V, head_dim, mask,
# the mean of V where it is not 0, and head_dim_v.
_SHAPES: dict[str, tuple[tuple, ...]] = {
    "ablation": ((4, 8448, 8448, 16, 16, 128, False),),  # table 2 of the paper
    # Lengths that none of our tiles divides, each with as many sequences as make 12 to 15 thousand tokens, and odd
    # numbers of heads.
    "fresh": tuple(
        (batch, n, n, heads, heads, head_dim, causal)
        for head_dim, heads in ((64, 29), (128, 15), (256, 7))
        for causal in (False, True)
        for n, batch in ((3000, 5), (5000, 3), (12000, 1))
    ),
    "ragged": (  # short and chunked work
        (1, 1024, 9000, 32, 8, 128, True),
        (8, 512, 512, 32, 8, 128, True),
        (2, 1000, 1000, 24, 8, 128, True),
        (1, 2048, 2048, 16, 16, 128, True),
        (3, 3000, 3000, 24, 8, 128, True),
        (1, 4000, 4000, 40, 8, 128, True),
    ),
    "gqa": tuple((2, 8192, 8192, 32, 8, 128, causal) for causal in (False, True)),
    "decode": tuple((batch, 1, n, 32, 8, 128, False) for batch, n in ((32, 8192), (4, 65536), (1, 65536))),
    # Memory grows with the length: one sequence.
    "length": tuple((1, n, n, 16, 16, 128, False) for n in (2048, 8192, 32768)),
    "widths": tuple(
        (TOKENS // n, n, n, HIDDEN // d, HIDDEN // d, d, causal, 0.0, v)
        for d, v in _WIDTHS
        for causal in (False, True)
        for n in SCHEDULE_SEQLENS
    ),
    "accumulator_loss": tuple((1, 256, n, 4, 4, d, False, 1.0) for d in HEAD_DIMS for n in (8192, 32768, 131072)),
}
_Unseen = tuple[Dtype, int, int, int, int, int, int, bool]
# Shapes that no other grid has: dtype, batch, queries, keys, heads, heads of K and V, head_dim, causal. Kernels and
# schedules are those of grid "schedules". Kinds of kernels come first each once, so that a run cut short has all.
UNSEEN: tuple[_Unseen, ...] = (
    ("fp16", 3, 3000, 3000, 24, 8, 128, True),
    ("e4m3", 3, 3000, 3000, 24, 8, 128, False),
    ("e4m3", 12, 768, 768, 20, 20, 128, True),
    ("fp16", 2, 5000, 5000, 24, 24, 64, False),
    ("e4m3", 2, 5000, 5000, 24, 24, 64, True),
    ("fp16", 14, 768, 768, 10, 10, 256, True),
    ("e4m3", 4, 3072, 3072, 10, 10, 256, False),
    ("fp16", 1, 12000, 12000, 12, 12, 128, False),
    ("e4m3", 4, 1536, 1536, 40, 8, 64, False),
    ("e4m3", 2, 5000, 5000, 9, 9, 256, True),
    ("fp16", 5, 1536, 1536, 20, 20, 64, True),
    ("fp16", 2, 5000, 5000, 9, 9, 256, False),
    ("bf16", 2, 6144, 6144, 20, 4, 128, True),
    ("bf16", 4, 3072, 3072, 10, 2, 256, False),
    ("e4m3", 1, 12000, 12000, 12, 12, 128, True),
    ("e4m3", 2, 6144, 6144, 20, 4, 128, False),
    ("fp16", 12, 640, 640, 16, 16, 128, True),
    ("fp16", 1, 1024, 9000, 32, 8, 128, True),
    ("e4m3", 1, 1024, 9000, 32, 8, 128, True),
    ("bf16", 6, 2560, 2560, 20, 20, 64, True),
)
# The second such set. A cut run has e4m3 and 16 bits alike, and every head_dim.
UNSEEN2: tuple[_Unseen, ...] = (
    ("e4m3", 3, 3500, 3500, 21, 7, 128, False),
    ("fp16", 4, 2200, 2200, 36, 36, 64, True),
    ("e4m3", 13, 900, 900, 18, 18, 128, True),
    ("fp16", 6, 1800, 1800, 11, 11, 256, False),
    ("e4m3", 2, 7000, 7000, 14, 14, 64, False),
    ("fp16", 3, 3500, 3500, 21, 7, 128, True),
    ("e4m3", 1, 10000, 10000, 10, 10, 256, True),
    ("fp16", 1, 14000, 14000, 10, 10, 128, False),
    ("e4m3", 7, 1300, 1300, 33, 33, 64, True),
    ("fp16", 9, 900, 900, 15, 5, 256, True),
    ("e4m3", 2, 4400, 4400, 20, 4, 128, True),
    ("fp16", 2, 7000, 7000, 24, 8, 64, False),
    ("e4m3", 5, 2600, 2600, 9, 3, 256, False),
    ("bf16", 4, 4400, 4400, 15, 5, 128, False),
    ("e4m3", 9, 1300, 1300, 20, 20, 128, False),
    ("bf16", 2, 2600, 2600, 40, 8, 64, True),
)
# The third: six launches of at most 1100 keys, whose CTAs wait for each other's loads, and eight longer ones, which
# hardly do; half of them e4m3, every head_dim, on both GPUs.
UNSEEN3: tuple[_Unseen, ...] = (
    ("e4m3", 22, 400, 400, 14, 14, 128, True),
    ("fp16", 10, 700, 700, 26, 26, 128, True),
    ("e4m3", 5, 2100, 2100, 25, 5, 128, False),
    ("fp16", 2, 3800, 3800, 13, 13, 256, True),
    ("e4m3", 11, 800, 800, 38, 38, 64, True),
    ("fp16", 20, 400, 400, 22, 22, 128, False),
    ("e4m3", 16, 600, 600, 9, 9, 256, True),
    ("bf16", 3, 2900, 2900, 18, 6, 128, True),
    ("e4m3", 1, 9500, 9500, 11, 11, 128, True),
    ("fp16", 5, 1900, 1900, 28, 7, 64, True),
    ("e4m3", 2, 3300, 3300, 12, 4, 256, False),
    ("fp16", 11, 1100, 1100, 13, 13, 256, True),
    ("e4m3", 3, 4700, 4700, 30, 30, 64, False),
    ("bf16", 4, 2300, 2300, 31, 31, 64, False),
)


_UNSEEN: dict[str, tuple[_Unseen, ...]] = {"unseen": UNSEEN, "unseen2": UNSEEN2, "unseen3": UNSEEN3}


def paper(
    dtypes: Iterable[Dtype],
    head_dims: Sequence[int],
    seqlens: Sequence[int],
    causal: Sequence[bool],
    *,
    grid: str = "paper",
) -> list[Cell]:
    """Return cells of hidden size 2048 and 16k tokens, split into heads and sequences, as the paper has them."""
    return [
        Cell(grid, dtype, TOKENS // n, n, n, HIDDEN // d, HIDDEN // d, d, masked)
        for dtype in dtypes
        for d in head_dims
        for masked in causal
        for n in seqlens
    ]


def practice_lines() -> list[str]:
    """Return what servers launch with the heads of the public models that generate, over pages of 1, 16 and 64 keys in
    turn: a step of decoding and a chunk of prompts each, one of both with lengths of their own.
    """
    layers = dict.fromkeys(
        f"{x.nheads}/{x.nheads_kv} d{x.head_dim}/{x.head_dim_v or x.head_dim}"
        for x in (model.share for model in models() if model.causal)
    )
    lines = []
    for i, layer in enumerate(layers):
        batch, page = (8, 64, 1)[i // 3 % 3], (1, 16, 64)[i % 3]
        keys = ("8192", "3000-13000")
        queries = ("512", "300-1200")
        lines.append(f"{layer} {batch} x 1 x {keys[i % 2]} page {page}")
        lines.append(f"{layer} {min(batch, 8)} x {queries[1 - i % 2]} x {keys[1 - i % 2]} causal page {page}")
    return lines


def drawn_lines(grid: str) -> list[str]:
    """Return the lines of ``reports/h200/speed/drawn`` that are of a grid, "drawn" or "backward_drawn"."""
    text = DRAWN.read_text(encoding="utf-8").splitlines()
    lines = [line for line in text if line and not line.startswith("#")]
    return [line.removesuffix(" backward") for line in lines if line.endswith(" backward") == (grid != "drawn")]


def _listed(grid: str, dtypes: Sequence[Dtype]) -> list[Cell]:
    """Return the cells of a grid whose shapes are listed above.

    The unseen shapes are cells of grid "schedules", whose kernels they run. Accumulator loss is measured in e4m3 alone,
    as other formats have none; a backward has no e4m3.
    """
    if grid == "practice":
        return [Cell.of(grid, f"{line} {dtype}") for dtype in dtypes for line in practice_lines()]
    if grid.endswith("drawn"):
        return [cell for cell in (Cell.of(grid, line) for line in drawn_lines(grid)) if cell.dtype in dtypes]
    if grid in _UNSEEN:
        return [Cell("schedules", *shape) for shape in _UNSEEN[grid] if shape[0] in dtypes]
    some: dict[str, Sequence[Dtype]] = {"accumulator_loss": ("e4m3",), "backward_widths": ("fp16", "bf16")}
    kept = some.get(grid, dtypes)
    taken: list[Dtype] = [dtype for dtype in dtypes if dtype in kept]
    return [Cell(grid, dtype, *shape) for dtype in taken for shape in _SHAPES[grid.removeprefix("backward_")]]


def select(
    grid: str,
    dtypes: Iterable[Dtype],
    *,
    head_dims: Iterable[int] = (),
    seqlens: Iterable[int] = (),
    causal: bool | None = None,
) -> list[Cell]:
    """Return the cells of a grid that pass the filters; an empty filter lets everything pass.

    Raises
    ------
    ValueError
        For an unknown grid, or a length or head_dim that the grids of hidden size 2048 cannot have.
    """
    if grid not in GRIDS:
        raise ValueError(f"grid must be one of {', '.join(GRIDS)}, got {grid!r}")
    head_dims = tuple(head_dims)
    seqlens = tuple(seqlens)
    if grid in ("paper", "schedules", "backward"):
        return _product(grid, dtypes, head_dims, seqlens, (False, True) if causal is None else (causal,))
    return [
        c
        for c in _listed(grid, tuple(dtypes))
        if (not head_dims or c.head_dim in head_dims)
        and (not seqlens or c.seqlen_k in seqlens)
        and (causal is None or c.causal == causal)
    ]


def _product(
    grid: str,
    dtypes: Iterable[Dtype],
    head_dims: Sequence[int],
    seqlens: Sequence[int],
    causal: Sequence[bool],
) -> list[Cell]:
    """Return the cells of a grid of hidden size 2048; e4m3 has no backward. ValueError for sizes that do not divide."""
    for name, values, total in (("head_dim", head_dims, HIDDEN), ("seqlen", seqlens, TOKENS)):
        for value in values:
            if value < 1 or total % value:
                raise ValueError(f"{name} must divide {total}, got {value}")
    lengths = seqlens or (SCHEDULE_SEQLENS if grid == "schedules" else SEQLENS)
    cells = paper(dtypes, head_dims or HEAD_DIMS, lengths, causal, grid=grid)
    if grid == "schedules":  # the code of bf16 is that of fp16 but for the formats
        return [c for c in cells if c.dtype != "bf16" or c.head_dim == 128]
    return [c for c in cells if grid != "backward" or c.dtype != "e4m3"]
