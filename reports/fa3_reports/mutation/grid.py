"""The grid: the same few faults over lengths, inputs and seeds, judged by our rules and by those of other projects.

In 16 bits 13 faults, three lengths, three families of inputs, two seeds: 234. In e4m3 six faults, two lengths, three
families, two seeds: 72. Correct kernels in several orders of operations run on the same inputs: what a rule rejects
of these is a false alarm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np

from fa3_kernels.faults.table import Fault, Rewrite
from fa3_reference.problem import AttentionProblem, Descale, Operands
from fa3_reference.quantize import QuantScheme
from fa3_reports.mutation.apart import apart
from fa3_reports.mutation.forward_faults import Mistake, fed
from fa3_reports.mutation.museum import Exhibit, kernel_of_exhibit
from fa3_reports.mutation.rules import RULES, compared
from fa3verify import operations
from fa3verify.campaign import tasks
from fa3verify.cases.case import Case
from fa3verify.inputs.recipe import FAMILIES, Recipe
from fa3verify.judging.family import CaseResult, Figured, family_row
from fa3verify.judging.gate import Baseline, baseline_rows
from fa3verify.judging.judgement import Judgement, judge, passes
from fa3verify.kernels.record import Kernel
from fa3verify.kernels.twins import twin
from fa3verify.known.registry import find
from fa3verify.operations.forward import Result

QUERIES = 128
HEAD_DIM = 128
_STEP_S = 600.0


def _zeros(problem: AttentionProblem, operands: Operands, config: Any, run: Callable[..., Result]) -> Result:
    found = run()
    return Result(np.zeros_like(found.out), found.lse)


def _half_stale_v(problem: AttentionProblem, operands: Operands) -> dict[str, Any]:
    v = operands.v.copy()
    v[:, 128:192] = v[:, :64]
    return {"v": v}


def _swapped_columns(problem: AttentionProblem, operands: Operands) -> dict[str, Any]:
    v = operands.v.copy()
    v[..., [0, 1]] = v[..., [1, 0]]
    return {"v": v}


def _moved(descale: Descale | None, places: Callable[[np.ndarray], np.ndarray]) -> Descale:
    assert descale is not None
    blocks = np.arange(descale.values.shape[-1])
    return Descale(np.ascontiguousarray(descale.values[..., places(blocks)]), descale.block_rows)


def _neighbour_descales(problem: AttentionProblem, operands: Operands) -> dict[str, Any]:
    return {f"{x}_descale": _moved(getattr(operands, f"{x}_descale"), lambda i: np.maximum(i - 1, 0)) for x in "kv"}


def _first_v_descale(problem: AttentionProblem, operands: Operands) -> dict[str, Any]:
    return {"v_descale": _moved(operands.v_descale, np.zeros_like)}


_P_IN_FP8 = Rewrite(
    "arithmetic",
    (
        "return convert.encode_f32(p, self.dtype)",
        'return convert.encode_f32(convert.encode_f32(p, "e4m3").astype(np.float32), self.dtype)',
    ),
)
FAULTS: Mapping[str, Mapping[str, Fault | Rewrite | Mistake]] = {
    "fp16": {
        "zeros": _zeros,
        "last tile dropped": Fault("dropped_last_tile"),
        "stale half tile of V": fed(_half_stale_v),
        "one missed rescale": Fault("missed_rescale"),
        "two columns of V exchanged": fed(_swapped_columns),
        "a column missing from the row sum": Fault("missing_column"),
        "scale 1/sqrt(d + 1)": Fault("wrong_softmax_scale"),
        "quadratic exp2": Fault("coarse_exp2"),
        "P truncated": Fault("truncated_p"),
        "P in bf16": Fault("bf16_p"),
        "P in e4m3": _P_IN_FP8,
        "O in fp16": Fault("fp16_accumulator"),
        "row sum in fp16": Fault("fp16_row_sum"),
    },
    "e4m3": {
        "K and V descales of the neighbour": fed(_neighbour_descales),
        "V descale of block 0": fed(_first_v_descale),
        "stale V": Fault("stale_v"),
        "last tile dropped": Fault("dropped_last_tile"),
        "one missed rescale": Fault("missed_rescale"),
        "O in fp16": Fault("fp16_accumulator"),
    },
}
LENGTHS = {"fp16": (1024, 4096, 16384), "e4m3": (1024, 4096)}
INPUTS = {"fp16": ("normal", "fa3_outliers", "peaky"), "e4m3": ("normal", "fa3_outliers", "block_scaled")}
SEEDS = (0, 1)
# Orders of operations of correct kernels: ours, ours with other tiles and splits, other families.
_ORDERS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "fp16": {
        "ours": {},
        "ours, key tile 64": {"tile_n": 64},
        "ours, 3 splits": {"num_splits": 3},
        "FlashAttention-3": {"family": "flash3.dew"},
        "FlashAttention-2": {"family": "flash2"},
        "cuDNN": {"family": "cudnn"},
    },
    "e4m3": {
        "ours": {},
        "ours, promoted every 64 keys": {"promotion_interval": 64},
        "ours, 3 splits": {"num_splits": 3},
    },
}


@dataclass(frozen=True, slots=True)
class Cell:
    """Inputs of the grid."""

    dtype: str
    seqlen_k: int
    family: str
    seed: int

    def case(self, kernel: str) -> Case:
        problem = AttentionProblem(
            batch=1,
            nheads=1,
            nheads_kv=1,
            seqlen_q=QUERIES,
            seqlen_k=self.seqlen_k,
            head_dim=HEAD_DIM,
            dtype=self.dtype,  # type: ignore[arg-type]
        )
        template = next(family for family in FAMILIES if family.name == self.family)
        recipe: Recipe = template.recipe(seed=self.seed)
        return Case(kernel, problem, recipe, scheme=QuantScheme("block") if self.dtype == "e4m3" else None)


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What the rules said of one kernel on one cell: ``rejected`` by rule; of a rule that is not asked, absent."""

    cell: Cell
    kernel: str
    is_correct: bool
    rejected: Mapping[str, bool]


def cells(lengths: Mapping[str, tuple[int, ...]] = LENGTHS) -> list[Cell]:
    """Every cell, the longest first."""
    found = [
        Cell(d, n, family, s) for d, sizes in lengths.items() for n in sizes for family in INPUTS[d] for s in SEEDS
    ]
    return sorted(found, key=lambda cell: -cell.seqlen_k)


def examine_cell(cell: Cell, rules: str = "all") -> list[Verdicts]:
    """Run every correct kernel and every fault on one cell."""
    kernel = f"twin.{cell.dtype}"
    sound = judge(find(kernel), cell.case(kernel))
    others = {name: rule for name, rule in RULES.items() if rules == "all"}
    found = []
    for name, changes in _ORDERS[cell.dtype].items():
        order = find(kernel) if not changes else twin(cell.dtype, name=kernel, **changes)  # type: ignore[arg-type]
        is_ours = "family" not in changes
        found.append(Verdicts(cell, name, True, _rejected(order, cell, sound, others, asks_baseline=is_ours)))
    for name, plant in FAULTS[cell.dtype].items():
        exhibit = Exhibit(0, name, kernel, plant)

        def work(exhibit: Exhibit = exhibit) -> Iterator[dict[str, bool]]:
            asked = kernel_of_exhibit(exhibit, bits=True)
            yield _rejected(asked, cell, sound, others, asks_baseline=True)

        said = apart(work, _STEP_S)
        if said.end != "finished":
            raise RuntimeError(f"{name} on {cell}: {said.words}")
        found.append(Verdicts(cell, name, False, said.values[0]))
    return found


def _rejected(
    kernel: Kernel, cell: Cell, sound: Judgement, others: Mapping[str, Any], *, asks_baseline: bool
) -> dict[str, bool]:
    """What every rule says of a kernel; bits where it has a twin, the baseline where it is a version of ours."""
    case = cell.case(kernel.name)
    judged = judge(kernel, case)
    measures = {name: x for name, x in judged.measures.items() if name != "bits_differing"}
    bound = not passes(kernel, measures)
    rejected = {"bound": bound}
    if asks_baseline:
        rejected["bound and baseline"] = bound or _is_worse(judged, sound)
    if kernel.twin is not None:
        rejected["bits"] = bool(judged.measures["bits_differing"])
    config: Any = kernel.config_for(case.problem, case.changes)
    arrays = judged.operands.dequantized(case.problem)
    seen = compared(case.problem, arrays, judged.seen["out"], judged.outputs["out"], config.out_dtype)
    return rejected | {name: not rule(seen) for name, rule in others.items()}


def _is_worse(judged: Judgement, sound: Judgement) -> bool:
    """Whether a figure is worse than the sound kernel's on the same inputs by more than the policy's margin."""
    operation = operations.find(operations.FORWARD)

    def body(judgement: Judgement) -> Figured:
        row = family_row([CaseResult("cell", judgement.case, judgement.measures)], operation)
        return Figured("kernel", (row,), operation.name)

    rows = baseline_rows(body(judged), Baseline.of("quick", 0, [body(sound)]))
    return any(row.status == "fail" for row in rows)


def run(
    pool: Executor,
    progress: Callable[[str], None],
    rules: str = "all",
    lengths: Mapping[str, tuple[int, ...]] = LENGTHS,
) -> list[Verdicts]:
    """Run the grid on a pool; verdicts in the order of cells."""
    todo = [
        tasks.CallTask(
            f"{cell.dtype} {cell.seqlen_k} keys, {cell.family}",
            examine_cell,
            {"cell": cell, "rules": rules},
        )
        for cell in cells(lengths)
    ]
    done: dict[Cell, list[Verdicts]] = {}
    for outcome in tasks.run(todo, pool):
        done[outcome.arguments["cell"]] = outcome.result()
        progress(outcome.task.label)
    return [verdict for cell in cells(lengths) for verdict in done[cell]]
