"""How well a kernel overlaps, measured beside simulated: what the GPU counted, and what stamps inside it say.

``python -m fa3_reports.measured.overlap COUNTERS.csv --timelines STAMPS.csv --markdown FILE`` writes one page, whose
words are those of :mod:`fa3_simulator.overlap`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from fa3_kernels.plan.config import Config
from fa3_reference.problem import AttentionProblem
from fa3_reports import stamps
from fa3_reports.measured import counters, timings
from fa3_reports.measured.printed import parser_of, printed
from fa3_simulator.costs import TICKS, costs
from fa3_simulator.cta import kernel_of
from fa3_simulator.engine import simulate
from fa3_simulator.machine import Machine
from fa3_simulator.overlap import Overlap, measure, softmax_ticks
from fa3_simulator.run import estimate
from fa3_simulator.schedules import TileBlocks, read_switches
from fa3_simulator.timeline import bars
from fa3_simulator.what_if import speedups
from fa3verify.files import markdown_table

INTRO = """T is the time of a launch or of a step, T_tensor that of its tensor cores, T_softmax the vector work of all
warpgroups run alone, all in cycles of an SM. Exposed is T - T_tensor, hidden the share of T_softmax that is not, and
busiest the share of T that the busiest unit works. Of launches, T, T_tensor and busiest are counted; of steps T is
stamped; T_softmax is simulated everywhere. The profiler empties the caches before a launch."""
BLOCKS = 24  # of a tile of the CTA whose steps are simulated; it has two


class Cta(NamedTuple):
    """A CTA of two long tiles, simulated: of one step T_tensor and T_softmax, and what would be faster if free."""

    tensor_cycles: float
    softmax_cycles: float
    cycles_per_block: float
    overlap: Overlap
    free: dict[str, float]


@lru_cache(maxsize=64)
def cta_of(config: Config, machine: Machine, clock_mhz: float) -> Cta:
    """Simulate a CTA of a configuration, as launched."""
    program = kernel_of(config).program([TileBlocks(BLOCKS)] * 2)
    tables = costs(program, machine, clock_mhz)
    trace = simulate(program, tables)
    each = TICKS * 2 * BLOCKS
    free = speedups(program, machine, clock_mhz, trace)
    return Cta(
        trace.busy["tensor"] / each,
        softmax_ticks(program, tables) / each,
        stamps.cycles_per_block(bars(program, trace)),
        measure(program, tables, trace),
        free,
    )


class Shares(NamedTuple):
    """Of a launch or a step: T in cycles, T_tensor over T, exposed cycles, and the share of the softmax hidden."""

    cycles: float
    tensor: float
    exposed: float
    hidden: float

    @classmethod
    def of(cls, cycles: float, tensor_cycles: float, softmax_cycles: float) -> Shares:
        exposed = cycles - tensor_cycles
        return cls(cycles, tensor_cycles / cycles, exposed, 1 - exposed / softmax_cycles)


class Launch(NamedTuple):
    """One counted launch beside the same simulated."""

    row: dict[str, str]
    problem: AttentionProblem
    config: Config
    cta: Cta
    measured: Shares
    simulated: Shares

    @property
    def busiest(self) -> tuple[str, float]:
        """The busiest unit by the counters, and its share of the time.

        A warp instruction takes the special-function unit 8 cycles, the integer and comparison pipe 2, and its
        scheduler one.
        """
        cycles = {
            "tensor": counters.tensor_cycles(self.row),
            "mufu": 8 * float(self.row["mufu_instructions"]),
            "alu": 2 * float(self.row["alu_instructions"]),
            "issue": float(self.row["instructions"]),
        }
        unit = max(cycles, key=lambda name: cycles[name])
        return unit, cycles[unit] / self.measured.cycles


def launches(path: Path, machine: Machine) -> Iterator[Launch]:
    """Every counted launch of a kernel that a program can be simulated for."""
    counted = counters.read(path)
    for row in timings.read(path)[0]:
        found = estimate(row.problem, row.config, machine, row.clock_mhz)
        config = kernel_of(row.config).compiled(row.problem).config
        assert isinstance(config, Config)
        cta = cta_of(config, machine, row.clock_mhz)
        steps = kernel_of(config).launch(row.problem, machine, row.clock_mhz).blocks / machine["sms"]
        softmax = steps * cta.softmax_cycles
        counts = counted[row.line]
        measured = Shares.of(row.cycles, counters.tensor_cycles(counts), softmax)
        simulated = Shares.of(found.cycles, steps * cta.tensor_cycles, softmax)
        yield Launch(counts, row.problem, config, cta, measured, simulated)


def _pair(measured: float, simulated: float, form: str = ".2f") -> str:
    return f"{measured:{form}} / {simulated:{form}}"


def _name(problem: AttentionProblem) -> str:
    mask = "causal" if problem.causal else "dense"
    return f"{problem.dtype} d{problem.head_dim} {mask} {problem.seqlen_k}"


def _launch_lines(found: Sequence[Launch]) -> list[str]:
    rows = []
    for x in found:
        m = x.measured
        s = x.simulated
        exposed = _pair(m.exposed / 1e3, s.exposed / 1e3, ".0f")
        (unit, share), overlap = x.busiest, x.cta.overlap
        busiest = f"{share:.2f} {unit} / {overlap.overlap_efficiency:.2f} {overlap.binds}"
        shares = (_pair(m.tensor, s.tensor), exposed, _pair(m.hidden, s.hidden), busiest)
        rows.append([_name(x.problem), x.row["kernel"], _pair(m.cycles / 1e3, s.cycles / 1e3, ".0f"), *shares])
    header = ("problem", "kernel", "kilocycles", "T_tensor / T", "exposed, kilocycles", "softmax hidden", "busiest")
    return ["## Whole launches, counted / simulated", "", *markdown_table(header, rows)]


def _config(read: stamps.Stamps) -> Config:
    """The configuration whose stamps a file has."""
    switches = read_switches(str(read.options.get("schedule", "pingpong+overlap")))
    interval = int(read.options.get("promotion_interval", 0))
    tile_m, tile_n = read.tile
    config = Config(read.dtype, read.head_dim, tile_m, tile_n, promotion_interval=interval, **switches)  # type: ignore[arg-type]
    return replace(config, integer_max=config.takes_integer_max(read.causal))


def _step_lines(paths: Sequence[Path], machine: Machine) -> list[str]:
    """Of every timeline a step, from turn to turn; the tensor cores' time is simulated in both."""
    rows = []
    for path in paths:
        read = stamps.read(path)
        config = _config(read)
        cta = cta_of(config, machine, read.sm_mhz)
        drawn = cta.cycles_per_block
        m, s = (Shares.of(t, cta.tensor_cycles, cta.softmax_cycles) for t in (read.cycles_per_block, drawn))
        name = f"{read.dtype} d{read.head_dim}{' chained' if config.is_fp8 and not config.promotion_interval else ''}"
        cycles, exposed = (_pair(getattr(m, x), getattr(s, x), ".0f") for x in ("cycles", "exposed"))
        rows.append(
            [name, f"{read.slowdown - 1:+.1%}", cycles, _pair(m.tensor, s.tensor), exposed, _pair(m.hidden, s.hidden)]
        )
    header = ("kernel", "cost of the stamps", "cycles of a step", "T_tensor / T", "exposed cycles", "softmax hidden")
    return ["## Steps, by stamps / simulated", "", *markdown_table(header, rows)]


def _free_lines(found: Sequence[Launch]) -> list[str]:
    """Of each configuration once."""
    ctas = {(x.row["kernel"], x.problem.causal, x.config): x.cta for x in found}
    things = tuple(next(iter(ctas.values())).free) if ctas else ()
    rows = []
    for (kernel, causal, c), cta in ctas.items():
        faster = (f"{cta.free[thing]:.2f}" for thing in things)
        waiting = f"{1 / cta.overlap.overlap_efficiency:.2f} ({cta.overlap.binds})"
        name = f"{c.dtype} d{c.head_dim} {'causal' if causal else 'dense'} {c.tile_m} x {c.tile_n}"
        rows.append([name, kernel, *faster, waiting])
    header = ("configuration", "kernel", *things, "waiting (what then binds)")
    return ["## Times as fast if it were free, simulated", "", *markdown_table(header, rows)]


def _byte_lines(rows: Iterable[dict[str, str]]) -> list[str]:
    """Of every counted launch, those without a program too."""
    lines = []
    for row in rows:
        cell = counters.cell_of(row)
        moved = float(row["hbm_read_bytes"]) + float(row["hbm_write_bytes"])
        out = 2.0 * cell.batch * cell.seqlen_q * cell.nheads * cell.head_dim
        busy = counters.tensor_cycles(row) / float(row["burst_cycles"])
        figures = (f"{busy:.2f}", f"{moved / 1e6:.0f}", f"{cell.io_bytes / 1e6:.0f}", f"{moved / cell.io_bytes:.2f}")
        more = (f"{float(row['l2_bytes']) / 1e6:.0f}", f"{float(row['peak_bytes']) / 1e6:.0f} ({out / 1e6:.0f})")
        lines.append([_name(cell.problem), row["kernel"], *figures, *more])
    header = (
        "problem",
        "kernel",
        "T_tensor / T",
        "HBM, MB",
        "every tensor once, MB",
        "times",
        "L2, MB",
        "allocated (output), MB",
    )
    return ["## Bytes of all that were counted", "", *markdown_table(header, lines)]


def page(counted: Sequence[Path], timelines: Sequence[Path], machine: Machine) -> str:
    """The page as Markdown."""
    found = [x for path in counted for x in launches(path, machine)]
    rows = [row for path in counted for row in counters.read(path).values()]
    parts = ["# Overlap, measured beside simulated", "", INTRO, "", *_launch_lines(found)]
    return "\n".join([*parts, *_step_lines(timelines, machine), *_free_lines(found), *_byte_lines(rows)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the page; 2 and one line for a file that cannot be used."""
    parser = parser_of("overlap", __doc__)
    parser.add_argument("counted", type=Path, nargs="+", metavar="COUNTERS.csv")
    parser.add_argument("--timelines", type=Path, nargs="*", default=(), metavar="STAMPS.csv")
    return printed(parser, lambda chosen, machine: page(chosen.counted, chosen.timelines, machine), arguments)


if __name__ == "__main__":
    raise SystemExit(main())
