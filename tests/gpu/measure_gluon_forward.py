"""Compare the Gluon forward with the CPU twin bit for bit on an H200, then time it beside torch's cuDNN and FLASH backends.

    PYTHONPATH=kernels:reference python3 tests/gpu/measure_gluon_forward.py OUT_DIR [bits] [speed]

Writes gluon_forward_{bits,controls,speed}.csv and gluon_forward_provenance.json. Needs torch,
triton 3.6 and pynvml or nvidia-smi (queries only). The twin runs in a process pool forked before CUDA starts.
"""

from __future__ import annotations

import csv
import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np

from fa3_kernels.evidence import source_sha256
from fa3_kernels.twin.faults import Fault
from fa3_kernels.twin.forward import forward as twin_forward
from fa3_reference.problem import AttentionProblem, Operands

NUMPY = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}
FAMILIES = ("normal", "outlier", "peaky", "subnormal", "special")
CONTROLS = ("truncated_p", "coarse_exp2", "fp16_row_sum", "kv_head_modulo", "swapped_v_rows")
HIDDEN, TOKENS, HEAD_DIM = 2048, 16384, 128


def operands(problem: AttentionProblem, family: str, seed: int) -> Operands:
    """Draw q, k and v; every family is a fixed recipe of one generator."""
    rng = np.random.default_rng(seed)
    arrays = []
    for shape in (problem.q_shape, problem.k_shape, problem.v_shape):
        x = rng.standard_normal(shape)
        if family == "outlier":
            x += rng.standard_normal(shape) * 10 * (rng.random(shape) < 0.001)
        elif family == "peaky":
            x *= 6
        elif family == "subnormal":
            x *= 2.0 ** rng.integers(-24, 3, shape)
        elif family == "special":
            values = np.array([np.inf, -np.inf, np.nan, 60000.0, -0.0])
            x = np.where(rng.random(shape) < 1e-5, rng.choice(values, shape), x)
        arrays.append(x.astype(NUMPY[problem.dtype]))
    return Operands(*arrays)


def cases() -> list[tuple[AttentionProblem, str, int]]:
    """Shapes x masks x dtypes x families: whole tiles, every kind of tail, GQA, more keys than queries and the reverse."""
    shapes = [(512, 512), (1024, 1024), (1000, 1000), (384, 1000), (1000, 384), (777, 640), (129, 1023)]
    rng = np.random.default_rng(2026)
    tails = [tuple(int(n) for n in rng.integers(1, 301, 2)) for _ in range(60)] + [
        (n, n) for n in (1, 2, 127, 128, 129, 300)
    ]
    grid = []
    for dtype in NUMPY:
        for causal in (False, True):
            for i, (m, n) in enumerate(shapes):
                for family in FAMILIES:
                    heads, kv = ((4, 4), (4, 2), (6, 1))[i % 3]
                    grid.append((AttentionProblem(2, heads, kv, m, n, 128, dtype=dtype, causal=causal), family))
            for i, (m, n) in enumerate(tails):
                heads, kv = ((2, 2), (4, 2), (3, 1))[i % 3]
                scale = (0.0, 1.0, 0.003)[i // 3 % 3]
                grid.append((
                    AttentionProblem(2, heads, kv, m, n, 128, dtype=dtype, causal=causal, softmax_scale=scale),
                    FAMILIES[i % len(FAMILIES)],
                ))  # fmt: skip
            for head_dim in (72, 96, 120):  # zero-padded to 128
                grid.append((AttentionProblem(2, 4, 2, 515, 515, head_dim, dtype=dtype, causal=causal), "normal"))
    grid.append((AttentionProblem(4, 40, 8, 1024, 1024, 128, dtype="fp16", causal=True), "normal"))  # > 132 tiles
    grid.append((AttentionProblem(4, 40, 8, 1000, 1000, 128, dtype="bf16"), "outlier"))
    return [(problem, family, seed) for seed, (problem, family) in enumerate(grid)]


def run_twin(case: tuple[AttentionProblem, str, int]) -> tuple[np.ndarray, np.ndarray]:
    problem, family, seed = case
    want = twin_forward(problem, operands(problem, family, seed))
    return want.out.view(np.int16), want.lse.view(np.int32)


def control_problem(dtype: str) -> AttentionProblem:
    return AttentionProblem(2, 4, 2, 500, 900, 128, dtype=dtype, causal=True)


def run_control(case: tuple[str, str]) -> tuple[np.ndarray, np.ndarray]:
    """The twin with a planted fault: the comparison must see it."""
    problem = control_problem(case[0])
    wrong = twin_forward(problem, operands(problem, "normal", 0), fault=Fault(case[1]))
    return wrong.out.view(np.int16), wrong.lse.view(np.int32)


def device_bits(problem: AttentionProblem, given: Operands, **switches) -> tuple[np.ndarray, np.ndarray]:
    import torch

    from fa3_kernels.gluon.launch import forward

    kind = {"fp16": torch.float16, "bf16": torch.bfloat16}[problem.dtype]
    tensors = [torch.from_numpy(x.view(np.int16)).cuda().view(kind) for x in (given.q, given.k, given.v)]
    out, lse = forward(*tensors, causal=problem.causal, softmax_scale=problem.softmax_scale, **switches)
    return out.view(torch.int16).cpu().numpy(), lse.view(torch.int32).cpu().numpy()


def run_controls(out_dir: Path, pool) -> None:
    """Negative controls: count what differs from twins with planted faults."""
    grid = [(dtype, fault) for dtype in NUMPY for fault in CONTROLS]
    device = {dtype: device_bits(p := control_problem(dtype), operands(p, "normal", 0)) for dtype in NUMPY}
    with open(out_dir / "gluon_forward_controls.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["dtype", "fault", "values", "values_differing", "lse", "lse_differing"])
        for (dtype, fault), (out, lse) in zip(grid, pool.imap(run_control, grid)):
            got = device[dtype]
            row = [dtype, fault, out.size, int((got[0] != out).sum()), lse.size, int((got[1] != lse).sum())]
            writer.writerow(row)
            print("control", *row, flush=True)


def compare_bits(out_dir: Path, pool) -> None:
    import torch

    torch.use_deterministic_algorithms(True)  # torch.empty comes filled with NaN
    grid = cases()
    totals = np.zeros(4, np.int64)
    with open(out_dir / "gluon_forward_bits.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            [
                "dtype",
                "causal",
                "batch",
                "nheads",
                "nheads_kv",
                "seqlen_q",
                "seqlen_k",
                "head_dim",
                "softmax_scale",
                "family",
                "seed",
                "values",
                "values_differing",
                "lse",
                "lse_differing",
                "variants_differing",
            ]
        )
        for case, (want_out, want_lse) in zip(grid, pool.imap(run_twin, grid, chunksize=1)):
            p, family, seed = case
            given = operands(p, family, seed)
            bits = [
                device_bits(p, given, pingpong=pingpong, intra_wg_overlap=overlap)
                for pingpong, overlap in ((True, True), (False, True), (True, False), (True, True))
            ]
            out, lse = bits[0]
            variants = sum(int((a != out).sum()) + int((b != lse).sum()) for a, b in bits[1:])
            row = [out.size, int((out != want_out).sum()), lse.size, int((lse != want_lse).sum())]
            totals += row
            writer.writerow(
                [p.dtype, p.causal, p.batch, p.nheads, p.nheads_kv, p.seqlen_q, p.seqlen_k, p.head_dim, p.softmax_scale, family, seed,
                 *row, variants]
            )  # fmt: skip
            if row[1] or row[3] or variants:
                index = np.argwhere(out != want_out)[:3].tolist(), np.argwhere(lse != want_lse)[:3].tolist()
                print("DIFFERS", p, family, seed, row, variants, index, flush=True)
    torch.use_deterministic_algorithms(False)
    print(
        f"bits: {len(grid)} cases, O {totals[0]} values {totals[1]} differ, LSE {totals[2]} values {totals[3]} differ",
        flush=True,
    )


class Clock:
    """SM clock in MHz, by query only."""

    def __init__(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            self.read = lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
        except ImportError:
            self.read = lambda: int(smi("clocks.sm"))


def smi(field: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", "-i", "0"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def kernels(dtype: str, seqlen: int, causal: bool) -> dict:
    """Name -> a function without arguments; all read the same (batch, seqlen, nheads, head_dim) tensors."""
    import torch
    import torch.nn.functional as functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from fa3_kernels.gluon.launch import forward

    kind = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    shape = (TOKENS // seqlen, seqlen, HIDDEN // HEAD_DIM, HEAD_DIM)
    q, k, v = (torch.randn(shape, device="cuda", dtype=kind) for _ in range(3))
    views = [x.transpose(1, 2) for x in (q, k, v)]

    def sdpa(backend):
        def run():
            with sdpa_kernel(backend):
                return functional.scaled_dot_product_attention(*views, is_causal=causal)

        return run

    found = {
        "gluon": lambda: forward(q, k, v, causal=causal),
        "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
        "flash2": sdpa(SDPBackend.FLASH_ATTENTION),
    }
    if dtype == "fp16":
        found["gluon no pingpong"] = lambda: forward(q, k, v, causal=causal, pingpong=False)
        found["gluon no overlap"] = lambda: forward(q, k, v, causal=causal, intra_wg_overlap=False)
        found["gluon neither"] = lambda: forward(q, k, v, causal=causal, pingpong=False, intra_wg_overlap=False)
    return found


def graph_of(run, launches: int):
    import torch

    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            run()
    return graph


def replay(graph, launches: int, clock: Clock) -> tuple[float, int]:
    """Milliseconds per launch and the SM clock while it ran."""
    import torch

    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    stop.record()
    mhz = clock.read()  # while it runs
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / launches, mhz


def measure(dtype: str, seqlen: int, causal: bool, clock: Clock) -> list[list]:
    """Cool bursts (0.3 s pause, 3 launches, median of 5, interleaved), then sustained (0.16 s warm, 40 ms timed, median of 3)."""
    flops = 4 * seqlen * TOKENS * HIDDEN // (2 if causal else 1)
    runs = kernels(dtype, seqlen, causal)
    bursts = {name: graph_of(run, 3) for name, run in runs.items()}
    times: dict[str, list] = {name: [] for name in runs}
    for _ in range(5):
        for name, graph in bursts.items():
            time.sleep(0.3)
            times[name].append(replay(graph, 3, clock))
    burst = {name: statistics.median(ms for ms, _ in x) for name, x in times.items()}
    launches = {name: max(3, int(40 / ms)) for name, ms in burst.items()}
    long = {name: graph_of(run, launches[name]) for name, run in runs.items()}
    hot: dict[str, list] = {name: [] for name in runs}
    for _ in range(3):
        for name, graph in long.items():
            for _ in range(4):  # about 0.16 s of the kernel's own heat: clocks otherwise depend on what ran before
                graph.replay()
            hot[name].append(replay(graph, launches[name], clock))
    rows = []
    for name in runs:
        sustained = statistics.median(ms for ms, _ in hot[name])
        mhz = [statistics.median(c for _, c in x) for x in (times[name], hot[name])]
        rows.append(
            [dtype, seqlen, causal, name, round(burst[name], 5), round(flops / burst[name] / 1e9, 1), mhz[0],
             round(sustained, 5), round(flops / sustained / 1e9, 1), mhz[1]]
        )  # fmt: skip
        print(*rows[-1], flush=True)
    return rows


def measure_all(out_dir: Path) -> None:
    clock = Clock()
    with open(out_dir / "gluon_forward_speed.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            [
                "dtype",
                "seqlen",
                "causal",
                "kernel",
                "burst_ms",
                "burst_tflops",
                "burst_sm_mhz",
                "sustained_ms",
                "sustained_tflops",
                "sustained_sm_mhz",
            ]
        )
        for dtype in NUMPY:
            for causal in (False, True):
                for seqlen in (1024, 4096, 16384):
                    writer.writerows(measure(dtype, seqlen, causal, clock))
                    file.flush()


def provenance(out_dir: Path) -> None:
    import torch
    import triton

    facts = {
        "gpu": smi("name"),
        "driver": smi("driver_version"),
        "max_sm_mhz": smi("clocks.max.sm"),
        "power_limit_w": smi("power.limit"),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "triton": triton.__version__,
        "numpy": np.__version__,
        "kernel_sources_sha256": source_sha256(),
        "date_utc": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
    }
    (out_dir / "gluon_forward_provenance.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(facts, flush=True)


def main() -> None:
    out_dir, todo = Path(sys.argv[1]), sys.argv[2:] or ["bits", "speed"]
    if "bits" in todo:
        for dtype in NUMPY:  # compile the twin before forking
            run_twin((AttentionProblem(1, 1, 1, 8, 8, 128, dtype=dtype), "normal", 0))
        with multiprocessing.get_context("fork").Pool(14) as pool:
            compare_bits(out_dir, pool)
            run_controls(out_dir, pool)
    if "speed" in todo:
        measure_all(out_dir)
    provenance(out_dir)


if __name__ == "__main__":
    main()
