"""Schedules that our kernels can be launched with: what ptxas makes of them, and what a GPU measures. Imports torch lazily."""

from __future__ import annotations

import inspect
import re
import statistics
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from fa3_simulator.run import Shape
from fa3_simulator.schedules import Schedule
from fa3verify.gpu.bench.cells import Cell

ROUNDS, PAUSE_S = 5, 0.3
_REGISTER = re.compile(r"\bR(\d+)\b")


def cell_of(schedule: Schedule, shape: Shape) -> Cell:
    """What is launched where a schedule is simulated for a shape."""
    sizes = (shape.batch, shape.seqlen_q, shape.seqlen_k, shape.nheads, shape.kv_heads)
    return Cell("schedules", schedule.dtype, *sizes, schedule.head_dim, shape.causal)  # type: ignore[arg-type]


class Built(NamedTuple):
    """One compiled schedule; ``note`` is empty for a sound one.

    ``registers`` is what the code names in one thread: consumers, whom setmaxnreg gives the most.
    """

    registers: int = 0
    spill_bytes: int = 0
    note: str = ""


def options_of(schedule: Schedule, shape: Shape) -> dict[str, Any]:
    """Launch options of :func:`fa3_kernels.gluon.launch.forward` that run a schedule for a shape.

    >>> options_of(Schedule(tile_n=64, pingpong=False), Shape(1, 8, 1, 4096, nheads_kv=2, pack_gqa=True))
    {'tile': (128, 64), 'pingpong': False, 'intra_wg_overlap': True, 'pack_gqa': True}
    """
    s = schedule
    options = {"tile": (s.tile_m, s.tile_n), "pingpong": s.pingpong, "intra_wg_overlap": s.intra_wg_overlap}
    options |= {"promotion_interval": s.promotion_interval} if s.dtype == "e4m3" else {}
    return options | ({"pack_gqa": shape.pack_gqa} if shape.kv_heads < shape.nheads else {})


def compile_schedule(shape: Shape, schedule: Schedule) -> Built:
    """Compile our kernel for sm_90a as a launch with this schedule would; what goes wrong is the note."""
    audit, compiler = import_module("fa3_kernels.audit.figures"), import_module("fa3_kernels.audit.compile")
    shipped, recorder = import_module("fa3_kernels.audit.shipped"), import_module("fa3_kernels.audit.record")
    try:
        options = options_of(schedule, shape)
        (call,) = recorder.record(shipped.Launch("tune", cell_of(schedule, shape).problem, options))
        code = compiler.compile_kernel(call.kernel, call.args, **call.options)
    except ValueError as error:
        return Built(note=f"refused: {error}")
    except Exception as error:  # the compiler may raise anything
        return Built(note=f"does not compile: {type(error).__name__}: {' '.join(str(error).split())[:120]}")
    spills = sum(loop[name] for loop in audit.tensor_loops(code.sass) for name in ("LDL", "STL"))
    notes = [f"{spills} spill instructions in the loops"] if spills else []
    notes += ["ptxas serialised wgmma"] if code.serialisation else []
    registers = 1 + max(int(n) for n in _REGISTER.findall(code.sass))
    return Built(registers, code.spill_bytes, ", ".join(notes))


def cannot_compile() -> str | None:
    """Why no schedule can be compiled here, or None."""
    gluon = import_module("fa3_kernels.gluon")
    if reason := gluon.unsupported():
        return reason
    launch = import_module("fa3_kernels.gluon.launch")
    if "tile" not in inspect.signature(launch.forward).parameters:
        return "the kernels of this version have no option tile"
    return None


def measure_cycles(cell: Cell, options: Sequence[Mapping[str, Any]]) -> list[float | str]:
    """Time our kernel with each set of launch options: interleaved cool bursts, in SM cycles by the counted clock.

    Parameters
    ----------
    cell : Cell
    options : sequence of mapping
        Launch options, see :func:`options_of`.

    Returns
    -------
    list of float or str
        Median cycles of a launch, or why there are none: refused, or bits that differ from the twin's.
    """
    kernels, timing = import_module("fa3verify.gpu.bench.kernels"), import_module("fa3verify.gpu.bench.timing")
    check, results = import_module("fa3verify.gpu.bench.check"), import_module("fa3verify.gpu.bench.results")
    inputs = kernels.draw(cell, kernels.MAX_COPIES, 0)
    runs: dict[int, Any] = {}
    found: list[float | str] = ["not timed"] * len(options)
    for i, chosen in enumerate(options):
        kernel = kernels.our_kernel(f"tune {i}", "a schedule of tune", (cell.dtype,), **chosen)
        try:
            run = kernel.prepare(cell, inputs)
            verdict = check.judge(cell, inputs[0], run.output(), kernel.configure(cell))
        except (kernels.Unsupported, ValueError) as error:
            found[i] = f"refused: {error}"
            continue
        if verdict.bits_differing > 0:
            found[i] = f"{verdict.bits_differing} bits differ from the twin"
        else:
            runs[i] = run.timed
    times = timing.measure(runs, timing.Pace(ROUNDS, PAUSE_S, sustained=False), timing.Clock())
    for i, record in times.items():
        found[i] = statistics.median(map(results.cycles, record.bursts))
    return found
