"""Tables that evidence already published was made from: whatever changes here makes that evidence of something else.

The cases that recordings and benches ask, the code of the microbenchmarks, the faults that hazards must find, cycles
that were published, and what searches breed. ``tests/pins.json`` holds a digest of each row; after a change that is
meant, ``python -m tests.bless pins`` writes it again, and the diff says what has to be measured anew. Launches are held
by the keys of evidence (:mod:`fa3_kernels.audit.evidence`), options of commands by ``tests/harness/pinned.json``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner

import fa3verify
import fa3verify.inputs
from fa3_kernels.plan.packed_order import PackedOrder
from fa3_reference.problem import AttentionProblem
from fa3_reports.adversary.forward import ISLANDS
from fa3_reports.adversary.gradients import colony as gradients_colony
from fa3_reports.adversary.gradients.mutations import MUTATIONS, Child, mutate_scale
from fa3_reports.adversary.search import search_island
from fa3_reports.bench import cells, results, tables
from fa3_reports.bench.grids import GRIDS
from fa3_reports.bits import corner_cases, forward_cases, gap_cases, quantise_cases, recorded_cases
from fa3_reports.microbench.suite import experiments
from fa3_reports.mutation.schedule_faults import PLANTED
from fa3_simulator.backward_consumer import backward_work
from fa3_simulator.backward_schedule import BackwardSchedule
from fa3_simulator.cta import kernel_of
from fa3_simulator.schedules import TileBlocks, switches
from fa3_simulator.tune import candidates
from fa3verify.cli.main import main
from tests.kernels.packed_schedule import packed_schedule
from tests.simulator.programs import spelled_out

FILE = Path(__file__).with_suffix(".json")
SMS = 132
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "e4m3": "float8_e4m3fn"}
Rows = Iterator[tuple[str, object]]


def digest(value: object) -> str:
    """Return 16 hexadecimal digits of the hash of what a value prints; of an array, of its bytes."""
    text = value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()
    return hashlib.sha256(text).hexdigest()[:16]


def recorded() -> Rows:
    """Cases of which bits are recorded, and a draw of every kind of operands, rounded where a power is not exact."""
    for case in forward_cases.cases():
        yield f"forward {case.problem.dtype} {case.feature}", case
    for dtype, family in product(DTYPES, ("normal", "outlier", "peaky", "subnormal", "mean", "special", "tiny")):
        problem = AttentionProblem(1, 2, 1, 300, 400, 64, dtype=dtype)  # type: ignore[arg-type]
        scopes = ("tensor", "head", "128") if dtype == "e4m3" else ("none", "none", "none")
        drawn = forward_cases.operands(forward_cases.Case("dense", problem, family, 5, {}, scopes))
        for x in (drawn.q, drawn.k, drawn.v):
            yield f"operands {dtype} {family}", np.ascontiguousarray(x)
        for descale in (drawn.q_descale, drawn.k_descale, drawn.v_descale):
            if descale is not None:
                yield f"operands {dtype} {family}", (descale.rows, np.round(np.log2(descale.values), 4).tolist())
    for case in quantise_cases.cases():
        yield f"quantise {case.dtype} {case.family}", case
    for family in quantise_cases.FAMILIES:
        for name, x in quantise_cases.arrays(next(c for c in quantise_cases.cases() if c.family == family)).items():
            yield f"operands of the quantiser {family}", (name, digest(x))
    for library, ask in product(("flash3", "flash2", "cudnn"), (corner_cases.corners, gap_cases.gaps)):
        for case in ask(library, tuple(DTYPES)):
            yield f"{ask.__name__} {library}", case
    for library in ("flash3", "flash2", "cudnn"):
        for case in recorded_cases.cases(library, tuple(DTYPES), 2):
            yield f"recorded {library}", case


def timed() -> Rows:
    """Shapes that the bench times."""
    for grid in GRIDS:
        for cell in cells.select(grid, tuple(DTYPES)):
            yield grid, cell


def microbenchmarks() -> Rows:
    """Code and form of every microbenchmark."""
    for experiment in experiments(SMS):
        form = {name: getattr(experiment, name, None) for name in ("parameters", "ctas", "stamps", "threads")}
        yield experiment.name, (experiment.ptx(), form)


def faults() -> Rows:
    """Programs with a planted fault, which the hazards are measured by."""
    for row, words, program in PLANTED:
        planted = program()  # whose lists may have entries of programs made before
        actors = [(actor.name, actor.threads, actor.registers) for actor in planted.actors]
        yield f"museum {row}", (words, actors, spelled_out(planted))


def schedules() -> Rows:
    """What a schedule needs of a multiprocessor, how packed sequences are cut, and how a program is drawn."""
    for config in candidates(AttentionProblem(1, 8, 2, 700, 1000, 128, dtype="fp16")):
        needed = kernel_of(config).cta([TileBlocks(1)]).warps[0].registers_needed
        yield "forward", (config, needed, switches(config))
    for family, head_dim, v_in_registers in product(("gluon", "flash3"), (64, 128, 256), (False, True)):
        for tile_m, tile_n in product((64, 80, 128), (64, 96, 128)):
            try:
                schedule = BackwardSchedule(head_dim, tile_m, tile_n, family, v_in_registers=v_in_registers)
            except ValueError as error:
                yield "backward", str(error)
                continue
            cta = kernel_of(schedule).cta([TileBlocks(1)])
            program = cta.build()
            sizes = [cta.warps[0].registers_needed, program.smem_bytes - 8 * len(program.mbarriers)]
            rest = [getattr(schedule, name) for name in ("dq_slices", "dq_parts", "layout", "is_ours")]
            yield "backward", (schedule, [schedule.registers, *sizes, *rest], backward_work(schedule))
    for tiles, splits, causal in product((1, 2), (1, 3), (False, True)):
        order = PackedOrder(tiles, 128, 128, 4, 2, -1, 0 if causal else -1, splits, 128)
        yield "packed", packed_schedule(order, [300, 1, 500, 0], [700, 900, 0, 40], 20)


def simulated() -> Rows:
    """Cycles of launches, to six digits: every family and dtype, two machines, two clocks, masks, both directions."""
    for family, dtype, head_dim in product(("gluon", "flash3"), DTYPES, (64, 128, 256)):
        for machine, clock, masked in (("h200", None, False), ("h100", 1500.0, True)):
            problem = AttentionProblem(2, 8, 2, 700, 1300, head_dim, dtype=dtype, causal=masked)  # type: ignore[arg-type]
            forward = _cycles(problem, machine=machine, clock_mhz=clock, family=family)
            yield f"{family} {dtype}", forward
            if dtype != "e4m3":
                yield f"{family} {dtype}", _cycles(problem, machine=machine, family=family, backward=True)
    problem = AttentionProblem(1, 4, 4, 512, 2048, 128, dtype="fp16")
    for family in ("gluon", "flash3"):
        for choice in ({"pingpong": False}, {"intra_wg_overlap": False}, {"num_stages": 3}):
            yield "switches", _cycles(problem, family=family, **choice)
    for seqlen_k, pack_gqa in product((5000, 40000), (False, True)):
        yield "decoding", _cycles(AttentionProblem(4, 32, 8, 1, seqlen_k, 128, dtype="bf16"), pack_gqa=pack_gqa)


def _cycles(problem: AttentionProblem, **choices: Any) -> object:
    try:
        return _rounded(vars_of(fa3verify.simulate(problem, **choices)))
    except ValueError as error:
        return str(error)


def vars_of(estimate: object) -> dict[str, object]:
    """Return the numbers and words of an estimate."""
    values = {field.name: getattr(estimate, field.name) for field in dataclasses.fields(estimate)}  # type: ignore[arg-type]
    return {name: value for name, value in values.items() if isinstance(value, bool | int | float | str | dict)}


SIMULATE = (
    "--seqlen 1024 --head-dim 256",
    "--seqlen 512 --causal --dtype e4m3 --kernel flash3 --machine h100",
    "--seqlen 1024 --backward --head-dim 64",
)


def words() -> Rows:
    """Pages of measured speed as they would be written again, and what ``simulate`` prints."""
    for file in sorted((FILE.parents[1] / "reports").rglob("bench.jsonl.xz")):
        measured = results.read(file.with_suffix(""))
        yield file.parent.name, (tables.markdown(measured), tables.csv_text(measured.cells.values()))
    for line in SIMULATE:
        yield "simulate", CliRunner().invoke(main, ["simulate", *line.split()]).output


def searches() -> Rows:
    """What searches breed from a seed, as the published curves were: figures to six digits, inputs exactly."""
    for island in ISLANDS:
        yield f"{island.dtype} {island.name}", _rounded(search_island(island.dtype, island.name, [5], 64))
    for island in gradients_colony.ISLANDS:
        rng = np.random.default_rng(2)
        colony = gradients_colony.GradientColony.normal(island, rng)
        with np.errstate(all="ignore"):
            for mutation, index in product(MUTATIONS, range(min(island.problems, 4))):
                mutation(Child(colony, index, 0.5, rng), rng)
        for _ in range(8):
            mutate_scale(colony, 0.5, True, rng)
            yield (
                f"gradients, {island.dtype} {island.name}",
                (f"{colony.environment.softmax_scale:.6g}", f"{colony.environment.softcap:.6g}"),
            )
        for name in ("q", "k", "v", "dout", "out"):
            yield (
                f"gradients, {island.dtype} {island.name}",
                (name, digest(np.ascontiguousarray(getattr(colony, name)))),
            )


def _rounded(value: Any) -> object:
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items() if name != "cpu_s"}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return f"{value:.6g}" if isinstance(value, float) else value


TABLES: tuple[Callable[[], Rows], ...] = (
    recorded,
    timed,
    microbenchmarks,
    faults,
    schedules,
    simulated,
    words,
    searches,
)


def digests(table: Callable[[], Rows]) -> dict[str, list[object]]:
    """Return of every label how many rows there are and the digest of them all."""
    found: dict[str, list[str]] = {}
    for label, value in table():
        found.setdefault(label, []).append(digest(value))
    return {label: [len(rows), digest(rows)] for label, rows in found.items()}


def renew() -> None:
    """Write the digests as they are."""
    FILE.write_text(json.dumps({table.__name__: digests(table) for table in TABLES}, indent=1) + "\n")
