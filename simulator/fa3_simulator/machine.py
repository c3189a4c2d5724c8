"""Hardware constants with their origin, read from ``machines/*.toml``.

A constant carries a value, its unit, where it comes from and how it was obtained; reports list the assumed ones.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Literal, get_args

Kind = Literal["measured", "documented", "assumed"]


@dataclass(frozen=True, slots=True)
class Constant:
    """One hardware constant. ``date`` is when it was measured or read (ISO 8601)."""

    value: float
    unit: str
    source: str
    date: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Machine:
    """One GPU. Cycles are SM clocks; pipe intervals are cycles per warp instruction on one of the four sub-cores.

    Times at another SM clock: on-chip cycles stay, memory latency is a wall-clock constant (``memory_latency_ns``).
    """

    name: str
    sms: Constant  # streaming multiprocessors
    max_clock_mhz: Constant
    smem_bytes: Constant  # per CTA, opt-in
    registers: Constant  # 32-bit, per SM
    tensor_flops_16bit: Constant  # dense FLOP per cycle and SM; e4m3 twice that
    wgmma_tail_cycles: Constant  # last instruction's issue slot to visible accumulators
    wgmma_issue_cycles: Constant  # between two wgmma of one warpgroup
    wgmma_window: Constant  # instructions admitted per warpgroup
    wgmma_rs_cycles: Constant  # more per instruction whose A comes from registers
    smem_bytes_per_cycle: Constant  # port shared by operand fetch, TMA writes and matrix stores
    mufu_cycles: Constant  # the special-function unit itself
    mufu_dispatch_cycles: Constant  # and what its instruction takes of the dispatch port, which all others share
    fma_cycles: Constant
    alu_cycles: Constant
    convert_cycles: Constant
    mufu_under_wgmma: Constant  # factors on these intervals while wgmma runs
    mufu_dispatch_under_wgmma: Constant
    fma_under_wgmma: Constant
    alu_under_wgmma: Constant
    convert_under_wgmma: Constant
    fma_lone_cycles: Constant  # a multiply-add of a warp that has the sub-core's port to itself
    fma_lone_under_wgmma: Constant
    mufu_lone_cycles: Constant
    mufu_lone_under_wgmma: Constant
    shuffle_cycles: Constant
    shuffle_under_wgmma: Constant
    shuffle_lone_cycles: Constant  # of a chain of two exchanges in a quad, for two rows at once
    shuffle_lone_under_wgmma: Constant
    fma_tensor_cycles: Constant  # what a multiply-add takes from the tensor core, beside wgmma of up to 128 columns
    fma_tensor_wide: Constant  # share of that for 256 columns
    mbarrier_hop_cycles: Constant  # last arrival to a waiting warp running
    mbarrier_poll_cycles: Constant  # a wait that finds its phase complete
    named_barrier_cycles: Constant  # last arrival to a waiting warp running
    tma_issue_cycles: Constant  # producer warp, per bulk instruction of at most tma_box_bytes
    tma_box_bytes: Constant
    memory_latency_ns: Constant  # TMA load from L2 to a complete barrier, empty pipeline
    l2_bytes_per_cycle: Constant  # per SM, all SMs loading
    store_bytes_per_cycle: Constant  # of TMA stores of one SM
    tile_overhead_cycles: Constant  # instruction fetch of what a tile executes once, per consumer
    launch_cycles: Constant  # kernel launch to the first instruction of a CTA, and the drain at the end

    def __getitem__(self, name: str) -> float:
        """Value of a constant by name."""
        return getattr(self, name).value

    def constants(self) -> dict[str, Constant]:
        """All constants by name, in declaration order."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "name"}

    def assumed(self) -> list[str]:
        """Names of constants that nobody measured and no document states."""
        return [name for name, constant in self.constants().items() if constant.kind == "assumed"]


def built_in() -> list[str]:
    """Names of the machine files that ship.

    >>> built_in()
    ['h100', 'h200']
    """
    folder = resources.files("fa3_simulator") / "machines"
    return sorted(path.name.removesuffix(".toml") for path in folder.iterdir() if path.name.endswith(".toml"))


def load(name: str) -> Machine:
    """Read a built-in machine by name, or any machine file by path.

    Raises
    ------
    ValueError
        If the name is unknown or the file is malformed; the message names key and line.
    """
    if name in built_in():
        text = (resources.files("fa3_simulator") / "machines" / f"{name}.toml").read_text()
    elif name.endswith(".toml"):
        text = Path(name).read_text()
    else:
        raise ValueError(f"machine must be one of {', '.join(built_in())} or a .toml file, got {name!r}")
    return parse(text, name)


def parse(text: str, origin: str = "machine file") -> Machine:
    """Build a machine from the text of its file; ValueError as in :func:`load`."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{origin}: {error}") from None
    expected = [f.name for f in fields(Machine) if f.name != "name"]
    if not isinstance(tables.get("name"), str):
        raise ValueError(f"{origin}: key 'name' must be a string")
    if missing := [key for key in expected if key not in tables]:
        raise ValueError(f"{origin}: misses {', '.join(missing)}")
    constants = {}
    for key, table in tables.items():
        if key == "name":
            continue
        if key not in expected:
            raise ValueError(f"{origin}, line {_line(text, key)}: unknown key {key!r}")
        constants[key] = _constant(table, key, f"{origin}, line {_line(text, key)}")
    return Machine(name=tables["name"], **constants)


def _constant(table: object, key: str, where: str) -> Constant:
    wanted = {f.name for f in fields(Constant)}
    if not isinstance(table, dict) or set(table) != wanted:
        raise ValueError(f"{where}: {key} needs exactly the keys {', '.join(sorted(wanted))}")
    value = table["value"]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{where}: value of {key} must be a number of at least 0, got {value!r}")
    if table["kind"] not in get_args(Kind):
        raise ValueError(f"{where}: kind of {key} must be one of {', '.join(get_args(Kind))}, got {table['kind']!r}")
    if key in ("sms", "smem_bytes", "registers", "wgmma_window", "tma_box_bytes") and value != int(value):
        raise ValueError(f"{where}: value of {key} must be whole, got {value!r}")
    return Constant(float(value), str(table["unit"]), str(table["source"]), str(table["date"]), table["kind"])


def _line(text: str, key: str) -> int:
    """Line on which a table of this name starts (0 when written in an unusual way)."""
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(rf"\s*(\[\s*)?{re.escape(key)}\s*[\]=]", line):
            return number
    return 0
