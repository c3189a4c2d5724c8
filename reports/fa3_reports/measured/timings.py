"""Measured cycles: rows of a table that ``fa3verify bench`` writes, with the schedule that each one ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from fa3_kernels.plan.choose import choose_num_splits
from fa3_kernels.plan.config import Config, default_config
from fa3_kernels.plan.families import FAMILIES, OURS
from fa3_reference.problem import AttentionProblem
from fa3_reports.bench.cells import CELL_FIELDS, SIZES
from fa3_reports.bench_rows import RECORDED, read_rows

# Families whose schedule other people's kernels have, builds of one alike: their tiles are known and not in the rows.
SCHEDULED = {"flash3": "flash3", "flash3.dew": "flash3", "flash4": "flash4"}
# Decoding: libraries choose how many parts the keys are cut into, but for ours with keys in one piece; of a build that
# keeps them in one piece whatever it is asked for, it is not known how it packs heads.
ONE_SPLIT = "gluon.one_split"
UNKNOWN_PARTS = "flash3.dew"
SCHEDULE_COLUMNS = ("tile_m", "tile_n", "pingpong", "overlap", "warp_specialized", "promotion_interval")
COLUMNS = (
    *(name for name in CELL_FIELDS if name != "v_mean"),
    "kernel",
    "status",
    *SCHEDULE_COLUMNS,
    "burst_sm_mhz",
    "burst_cycles",
)
_TRUE = ("true", "1")
_FALSE = ("false", "0")


class MeasuredRow(NamedTuple):
    """One row: ``cycles`` from launch to end at an SM clock of ``clock_mhz``, and what models predict of them
    (:func:`fa3_reports.measured.validation.compare`).
    """

    line: int
    kernel: str
    problem: AttentionProblem
    config: Config
    cycles: float
    clock_mhz: float
    predicted: tuple[float, ...] = ()

    @property
    def group(self) -> str:
        """Return the kind of kernel in words."""
        c = self.config
        return f"{c.family} {c.dtype} d{c.head_dim} {'causal' if self.problem.causal else 'dense'}"

    @property
    def title(self) -> str:
        """Return the problem in words."""
        p = self.problem
        return f"{self.group} b{p.batch} h{p.nheads} {p.seqlen_q}x{p.seqlen_k}"


class _Row:
    """Values of one line by column; what is wrong names both."""

    def __init__(self, line: int, values: dict[str, str], origin: str) -> None:
        self.line = line
        self.values = values
        self.origin = origin
        self.kernel = RECORDED.get(values["kernel"], values["kernel"])  # as its kernel is called now

    def refuse(self, column: str, rule: str) -> ValueError:
        return ValueError(f"{self.origin}, line {self.line}: {column} must be {rule}, got {self.values[column]!r}")

    def positive(self, column: str) -> float:
        try:
            value = float(self.values[column])
        except ValueError:
            value = -1.0
        if not 0 < value < float("inf"):
            raise self.refuse(column, "a number above 0")
        return value

    def whole(self, column: str, at_least: int = 1) -> int:
        text = self.values[column]
        if not (text.isascii() and text.isdigit()) or int(text) < at_least:
            raise self.refuse(column, f"a whole number of at least {at_least}")
        return int(text)

    def flag(self, column: str) -> bool:
        text = self.values[column].lower()
        if text not in (*_TRUE, *_FALSE):
            raise self.refuse(column, "True or False")
        return text in _TRUE


def read(path: Path) -> tuple[list[MeasuredRow], Counter[str]]:
    """Read the rows that a program can be simulated for.

    Parameters
    ----------
    path : Path
        ``bench.jsonl``, or ``bench.csv`` with the columns of :data:`COLUMNS`; others are ignored.

    Returns
    -------
    rows : list of MeasuredRow
    left_out : Counter
        Rows that are not among them, by reason.

    Raises
    ------
    ValueError
        For a file that is no such table; the message names column and line.
    """
    rows = []
    left_out = Counter()
    for line, values in enumerate(read_rows(path, COLUMNS), 2):
        row = _Row(line, values, path.name)
        if reason := _unusable(row):
            left_out[reason] += 1
            continue
        problem = _problem(row)
        config = _config(row, problem)
        if isinstance(config, str):
            left_out[config] += 1
            continue
        cycles = row.positive("burst_cycles")
        clock = row.positive("burst_sm_mhz")
        rows.append(MeasuredRow(row.line, row.values["kernel"], problem, config, cycles, clock))
    return rows, left_out


def _unusable(row: _Row) -> str | None:
    """Return why there is nothing to compare, or None."""
    if row.values.get("line"):
        return "sequences with lengths of their own, or keys in pages"
    if row.values["grid"] == "drawn" and row.values["nheads"] != row.values["nheads_kv"]:
        return "drawn: whether heads of a group were packed is not in the row"
    if row.values["status"] != "ok":
        return "no timing: the kernel failed or does not take the shape"
    if row.values["grid"] == "decode" and row.kernel == UNKNOWN_PARTS:
        return f"decode: how {UNKNOWN_PARTS} cuts keys and packs heads is not known"
    if not row.values["burst_cycles"]:
        return "no cycles: the SM clock was not counted"
    return None


def _problem(row: _Row) -> AttentionProblem:
    """Return what was computed in a row."""
    sizes = {name: row.whole(name) for name in SIZES}
    if sizes["nheads"] % sizes["nheads_kv"]:
        raise row.refuse("nheads_kv", f"a divisor of nheads {sizes['nheads']}")
    with _named(row):
        if row.values.get("head_dim_v"):
            sizes["head_dim_v"] = row.whole("head_dim_v")
        return AttentionProblem(**sizes, dtype=row.values["dtype"], causal=row.flag("causal"))  # type: ignore[arg-type]


def _config(row: _Row, problem: AttentionProblem) -> Config | str:
    """The configuration that ran, or why there is none."""
    name = row.kernel
    if family := SCHEDULED.get(name):
        if not FAMILIES[family].shipped(problem):
            return f"{FAMILIES[family].title} with a tile not in our table"
        return default_config(problem, family=family, num_splits=0 if row.values["grid"] == "decode" else 1)
    if not row.values["tile_m"]:
        return f"no program for {name}"
    with _named(row):
        specialized = row.flag("warp_specialized")
        head_dim, head_dim_v = FAMILIES[OURS].compiled_head_dims(problem)
        config = Config(
            dtype=problem.dtype,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            tile_m=row.whole("tile_m"),
            tile_n=row.whole("tile_n"),
            promotion_interval=row.whole("promotion_interval", 0) if row.values["promotion_interval"] else 0,
            pack_gqa=row.values["grid"] == "decode" and problem.group > 1,  # one query: a group is one tile
            pingpong=row.flag("pingpong") and specialized,
            intra_wg_overlap=row.flag("overlap"),
            warp_specialized=specialized,
        )
    if not _is_current(row, config):
        return "our kernel has another schedule by now"
    if row.values["grid"] != "decode" or name == ONE_SPLIT:
        return config
    return replace(config, num_splits=choose_num_splits(problem, config))


def _is_current(row: _Row, config: Config) -> bool:
    """Tell whether our kernel has the schedule of a row still.

    A kernel of which columns ``holds_turn``, ``holds_queries`` and ``former`` say nothing was timed before it held its
    turn, or Q in registers, or rotated its sums. A kernel that rotates sums hands on its turn as the one before did,
    which only ``former`` tells.
    """
    keeps = config.keeps_queries(row.flag("causal"))
    if keeps and not ("holds_queries" in row.values and row.flag("holds_queries")):
        return False
    if not (config.holds_turn or config.adds_in_place):
        return True
    says = "holds_turn" in row.values and row.flag("holds_turn") == config.holds_turn
    return says and row.values.get("former") != "True"


@contextmanager
def _named(row: _Row) -> Iterator[None]:
    """Name file and line in what a record refuses."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(row.origin) else f"{row.origin}, line {row.line}: {text}") from None
