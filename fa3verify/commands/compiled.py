"""A compiled kernel beside the description of it: registers, and instructions of a block class by class.

The binary is read by cuobjdump. Loops are found in its flow of control (:func:`fa3_kernels.audit.sass.work_loops`), and
each stream of a description is matched with the loop whose products are most like its own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from fa3_kernels.audit.sass import run_tool, work_loops
from fa3_reference.rules import require
from fa3_simulator.description import COUNTS, Schedule
from fa3verify.files import Json
from fa3verify.text import one_line

FAR_OFF = 0.2  # from which on a count differs
COMPARED = (*COUNTS, "cp.async", "tma load", "tma store", "arrive", "wait", "bar", "spill")


def read_function(path: Path, pattern: str = "") -> tuple[Json, str]:
    """Return facts and disassembly of the one function of a cubin, a fatbin or a library that ``pattern`` is found in.

    Raises
    ------
    ValueError
        Where the file has no code for Hopper, where no or several names fit, and where cuobjdump fails.
    FileNotFoundError
        Where the tools are missing.
    """
    told = run_tool("cuobjdump", "-arch", "sm_90a", "-res-usage", path).stdout
    known = {name: facts for name, *facts in re.findall(r"Function (\S+):\s+REG:(\d+).*?SHARED:(\d+)", told)}
    fitting = [name for name in known if re.search(pattern, name)]
    names = ", ".join(fitting or known) or "none for Hopper"
    require(len(fitting) == 1, f"--function must fit one function of {path}, which has {one_line(names, 2000)}")
    registers, smem = map(int, known[fitting[0]])
    facts = {"function": fitting[0], "registers": registers, "static_smem_bytes": smem}
    return facts, run_tool("cuobjdump", "-arch", "sm_90a", "-sass", "-fun", *fitting, path).stdout


def _products(counts: Mapping[str, float]) -> dict[str, float]:
    return {name: count for name, count in counts.items() if name[0].isdigit()}


def _blocks(said: Counter[str], trip: Counter[str]) -> float:
    """Return how many blocks a trip of a loop is: by its products, or else by its arrivals."""
    mine, own = (
        sum(count * int(name.split("x")[1] if "x" in name else 1) for name, count in _products(counts).items())
        or counts["arrive"]
        for counts in (said, trip)
    )
    ratio = own / mine if own and mine else 1
    return round(ratio) if ratio >= 1 else 1 / round(1 / ratio)


def _matched(said: Counter[str], loops: Mapping[str, Counter[str]]) -> Json:
    """Return what a stream does beside what a loop does that is most like it, if any multiplies or loads as it does.

    Most alike is the one with the least relative differences: of products, then of all counts; then the smallest.
    """
    rows = {
        place: {
            x: (said[x], trip[x] / (1 if x == "registers" else _blocks(said, trip)))
            for x in ("registers", *sorted(_products(said | trip)), *COMPARED)
            if said[x] or trip[x]
        }
        for place, trip in loops.items()
        if bool(_products(said)) == bool(_products(trip))
    }
    if not rows:
        return {"loop": None, "blocks_a_trip": 0, "counts": {}, "differs": ["loop"]}
    gaps = {
        place: {x: abs(mine - own) / max(mine, own) for x, (mine, own) in row.items()} for place, row in rows.items()
    }
    place = min(rows, key=lambda x: (sum(_products(gaps[x]).values()), sum(gaps[x].values()), loops[x]["instructions"]))
    # A copy in several boxes has an instruction for each, and a wait that is tried first has two.
    differs = [
        x
        for x, (mine, own) in rows[place].items()
        if gaps[place][x] > FAR_OFF and (x not in ("tma load", "wait") or own < mine)
    ]
    return {
        "loop": place,
        "blocks_a_trip": _blocks(said, loops[place]),
        "counts": rows[place],
        "differs": differs,
    }


def beside(schedule: Schedule, sass: str, registers: int) -> list[Json]:
    """Return what a description says of a block beside what compiled loops do, of one warp; like streams are one row.

    ``registers`` are those of a thread where no ``setmaxnreg`` sets them. A stream that neither multiplies nor loads
    has no loop that could be found, and is left out.
    """
    loops = {x: Counter(trip | {"registers": trip["registers"] or registers}) for x, trip in work_loops(sass).items()}
    rows: dict[tuple[tuple[str, float], ...], Json] = {}
    for name, (actor, counts) in schedule.of_a_block().items():
        said = Counter(counts | {"registers": actor.registers})
        if _products(said) or said["tma load"] or said["cp.async"]:
            row = rows.setdefault(tuple(sorted(said.items())), {"streams": [], **_matched(said, loops)})
            row["streams"].append(name)
    return list(rows.values())
