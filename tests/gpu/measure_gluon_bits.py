"""Compare the Gluon forward with the CPU twin bit for bit on an H200: every head_dim, mask, packing, split, varlen and scope.

    PYTHONPATH=.:kernels:reference python3 tests/gpu/measure_gluon_bits.py OUT_DIR [FEATURE ...] [--dtype fp16,bf16,e4m3]
    ... measure_gluon_bits.py OUT_DIR --merge DIR DIR    tables of different dtypes into one
    ... measure_gluon_bits.py OUT_DIR --dry N            the twin alone, on N random cases; no GPU

Writes gluon_forward_{bits,controls}.csv and gluon_forward_bits_provenance.json; FEATURE is a part of a feature's name. Needs
torch and triton 3.6. Cases run in processes that each hold the GPU and run the twin beside it; exit code 1 if a bit differs
or a process hangs.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from bit_cases import DEFAULTS, DTYPES, Case, cases, operands

from fa3_kernels.audit.evidence import evidence_facts
from fa3_kernels.plan.choose import config_of, shape_of
from fa3_kernels.plan.variant import variant_of
from fa3_kernels.twin.faults import Fault
from fa3_kernels.twin.forward import forward as twin_forward
from fa3_reference.problem import AttentionProblem, Operands

CONTROLS = ("truncated_p", "coarse_exp2", "fp16_row_sum", "kv_head_modulo", "swapped_v_rows")
E4M3_CONTROLS = (
    *CONTROLS, "neighbour_q_descale", "neighbour_k_descale", "neighbour_v_descale", "descales_ignored", "no_p_offset",
    "no_promotion",
)  # fmt: skip
WORKERS, HANG_SECONDS = 16, 100
SWITCHES = ((False, True), (True, False))  # pingpong, overlap
SWITCHED = ("dense", "causal", "varlen", "packed-splits")  # features whose cases also run with the switches
COLUMNS = (
    "feature", "dtype", "out_dtype", "head_dim", "head_dim_v", "causal", "left", "right", "softcap", "batch", "nheads",
    "nheads_kv", "seqlen_q", "seqlen_k", "varlen", "pack_gqa", "num_splits", "promotion_interval", "q_scope", "k_scope",
    "v_scope", "softmax_scale", "family", "seed", "values", "values_differing", "lse", "lse_differing",
    "variants_differing",
)  # fmt: skip
CONTROL_COLUMNS = ("dtype", "fault", "values", "values_differing", "lse", "lse_differing")
BITS, CONTROL_ROWS, PROVENANCE = (
    "gluon_forward_bits.csv", "gluon_forward_controls.csv", "gluon_forward_bits_provenance.json",
)  # fmt: skip


def device_bits(case: Case, given: Operands, **switches) -> tuple[np.ndarray, np.ndarray]:
    import torch

    from fa3_kernels.gluon.launch import forward

    p = case.problem
    kinds = {"fp16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
    raw = np.int8 if p.dtype == "e4m3" else np.int16
    tensors = [torch.from_numpy(x.view(raw)).cuda().view(kinds[p.dtype]) for x in (given.q, given.k, given.v)]
    options = dict(case.choices)
    if p.is_varlen:
        options |= {name: torch.from_numpy(getattr(p, name)) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    if p.dtype == "e4m3":
        descales = {"q": given.q_descale, "k": given.k_descale, "v": given.v_descale}
        options["out_dtype"] = kinds[options["out_dtype"]]
        options["descale_blocks"] = tuple(d.block_rows if d else 0 for d in descales.values())
        options |= {f"{name}_descale": torch.from_numpy(d.values).cuda() for name, d in descales.items() if d}
    out, lse = forward(
        *tensors, causal=p.causal, window=p.window, softcap=p.softcap, softmax_scale=p.softmax_scale, **options,
        **switches,
    )  # fmt: skip
    return out.view(torch.int16).cpu().numpy(), lse.view(torch.int32).cpu().numpy()


def twin_bits(case: Case, given: Operands, fault: Fault | None = None) -> tuple[np.ndarray, np.ndarray]:
    want = twin_forward(case.problem, given, config_of(case.problem, **case.choices), fault=fault)
    return want.out.view(np.int16), want.lse.view(np.int32)


def differing(got: tuple[np.ndarray, np.ndarray], want: tuple[np.ndarray, np.ndarray]) -> tuple[int, int]:
    return int((got[0] != want[0]).sum()), int((got[1] != want[1]).sum())


def switches_of(case: Case) -> list[tuple[bool, bool]]:
    """A repeat, and where they are tried the switches of the schedule: no bit may depend on them."""
    is_tried = case.problem.dtype == "fp16" or DEFAULTS.items() <= case.choices.items()
    return [(True, True), *(SWITCHES if case.feature in SWITCHED and is_tried else ())]


def run_case(case: Case) -> list:
    """One row of the table."""
    p, given = case.problem, operands(case)
    config = config_of(p, **case.choices)
    want = twin_bits(case, given)
    got = device_bits(case, given)
    o, lse = differing(got, want)
    again = [device_bits(case, given, pingpong=a, intra_wg_overlap=b) for a, b in switches_of(case)]
    variants = sum(sum(differing(bits, got)) for bits in again)
    if o or lse or variants:
        where = np.argwhere(got[0] != want[0])[:3].tolist(), np.argwhere(got[1] != want[1])[:3].tolist()
        print("DIFFERS", case, config, o, lse, variants, where, flush=True)
    return [
        case.feature, p.dtype, config.out_dtype, p.head_dim, p.head_dim_v, p.causal, *p.window, p.softcap, p.batch,
        p.nheads, p.nheads_kv, p.seqlen_q, p.seqlen_k, p.is_varlen, config.pack_gqa, config.num_splits,
        config.promotion_interval, *case.scopes, p.softmax_scale, case.family, case.seed, want[0].size, o, want[1].size,
        lse, variants,
    ]  # fmt: skip


def run_batch(batch: list[Case]) -> list[list]:
    import torch

    torch.use_deterministic_algorithms(True)  # torch.empty comes filled with NaN
    return [run_case(case) for case in batch]


def control_case(dtype: str) -> Case:
    problem = AttentionProblem(2, 4, 2, 500, 900, 128, dtype=dtype, causal=True)
    if dtype != "e4m3":
        return Case("control", problem)
    return Case("control", problem, choices=dict(DEFAULTS), scopes=("64", "128", "128"))


def run_control(control: tuple[str, str]) -> list:
    """Negative control: the twin with a planted fault must differ from the device."""
    dtype, fault = control
    case = control_case(dtype)
    given = operands(case)
    got = device_bits(case, given)
    o, lse = differing(got, twin_bits(case, given, Fault(fault)))
    return [dtype, fault, got[0].size, o, got[1].size, lse]


def kind(case: Case) -> tuple:
    """What of a case changes the compiled kernel."""
    config = config_of(case.problem, **case.choices)
    shape = shape_of(case.problem, pack_gqa=config.pack_gqa, num_splits=config.num_splits)
    by_tile = any(scope.isdigit() for scope in case.scopes[1:])
    variant = variant_of(config, case.problem, shape, block_descales=by_tile)
    return config.dtype, config.out_dtype, config.head_dim, config.tile_n, variant


def cost(case: Case) -> int:
    """Products of the two GEMMs: what the twin's time goes with."""
    p = case.problem
    return p.nheads * p.q_shape[0] * (1 if p.is_varlen else p.seqlen_q) * p.seqlen_k * (p.head_dim + p.head_dim_v)


def batches(grid: list[Case]) -> list[list[Case]]:
    """Cases that share a compiled kernel, up to a share of the work at a time, the longest first."""
    alike: dict[tuple, list[list[Case]]] = {}
    limit = sum(map(cost, grid)) / (2 * WORKERS)
    for case in grid:
        pieces = alike.setdefault(kind(case), [[]])
        if sum(map(cost, pieces[-1])) + cost(case) > limit and pieces[-1]:
            pieces.append([])
        pieces[-1].append(case)
    return sorted((x for pieces in alike.values() for x in pieces), key=lambda piece: -sum(map(cost, piece)))


def write(path: Path, columns: Sequence[str], rows: Sequence[Sequence]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])


def write_all(out: Path, rows: list[list], controls: list[list], facts: dict) -> None:
    out.mkdir(parents=True, exist_ok=True)
    write(out / BITS, COLUMNS, sorted(rows, key=lambda row: int(row[COLUMNS.index("seed")])))
    write(out / CONTROL_ROWS, CONTROL_COLUMNS, controls)
    (out / PROVENANCE).write_text(json.dumps(facts, indent=1) + "\n")


def provenance(dtypes: Sequence[str]) -> dict:
    import torch
    import triton

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "-i", "0"]
    name, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().split(", ")
    versions = {module.__name__: module.__version__ for module in (torch, triton, np)}
    date = time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime())
    return {
        "gpu": name,
        "driver": driver,
        **versions,
        "dtypes": list(dtypes),
        **evidence_facts("forward"),
        "date_utc": date,
    }


def merge(out: Path, folders: Sequence[Path]) -> None:
    """Join the tables of several runs; ValueError unless they are of the same launches and of different dtypes."""
    found = [json.loads((folder / PROVENANCE).read_text()) for folder in folders]
    dtypes = [dtype for facts in found for dtype in facts["dtypes"]]
    if len({facts["launches_sha256"] for facts in found}) != 1 or len(set(dtypes)) != len(dtypes):
        raise ValueError(f"tables to merge must be of one kernel and different dtypes, got {dtypes} of {found}")
    tables = []
    for name, columns in ((BITS, COLUMNS), (CONTROL_ROWS, CONTROL_COLUMNS)):
        rows = []
        for folder in folders:
            with (folder / name).open(newline="") as file:
                head, *body = csv.reader(file)
            if tuple(head) != columns:
                raise ValueError(f"columns of {folder / name} must be {columns}, got {head}")
            rows += body
        tables.append(rows)
    write_all(out, *tables, {**found[-1], "dtypes": dtypes, "date_utc": max(f["date_utc"] for f in found)})


def dry(grid: list[Case], number: int) -> None:
    """Run the twin of some cases and say what all of them will take."""
    kinds = {(kind(case), switches) for case in grid for switches in switches_of(case)}
    chosen = random.Random(0).sample(grid, min(number, len(grid)))
    seconds, values = 0.0, 0
    for case in chosen:
        given = operands(case)
        start = time.monotonic()
        values += twin_bits(case, given)[0].size
        seconds += time.monotonic() - start
    share = sum(map(cost, chosen)) / sum(map(cost, grid))
    print(f"{len(grid)} cases, {sum(np.prod(case.problem.out_shape) for case in grid)} values, {len(kinds)} kernels")
    print(
        f"twin: {len(chosen)} cases, {values} values in {seconds:.1f} s; all of them {seconds / share:.0f} s of one core"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("features", nargs="*")
    parser.add_argument("--dtype", default=",".join(DTYPES))
    parser.add_argument("--merge", nargs="+", type=Path)
    parser.add_argument("--dry", type=int)
    return parser.parse_args()


def main() -> None:
    given = arguments()
    if given.merge:
        merge(given.out, given.merge)
        return
    dtypes = given.dtype.split(",")
    if unknown := sorted(set(dtypes) - set(DTYPES)):
        sys.exit(f"--dtype takes {', '.join(DTYPES)}, got {', '.join(unknown)}")
    grid = [case for case in cases() if case.problem.dtype in dtypes]
    grid = [case for case in grid if not given.features or any(word in case.feature for word in given.features)]
    for dtype in dtypes:  # compile the twin before forking
        case = Case("warm", AttentionProblem(1, 1, 1, 8, 8, 64, dtype=dtype))
        twin_forward(case.problem, operands(case))
    if given.dry:
        dry(grid, given.dry)
        return
    work, started = batches(grid), time.monotonic()
    rows: list[list] = []
    with multiprocessing.get_context("fork").Pool(WORKERS) as pool:
        results = pool.imap_unordered(run_batch, work)
        for done in range(len(work)):
            try:
                rows += results.next(HANG_SECONDS)
            except multiprocessing.TimeoutError:
                sys.exit(f"no result for {HANG_SECONDS} s with {done} of {len(work)} batches done: a kernel hangs")
        wanted = [(dtype, f) for dtype in dtypes for f in (E4M3_CONTROLS if dtype == "e4m3" else CONTROLS)]
        controls = pool.map(run_control, wanted)
    write_all(given.out, rows, controls, provenance(dtypes))
    values, wrong, lse, lse_wrong, variants = (sum(row[i] for row in rows) for i in range(-5, 0))
    print(f"{len(rows)} cases in {time.monotonic() - started:.0f} s: O {values} values, {wrong} differ; "
          f"LSE {lse}, {lse_wrong} differ; switches {variants}")  # fmt: skip
    silent = [row[:2] for row in controls if row[3] == 0]
    if silent:
        print(f"controls that differ in no bit: {silent}")
    sys.exit(int(bool(wrong or lse_wrong or variants or silent)))


if __name__ == "__main__":
    main()
