"""Measured timelines: cycle counts that an instrumented kernel stamped, as bars of the kinds that simulated ones have.

Lines ``# key=value`` say what ran (:data:`KEYS`), then come the columns ``actor,step,event,cycle``. An actor's stamps are in
order; ``step`` counts the key blocks of a CTA. What lies between two neighbouring events of :data:`EVENTS` is a bar; where a
stamp is missing, as between tiles, there is none.
"""

from __future__ import annotations

import csv
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from fa3_simulator.timeline import Bar

MAX_SLOWDOWN = 1.03  # of the instrumented kernel: beyond it, what was measured is the instrument
KEYS = ("kernel", "dtype", "head_dim", "tile", "seqlen", "causal", "sm_mhz", "slowdown")
COLUMNS = ["actor", "step", "event", "cycle"]
# Events of a step in order, and the name and kind of the bar that each begins; the last ends at the next step's first.
EVENTS: dict[str, dict[str, tuple[str, str]]] = {
    "consumer": {
        "turn": ("issue Q K^T and P V", "issue"),
        "issued": ("wait Q K^T", "wait"),
        "scores": ("softmax", "vector"),
        "softmax": ("wait P V", "wait"),
        "output": ("rescale O, convert P, wait for turn", "vector"),
    },
    "producer": {
        "k_free": ("load K", "copy"),
        "k_issued": ("wait for a slot of V", "wait"),
        "v_free": ("load V", "copy"),
        "v_issued": ("wait for a slot of K", "wait"),
    },
}
_BEGINS = {"turn": "issue", "k_free": "load k_full", "v_free": "load v_full"}  # simulated bars that begin at an event


@dataclass(frozen=True, slots=True)
class Stamps:
    """A measured timeline; cycles count from the first stamp.

    ``first`` is the actor and the event of that stamp.
    """

    kernel: str
    dtype: str
    head_dim: int
    tile: tuple[int, int]
    seqlen: int
    causal: bool
    sm_mhz: float
    slowdown: float
    first: tuple[str, str]
    bars: tuple[Bar, ...]

    @property
    def cycles_per_block(self) -> float:
        """Median of the steps of the first consumer; NaN for fewer than two."""
        return cycles_per_block(self.bars)


def cycles_per_block(drawn: Sequence[Bar]) -> float:
    """Median cycles from one Q K^T of the first consumer to the next, of simulated or measured bars; NaN for fewer than two."""
    starts = [bar.start for bar in drawn if bar.row == "consumer 0" and bar.name.startswith("issue Q K^T")]
    return statistics.median(b - a for a, b in pairwise(starts)) if len(starts) > 1 else float("nan")


def read(path: Path) -> Stamps:
    """Read a file of stamps.

    Raises
    ------
    ValueError
        For a malformed line, by number; and for a kernel that its stamps slowed down by more than 3 %.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} is no text: {error}") from None
    facts = _facts(lines, path.name)
    if facts["slowdown"] > MAX_SLOWDOWN:
        raise ValueError(
            f"{path.name}: slowdown must be at most {MAX_SLOWDOWN} for the stamps to be evidence, got {facts['slowdown']:g}"
        )
    stamps = _stamps(lines, path.name)
    zero = min(cycle for rows in stamps.values() for _, _, cycle in rows)
    actor, (_, event, _) = min(((a, rows[0]) for a, rows in stamps.items()), key=lambda item: item[1][2])
    drawn = tuple(bar for name in sorted(stamps) for bar in _bars(name, stamps[name], zero))
    return Stamps(**facts, first=(actor, event), bars=drawn)


def _facts(lines: Sequence[str], origin: str) -> dict:
    """The values of :data:`KEYS`, in their types."""
    found: dict[str, tuple[int, str]] = {}
    for number, line in enumerate(lines, 1):
        if line.startswith("#") and "=" in line:
            key, _, value = line.lstrip("# ").partition("=")
            found[key.strip()] = (number, value.strip())
    if missing := [key for key in KEYS if key not in found]:
        raise ValueError(f"{origin} misses the line '# {missing[0]}=...'; it needs {', '.join(KEYS)}")

    def fact(key: str, pattern: str, rule: str) -> str:
        number, value = found[key]
        if not re.fullmatch(pattern, value):
            raise ValueError(f"{origin}, line {number}: {key} must be {rule}, got {value!r}")
        return value

    number, whole = r"\d+(\.\d+)?", r"[1-9]\d*"
    tile_m, tile_n = fact("tile", r"\d+x\d+", "ROWSxKEYS").split("x")
    return {
        "kernel": found["kernel"][1],
        "dtype": fact("dtype", "fp16|bf16|e4m3", "fp16, bf16 or e4m3"),
        "head_dim": int(fact("head_dim", whole, "a whole number")),
        "tile": (int(tile_m), int(tile_n)),
        "seqlen": int(fact("seqlen", whole, "a whole number")),
        "causal": fact("causal", "(?i:true|false|0|1)", "true or false").lower() in ("true", "1"),
        "sm_mhz": float(fact("sm_mhz", r"[1-9]\d*(\.\d+)?", "a clock in MHz")),
        "slowdown": float(fact("slowdown", number, "a ratio of times")),
    }


def _stamps(lines: Sequence[str], origin: str) -> dict[str, list[tuple[int, str, int]]]:
    """Step, event and cycle of every stamp by actor."""
    found: dict[str, list[tuple[int, str, int]]] = {}
    header = False
    for number, line in enumerate(lines, 1):
        if line.startswith("#") or not line.strip():
            continue
        fields = next(csv.reader([line]))
        if not header:
            header = True
            if fields != COLUMNS:
                raise ValueError(f"{origin}, line {number}: columns must be {','.join(COLUMNS)}, got {line!r}")
            continue
        where = f"{origin}, line {number}"
        if len(fields) != len(COLUMNS):
            raise ValueError(f"{where}: must have {len(COLUMNS)} fields, got {line!r}")
        actor, step, event, cycle = fields
        if not re.fullmatch(r"consumer \d|producer", actor):
            raise ValueError(f"{where}: actor must be 'consumer N' or 'producer', got {actor!r}")
        order = list(EVENTS[actor.split()[0]])
        if event not in order:
            raise ValueError(f"{where}: event of a {actor.split()[0]} must be one of {', '.join(order)}, got {event!r}")
        for name, text in (("step", step), ("cycle", cycle)):
            if not (text.isascii() and text.isdigit()):
                raise ValueError(f"{where}: {name} must be a whole number, got {text!r}")
        rows = found.setdefault(actor, [])
        if rows and (int(step), order.index(event)) <= (rows[-1][0], order.index(rows[-1][1])):
            raise ValueError(f"{where}: {event} of step {step} must not follow {rows[-1][1]} of step {rows[-1][0]}")
        if rows and int(cycle) < rows[-1][2]:
            raise ValueError(f"{where}: cycle must not fall, got {cycle} after {rows[-1][2]}")
        rows.append((int(step), event, int(cycle)))
    if not found:
        raise ValueError(f"{origin} has no stamps")
    return found


def _bars(actor: str, rows: Sequence[tuple[int, str, int]], zero: int) -> list[Bar]:
    kinds = EVENTS[actor.split()[0]]
    order = list(kinds)
    place = [step * len(order) + order.index(event) for step, event, _ in rows]
    return [
        Bar(actor, *kinds[a[1]], a[2] - zero, b[2] - zero)
        for (a, i), (b, j) in pairwise(zip(rows, place))
        if j == i + 1
    ]


def aligned(stamps: Stamps, simulated: Sequence[Bar]) -> list[Bar]:
    """The measured bars, moved so that the first stamp lies where the simulated actor first does the same.

    A first stamp that begins no simulated bar lies where the actor begins.
    """
    actor, event = stamps.first
    mine = [bar for bar in simulated if bar.row == actor]
    same = [bar for bar in mine if event in _BEGINS and bar.name.startswith(_BEGINS[event])]
    shift = min((bar.start for bar in same or mine), default=0.0)
    return [bar._replace(start=bar.start + shift, stop=bar.stop + shift) for bar in stamps.bars]
