"""Compare the quantiser with its CPU twin bit for bit on an H200, then time it beside torch's copy and an eager quantiser.

    PYTHONPATH=kernels:reference:. python3 tests/gpu/measure_quantize.py OUT_DIR [bits] [speed] [accuracy]

Writes quantize_{bits,speed,accuracy}.csv and quantize_provenance.json. Needs torch, triton 3.6 and nvidia-smi (queries only).
Bits are compared in a pool of processes forked before CUDA starts.
"""

from __future__ import annotations

import csv
import json
import math
import multiprocessing
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from fa3_kernels.audit.evidence import evidence_facts
from fa3_kernels.twin.quantize import quantize_qkv as twin_quantize

NUMPY = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}
FAMILIES = ("normal", "outlier", "offset", "subnormal", "special", "zero blocks")
FIELDS = ("q", "k", "v", "q_descale", "k_descale", "v_descale", "lse_correction", "k_mean")
HIDDEN = 2048
PROCESSES = 14


@dataclass(frozen=True)
class Case:
    """One comparison. ``lengths`` are (seqlen_q, seqlen_k) of each sequence; equal ones are batched unless ``packed``."""

    dtype: str
    family: str
    seed: int
    lengths: tuple[tuple[int, int], ...]
    heads: tuple[int, int]
    head_dims: tuple[int, int]
    options: dict[str, Any] = field(hash=False)
    packed: bool = False


def draw(rng: np.random.Generator, family: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draw one operand, float64."""
    x = rng.standard_normal(shape)
    if family == "outlier":
        x += rng.standard_normal(shape) * 10 * (rng.random(shape) < 0.001)
    elif family == "offset":
        x = x * 2.0 ** rng.integers(-3, 4, shape[-2:]) + 8 * rng.standard_normal(shape[-2:])
    elif family == "subnormal":
        x *= 2.0 ** rng.integers(-24, -10, shape)
    elif family == "special":
        values = np.array([np.inf, -np.inf, np.nan, 65504.0, -0.0])
        x = np.where(rng.random(shape) < 1e-5, rng.choice(values, shape), x)
    elif family == "zero blocks":
        flat = x.reshape(-1, *shape[-2:])
        flat[: len(flat) // 2] = 0
    return x


def arrays(case: Case) -> dict[str, np.ndarray]:
    """Draw q, k, v, and the cumulative lengths of packed sequences."""
    rng = np.random.default_rng(case.seed)
    (heads, heads_kv), (dim, dim_v) = case.heads, case.head_dims
    queries, keys = ([n[i] for n in case.lengths] for i in (0, 1))
    lead_q, lead_k = ((sum(n),) if case.packed else (len(n), n[0]) for n in (queries, keys))
    shapes = {"q": (*lead_q, heads, dim), "k": (*lead_k, heads_kv, dim), "v": (*lead_k, heads_kv, dim_v)}
    with np.errstate(over="ignore"):
        given = {name: draw(rng, case.family, shape).astype(NUMPY[case.dtype]) for name, shape in shapes.items()}
    if case.packed:
        for name, lengths in (("q", queries), ("k", keys)):
            given[f"cu_seqlens_{name}"] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return given


def cases() -> list[Case]:
    """Random options over head dims, lengths, families and dtypes, a few large ones, and packed sequences."""
    rng = np.random.default_rng(20261121)
    lengths = [(1, 1), (31, 33), (64, 128), (127, 129), (300, 777), (1000, 1024), (1500, 515), (257, 2100)]
    dims = [(64, 64), (128, 128), (256, 256), (32, 32), (64, 128), (96, 96), (128, 80), (256, 64)]
    rows = [32, 64, 128, 192, 256, (64, 128, 128), (128, 64, 32), (192, 128, 64)]
    grid = []
    for i in range(180):
        m, n = lengths[i % 8] if i % 2 else (int(rng.integers(1, 600)), int(rng.integers(1, 600)))
        dim = dims[int(rng.integers(8))]
        options = {
            "block_rows": rows[int(rng.integers(8))],
            "scope": ("block", "block", "head")[int(rng.integers(3))],
            "scale": ("amax", "power_of_two")[int(rng.integers(2))],
            "rotate": bool(rng.integers(2)) and dim[0] != 96,
            "subtract_k_mean": bool(rng.integers(2)),
            "seed": int(rng.integers(3)),
        }
        packed = i % 5 == 4
        several = tuple((int(a), int(b)) for a, b in rng.integers(0, 400, (4, 2))) if packed else ((m, n), (m, n))
        if packed:
            several = ((m, n), *several)
        heads = ((3, 3), (4, 2), (3, 1))[i % 3]
        family, dtype = FAMILIES[i % len(FAMILIES)], ("fp16", "bf16")[i // 6 % 2]
        grid.append(Case(dtype, family, i, several, heads, dim, options, packed))
    for i, dim in enumerate((64, 128, 256)):  # more chunks of the K mean than its last step takes at once
        options = {"rotate": i > 0, "subtract_k_mean": True, "seed": i, "scope": ("block", "head", "block")[i]}
        grid.append(Case("bf16", "offset", 900 + i, ((130, 17000 + i),), (2, 1), (dim, dim), options))
    for i, rotate in enumerate((False, True)):
        for j, dim in enumerate((64, 128, 256)):
            options = {"block_rows": 128, "rotate": rotate, "subtract_k_mean": j == 1}
            shape = ((2048, 2048),)
            grid.append(Case("fp16", "outlier", 1000 + 10 * i + j, shape, (HIDDEN // dim,) * 2, (dim, dim), options))
    return grid


def run_device(case: Case, given: dict[str, np.ndarray]) -> dict[str, np.ndarray | None]:
    """Quantise on the GPU; results as numpy bits."""
    import torch

    from fa3_kernels.gluon.quantize import quantize_qkv

    torch.use_deterministic_algorithms(True)  # torch.empty comes filled with NaN
    kind = {"fp16": torch.float16, "bf16": torch.bfloat16}[case.dtype]
    on_device: dict[str, Any] = {}
    for name, x in given.items():
        if name.startswith("cu_seqlens"):
            on_device[name] = torch.from_numpy(x).cuda()
            on_device[f"max_seqlen_{name[-1]}"] = int(np.diff(x).max())
        else:
            on_device[name] = torch.from_numpy(x.view(np.int16)).cuda().view(kind)
    got = quantize_qkv(**on_device, **case.options)
    found = {}
    for name in FIELDS:
        x = getattr(got, name)
        as_int = None if x is None else x.contiguous().view(torch.uint8 if x.element_size() == 1 else torch.int32)
        found[name] = None if as_int is None else as_int.cpu().numpy()
    return found


def same(name: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where bits agree; any NaN equals any NaN among the results that are plain sums."""
    equal = a == b
    if name in ("lse_correction", "k_mean"):
        equal |= np.isnan(a.view(np.float32)) & np.isnan(b.view(np.float32))
    return equal


def check(case: Case) -> tuple[list[int], list]:
    """Return counts (e4m3 values, differing, float32 values, differing), and where each differing array first differs."""
    given = arrays(case)
    want, got = twin_quantize(**given, **case.options), run_device(case, given)
    counts, where = [0, 0, 0, 0], []
    for name in FIELDS:
        a, b = got[name], getattr(want, name)
        if (a is None) != (b is None) or (a is not None and a.shape != b.shape):
            raise ValueError(f"{case}: {name} has another shape")
        if a is None:
            continue
        b = np.ascontiguousarray(b).view(a.dtype)
        wrong = ~same(name, a, b)
        kind = 0 if a.dtype == np.uint8 else 2
        counts[kind] += a.size
        counts[kind + 1] += int(wrong.sum())
        if wrong.any():
            at = tuple(np.argwhere(wrong)[0])
            where.append((name, int(wrong.sum()), a.size, [int(i) for i in at], int(a[at]), int(b[at])))
    return counts, where


def compare_bits(out_dir: Path) -> None:
    grid, totals, failing = cases(), np.zeros(4, np.int64), 0
    columns = ["dtype", "family", "seed", "packed", "lengths", "heads", "head_dims", "options"]
    context = multiprocessing.get_context("fork")  # every process has its own CUDA context and compiles its own cases
    with context.Pool(PROCESSES) as pool, open(out_dir / "quantize_bits.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*columns, "values", "values_differing", "floats", "floats_differing"])
        for case, (counts, where) in zip(grid, pool.imap(check, grid, chunksize=1)):
            totals += counts
            described = [getattr(case, name) for name in columns[:-1]]
            writer.writerow([*described, json.dumps(case.options), *counts])
            if where:
                failing += 1
                if failing <= 12:
                    print("DIFFERS", case, where, flush=True)
    print(
        f"bits: {len(grid)} cases, {failing} differ; e4m3 {totals[0]}, {totals[1]} differ; "
        f"float32 {totals[2]}, {totals[3]} differ", flush=True
    )  # fmt: skip


def eager(q, k, v, *, rotate: bool, rows: int = 128):
    """The same task in torch operations: q, k, v to e4m3 with one descale per block of rows and head."""
    import torch

    dim = q.shape[-1]
    hadamard = None
    if rotate:
        hadamard = torch.ones(1, 1, device=q.device)
        while hadamard.shape[0] < dim:
            hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
        hadamard = (hadamard / math.sqrt(dim)).to(q.dtype)
    results = []
    for x, turn in ((q, rotate), (k, rotate), (v, False)):
        y = (x @ hadamard if turn else x).float()
        blocks = y.view(y.shape[0], -1, rows, *y.shape[2:])
        descale = blocks.abs().amax((2, 4), keepdim=True) / 448
        results.append(((blocks / descale).to(torch.float8_e4m3fn).view(x.shape), descale))
    return results


def candidates(tokens: int, dim: int) -> tuple[dict, int]:
    """Name -> a function without arguments, all on the same tensors; and the elements of q, k and v."""
    import torch

    from fa3_kernels.gluon.quantize import quantize_qkv

    seqlen = 4096
    shape = (tokens // seqlen, seqlen, HIDDEN // dim, dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.float16) for _ in range(3))
    into = [torch.empty_like(x) for x in (q, k, v)]
    whole, whole_into = (torch.cat([x.view(-1) for x in xs]) for xs in ((q, k, v), into))

    def ours(**options):
        return lambda: quantize_qkv(q, k, v, **options)

    found = {
        "copy": lambda: whole_into.copy_(whole),
        "block": ours(),
        "block rotated": ours(rotate=True),
        "block 64 rotated": ours(block_rows=64, rotate=True),
        "block power of two rotated": ours(scale="power_of_two", rotate=True),
        "head": ours(scope="head"),
        "head rotated": ours(scope="head", rotate=True),
        "block K mean": ours(subtract_k_mean=True),
        "block K mean rotated": ours(rotate=True, subtract_k_mean=True),
    }
    if tokens == 16384:
        found["torch eager block"] = lambda: eager(q, k, v, rotate=False)
        found["torch eager block rotated"] = lambda: eager(q, k, v, rotate=True)
    return found, 3 * q.numel()


def bytes_moved(name: str, elements: int) -> int:
    """Bytes that have to move: 2 in and 1 out per element; 2 more where the data are read twice, by k alone for a mean."""
    if name == "copy":
        return 4 * elements
    twice = elements if name.startswith("head") else elements // 3 if "mean" in name else 0
    return 3 * elements + 2 * twice


def smi(field_name: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={field_name}", "--format=csv,noheader,nounits", "-i", "0"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def graph_of(run, launches: int):
    import torch

    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            run()
    return graph


def measure(tokens: int, dim: int) -> list[list]:
    """Interleaved cool bursts: 5 launches in a graph after a pause of 30 ms, median of 7."""
    import torch

    runs, elements = candidates(tokens, dim)
    launches = 5
    graphs = {name: graph_of(run, launches) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(7):
        for name, graph in graphs.items():
            time.sleep(0.03)
            start.record()
            graph.replay()
            stop.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(stop) / launches)
    copy = 4 * elements / statistics.median(times["copy"])
    rows = []
    for name, found in times.items():
        ms, moved = statistics.median(found), bytes_moved(name, elements)
        rows.append([tokens, dim, name, round(ms, 5), moved, round(moved / ms / 1e9, 3), round(moved / ms / copy, 3)])
        print(*rows[-1], f"spread {min(found):.4f}..{max(found):.4f}", flush=True)
    return rows


def measure_all(out_dir: Path) -> None:
    with open(out_dir / "quantize_speed.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["tokens", "head_dim", "quantiser", "ms", "bytes", "tb_per_s", "share_of_copy_bandwidth"])
        for tokens in (16384, 65536):
            for dim in (64, 128, 256):
                writer.writerows(measure(tokens, dim))
                file.flush()


SCHEMES = [
    {"scope": scope, "rotate": rotate, "subtract_k_mean": k_mean}
    for scope in ("tensor", "head", "block")
    for rotate in (False, True)
    for k_mean in (False, True)
]


def attend(problem, quantized, truth) -> tuple[np.ndarray, np.ndarray]:
    """Relative output RMSE and absolute LSE RMSE of each query head, by the attention twin."""
    from fa3_kernels.twin.forward import forward

    operands, lse_shift = quantized
    result = forward(problem, operands)
    lse = result.lse + (0 if lse_shift is None else lse_shift)
    error = np.sqrt(np.mean(np.square(result.out.astype(np.float64) - truth.out), axis=(0, 1, 3)))
    level = np.sqrt(np.mean(np.square(truth.out), axis=(0, 1, 3)))
    return error / level, np.sqrt(np.mean(np.square(lse - truth.lse), axis=(0, 2)))


def from_device(got: dict[str, np.ndarray | None], rows: tuple[int, int, int]):
    """Operands and LSE correction as the attention twin takes them, from the device's bits."""
    from fa3_reference.problem import Descale, Operands

    x = [got[name].view(ml_dtypes.float8_e4m3fn) for name in "qkv"]
    descales = [Descale(got[f"{name}_descale"].view(np.float32), n) for name, n in zip("qkv", rows)]
    lse = got["lse_correction"]
    return Operands(*x, *descales), None if lse is None else lse.view(np.float32)


def accuracy_of(name: str) -> list[list]:
    """Measured and predicted error of every scheme on one file of real activations."""
    from fa3_reference.attention import attention
    from fa3_reference.bounds.quantisation import predict_error
    from fa3_reference.quantize import QuantScheme, prepare
    from fa3verify.inputs import activations

    case = activations.find(name)
    problem, *exact = activations.load(name, dtype="e4m3")
    given = {key: x.astype(np.float16) for key, x in zip("qkv", exact)}
    truth = attention(problem, *exact)
    level = np.sqrt(np.mean(np.square(truth.out), axis=(0, 1, 3)))
    rows, predictions = [], {}
    for scheme in SCHEMES:
        turned = QuantScheme(
            scheme["scope"], hadamard_seed=0 if scheme["rotate"] else None, k_mean=scheme["subtract_k_mean"]
        )
        model = (scheme["rotate"], scheme["subtract_k_mean"])  # the model knows no scales
        if model not in predictions:
            predictions[model] = predict_error(problem, *exact, turned).total[0] / level
        predicted = predictions[model]
        if scheme["scope"] == "tensor":  # the kernel has no such scope: float64 reference quantiser
            source, quantized = "reference", prepare(problem, *exact, turned)
        else:
            options = {**scheme, "block_rows": 128, "softmax_scale": problem.softmax_scale}
            same_case = Case("fp16", "real", 0, ((case.seqlen,) * 2,), (0, 0), (0, 0), options)
            source, got = "device", run_device(same_case, given)
            want = twin_quantize(**given, **options)
            if any(np.any(got[x].view(np.uint8) != getattr(want, x).view(np.uint8)) for x in FIELDS[:6]):
                raise ValueError(f"{name} {scheme}: the device's bits are not the twin's")
            quantized = from_device(got, want.block_rows)
        measured, lse_error = attend(problem, quantized, truth)
        for i, head in enumerate(case.q_heads):
            rows.append(
                [name, case.model, case.layer, head, case.seqlen, *scheme.values(), source, f"{measured[i]:.6g}",
                 f"{predicted[i]:.6g}", round(float(measured[i] / predicted[i]), 4), f"{lse_error[i]:.4g}"]
            )  # fmt: skip
    return rows


def tabulate_accuracy(out_dir: Path) -> None:
    from fa3verify.inputs import activations

    columns = ["file", "model", "layer", "head", "tokens", "scope", "rotate", "subtract_k_mean", "quantised_by"]
    names = [case.name for case in activations.list_activations()]
    context = multiprocessing.get_context("fork")
    with context.Pool(PROCESSES) as pool, open(out_dir / "quantize_accuracy.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*columns, "rel_rmse", "rel_rmse_predicted", "measured_over_predicted", "lse_rms_error"])
        for rows in pool.imap(accuracy_of, names, chunksize=1):
            writer.writerows(rows)
    print(f"accuracy: {len(names)} files", flush=True)


def provenance(out_dir: Path, wanted: list[str]) -> None:
    import torch
    import triton

    facts = {
        "gpu": smi("name"),
        "driver": smi("driver_version"),
        "max_sm_mhz": smi("clocks.max.sm"),
        "power_limit_w": smi("power.limit"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "numpy": np.__version__,
        **evidence_facts("quantize"),
        "parts": wanted,
        "date_utc": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
    }
    (out_dir / "quantize_provenance.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(facts, flush=True)


def main() -> None:
    out_dir, wanted = Path(sys.argv[1]), sys.argv[2:] or ["bits", "accuracy", "speed"]
    if "bits" in wanted:
        twin_quantize(**arrays(cases()[0]), **cases()[0].options)  # compile before forking
        compare_bits(out_dir)
    if "accuracy" in wanted:
        tabulate_accuracy(out_dir)
    if "speed" in wanted:
        measure_all(out_dir)
    provenance(out_dir, wanted)


if __name__ == "__main__":
    main()
