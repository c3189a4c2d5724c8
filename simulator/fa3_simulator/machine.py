"""Hardware constants with their origin, read from ``machines/*.toml``.

A constant carries a value, its unit, where it comes from and how it was obtained; reports list the assumed ones.
:mod:`fa3_simulator.costs` turns the constants into costs of operations. What error bounds assume of a machine is in
:mod:`fa3_reference.bounds.device`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Literal, get_args

from fa3_reference.rules import require

SM_REGISTERS = 65536
THREADS_OF_REGISTERS = 512  # so many threads share the registers of an SM where each has 128
Kind = Literal["measured", "documented", "assumed", "fitted"]
# What the table [clock] of a machine file has, for fa3_simulator.clock; no cycle depends on it.
CLOCK = (
    "largest_mhz",
    "base",
    "tensor_fp16",
    "tensor_bf16",
    "tensor_e4m3",
    "smem",
    "exponent",
    "power_cap_w",
    "mean_error",
)
# Every constant of a machine, and what it says.
CONSTANTS = {
    "sms": "streaming multiprocessors",
    "max_clock_mhz": "largest SM clock",
    "smem_bytes": "shared memory that a CTA may opt in to",
    "registers": "32-bit registers of an SM",
    "tensor_flops_16bit": "dense FLOP per cycle and SM; e4m3 twice that",
    "wgmma_tail_cycles": "from the end of a group's last instruction to visible accumulators",
    "wgmma_issue_cycles": "between two wgmma of one warpgroup, of 128 columns; others in proportion",
    "wgmma_window": "instructions of one warpgroup that may be in flight",
    "wgmma_rs_cycles": "additional cycles of an instruction whose A comes from registers",
    "smem_bytes_per_cycle": "port shared by operand fetch, TMA writes and matrix stores",
    "issue_cycles": "interval between two instructions of one warp, of any kind",
    "alu_cycles": "interval at the port that all instructions share: of a maximum, permutation or conversion",
    "mufu_port_cycles": "interval of an exponential at that port",
    "mufu_cycles": "interval of an exponential in the special-function unit",
    "mufu_lone_cycles": "interval of an exponential where one warp runs alone; the other instructions of its "
    "softmax hide behind it",
    "shuffle_cycles": "interval of one of the four shuffles that reduce two rows over a quad, with the "
    "instructions that wait for them",
    "trip_cycles": "latency of one trip: a warp loads matrices, permutes them and stores them",
    "issue_under_wgmma": "factor on ``issue_cycles`` while wgmma runs",
    "alu_under_wgmma": "factor on ``alu_cycles`` while wgmma runs",
    "mufu_port_under_wgmma": "factor on ``mufu_port_cycles`` while wgmma runs",
    "mufu_under_wgmma": "factor on ``mufu_cycles`` while wgmma runs",
    "mufu_lone_under_wgmma": "factor on ``mufu_lone_cycles`` while wgmma runs",
    "shuffle_under_wgmma": "factor on ``shuffle_cycles`` while wgmma runs",
    "trip_under_wgmma": "factor on ``trip_cycles`` while wgmma runs",
    "fma_tensor_cycles": "time that a multiply-add takes from the tensor core while wgmma of 128 columns run",
    "fma_tensor_narrow": "factor on that for wgmma of 64 columns",
    "fma_tensor_wide": "factor on that for wgmma of 256 columns",
    "held_up_factor": "how many times as long other warps take beside a warp that issues multiply-adds alone",
    "mbarrier_hop_cycles": "from the last arrival at an mbarrier until a waiting warp runs",
    "mbarrier_poll_cycles": "duration of a wait at an mbarrier whose phase is complete",
    "named_barrier_cycles": "from the last arrival at a named barrier until a waiting warp runs",
    "warp_skew_cycles": "from the first to the last of a warpgroup's warps where another warpgroup runs beside it",
    "tma_issue_cycles": "time of the producer warp for each bulk instruction of at most tma_box_bytes",
    "tma_box_bytes": "largest bulk instruction of TMA",
    "memory_latency_ns": "from a TMA load to its complete barrier, less the time of its bytes, while all SMs load",
    "l2_bytes_per_cycle": "rate from L2 to one SM while all SMs load",
    "hbm_bytes_per_ns": "rate from HBM to one SM while all SMs load",
    "hbm_lone_bytes_per_cycle": "rate from HBM to one SM while the others load nothing from there",
    "store_bytes_per_cycle": "rate of TMA stores of one SM",
    "reduce_bytes_per_ns": "rate at which one SM adds fp32 to global memory, by TMA or from registers",
    "thread_store_bytes_per_cycle": "rate at which what the threads of one SM store leaves, while those of all "
    "SMs store",
    "store_queue_bytes": "what threads may have stored to global memory before they wait for it to leave",
    "shared_load_cycles": "from a warp's load from shared memory to its first use",
    "mma_tail_cycles": "from the end of the last ``mma.sync`` of some to its sums",
    "l2_latency_ns": "latency of a thread's load from L2, and of its writes becoming visible there",
    "proxy_fence_cycles": "duration of fence.proxy.async behind matrix stores",
    "cold_code_cycles": "instruction fetch of half of the code that a tile executes once, per consumer",
    "launch_cycles": "from kernel launch to the first instruction of a CTA, plus from its end to the next launch",
    "drain_cycles": "additional cycles of that behind a forward's loads and stores",
}


@dataclass(frozen=True, slots=True)
class Constant:
    """One hardware constant.

    Parameters
    ----------
    value : float
        At least 0.
    unit : str
        Unit of the value, in words.
    source : str
        Where it comes from: a report, or a section of a manual.
    date : str
        When it was measured or read (ISO 8601).
    kind : {"measured", "documented", "assumed", "fitted"}
        How it was obtained.
    """

    value: float
    unit: str
    source: str
    date: str
    kind: Kind


@dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """The constants of one GPU. A machine equals only itself, so that caches of simulations find it quickly.

    Cycles are SM clocks; pipe intervals are cycles per warp instruction on one of the four sub-cores. At another SM
    clock, on-chip cycles stay the same, while memory latency and HBM bandwidth are wall-clock constants (``*_ns``).

    Parameters
    ----------
    name : str
        Such as H200.
    table : mapping of str to Constant
        Each of :data:`CONSTANTS`; ``machine.sms`` is the constant, and ``machine["sms"]`` its value.
    clock : mapping of str to Constant
        The fit of the SM clock under load, with the keys :data:`CLOCK`; empty where nobody fitted it.
    """

    name: str
    table: Mapping[str, Constant]
    clock: Mapping[str, Constant] = field(default_factory=dict)

    @property
    def more_registers(self) -> float:
        """Registers that a thread has beyond those of a real SM: 0 but for a machine that somebody asks about."""
        return max(0.0, (self["registers"] - SM_REGISTERS) / THREADS_OF_REGISTERS)

    def __getitem__(self, name: str) -> float:
        """Return the value of a constant by name."""
        return self.table[name].value

    def __getattr__(self, name: str) -> Constant:
        """Return a constant by name."""
        if name not in CONSTANTS:
            raise AttributeError(f"a machine has no constant {name}")
        return self.table[name]

    def constants(self) -> dict[str, Constant]:
        """Return all constants by name, in declaration order.

        Returns
        -------
        dict of str to Constant
            Constants with units and origins; ``machine[name]`` is the value alone. Those of the clock are apart.
        """
        return {name: self.table[name] for name in CONSTANTS}

    def with_values(self, values: Mapping[str, float], kind: Kind | None = None) -> Machine:
        """Return a machine on which some constants have other values.

        Parameters
        ----------
        values : mapping of str to float
            By the name of the constant, in its unit.
        kind : str, optional
            Where the new values come from; as before without it.

        Returns
        -------
        Machine
            Equal to no other, as every machine.

        Examples
        --------
        >>> load("h200").with_values({"sms": 1})["sms"]
        1
        """
        changed = {x: replace(self.table[x], value=n, kind=kind or self.table[x].kind) for x, n in values.items()}
        return replace(self, table={**self.table, **changed})

    def assumed(self) -> list[str]:
        """Return the names of constants that nobody measured and no document states.

        Returns
        -------
        list of str
            Their names, in declaration order.
        """
        return [name for name, constant in self.constants().items() if constant.kind == "assumed"]


def built_in() -> list[str]:
    """Return the names of the machine files that ship with the package.

    >>> built_in()
    ['h100', 'h200']
    """
    folder = resources.files("fa3_simulator") / "machines"
    return sorted(path.name.removesuffix(".toml") for path in folder.iterdir() if path.name.endswith(".toml"))


def load(name: str) -> Machine:
    """Read a built-in machine by name, or any machine file by path.

    Parameters
    ----------
    name : str
        ``"h100"``, ``"h200"``, or the path of a .toml file.

    Returns
    -------
    Machine
        Its constants, with their origins.

    Raises
    ------
    ValueError
        If the name is unknown or the file is malformed; the message names key and line.
    OSError
        If the file cannot be read.

    Examples
    --------
    >>> machine = load("h200")
    >>> machine["max_clock_mhz"], machine.sms.kind
    (1980.0, 'documented')
    """
    if name in built_in():
        text = (resources.files("fa3_simulator") / "machines" / f"{name}.toml").read_text()
    elif name.endswith(".toml"):
        text = Path(name).read_text()
    else:
        raise ValueError(f"machine must be one of {', '.join(built_in())} or a .toml file, got {name!r}")
    return parse(text, name)


def parse(text: str, origin: str = "machine file") -> Machine:
    """Build a machine from the text of its file; ``origin`` names it in messages. ValueError as in :func:`load`."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{origin}: {error}") from None
    require(isinstance(tables.get("name"), str), f"{origin}: key 'name' must be a string")
    missing = [key for key in CONSTANTS if key not in tables]
    require(not missing, f"{origin}: misses {', '.join(missing)}")
    fitted = tables.pop("clock", {})
    require(
        isinstance(fitted, dict) and set(fitted) in (set(), set(CLOCK)),
        f"{origin}: table clock needs exactly the keys {', '.join(CLOCK)}",
    )
    clock = {
        key: _constant(table, key, f"{origin}, line {_line(text, f'clock.{key}')}") for key, table in fitted.items()
    }
    for key in tables:
        require(key in ("name", *CONSTANTS), f"{origin}, line {_line(text, key)}: unknown key {key!r}")
    constants = {key: _constant(tables[key], key, f"{origin}, line {_line(text, key)}") for key in CONSTANTS}
    return Machine(tables["name"], constants, clock)


def _constant(table: object, key: str, where: str) -> Constant:
    wanted = {f.name for f in fields(Constant)}
    if not isinstance(table, dict) or set(table) != wanted:
        raise ValueError(f"{where}: {key} needs exactly the keys {', '.join(sorted(wanted))}")
    value = table["value"]
    require(
        not isinstance(value, bool) and isinstance(value, int | float) and 0 <= value < float("inf"),
        f"{where}: value of {key} must be a number of at least 0, got {value!r}",
    )
    require(
        table["kind"] in get_args(Kind),
        f"{where}: kind of {key} must be one of {', '.join(get_args(Kind))}, got {table['kind']!r}",
    )
    require(
        key not in ("sms", "smem_bytes", "registers", "wgmma_window", "tma_box_bytes") or value == int(value),
        f"{where}: value of {key} must be whole, got {value!r}",
    )
    return Constant(float(value), str(table["unit"]), str(table["source"]), str(table["date"]), table["kind"])


def _line(text: str, key: str) -> int:
    """Return the line on which a table of this name starts; 0 where it is written in an unusual way."""
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(rf"\s*(\[\s*)?{re.escape(key)}\s*[\]=]", line):
            return number
    return 0
