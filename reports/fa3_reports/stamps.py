"""Measured timelines: cycle counts that an instrumented kernel stamped, as bars of the kinds that simulated ones have.

A file of stamps has lines ``# key=value`` that say what ran (:data:`KEYS`), and then rows ``actor,step,event,cycle`` in
any order; ``step`` counts the key blocks of a CTA. Events are those of :mod:`fa3_kernels.plan.stamps`. In which order
an actor meets them depends on the kernel, so its stamps are sorted by cycle. Two neighbours make the bar that
:data:`BARS` names for them. If it names none, as between tiles or where a stamp is missing, there is no bar.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fa3_kernels.plan.stamps import COLUMNS, CONSUMER_EVENTS, PRODUCER_EVENTS
from fa3_reference.rules import require
from fa3_simulator.timeline import Bar
from fa3verify.files import Json
from fa3verify.timed.timing import median

STEPS = 512  # steps of a CTA in a recorded timeline; later steps are not stamped
MAX_SLOWDOWN = 1.03  # of the instrumented kernel; beyond it the stamps themselves distort what is measured
# A pattern of legal values, the same in words, and the function that reads one.
_WHOLE = (r"[1-9]\d*", "a whole number", int)
_FLAG = ("(?i:true|false|0|1)", "true or false", lambda text: text.lower() in ("true", "1"))
# The lines that every file has, by key, each as above.
_FACTS: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "kernel": (".*", "a name", str),
    "dtype": ("fp16|bf16|e4m3", "fp16, bf16 or e4m3", str),
    "head_dim": _WHOLE,
    "tile": (r"\d+x\d+", "ROWSxKEYS", lambda text: tuple(map(int, text.split("x")))),
    "seqlen": _WHOLE,
    "causal": _FLAG,
    "sm_mhz": (r"[1-9]\d*(\.\d+)?", "a clock in MHz", float),
    "slowdown": (r"\d+(\.\d+)?", "a ratio of times", float),
}
KEYS = tuple(_FACTS)
SIZES = ("batch", "nheads", "promotion_interval")  # lines that a file may have as well
SWITCHES = {"pingpong": "pingpong", "intra_wg_overlap": "overlap"}  # likewise, with their names in a schedule
EVENTS = {"consumer": CONSUMER_EVENTS, "producer": PRODUCER_EVENTS}
_FOR_V = ("wait for a slot of V", "wait")
_FOR_K = ("wait for a slot of K", "wait")
# Of two events that follow each other: name and kind of the bar between them, and by how many steps the second may be
# ahead. A kernel that sums P V in parts waits for it before it issues Q K^T, others wait after that.
BARS: dict[tuple[str, str], tuple[tuple[str, str], tuple[int, ...]]] = {
    ("turn", "turn"): (("Q K^T, P V and softmax, from turn to turn", "vector"), (1,)),
    ("turn", "issued"): (("issue Q K^T and P V", "issue"), (0,)),
    ("turn", "output"): (("P V", "wait"), (0,)),
    ("output", "issued"): (("issue Q K^T", "issue"), (0,)),
    ("issued", "scores"): (("wait Q K^T", "wait"), (0,)),
    ("scores", "output"): (("softmax under P V", "vector"), (0,)),
    ("output", "turn"): (("end of the softmax, rescale O, convert P, wait for turn", "vector"), (1,)),
    ("scores", "turn"): (("softmax, rescale O, convert P, wait for turn", "vector"), (1,)),
    ("k_free", "k_issued"): (("load K", "copy"), (0,)),
    ("v_free", "v_issued"): (("load V", "copy"), (0,)),
    ("k_issued", "v_free"): (_FOR_V, (0, -1)),  # -1, and 2 below: V is transposed a step behind the loads
    ("v_issued", "k_free"): (_FOR_K, (1, 2)),
    ("k_issued", "k_free"): (_FOR_K, (1,)),
    ("v_issued", "v_free"): (_FOR_V, (1,)),
}
FP8_NAMES = {"load K": "load K and V", "load V": "transpose V"}
_BEGINS = {"turn": "issue", "k_free": "load k_full", "v_free": "load v_full"}  # simulated bars that begin at an event


class Stamp(NamedTuple):
    """One event of an actor in a step; ``cycle`` counts from the first stamp of the CTA."""

    actor: str
    step: int
    event: str
    cycle: int


def read_stamps(stamps: np.ndarray, cta: int = 0) -> Iterator[Stamp]:
    """Yield the events of one CTA, by actor and step.

    Parameters
    ----------
    stamps : int32 (ctas, actors, steps, COLUMNS)
    cta : int

    Raises
    ------
    ValueError
        If nothing was stamped, or the array has not the shape and type of stamps.
    """
    require(
        stamps.ndim == 4 and stamps.dtype == np.int32 and stamps.shape[3] == COLUMNS,
        f"stamps must be int32 (ctas, actors, steps, {COLUMNS}), got {stamps.dtype} {stamps.shape}",
    )
    mine = stamps[cta]
    written = mine[mine != 0]
    require(written.size, f"CTA {cta} has no stamps")
    since = mine - written[0]  # wraps as the counter does
    since -= since[mine != 0].min()
    for actor in range(mine.shape[0]):
        is_producer = actor == mine.shape[0] - 1
        events = PRODUCER_EVENTS if is_producer else CONSUMER_EVENTS
        name = "producer" if is_producer else f"consumer {actor}"
        for step in range(mine.shape[1]):
            for column, event in enumerate(events):
                if mine[actor, step, column]:
                    yield Stamp(name, step, event, int(since[actor, step, column]))


FIELDS = list(Stamp._fields)


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
    options: dict[str, int | str]  # of SIZES what is there, and ``schedule`` where all switches are
    first: tuple[str, str]
    cycles_per_block: float  # median, from one turn of the first consumer to its next; NaN for fewer than two
    bars: tuple[Bar, ...]


def cycles_per_block(drawn: Sequence[Bar]) -> float:
    """Median cycles from one Q K^T of the first consumer to the next, of simulated bars; NaN for fewer than two."""
    starts = [bar.start for bar in drawn if bar.row == "consumer 0" and bar.name == "issue Q K^T"]
    return median(b - a for a, b in pairwise(starts))


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
    require(
        facts["slowdown"] <= MAX_SLOWDOWN,
        f"{path.name}: slowdown must be at most {MAX_SLOWDOWN} for the stamps to be evidence, "
        f"got {facts['slowdown']:g}",
    )
    stamps = _stamps(lines, path.name)
    first = min((rows[0] for rows in stamps.values()), key=lambda stamp: stamp.cycle)
    names = FP8_NAMES if facts["dtype"] == "e4m3" else {}
    drawn = tuple(bar for name in sorted(stamps) for bar in _bars(stamps[name], first.cycle, names))
    turns = [stamp for stamp in stamps.get("consumer 0", ()) if stamp.event == "turn"]
    pace = median(b.cycle - a.cycle for a, b in pairwise(turns) if b.step == a.step + 1)
    return Stamps(**facts, first=(first.actor, first.event), cycles_per_block=pace, bars=drawn)


def _facts(lines: Sequence[str], origin: str) -> Json:
    """Return the values of :data:`KEYS` in their types, and ``options``; ValueError, with the line, for a bad value."""
    texts: dict[str, tuple[int, str]] = {}
    for number, line in enumerate(lines, 1):
        if line.startswith("#") and "=" in line:
            key, _, value = line.lstrip("# ").partition("=")
            texts[key.strip()] = (number, value.strip())
    if missing := [key for key in KEYS if key not in texts]:
        raise ValueError(f"{origin} misses the line '# {missing[0]}=...'; it needs {', '.join(KEYS)}")

    def fact(key: str, pattern: str, rule: str, kind: Callable[[str], Any]) -> Any:
        number, value = texts[key]
        require(re.fullmatch(pattern, value), f"{origin}, line {number}: {key} must be {rule}, got {value!r}")
        return kind(value)

    options = {key: fact(key, r"\d+", "a whole number", int) for key in SIZES if key in texts}
    if SWITCHES.keys() <= texts.keys():
        options["schedule"] = "+".join(name for key, name in SWITCHES.items() if fact(key, *_FLAG)) or "none"
    return {key: fact(key, *legal) for key, legal in _FACTS.items()} | {"options": options}


def _stamps(lines: Sequence[str], origin: str) -> dict[str, list[Stamp]]:
    """Return the stamps of every actor in the order of their cycles; ValueError, with the line, for a bad one."""
    rows = [(f"{origin}, line {n}", line) for n, line in enumerate(lines, 1) if line.strip() and line[0] != "#"]
    if rows and rows[0][1].split(",") != FIELDS:
        raise ValueError(f"{rows[0][0]}: columns must be {','.join(FIELDS)}, got {rows[0][1]!r}")
    actors: dict[str, dict[tuple[int, str], Stamp]] = {}
    for where, line in rows[1:]:
        stamp = _stamp(line, where)
        mine = actors.setdefault(stamp.actor, {})
        require(
            (stamp.step, stamp.event) not in mine,
            f"{where}: {stamp.event} of step {stamp.step} of {stamp.actor} must not be there twice",
        )
        mine[stamp.step, stamp.event] = stamp
    require(actors, f"{origin} has no stamps")
    return {actor: sorted(mine.values(), key=lambda stamp: stamp.cycle) for actor, mine in actors.items()}


def _stamp(line: str, where: str) -> Stamp:
    """Return the stamp of a line; ValueError, which begins with ``where``, for a malformed one."""
    fields = line.split(",")
    require(len(fields) == len(FIELDS), f"{where}: must have {len(FIELDS)} fields, got {line!r}")
    actor, step, event, cycle = fields
    require(
        re.fullmatch(r"consumer \d|producer", actor),
        f"{where}: actor must be 'consumer N' or 'producer', got {actor!r}",
    )
    role = actor.split()[0]
    require(
        event in EVENTS[role], f"{where}: event of a {role} must be one of {', '.join(EVENTS[role])}, got {event!r}"
    )
    for name, text in (("step", step), ("cycle", cycle)):
        require(text.isascii() and text.isdigit(), f"{where}: {name} must be a whole number, got {text!r}")
    return Stamp(actor, int(step), event, int(cycle))


def _bars(rows: Sequence[Stamp], zero: int, names: Mapping[str, str]) -> list[Bar]:
    """Return the bars between neighbouring stamps, cycles from ``zero``; ``names`` replaces names of :data:`BARS`."""
    drawn = []
    for a, b in pairwise(rows):
        (name, kind), ahead = BARS.get((a.event, b.event), (("", ""), ()))
        if b.step - a.step in ahead:
            drawn.append(Bar(a.actor, names.get(name, name), kind, a.cycle - zero, b.cycle - zero))
    return drawn


def aligned(stamps: Stamps, simulated: Sequence[Bar]) -> list[Bar]:
    """Return the measured bars, moved so that their first stamp lies where the simulated actor first does the same.

    If no simulated bar begins with that event, the first stamp lies where the actor's first bar begins.
    """
    actor, event = stamps.first
    mine = [bar for bar in simulated if bar.row == actor]
    begins = "transpose V" if (stamps.dtype, event) == ("e4m3", "v_free") else _BEGINS.get(event)
    same = [bar for bar in mine if begins and bar.name.startswith(begins)]
    shift = min((bar.start for bar in same or mine), default=0.0)
    return [bar._replace(start=bar.start + shift, stop=bar.stop + shift) for bar in stamps.bars]
