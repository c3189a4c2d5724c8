"""Compare the Gluon forward with the CPU twin bit for bit on an H200: every head_dim, mask, packing, split and varlen.

    PYTHONPATH=kernels:reference python3 tests/gpu/measure_gluon_bits.py OUT_DIR [SUBSTRING of a feature ...]

Writes gluon_forward_{bits,controls}.csv and gluon_forward_bits_provenance.json. Needs torch and triton 3.6. Cases run in
processes that each hold the GPU and run the twin beside it; exit code 1 if a bit differs or a process hangs.
"""

from __future__ import annotations

import csv
import json
import multiprocessing
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import ml_dtypes
import numpy as np

from fa3_kernels.evidence import FORWARD_SOURCES, files_sha256
from fa3_kernels.gluon.choose import config_of
from fa3_kernels.twin.faults import Fault
from fa3_kernels.twin.forward import forward as twin_forward
from fa3_reference.problem import AttentionProblem, Operands

NUMPY = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}
FAMILIES = ("normal", "outlier", "peaky", "subnormal", "special")
CONTROLS = ("truncated_p", "coarse_exp2", "fp16_row_sum", "kv_head_modulo", "swapped_v_rows")
WORKERS, HANG_SECONDS = 14, 100
SWITCHES = ((False, True), (True, False))  # pingpong, overlap
SWITCHED = ("dense", "causal", "varlen", "packed-splits")  # features whose cases also run with the switches
COLUMNS = (
    "feature", "dtype", "head_dim", "head_dim_v", "causal", "left", "right", "softcap", "batch", "nheads", "nheads_kv",
    "seqlen_q", "seqlen_k", "varlen", "pack_gqa", "num_splits", "softmax_scale", "family", "seed", "values",
    "values_differing", "lse", "lse_differing", "variants_differing",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One launch: ``choices`` are num_splits and pack_gqa as the launcher takes them."""

    feature: str
    problem: AttentionProblem
    family: str = "normal"
    seed: int = 0
    choices: dict = field(default_factory=dict)


def operands(case: Case) -> Operands:
    """Draw q, k and v; every family is a fixed recipe of one generator."""
    rng = np.random.default_rng(case.seed)
    arrays = []
    for shape in (case.problem.q_shape, case.problem.k_shape, case.problem.v_shape):
        x = rng.standard_normal(shape)
        if case.family == "outlier":
            x += rng.standard_normal(shape) * 10 * (rng.random(shape) < 0.001)
        elif case.family == "peaky":
            x *= 6
        elif case.family == "subnormal":
            x *= 2.0 ** rng.integers(-24, 3, shape)
        elif case.family == "special":
            values = np.array([np.inf, -np.inf, np.nan, 60000.0, -0.0])
            x = np.where(rng.random(shape) < 1e-5, rng.choice(values, shape), x)
        arrays.append(x.astype(NUMPY[case.problem.dtype]))
    return Operands(*arrays)


def dense_cases(dtype: str, head_dim: int, seeds) -> list[Case]:
    """Whole tiles, every kind of tail, GQA, more keys than queries and the reverse; masks and the cap."""
    shapes = [(512, 512), (1024, 1024), (1000, 1000), (384, 1000), (1000, 384), (777, 640), (129, 1023)]
    rng = np.random.default_rng(2026)
    tails = [tuple(int(n) for n in rng.integers(1, 301, 2)) for _ in range(30)] + [
        (n, n) for n in (1, 127, 128, 129, 300)
    ]
    masks = {
        "dense": {},
        "causal": {"causal": True},
        "window": {"window": (200, 0)},
        "band": {"window": (90, 150)},
        "left": {"window": (250, -1)},
        "right": {"window": (-1, 40)},
        "softcap": {"softcap": 20.0},
        "softcap-window": {"softcap": 5.0, "window": (300, 20)},
    }
    if dtype == "bf16":  # the same code but for the formats: fewer kernels to compile
        masks = {name: masks[name] for name in ("dense", "causal", "window")}
    found = []
    for name, mask in masks.items():
        for i, (m, n) in enumerate(shapes):
            heads, kv = ((4, 4), (4, 2), (6, 1))[i % 3]
            problem = AttentionProblem(2 - i % 2, heads, kv, m, n, head_dim, dtype=dtype, **mask)
            families = FAMILIES if name in ("dense", "causal") else (FAMILIES[i % 5],)
            found += [Case(name, problem, family, next(seeds)) for family in families]
        for i, (m, n) in enumerate(tails):
            heads, kv = ((2, 2), (4, 2), (3, 1))[i % 3]
            scale = (0.0, 1.0, 0.003)[i // 3 % 3]
            problem = AttentionProblem(2, heads, kv, m, n, head_dim, dtype=dtype, softmax_scale=scale, **mask)
            found.append(Case(name, problem, FAMILIES[i % 5], next(seeds)))
    return found


def grouped_cases(dtype: str, head_dim: int, seeds) -> list[Case]:
    """PackGQA with every padded group, splits with and without empty ones, decode shapes."""
    groups = [(8, 4), (6, 2), (12, 3), (8, 1), (28, 2), (32, 1), (48, 1)]
    if (dtype, head_dim) != ("fp16", 128):
        groups = [(6, 2), (8, 1)] if dtype == "fp16" else [(8, 1)]
    found = []
    for heads, kv in groups:
        for m, n, mask in ((1, 900, {}), (70, 333, {"causal": True}), (130, 520, {"window": (100, 0)})):
            problem = AttentionProblem(2, heads, kv, m, n, head_dim, dtype=dtype, **mask)
            family = FAMILIES[next(seeds) % 5]
            found.append(Case("packed", problem, family, next(seeds), {"pack_gqa": True}))
            found.append(Case("packed-splits", problem, family, next(seeds), {"pack_gqa": True, "num_splits": 3}))
    for m, n, mask in (
        (1, 4000, {}), (300, 1100, {"causal": True}), (200, 40, {"causal": True}), (333, 777, {"window": (150, 30)}),
        (64, 700, {"softcap": 15.0}),
    ):  # fmt: skip
        if dtype == "bf16" and mask:
            continue
        for splits in (2, 5, 0):
            problem = AttentionProblem(3, 4, 2, m, n, head_dim, dtype=dtype, **mask)
            choices = {"num_splits": splits, "pack_gqa": False}
            found += [Case("splits", problem, family, next(seeds), choices) for family in FAMILIES]
    return found


def varlen_cases(dtype: str, head_dim: int, seeds) -> list[Case]:
    """Packed sequences, empty ones among them; family special and the neighbours' rows test the clipping."""
    lengths = (
        ((100, 1, 0, 257, 64), (130, 500, 70, 0, 64)),
        ((513, 128, 7), (385, 129, 1000)),
        ((1, 1, 1, 1), (1, 300, 0, 700)),
    )
    masks = ({}, {"causal": True}, {"window": (120, 10)}, {"causal": True, "softcap": 10.0})
    masks = masks if dtype == "fp16" else masks[1:2]
    found = []
    for i, (m, n) in enumerate(lengths):
        for mask in masks:
            for family in (FAMILIES[i], "special"):
                problem = AttentionProblem.varlen(m, n, nheads=4, nheads_kv=2, head_dim=head_dim, dtype=dtype, **mask)
                found.append(Case("varlen", problem, family, next(seeds), {"pack_gqa": False}))
                found.append(Case("varlen-packed", problem, family, next(seeds), {"pack_gqa": True}))
                choices = {"pack_gqa": True, "num_splits": 3}
                found.append(Case("varlen-packed-splits", problem, family, next(seeds), choices))
    return found


def cases() -> list[Case]:
    seeds = count()
    found = []
    for dtype in NUMPY:
        for head_dim in (64, 128, 256):
            for family in (dense_cases, grouped_cases, varlen_cases):
                found += family(dtype, head_dim, seeds)
        for head_dim in (8, 40, 72, 96, 120, 136, 200):  # zero-padded to 64, 128 or 256
            problem = AttentionProblem(2, 4, 2, 515, 515, head_dim, dtype=dtype, causal=True)
            found.append(Case("padded", problem, "normal", next(seeds)))
        for dim, dim_v in ((192, 128), (64, 256), (128, 72)):
            problem = AttentionProblem(2, 4, 2, 300, 515, dim, dim_v, dtype=dtype, causal=True)
            found.append(Case("head_dim_v", problem, "outlier", next(seeds)))
    for head_dim in (64, 128, 256):  # more tiles than SMs
        for dtype, n, causal in (("fp16", 1024, True), ("bf16", 1000, False)):
            problem = AttentionProblem(2, 40, 8, n, n, head_dim, dtype=dtype, causal=causal)
            found.append(Case("wraps", problem, "outlier", next(seeds)))
    return found


def device_bits(case: Case, given: Operands, **switches) -> tuple[np.ndarray, np.ndarray]:
    import torch

    from fa3_kernels.gluon.launch import forward

    p = case.problem
    kind = {"fp16": torch.float16, "bf16": torch.bfloat16}[p.dtype]
    tensors = [torch.from_numpy(x.view(np.int16)).cuda().view(kind) for x in (given.q, given.k, given.v)]
    starts = {}
    if p.is_varlen:
        starts = {name: torch.from_numpy(getattr(p, name)) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    out, lse = forward(
        *tensors, causal=p.causal, window=p.window, softcap=p.softcap, softmax_scale=p.softmax_scale, **starts,
        **case.choices, **switches,
    )  # fmt: skip
    return out.view(torch.int16).cpu().numpy(), lse.view(torch.int32).cpu().numpy()


def differing(got: tuple[np.ndarray, np.ndarray], want: tuple[np.ndarray, np.ndarray]) -> tuple[int, int]:
    return int((got[0] != want[0]).sum()), int((got[1] != want[1]).sum())


def run_case(case: Case) -> list:
    """One row of the table."""
    p, given = case.problem, operands(case)
    config = config_of(p, **case.choices)
    want = twin_forward(p, given, config)
    want = want.out.view(np.int16), want.lse.view(np.int32)
    got = device_bits(case, given)
    o, lse = differing(got, want)
    again = [(True, True), *(SWITCHES if case.feature in SWITCHED and p.dtype == "fp16" else ())]
    variants = sum(sum(differing(device_bits(case, given, pingpong=a, intra_wg_overlap=b), got)) for a, b in again)
    if o or lse or variants:
        where = np.argwhere(got[0] != want[0])[:3].tolist(), np.argwhere(got[1] != want[1])[:3].tolist()
        print("DIFFERS", case, config, o, lse, variants, where, flush=True)
    return [
        case.feature, p.dtype, p.head_dim, p.head_dim_v, p.causal, *p.window, p.softcap, p.batch, p.nheads, p.nheads_kv,
        p.seqlen_q, p.seqlen_k, p.is_varlen, config.pack_gqa, config.num_splits, p.softmax_scale, case.family,
        case.seed, want[0].size, o, want[1].size, lse, variants,
    ]  # fmt: skip


def run_batch(batch: list[Case]) -> list[list]:
    import torch

    torch.use_deterministic_algorithms(True)  # torch.empty comes filled with NaN
    return [run_case(case) for case in batch]


def run_control(control: tuple[str, str]) -> list:
    """Negative control: the twin with a planted fault must differ from the device."""
    dtype, fault = control
    case = Case("control", AttentionProblem(2, 4, 2, 500, 900, 128, dtype=dtype, causal=True))
    given = operands(case)
    got = device_bits(case, given)
    wrong = twin_forward(case.problem, given, config_of(case.problem), fault=Fault(fault))
    o, lse = differing(got, (wrong.out.view(np.int16), wrong.lse.view(np.int32)))
    return [dtype, fault, got[0].size, o, got[1].size, lse]


def batches(grid: list[Case]) -> list[list[Case]]:
    """Cases that share compiled kernels, in pieces of about equal work."""
    alike: dict[tuple, list[Case]] = {}
    for case in grid:
        p = case.problem
        padded = max(64, 1 << (p.head_dim - 1).bit_length())
        pack = (p.nheads, p.nheads_kv) if "packed" in case.feature else ()
        alike.setdefault((case.feature, p.dtype, padded, pack), []).append(case)
    return [group[i : i + 40] for group in alike.values() for i in range(0, len(group), 40)]


def write(path: Path, columns: tuple[str, ...], rows: list[list]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])


def provenance() -> dict:
    import torch
    import triton

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "-i", "0"]
    name, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().split(", ")
    versions = {module.__name__: module.__version__ for module in (torch, triton, np)}
    date = time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime())
    kernels = {"kernel_files": FORWARD_SOURCES, "kernel_sources_sha256": files_sha256(FORWARD_SOURCES)}
    return {"gpu": name, "driver": driver, **versions, **kernels, "date_utc": date}


def main() -> None:
    out_dir, wanted = Path(sys.argv[1]), sys.argv[2:]
    grid = [case for case in cases() if not wanted or any(word in case.feature for word in wanted)]
    for dtype in NUMPY:  # compile the twin before forking
        case = Case("warm", AttentionProblem(1, 1, 1, 8, 8, 64, dtype=dtype))
        twin_forward(case.problem, operands(case))
    work = sorted(batches(grid), key=len, reverse=True)
    rows: list[list] = []
    with multiprocessing.get_context("fork").Pool(WORKERS) as pool:
        results = pool.imap_unordered(run_batch, work)
        for done in range(len(work)):
            try:
                rows += results.next(HANG_SECONDS)
            except multiprocessing.TimeoutError:
                sys.exit(f"no result for {HANG_SECONDS} s with {done} of {len(work)} batches done: a kernel hangs")
        controls = pool.map(run_control, [(dtype, fault) for dtype in NUMPY for fault in CONTROLS])
    rows.sort(key=lambda row: row[COLUMNS.index("seed")])
    write(out_dir / "gluon_forward_bits.csv", COLUMNS, rows)
    columns = ("dtype", "fault", "values", "values_differing", "lse", "lse_differing")
    write(out_dir / "gluon_forward_controls.csv", columns, controls)
    (out_dir / "gluon_forward_bits_provenance.json").write_text(json.dumps(provenance(), indent=1) + "\n")
    values, wrong, lse, lse_wrong, variants = (sum(row[i] for row in rows) for i in range(-5, 0))
    print(f"{len(rows)} cases: O {values} values, {wrong} differ; LSE {lse}, {lse_wrong} differ; switches {variants}")
    sys.exit(int(bool(wrong or lse_wrong or variants or any(row[3] == 0 for row in controls))))


if __name__ == "__main__":
    main()
