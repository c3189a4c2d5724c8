"""The microbenchmarks assemble as meant, without a GPU: nothing spilled, nothing serialised, nothing folded away."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from fa3_reports.microbench.additions import bulk_add, vector_add
from fa3_reports.microbench.experiment import digest
from fa3_reports.microbench.latency import DEPENDENT, PER_PASS
from fa3_reports.microbench.ptx import VECTOR, repeat, vector
from fa3_reports.microbench.softmax import Step, convert, exponentials, maxima, pv, qk, rescale
from fa3_reports.microbench.suite import chosen
from fa3_reports.stored import read_csv

MULTIPROCESSORS = 132
NAMES = {
    "softmax_step",
    "softmax_step_under_wgmma",
    "softmax_step_own_wgmma",
    "serial_step",
    "epilogue",
    "tile_chain",
    "chain",
    "cold_code",
    "tma_store",
    "setmaxnreg",
    "launch",
    "transposition",
    "bulk_add",
    "vector_add",
    "sharing",
    "mbarrier_arrivals",
    "mbarrier_stream",
    "mma_sync",
    "mma_sync_ldmatrix",
    "shared_latency",
    "mma_latency",
    "bar_sync",
    "shared_trip",
    "fence_latency",
    "global_latency",
    "cp_async_latency",
    "cp_async_beside",
    "cta_start",
    "warp_stream",
    "store_issue",
}


REPORTS = Path(__file__).parents[3] / "reports"


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_every_recorded_row_is_of_the_ptx_that_its_experiment_has_now(gpu):
    now = {(e.name, digest(e.ptx())) for e in chosen(MULTIPROCESSORS, None)}
    rows = read_csv(REPORTS / gpu / "simulator" / "microbench" / "microbench.csv")
    assert len(rows) > 1400
    changed = {row["experiment"] for row in rows if (row["experiment"], row["ptx_sha256"]) not in now}
    assert not changed, "measure these again (--only), or take their rows out"


def _tool(name: str) -> Path:
    spec = find_spec("triton")
    path = Path(spec.origin).parent / "backends/nvidia/bin" / name if spec and spec.origin else Path(name)
    if not path.exists():
        pytest.skip(f"{name} comes with triton, which is not installed")
    return path


def _representatives() -> Iterator:
    """Of each kind the one with most registers per lane, which is where ptxas gives up first, and every seventh.

    All but the widest and every twenty-eighth are assembled at night.
    """
    if find_spec("triton") is None:
        yield pytest.param(None, marks=pytest.mark.skip(reason="ptxas comes with triton, which is not installed"))
        return
    suite = chosen(MULTIPROCESSORS, sorted(NAMES))
    for i, experiment in enumerate(suite):
        parameters = getattr(experiment, "parameters", {"i": i})
        wide = parameters.get("head_dim", 0) + parameters.get("n", 0)
        if i % 7 == 0 or wide >= 256:
            label = "-".join(map(str, parameters.values()))
            marks = () if i % 28 == 0 or wide >= 512 else pytest.mark.nightly
            yield pytest.param(experiment, id=f"{experiment.name}-{label}", marks=marks)


def _assemble(ptx: str, folder: Path) -> tuple[Path, str]:
    source, binary = folder / "bench.ptx", folder / "bench.cubin"
    source.write_text(ptx)
    command = [_tool("ptxas"), "-arch=sm_90a", "-v", source, "-o", binary]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return binary, done.stderr


@pytest.mark.optional
@pytest.mark.parametrize("experiment", list(_representatives()))
def test_every_experiment_assembles_without_spills(experiment, tmp_path):
    _, said = _assemble(experiment.ptx(), tmp_path)
    assert "0 bytes spill stores, 0 bytes spill loads" in said, said
    assert not any(word in said for word in ("serialized", "warning", "Potential Performance Loss")), said
    registers = int(said.split("Used ")[1].split()[0])
    threads = int(experiment.ptx().split(".maxntid ")[1].split(",")[0])
    assert registers * threads <= 65536, f"{registers} registers of {threads} threads"


# (keys, head_dim): the smallest, that of the shipped kernels, and one whose halves differ
@pytest.mark.parametrize(("n", "head_dim"), [(32, 64), (128, 128), (64, 256)])
@pytest.mark.parametrize("dtype", ["fp16", "e4m3"])
@pytest.mark.parametrize("order", ["serial", "tree"])
def test_a_step_has_the_instructions_it_states(dtype, n, head_dim, order):
    step = Step(dtype, n, head_dim, order)
    assert maxima(step).count("shfl.sync") == 4
    assert maxima(step).count("max.") == n // 2 + 4  # the running maximum is one more operand of each row
    assert exponentials(step).count("ex2.approx") == n // 2 + 2  # and alpha of two rows
    assert exponentials(step).count("fma.rn") == n // 2 + 2  # and the sums
    assert exponentials(step).count("add.rn") == n // 2 - 2
    assert convert(step, carry=True).count("cvt.rn") == n // 4
    assert rescale(step).count("mul.rn") == head_dim // 2
    k = 16 if dtype == "fp16" else 32
    assert qk(step).count("wgmma.mma_async") == head_dim // k
    assert pv(step).count("wgmma.mma_async") == n // k
    assert pv(step, 8).count("wgmma.mma_async") == 8


@pytest.mark.optional
@pytest.mark.parametrize("dtype", ["fp16", "e4m3"])
def test_the_loop_of_a_step_keeps_every_exponential_and_hoists_nothing(dtype, tmp_path):
    (experiment,) = (
        e
        for e in chosen(MULTIPROCESSORS, ["softmax_step"])
        if not hasattr(e, "smem_bytes")
        and e.parameters == Step(dtype, 128, 128).parameters | {"steps": 8, "stamps": "whole", "warpgroups": 1}
    )
    binary, _ = _assemble(experiment.ptx(), tmp_path)
    sass = subprocess.run([_tool("nvdisasm"), binary], capture_output=True, text=True, check=True).stdout
    loop = sass[sass.index("\n.L_x_0:") : sass.index("BRA `(.L_x_0)")]
    assert loop.count("MUFU.EX2") == 64 + 2
    assert loop.count("F2FP") == 32
    assert loop.count("FMUL") == 64 + 2  # O, and the maxima times the scale
    assert loop.count("FFMA") == 64 + 2
    assert loop.count("FMNMX") == (64 + 4 if dtype == "fp16" else 0)
    assert loop.count("VIMNMX3") == (0 if dtype == "fp16" else 32)


@pytest.mark.parametrize("chains", [1, 2, 4, 8])
@pytest.mark.parametrize("operation", sorted(VECTOR))
def test_chains_are_as_long_as_stated(operation, chains):
    passes, remainder = divmod(DEPENDENT * chains, PER_PASS)
    assert remainder == 0
    text = repeat(vector(operation, PER_PASS // chains, chains), passes).text
    assert f"add.u32 %count, %zero, {passes};" in text
    assert sum(text.count(VECTOR[operation].format(i=i)) for i in range(8)) * passes == DEPENDENT * chains


@pytest.mark.parametrize("size", [8192, 32768])
def test_an_addition_adds_as_many_bytes_as_it_states(size):
    assert vector_add(size).text.count("red.global.add.v4.f32") * 128 * 16 == size
    assert f"[%copies], {size};" in bulk_add(size).text


def test_experiments_are_chosen_by_name():
    assert {e.name for e in chosen(MULTIPROCESSORS, ["launch", "chain"])} == {"launch", "chain"}
    with pytest.raises(ValueError, match="no experiment is called nothing"):
        chosen(MULTIPROCESSORS, ["nothing"])
    assert {e.name for e in chosen(MULTIPROCESSORS, None)} >= NAMES
