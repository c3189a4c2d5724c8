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
    kind : {"measured", "documented", "assumed"}
        How it was obtained.
    """

    value: float
    unit: str
    source: str
    date: str
    kind: Kind


@dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """One GPU, equal to itself alone, so that what was simulated on it is quickly found again.

    Cycles are SM clocks; pipe intervals are cycles per warp instruction on one of the four sub-cores.
    Times at another SM clock: on-chip cycles stay; memory latency and HBM bandwidth are wall-clock constants
    (``*_ns``).

    Parameters
    ----------
    name : str
        Such as H200.
    sms : Constant
        Streaming multiprocessors.
    max_clock_mhz : Constant
        Largest SM clock.
    smem_bytes : Constant
        Shared memory of a CTA, opt-in.
    registers : Constant
        32-bit registers of an SM.
    tensor_flops_16bit : Constant
        Dense FLOP per cycle and SM; e4m3 twice that.
    wgmma_tail_cycles : Constant
        Last instruction's issue slot to visible accumulators.
    wgmma_issue_cycles : Constant
        Between two wgmma of one warpgroup, of 128 columns; others in proportion.
    wgmma_window : Constant
        Instructions admitted per warpgroup.
    wgmma_rs_cycles : Constant
        Additional cycles of an instruction whose A comes from registers.
    smem_bytes_per_cycle : Constant
        Port shared by operand fetch, TMA writes and matrix stores.
    issue_cycles : Constant
        Interval between two instructions of one warp, of any kind.
    alu_cycles : Constant
        Interval at the port that all instructions share: of a maximum, permutation or conversion.
    mufu_port_cycles : Constant
        Interval of an exponential at that port.
    mufu_cycles : Constant
        Interval of an exponential in the special-function unit.
    mufu_lone_cycles : Constant
        Interval of an exponential of one warp alone, among the other instructions of a softmax, which it hides.
    shuffle_cycles : Constant
        Interval of one of the four shuffles that reduce two rows over a quad, with what waits for them.
    trip_cycles : Constant
        Matrices loaded, permuted and stored by one warp: latency.
    issue_under_wgmma : Constant
        Factor on ``issue_cycles`` while wgmma runs.
    alu_under_wgmma : Constant
        Factor on ``alu_cycles`` while wgmma runs.
    mufu_port_under_wgmma : Constant
        Factor on ``mufu_port_cycles`` while wgmma runs.
    mufu_under_wgmma : Constant
        Factor on ``mufu_cycles`` while wgmma runs.
    mufu_lone_under_wgmma : Constant
        Factor on ``mufu_lone_cycles`` while wgmma runs.
    shuffle_under_wgmma : Constant
        Factor on ``shuffle_cycles`` while wgmma runs.
    trip_under_wgmma : Constant
        Factor on ``trip_cycles`` while wgmma runs.
    fma_tensor_cycles : Constant
        What a multiply-add takes from the tensor core, beside wgmma of 128 columns.
    fma_tensor_narrow : Constant
        Share of that for 64 columns.
    fma_tensor_wide : Constant
        And for 256.
    held_up_factor : Constant
        How many times as long other warps take beside multiply-adds alone.
    mbarrier_hop_cycles : Constant
        Last arrival to a waiting warp running.
    mbarrier_poll_cycles : Constant
        A wait that finds its phase complete.
    named_barrier_cycles : Constant
        Last arrival to a waiting warp running.
    warp_skew_cycles : Constant
        From the first to the last of a warpgroup's warps, beside another warpgroup.
    tma_issue_cycles : Constant
        Producer warp, per bulk instruction of at most tma_box_bytes.
    tma_box_bytes : Constant
        Largest bulk instruction of TMA.
    memory_latency_ns : Constant
        TMA load to a complete barrier but for its bytes, all SMs loading.
    l2_bytes_per_cycle : Constant
        Per SM, all SMs loading.
    hbm_bytes_per_ns : Constant
        HBM to one SM, all SMs loading.
    hbm_lone_bytes_per_cycle : Constant
        Of one SM while the others load nothing from there.
    store_bytes_per_cycle : Constant
        Of TMA stores of one SM.
    reduce_bytes_per_ns : Constant
        Of fp32 that one SM adds to global memory, by TMA or from registers.
    l2_latency_ns : Constant
        A thread's load from L2, or what it wrote becoming visible there.
    proxy_fence_cycles : Constant
        Fence.proxy.async behind matrix stores.
    cold_code_cycles : Constant
        Instruction fetch of half of what a tile executes once, per consumer.
    launch_cycles : Constant
        Kernel launch to the first instruction of a CTA, and from its end to the next launch.
    drain_cycles : Constant
        What that takes longer behind a forward's loads and stores.
    """

    name: str
    sms: Constant
    max_clock_mhz: Constant
    smem_bytes: Constant
    registers: Constant
    tensor_flops_16bit: Constant
    wgmma_tail_cycles: Constant
    wgmma_issue_cycles: Constant
    wgmma_window: Constant
    wgmma_rs_cycles: Constant
    smem_bytes_per_cycle: Constant
    issue_cycles: Constant
    alu_cycles: Constant
    mufu_port_cycles: Constant
    mufu_cycles: Constant
    mufu_lone_cycles: Constant
    shuffle_cycles: Constant
    trip_cycles: Constant
    issue_under_wgmma: Constant
    alu_under_wgmma: Constant
    mufu_port_under_wgmma: Constant
    mufu_under_wgmma: Constant
    mufu_lone_under_wgmma: Constant
    shuffle_under_wgmma: Constant
    trip_under_wgmma: Constant
    fma_tensor_cycles: Constant
    fma_tensor_narrow: Constant
    fma_tensor_wide: Constant
    held_up_factor: Constant
    mbarrier_hop_cycles: Constant
    mbarrier_poll_cycles: Constant
    named_barrier_cycles: Constant
    warp_skew_cycles: Constant
    tma_issue_cycles: Constant
    tma_box_bytes: Constant
    memory_latency_ns: Constant
    l2_bytes_per_cycle: Constant
    hbm_bytes_per_ns: Constant
    hbm_lone_bytes_per_cycle: Constant
    store_bytes_per_cycle: Constant
    reduce_bytes_per_ns: Constant
    l2_latency_ns: Constant
    proxy_fence_cycles: Constant
    cold_code_cycles: Constant
    launch_cycles: Constant
    drain_cycles: Constant

    def __getitem__(self, name: str) -> float:
        """Return the value of a constant by name."""
        constant: Constant = getattr(self, name)
        return constant.value

    def constants(self) -> dict[str, Constant]:
        """Return all constants by name, in declaration order.

        Returns
        -------
        dict of str to Constant
            With units and origins; ``machine[name]`` is the value alone.
        """
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "name"}

    def assumed(self) -> list[str]:
        """Return the names of constants that nobody measured and no document states.

        Returns
        -------
        list of str
            In declaration order.
        """
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
