"""``simulate --cubin`` of a GEMM that Triton compiles here, without a GPU, and of descriptions right and wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("torch", reason="needs torch (extra 'gpu')")
pytest.importorskip("triton", reason="needs triton: pip install triton==3.6.0")

import triton
import triton.language as tl

from fa3_reports.audit.compile import FakeTensor, _build
from fa3verify.cli.main import main

pytestmark = pytest.mark.optional
BM, BN, BK = 128, 128, 64


@triton.jit
def gemm(a, b, c, k, bm: tl.constexpr, bn: tl.constexpr, bk: tl.constexpr):
    rows, columns, depth = tl.arange(0, bm), tl.arange(0, bn), tl.arange(0, bk)
    acc = tl.zeros((bm, bn), tl.float32)
    for start in range(0, k, bk):
        left = tl.load(a + rows[:, None] * 4096 + (start + depth)[None, :])
        right = tl.load(b + (start + depth)[:, None] * 4096 + columns[None, :])
        acc += tl.dot(left, right)
    tl.store(c + rows[:, None] * 4096 + columns[None, :], acc.to(tl.bfloat16))


DESCRIBED = """
from fa3verify.schedule import Launch, kernel

@kernel
def gemm(cta, tiles, *, bn=128, bk=64, stages=3, fma=0.0, counts=True, other=40):
    a, b = ([cta.smem(f"{x}[{i}]", size * bk * 2) for i in range(stages)] for x, size in (("A", 128), ("B", bn)))
    everyone = cta.named_barrier("__syncthreads", 256, 0)
    w = cta.warpgroup("warps", registers=255, warpgroups=2)
    acc = w.fragment("C", bn, rows=128)
    for tile in tiles:
        for i in range(stages - 1):
            w.cp_async(a[i])
            w.cp_async(b[i])
        for block in range(tile.blocks):
            w.cp_async_wait(2)
            w.bar_sync(everyone)
            w.wgmma("A B", a=a[block % stages], b=b[block % stages], acc=acc, m=128, n=bn, k=bk)
            if counts:
                w.vector("addresses", other=other, fma=fma)
            w.wgmma_wait(0)
            w.cp_async(a[(block + 2) % stages])
            w.cp_async(b[(block + 2) % stages])
        w.read(acc)
        w.global_store(128 * bn * 2)

@gemm.launch
def launch(k=4096, *, bk):
    return Launch([k // bk] * 1024, flops=2 * 128 * 128 * 1024 * k, persistent=False)
"""


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    """The description of the GEMM, and the GEMM as Triton compiles it for Hopper."""
    folder = tmp_path_factory.mktemp("cubin")
    page, binary = folder / "gemm.py", folder / "gemm.cubin"
    page.write_text(DESCRIBED)
    bf16 = FakeTensor(tl.bfloat16)
    built = _build(gemm, (bf16, bf16, bf16, 4096, BM, BN, BK), {"num_warps": 8, "num_stages": 3})
    binary.write_bytes(built.asm["cubin"])
    return page, binary


def compiled(files: tuple[Path, Path], *settings: str) -> dict:
    page, binary = files
    given = [word for setting in settings for word in ("--set", setting)]
    code, out, _ = run("simulate", page, "--cubin", binary, *given, "--quiet", "--json", "-")
    assert code in (0, 1), out  # 1 where the description has hazards, which is not asked here
    return json.loads(out)


def test_products_and_copies_of_a_compiled_loop_are_those_described(files) -> None:
    told = compiled(files)["compiled"]
    (row,) = told["streams"]
    assert told["function"] == "gemm"
    assert row["streams"] == ["warps"]
    # two warpgroups: each has 64 of 128 rows, in four steps of 16; 32 KiB are eight copies of 16 bytes a thread
    assert row["counts"]["64x128x16"] == [4, 4]
    assert row["counts"]["cp.async"] == [8, 8]
    assert not {"64x128x16", "cp.async", "arrive"} & {*row["differs"]}


def test_a_description_of_another_tile_or_of_wrong_counts_is_named(files) -> None:
    (row,) = compiled(files, "bn=256", "fma=500")["compiled"]["streams"]
    assert {"64x128x16", "64x256x16", "fma"} <= {*row["differs"]}
    assert row["counts"]["fma"][0] == 500
    (row,) = compiled(files, "bk=128")["compiled"]["streams"]
    assert row["blocks_a_trip"] == 0.5  # and a trip is half of such a block, with the same products
    assert row["counts"]["64x128x16"] == [8, 8]


def test_compiled_counts_take_the_place_of_those_declared(files) -> None:
    """Whoever declares what is compiled, or nothing, or ten times as much, gets the same second estimate."""
    (row,) = compiled(files)["compiled"]["streams"]
    own = row["counts"]["other"][1]
    nothing = compiled(files, "other=0")
    tenfold = compiled(files, f"other={10 * own:.0f}")
    assert tenfold["cycles"] > nothing["cycles"]
    again = [told["compiled"]["cycles"] for told in (nothing, tenfold)]
    assert again[0] == pytest.approx(again[1], rel=0.02)
    assert nothing["cycles"] <= again[0] < tenfold["cycles"]
    assert compiled(files, "counts=False")["compiled"]["moves_by_vector_counts"][0] <= 0


def test_the_table_is_printed_with_marks(files) -> None:
    page, binary = files
    code, out, _ = run("simulate", page, "--cubin", binary, "--set", "fma=500")
    assert code in (0, 1)
    lines = {line.split()[0]: line for line in out.splitlines() if line.startswith("    ")}
    assert lines["64x128x16"].split() == ["64x128x16", "4", "4"]
    assert lines["fma"].endswith("differs")
    assert "with the compiled counts in each vector(...)" in out


def test_what_cannot_be_read_is_said_in_one_line(files, tmp_path: Path, monkeypatch) -> None:
    page, binary = files
    code, _, told = run("simulate", page, "--cubin", binary, "--function", "attention")
    assert (code, told.count("\n")) == (2, 1)
    assert told.endswith("which has gemm\n")
    assert run("simulate", "gluon", "--cubin", binary)[2].endswith("--cubin is for one described kernel\n")
    assert run("simulate", page, page, "--cubin", binary)[0] == 2
    text = tmp_path / "text.cubin"
    text.write_text("no binary")
    code, _, told = run("simulate", page, "--cubin", text)
    assert (code, told.count("\n")) == (2, 1)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("fa3_kernels.audit.sass.find_spec", lambda name: None)
    code, _, told = run("simulate", page, "--cubin", binary)
    assert (code, told.count("\n")) == (3, 1)
    assert "cuobjdump is missing" in told
