"""Pictures of a run: a trace for Chrome and Perfetto, and a Gantt chart for the terminal.

:func:`bars` turns a trace of :mod:`fa3_simulator.engine` into rectangles, and the other functions draw these;
:mod:`fa3verify.report.schedules` draws them as SVG.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    events: list[dict] = []
    for number, (name, drawn) in enumerate(processes.items(), 1):
        events += _events(drawn, clock_mhz, name, number)
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _events(drawn: Sequence[Bar], clock_mhz: float, process: str, pid: int) -> list[dict]:
    rows = {name: i for i, name in enumerate(dict.fromkeys(bar.row for bar in drawn))}
    events: list[dict] = [{"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": process}}]
    for name, tid in rows.items():
        events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}})
        events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
    for bar in drawn:
        events.append(
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
        )
    return events


def text_gantt(drawn: Sequence[Bar], start: float, stop: float, width: int = 100) -> str:
    """Return a chart of the cycles from ``start`` to ``stop``: a line per row, of ``width`` letters, and a legend.

    A letter stands for the kind that fills most of its slice of time, a blank for slices that are mostly empty.
    """
    rows = list(dict.fromkeys(bar.row for bar in drawn))
    label = max(len("tensor core"), *map(len, rows)) + 1  # pictures under one another begin in one column
    step = (stop - start) / width
    lines = []
    for row in rows:
        cells = []
        mine = [bar for bar in drawn if bar.row == row and bar.stop > start and bar.start < stop]
        for i in range(width):
            left = start + i * step
            right = start + (i + 1) * step
            share: dict[str, float] = {}
            for bar in mine:
                if (overlap := min(bar.stop, right) - max(bar.start, left)) > 0:
                    share[bar.kind] = share.get(bar.kind, 0.0) + overlap
            best = max(share, key=lambda kind: share[kind], default="")
            cells.append(LETTERS[best] if best and share[best] > step / 4 else " ")  # less than a quarter is empty
        lines.append(f"{row:<{label}}{''.join(cells)}")
    legend = ", ".join(f"{letter} {kind}" for kind, letter in LETTERS.items())
    return "\n".join([*lines, f"{'':<{label}}{legend}; {step:.0f} cycles a letter from cycle {start:.0f}"])
