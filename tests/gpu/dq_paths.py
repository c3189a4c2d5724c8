"""How dQ reaches memory: the shipped backward kernel beside variants of it, timed in interleaved bursts.

``python -m tests.gpu.dq_paths OUT.csv`` times head_dim 64, 128 and 256, dense and causal, in fp16. A variant is the
kernel's source with two places replaced, each of which must be there exactly once: where a warpgroup hands its share of
dQ on, and what the warp of dQ does. The dQ of every variant that adds it is held to the shipped kernel's.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from triton.experimental.gluon import language as gl

from fa3_kernels.gluon import backward_dq, launch_backward
from fa3_kernels.gluon.launch import num_sms
from fa3_kernels.gluon.run import KERNELS, PlanOnGpu
from fa3_kernels.plan.backward import BackwardPlan, backward_plan
from fa3_reference.problem import AttentionProblem
from fa3_reports.audit.calls import ShippedLaunch, calls_of
from fa3_reports.audit.compile import Compiled, compile_call
from fa3_reports.bench.cells import Cell, paper
from fa3verify.bench.graphs import GraphTimed
from fa3verify.bench.kernels import draw
from fa3verify.known.launches import GivenBackward
from fa3verify.timed.timing import LaunchTime, Pace, cycles, measure
from tests.gpu import dq_kernels

SEQLENS = (1024, 4096, 16384)
HEAD_DIMS = (64, 128, 256)
SHIPPED = "tma, a warp of its own"
SHARE = 64  # rows, and channels, of a warpgroup's share of dQ, or of the part it hands on at a time
FOLDER = Path(backward_dq.__file__).parent
_COLUMNS = ("head_dim", "seqlen", "causal", "path", "ms", "sm_mhz", "kilocycles", "tflops", "speed", "difference")


class Route(NamedTuple):
    """What a warpgroup does with its share of dQ, what the warp of dQ does, and whether sums come of it.

    ``surplus`` are Triton's barriers around the exchange of dS: a barrier elsewhere in the loop spares one.
    """

    hand_on: Any
    of_warp: Any
    adds: bool = True
    surplus: int = 2


PATHS = {
    SHIPPED: Route(dq_kernels.stage, backward_dq.add_dq),
    "tma, the consumer": Route(dq_kernels.start_additions, dq_kernels.idle, surplus=1),
    "red of 4, whole lines": Route(dq_kernels.add_lines, dq_kernels.idle),
    "red of 2": Route(dq_kernels.add_pairs, dq_kernels.idle),
    "atomics of 1": Route(dq_kernels.add_single, dq_kernels.idle),
    "staged, not added": Route(dq_kernels.stage, dq_kernels.hand_back, adds=False),
    "neither": Route(dq_kernels.leave_out, dq_kernels.idle, adds=False),
}

_STAGED = """            warpgroup_barrier("sync", DQ_EMPTY, WARPGROUP)
            staged.store(dq)
            warpgroup_barrier("arrive", DQ_FULL, WARPGROUP)
"""
REPLACED = {
    "backward": (
        (_STAGED, "            hand_on(p, dq, tile, rows, i, first_row, 0, WARPGROUP)\n"),
        (
            "(consume_wide, (p, 0)), (consume_wide, (p, 1)), (produce, (p,)), (add_dq, (p,))",
            "(consume_wide, (p, 0)), (consume_wide, (p, 1)), (produce, (p,)), (of_warp, (p,))",
        ),
        (
            "(_consume, (p, 0)), (_consume, (p, 1)), (produce, (p,)), (add_dq, (p,))",
            "(_consume, (p, 0)), (_consume, (p, 1)), (produce, (p,)), (of_warp, (p,))",
        ),
    ),
    "backward_wide": (
        ("for _i in range(rows.count * p.group)", "for i in range(rows.count * p.group)"),
        (
            "            _hand_on(p, dq_total[0], WARPGROUP)\n",
            "            hand_on(p, dq_total[0], this, rows, i, first_row, 0, WARPGROUP)\n",
        ),
        (
            "                _hand_on(p, other, WARPGROUP)\n",
            "                hand_on(p, other, this, rows, i, first_row, part, WARPGROUP)\n",
        ),
    ),
}


def replaced(name: str, text: str) -> str:
    """The source of a kernel's module with its places replaced; ValueError unless each is there exactly once."""
    for place, by in REPLACED[name]:
        if text.count(place) != 1:
            raise ValueError(f"{name}.py must have this once, has it {text.count(place)} times: {place.strip()!r}")
        text = text.replace(place, by)
    return text


def _variant_module(folder: Path, name: str, path: Route) -> ModuleType:
    """A module of its own from the replaced source: Triton reads the source of a kernel from its file."""
    source = folder / f"{name}.py"
    source.write_text(replaced(name, (FOLDER / f"{name}.py").read_text(encoding="utf-8")), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"dq_paths_{name}_{folder.name}", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    vars(module).update(hand_on=path.hand_on, of_warp=path.of_warp, SURPLUS=gl.constexpr(path.surplus))
    return module


@cache
def kernel(name: str) -> Any:
    """Build the backward kernel of a path."""
    folder = Path(tempfile.mkdtemp(prefix="dq-path-"))
    path = PATHS[name]
    wide = _variant_module(folder, "backward_wide", path)
    module = _variant_module(folder, "backward", path)
    vars(module).update(consume_wide=wide.consume_wide)
    return module.backward


def compiled(name: str, problem: AttentionProblem) -> Compiled:
    """Compile the main kernel of a path for a problem, without a GPU."""
    KERNELS[name] = kernel(name)
    (call,) = (x for x in calls_of(ShippedLaunch("dq", problem, {}, "backward")) if x.kernel == "backward")
    return compile_call(call._replace(kernel=name))


def _compile(job: tuple[str, AttentionProblem]) -> str:
    found = compiled(*job)
    return f"{found.registers} registers, {found.spill_bytes} bytes spilled {' '.join(found.serialisation)}"


def plan_of(name: str, problem: AttentionProblem, sms: int) -> BackwardPlan:
    """The plan of a launch with the kernel of a path."""
    plan = backward_plan(problem, sms)
    KERNELS[name] = kernel(name)
    calls = tuple(x._replace(kernel=name) if x.kernel == "backward" else x for x in plan.kernels)
    return BackwardPlan(plan.problem, plan.config, plan.schedule, calls)


def launcher(name: str, problem: AttentionProblem, x: GivenBackward) -> Any:
    """What launches a path on the GPU."""
    plan = plan_of(name, problem, num_sms(x.q.device))
    ready = (plan, PlanOnGpu(plan.tables, x.q.device))
    return lambda: launch_backward._run(ready, (x.dout, x.q, x.k, x.v, x.out, x.lse), None, None)


def in_place(dq: np.ndarray) -> np.ndarray:
    """Undo the order in which "red of 4, whole lines" keeps the elements of a share; (rows, channels)."""
    row, channel = np.indices((SHARE, SHARE))
    lane, chunk, warp = row % 8 * 4 + channel % 8 // 2, channel // 8, row // 16
    group = (warp * (SHARE // 8) + chunk) * 32 + lane
    at = group * 4 + row // 8 % 2 * 2 + channel % 2
    rows, channels = dq.shape
    tiles = dq.reshape(rows // SHARE, SHARE, channels // SHARE, SHARE).transpose(0, 2, 1, 3)
    found = tiles.reshape(*tiles.shape[:2], -1)[..., at]
    return found.transpose(0, 2, 1, 3).reshape(rows, channels)


def difference(name: str, found: torch.Tensor, shipped: torch.Tensor) -> float:
    """Relative RMSE of a path's dQ over the shipped kernel's, of the first sequence's last head."""
    got, want = (x[0, :, -1].float().cpu().numpy() for x in (found, shipped))
    if "lines" in name:
        got = in_place(got)
    return float(np.sqrt(np.sum((got - want) ** 2) / np.sum(want**2)))


def cells(head_dims: Iterable[int] = HEAD_DIMS, seqlens: Iterable[int] = SEQLENS) -> list[Cell]:
    """The cells that are timed."""
    return paper(["fp16"], head_dims, seqlens, [False, True], grid="backward")


def timed(cell: Cell, names: Sequence[str], pace: Pace) -> list[tuple]:
    """Rows of one cell, of the shipped kernel and of some paths."""
    (x,) = draw(cell, 1, 0)
    launches = {name: launcher(name, cell.problem, x) for name in dict.fromkeys((SHIPPED, *names))}
    found = {name: launch()[0] for name, launch in launches.items()}
    torch.cuda.synchronize()
    differences = {name: difference(name, found[name], found[SHIPPED]) for name in launches if PATHS[name].adds}
    runs = {name: GraphTimed(lambda _, launch=launch: launch()) for name, launch in launches.items()}
    times = measure(runs, pace)
    base = _ms(times[SHIPPED])
    rows = []
    for name, bursts in times.items():
        ms = _ms(bursts)
        mhz = float(np.median([b.sm_mhz for b in bursts]))
        kilocycles = float(np.median([cycles(b) for b in bursts])) / 1e3
        rows.append(
            (
                cell.head_dim,
                cell.seqlen_q,
                cell.causal,
                name,
                round(ms, 5),
                round(mhz),
                round(kilocycles, 1),
                round(cell.flops / ms / 1e9, 1),
                round(base / ms, 4),
                f"{differences.get(name, float('nan')):.2e}",
            )
        )
    return rows


def _ms(bursts: list[LaunchTime]) -> float:
    return float(np.median([b.ms for b in bursts]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Time all cells, and write every cell when it is done."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.dq_paths", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("csv", type=Path, metavar="OUT.csv")
    parser.add_argument("--head-dims", type=int, nargs="+", default=HEAD_DIMS)
    parser.add_argument("--seqlens", type=int, nargs="+", default=SEQLENS)
    parser.add_argument("--masks", nargs="+", choices=("dense", "causal"), default=("dense", "causal"))
    parser.add_argument("--paths", nargs="+", choices=tuple(PATHS), default=tuple(PATHS), metavar="PATH")
    parser.add_argument("--compile", action="store_true", help="only compile, into Triton's cache; needs no GPU")
    chosen = parser.parse_args(arguments)
    masks = [mask == "causal" for mask in chosen.masks]
    todo = [cell for cell in cells(chosen.head_dims, chosen.seqlens) if cell.causal in masks]
    names = dict.fromkeys((SHIPPED, *chosen.paths))
    jobs = [(name, cell.problem) for cell in todo[:: len(chosen.seqlens)] for name in names]
    with ProcessPoolExecutor(min(len(jobs), os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        for (name, problem), said in zip(jobs, pool.map(_compile, jobs), strict=True):
            print(f"d{problem.head_dim} {'causal' if problem.causal else 'dense'}, {name}: {said}", flush=True)
    if chosen.compile:
        return 0
    pace = Pace()
    with chosen.csv.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for cell in todo:
            for row in timed(cell, chosen.paths, pace):
                writer.writerow(row)
                print(*row, flush=True)
            file.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
