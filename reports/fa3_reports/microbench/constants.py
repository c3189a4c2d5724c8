"""Constants of a GPU from its table of microbenchmarks, by the experiments that another GPU's constants stand for.

    python -m fa3_reports.microbench.constants H100.csv --name H100 --date DATE --reference-table H200.csv

Every measured constant names experiments and a statistic of them. A new GPU's constant is the reference's times what
the statistic has changed by: the reference's values were read off by people, ranges among them, and the rule carries
what they chose. Where a statistic is the constant itself, a test holds it against the reference's. Of what the same
chip has, experiments agree to the cycle; a change of less than :data:`REPEATS` is what two runs of one GPU differ by.
No timing of an attention kernel is read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fa3_reports.stored import read_csv
from fa3_simulator.machine import Constant, Machine, load
from fa3verify.files import stored

REPEATS = 0.02
STAMP_CYCLES = 20
OUTCOMES = ("nanoseconds_per_launch", "spilled_bytes")  # what is measured, though it stands among the parameters
Key = tuple[str, frozenset[tuple[str, object]]]
Stretches = Mapping[Key, list[list[float]]]  # stamps' differences of each warpgroup, by experiment and parameters


def read(path: Path) -> Stretches:
    """Read a table, and ``sharing.csv`` beside it; rows of one experiment on two GPUs have equal keys.

    Raises
    ------
    ValueError
        For a file without the columns; the message names the file.
    """
    found: dict[Key, list[list[float]]] = {}
    for name in (path, path.with_name("sharing.csv")):
        if name == path or stored(name).exists():
            _read_into(found, name)
    return found


def _read_into(found: dict[Key, list[list[float]]], path: Path) -> None:
    try:
        for row in read_csv(path, ("experiment", "parameters", "cycles")):
            parameters = {k: v for k, v in json.loads(row["parameters"]).items() if k not in OUTCOMES}
            key = row["experiment"], frozenset(parameters.items())
            found.setdefault(key, []).append([float(x) for x in row["cycles"].split()])
    except ValueError as error:
        raise ValueError(f"{path.name} is no table of microbenchmarks: {error}") from None


def select(table: Stretches, experiment: str, **parameters: object) -> list[list[list[float]]]:
    """Warpgroups' differences of the experiments of a name with these parameters, in the table's order."""
    wanted = parameters.items()
    found = [groups for (name, of), groups in table.items() if name == experiment and wanted <= of]
    if not found:
        raise ValueError(f"the table has no experiment {experiment} with {parameters}")
    return found


Statistic = Callable[[Stretches], float]


def median(experiment: str, *, group: int = -1, **parameters: object) -> Statistic:
    """Median over experiments of the time of a warpgroup, the last by default: of all its stretches together."""
    return lambda table: float(np.median([sum(groups[group]) for groups in select(table, experiment, **parameters)]))


def _over(one: Statistic, other: Statistic) -> Statistic:
    return lambda table: one(table) / other(table)


def _instruction(operations: Sequence[str], warpgroups: int) -> Statistic:
    """Cycles of a warp instruction of one sub-core, the first warpgroup's: median over operations."""

    def cycles(table: Stretches) -> float:
        rows = [select(table, "vector", op=op, count=1024, warpgroups=warpgroups)[0] for op in operations]
        return float(np.median([groups[0][0] for groups in rows])) / (1024 * warpgroups)

    return cycles


def _under(operation: str) -> Statistic:
    """What an instruction takes longer under wgmma, with two warpgroups."""
    return _over(median("under_wgmma", op=operation, warpgroups=2), median("vector", op=operation, warpgroups=2))


def _from_registers(table: Stretches) -> float:
    """Cycles more of a wgmma whose A comes from registers: slopes over the number of instructions, 128 columns."""

    def cycles(rs: bool, count: int) -> float:
        return select(table, "wgmma", dtype="fp16", n=128, rs=rs, count=count, warpgroups=1)[0][0][0]

    return (cycles(True, 20) - cycles(True, 12)) / 8 - (cycles(False, 36) - cycles(False, 12)) / 24


def _issue(table: Stretches) -> float:
    """Of 128 columns between the fourth and the sixth wgmma, and half of that of 256: their mean."""

    def slope(n: int) -> float:
        four, six = (select(table, "wgmma_issue", n=n, count=count)[0][0][0] for count in (4, 6))
        return (six - four) / 2

    return (slope(128) + slope(256) / 2) / 2


def _window(table: Stretches) -> float:
    """Most wgmma of 64 columns that are issued without one being waited for."""
    issued = {count: select(table, "wgmma_issue", n=64, count=count)[0][0][0] for count in (1, 2, 4, 6, 8, 12)}
    waits = [b for a, b in zip(issued, list(issued)[1:]) if (issued[b] - issued[a]) / (b - a) > 32 / 2]
    return max(count for count in issued if count < waits[0])


def _trip(table: Stretches) -> float:
    """A trip of V^T at head_dim 64, four to a block, less its four permutations."""
    ((first, *_),) = select(table, "transposition", head_dim=64, softmax=0, wgmma=False)
    return first[0] / 8 / 4 - 4 * _instruction(("prmt",), 2)(table)


def _copy_rate(experiment: str, ctas: int = 132, **parameters: object) -> Statistic:
    """Bytes a cycle of each of so many SMs that load 64 copies of 32 KiB, by default of all."""
    return lambda table: 64 * 32768 / select(table, experiment, bytes=32768, ctas=ctas, **parameters)[0][0][0]


L2 = _copy_rate("copy_stream")
HBM = _copy_rate("far_copy", what="stream")
HBM_ALONE = _copy_rate("far_copy", 1, what="stream")


def _store_rate(table: Stretches) -> float:
    """Bytes a cycle of each SM, all storing 32 KiB: of three passes the fastest."""
    stamps = select(table, "tma_store", bytes=32768, ctas=132)[0][0]
    return 32768 / min(stamps[1::4])


def _latency(table: Stretches) -> float:
    """Cycles to a copy from HBM and to one from L2 behind it, all SMs loading, less their bytes."""
    found: list[float] = []
    for size in (16384, 32768):
        stamps = select(table, "far_copy", bytes=size, what="mixed", ctas=132)[0][0]
        for near, far in zip(stamps[1::4], stamps[2::4], strict=True):
            found += [near - size / L2(table), near + far - size / HBM(table)]
    return float(np.median(found))


def _hop(experiment: str) -> Statistic:
    """Half a round trip."""
    return lambda table: select(table, experiment, rounds=64)[0][0][0] / 64 / 2


def _first(works: str) -> Statistic:
    """The second stretch of the first warpgroup, fp16, 128 keys, without wgmma: all run."""
    return lambda table: select(table, "sharing", dtype="fp16", n=128, works=works, wgmma=False)[0][0][1]


_LONE = median("softmax_step", stamps="whole", warpgroups=1)
_LONE_UNDER = _over(median("softmax_step_under_wgmma", stamps="whole", warpgroups=1), _LONE)
_BESIDE, _BESIDE_UNDER = (
    median("sharing", group=1, n=128, works="maxima exponentials", wgmma=runs) for runs in (False, True)
)


class Evidence(NamedTuple):
    """What a constant is read off: in words, and as a statistic."""

    text: str
    statistic: Statistic


EVIDENCE: Mapping[str, Evidence] = {
    "wgmma_tail_cycles": Evidence("serial_step, one warpgroup", median("serial_step", stamps="whole", warpgroups=1)),
    "wgmma_issue_cycles": Evidence("wgmma_issue, 128 and 256 columns", _issue),
    "wgmma_window": Evidence("wgmma_issue, 64 columns", _window),
    "wgmma_rs_cycles": Evidence("wgmma, slope of RS over SS", _from_registers),
    "issue_cycles": Evidence("vector, ffma with two warpgroups", _instruction(("ffma",), 2)),
    "alu_cycles": Evidence("vector, fmnmx, prmt and f2fp_f16", _instruction(("fmnmx", "prmt", "f2fp_f16"), 2)),
    "mufu_port_cycles": Evidence("sharing, maxima beside exponentials", _BESIDE),
    "mufu_cycles": Evidence("vector, ex2 with two warpgroups", _instruction(("ex2",), 2)),
    "mufu_lone_cycles": Evidence("softmax_step, one warpgroup", _LONE),
    "shuffle_cycles": Evidence("softmax_step, one warpgroup", _LONE),
    "trip_cycles": Evidence("transposition, head_dim 64, alone, less its permutations", _trip),
    "issue_under_wgmma": Evidence("under_wgmma, ffma", _under("ffma")),
    "alu_under_wgmma": Evidence("under_wgmma, fmnmx", _under("fmnmx")),
    "mufu_port_under_wgmma": Evidence("sharing under wgmma, maxima beside exponentials", _over(_BESIDE_UNDER, _BESIDE)),
    "mufu_under_wgmma": Evidence("under_wgmma, ex2", _under("ex2")),
    "mufu_lone_under_wgmma": Evidence("softmax_step_under_wgmma, one warpgroup", _LONE_UNDER),
    "shuffle_under_wgmma": Evidence("softmax_step_under_wgmma, one warpgroup", _LONE_UNDER),
    "trip_under_wgmma": Evidence(
        "transposition under wgmma, alone",
        _over(median("transposition", softmax=0, wgmma=True, group=0), median("transposition", softmax=0, wgmma=False)),
    ),
    "fma_tensor_cycles": Evidence(
        "softmax_step_under_wgmma, one warpgroup, 128 keys: the wgmma",
        median("softmax_step_under_wgmma", n=128, warpgroups=1, group=0),
    ),
    "fma_tensor_narrow": Evidence(
        "wgmma_under_vector, ffma, 64 columns: the wgmma", median("wgmma_under_vector", op="ffma", n=64, group=0)
    ),
    "fma_tensor_wide": Evidence(
        "softmax_step_own_wgmma, head_dim 256, two warpgroups",
        median("softmax_step_own_wgmma", head_dim=256, warpgroups=2),
    ),
    "held_up_factor": Evidence(
        "sharing, exponentials beside conversion and rescaling",
        _over(_first("exponentials conversion"), _first("exponentials")),
    ),
    "mbarrier_hop_cycles": Evidence("mbarrier, half a round trip", _hop("mbarrier")),
    "named_barrier_cycles": Evidence("named_barrier, half a round trip", _hop("named_barrier")),
    "warp_skew_cycles": Evidence("consumer_step", median("consumer_step", group=0)),
    "tma_issue_cycles": Evidence(
        "tensor_copy, bulk, less a stamp",
        lambda table: float(np.median(select(table, "tensor_copy", kind="tensor", beside=0)[0][0][1:3])) - STAMP_CYCLES,
    ),
    "memory_latency_ns": Evidence("far_copy, mixed, 132 SMs, less the bytes", _latency),
    "l2_bytes_per_cycle": Evidence("copy_stream, 32 KiB, all SMs", L2),
    "hbm_bytes_per_ns": Evidence("far_copy, stream, 32 KiB, 132 SMs", HBM),
    "hbm_lone_bytes_per_cycle": Evidence("far_copy, stream, 32 KiB, one SM", HBM_ALONE),
    "store_bytes_per_cycle": Evidence("tma_store, 32 KiB of each of 132 SMs", _store_rate),
    "cold_code_cycles": Evidence("cold_code of 64 KiB", median("cold_code", kibibytes=64, warpgroups=1)),
    "launch_cycles": Evidence(
        "launch, prologue, 132 CTAs of 384 threads, start to start in a graph",
        lambda table: select(table, "launch", kernel="prologue", ctas=132, threads=384)[0][0][0],
    ),
}


def transferred(
    table: Stretches, reference: Machine, reference_table: Stretches, name: str, source: str, date: str
) -> Machine:
    """Constants of the GPU of ``table``: those of ``reference`` times what their statistics have changed by.

    Parameters
    ----------
    table, reference_table : Stretches
        Of the new GPU and of ``reference``, by :func:`read`.
    name, source, date : str
        Of the new GPU, of the file of its table, and when it was measured.

    Raises
    ------
    ValueError
        If a table lacks an experiment.
    """
    changed: dict[str, Constant] = {}
    for key, (text, statistic) in EVIDENCE.items():
        constant = getattr(reference, key)
        ratio = statistic(table) / statistic(reference_table)
        is_same = abs(ratio - 1) < REPEATS
        value = constant.value if is_same else float(f"{constant.value * ratio:.3g}")
        told = f"as the {reference.name}" if is_same else f"{ratio:.3f} of the {reference.name}"
        changed[key] = replace(constant, value=value, source=f"{source}: {text}: {told}", date=date, kind="measured")
    return replace(reference, name=name, table={**reference.table, **changed})


def text_of(machine: Machine) -> str:
    """A machine as the text of its file."""
    parts = [f'name = "{machine.name}"\n']
    for name, c in machine.constants().items():
        parts.append(
            f'[{name}]\nvalue = {c.value:g}\nunit = "{c.unit}"\nsource = "{c.source}"\ndate = "{c.date}"\n'
            f'kind = "{c.kind}"\n'
        )
    return "\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the file of a machine."""
    parser = argparse.ArgumentParser(
        prog="python -m fa3_reports.microbench.constants", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("table", type=Path, metavar="MICROBENCH.csv")
    parser.add_argument("--name", required=True)
    parser.add_argument("--date", required=True, help="when it was measured")
    parser.add_argument("--reference", default="h200", help="machine whose constants are carried over")
    parser.add_argument("--reference-table", type=Path, required=True, metavar="MICROBENCH.csv", help="its table")
    chosen = parser.parse_args(arguments)
    try:
        found = transferred(
            read(chosen.table),
            load(chosen.reference),
            read(chosen.reference_table),
            chosen.name,
            chosen.table.as_posix(),
            chosen.date,
        )
    except (ValueError, OSError) as error:
        print(f"constants: {error}", file=sys.stderr)
        return 2
    sys.stdout.write(text_of(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
