"""Pictures of a run: a trace for Chrome and Perfetto, and a Gantt chart for the terminal.

:func:`bars` turns a trace of :mod:`fa3_simulator.engine` into rectangles, and the other functions draw these;
:mod:`fa3verify.report.schedules` draws them as SVG.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from fa3_simulator.costs import TICKS
from fa3_simulator.engine import Trace
from fa3_simulator.program import Op, Program


class Bar(NamedTuple):
    """One rectangle of a picture: its row, what is done, and from which cycle to which."""

    row: str
    name: str
    kind: str  # tensor, vector, wait, issue, copy
    start: float
    stop: float


LETTERS = {"tensor": "#", "vector": "s", "issue": "i", "wait": ".", "copy": "c"}
_KINDS = {
    Op.VECTOR: "vector",
    Op.DELAY: "vector",
    Op.WGMMA: "issue",
    Op.LOAD: "copy",
    Op.STORE: "copy",
    Op.REDUCE: "copy",
}


def bars(program: Program, trace: Trace) -> list[Bar]:
    """Return the bars of a run: bursts of the tensor core first, then the spans of all actors.

    Bursts of one product that follow each other without a gap are one bar.
    """
    drawn: list[Bar] = []
    for burst in trace.bursts:
        name = program.describe(burst.actor, burst.row).removeprefix("issue ")
        owner = program.actors[burst.actor].name
        last = drawn[-1] if drawn else None
        start = burst.start / TICKS
        stop = burst.stop / TICKS
        if last and last.name == f"{name} ({owner})" and last.stop == start:
            drawn[-1] = last._replace(stop=stop)
        else:
            drawn.append(Bar("tensor core", f"{name} ({owner})", "tensor", start, stop))
    for span in trace.spans:
        kind = _KINDS.get(Op(int(program.actors[span.actor].ops[span.row][0])), "wait")
        name = program.describe(span.actor, span.row)
        drawn.append(Bar(program.actors[span.actor].name, name, kind, span.start / TICKS, span.stop / TICKS))
    return drawn


def chrome_trace(processes: Mapping[str, Sequence[Bar]], clock_mhz: float) -> dict:
    """Return Chrome trace-event JSON, for Perfetto, as an object ready for ``json.dump``.

    Each of ``processes`` is a process of that name with one thread per row; times are microseconds at ``clock_mhz``.
    """
    events = chain(*(_events(drawn, clock_mhz, name, i) for i, (name, drawn) in enumerate(processes.items(), 1)))
    return {"traceEvents": [*events], "displayTimeUnit": "ns"}


def _events(drawn: Sequence[Bar], clock_mhz: float, process: str, pid: int) -> list[dict]:
    rows = {name: i for i, name in enumerate(dict.fromkeys(bar.row for bar in drawn))}
    names = [(0, "process_name", {"name": process})]
    for row, tid in rows.items():
        names += [(tid, "thread_name", {"name": row}), (tid, "thread_sort_index", {"sort_index": tid})]
    heads = [{"ph": "M", "pid": pid, "tid": tid, "name": name, "args": args} for tid, name, args in names]
    return heads + [
        {
            "ph": "X",
            "pid": pid,
            "tid": rows[bar.row],
            "cat": bar.kind,
            "name": bar.name,
            "ts": bar.start / clock_mhz,
            "dur": (bar.stop - bar.start) / clock_mhz,
            "args": {"start_cycle": bar.start, "cycles": bar.stop - bar.start},
        }
        for bar in drawn
    ]


def text_gantt(drawn: Sequence[Bar], start: float, stop: float, width: int = 100) -> str:
    """Return a chart of the cycles from ``start`` to ``stop``: a line per row, of ``width`` letters, and a legend.

    A letter stands for the kind that fills most of its slice of time, a blank for slices that are mostly empty.
    """
    rows = list(dict.fromkeys(bar.row for bar in drawn))
    label = max(len("tensor core"), *map(len, rows)) + 1  # pictures under one another begin in one column
    step = (stop - start) / width
    slices = [(start + i * step, start + (i + 1) * step) for i in range(width)]
    seen = [bar for bar in drawn if bar.stop > start and bar.start < stop]
    lines = []
    for row in rows:
        mine = [bar for bar in seen if bar.row == row]
        lines.append(f"{row:<{label}}{''.join(_letter(mine, *ends, step / 4) for ends in slices)}")
    legend = ", ".join(f"{letter} {kind}" for kind, letter in LETTERS.items())
    return "\n".join([*lines, f"{'':<{label}}{legend}; {step:.0f} cycles a letter from cycle {start:.0f}"])


def _letter(drawn: Sequence[Bar], left: float, right: float, least: float) -> str:
    """Return the letter of the kind that fills most of a slice of time; a blank unless it fills more than ``least``."""
    share: defaultdict[str, float] = defaultdict(float)
    for bar in drawn:
        if (overlap := min(bar.stop, right) - max(bar.start, left)) > 0:
            share[bar.kind] += overlap
    kind, cycles = max(share.items(), key=lambda item: item[1], default=("", 0.0))
    return LETTERS[kind] if cycles > least else " "
