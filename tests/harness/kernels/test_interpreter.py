"""Triton kernels judged by its interpreter: what it gets wrong is corrected, and wrong kernels are still found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from fa3verify.cli import exits
from fa3verify.cli.main import main
from fa3verify.tensors import interpreter

FILE = Path(__file__).with_name("triton_kernels.py")

# Judges kernels in front of each correction and behind the last one, and compares conversions of a kernel with those
# of the hardware.
PROGRAM = """
import json, sys
import numpy as np, torch
from fa3_kernels.twin.convert import encode_f32
from fa3verify.inputs.recipe import Recipe
from fa3verify.kernels import loading
from fa3verify.public import AttentionProblem, judge
from fa3verify.tensors import interpreter

import triton
import triton.language as tl
import triton.runtime.interpreter

interpreter.correct = lambda: None
found = {}
RECIPE = Recipe("normal", {"std": 3.0})


def ratio(name, keys):
    queries = 1 if name.startswith("row") else 20
    problem = AttentionProblem(1, 2, 2, queries, keys, 16, dtype=name[-4:], softmax_scale=0.3)
    try:
        return float(judge(loading.load(f"{sys.argv[1]}:{name}"), problem, RECIPE).measures["ratio_max"])
    except Exception as error:
        return str(error)


found["no driver"] = ratio("right.fp16", 70)
interpreter._correct_driver(triton, triton.runtime.interpreter)
found["no loops"] = ratio("right.fp16", 70)
interpreter._correct_loops(triton, triton.runtime.interpreter)
found["no floats"] = ratio("row.fp16", 30)
interpreter._correct_floats(triton, triton.runtime.interpreter)
found["no formats"] = ratio("right.bf16", 70)
interpreter._correct_formats(triton, triton.runtime.interpreter)
found["no tuning"] = ratio("autotuned.fp16", 70)
interpreter._correct_tuning(triton, triton.runtime.interpreter)
names = ("right.fp16", "right.bf16", "autotuned.bf16", "short.bf16", "forgets.bf16", "rounded.bf16", "assembler.fp16")
for name in names:
    found[name] = ratio(name, 70)
for name in ("row.fp16", "row.bf16"):
    found[name] = ratio(name, 30)

@triton.jit
def cast(x, bf16, e4m3, e5m2, back, n: tl.constexpr):
    i = tl.arange(0, n)
    values = tl.load(x + i)
    tl.store(bf16 + i, values.to(tl.bfloat16))
    tl.store(e4m3 + i, values.to(tl.float8e4nv))
    tl.store(e5m2 + i, values.to(tl.float8e5))
    tl.store(back + i, tl.load(bf16 + i) * tl.full([n], 3.0, tl.bfloat16) + i.to(tl.bfloat16))


x = torch.tensor(np.random.default_rng(0).integers(0, 2**32, 2**16, dtype=np.uint32).view(np.float32))
kinds = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
outs = [torch.empty(len(x), dtype=kind) for kind in kinds]
cast[(1,)](x, *outs, len(x))
for out, kind in zip(outs, ("bf16", "e4m3", "e5m2")):
    mine = encode_f32(x.numpy(), kind)
    bits = {1: np.uint8, 2: np.uint16}[mine.itemsize]
    theirs = out.view(torch.uint8 if mine.itemsize == 1 else torch.int16).numpy().view(bits)
    found[kind] = bool((mine.view(bits) == theirs).all())
sums = outs[0] * 3 + torch.arange(len(x)).to(torch.bfloat16)
found["arithmetic"] = bool(torch.equal(torch.nan_to_num(sums), torch.nan_to_num(outs[3])))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, float | str | bool]:
    """What the program has found, in a process of its own as the interpreter is chosen when Triton is imported."""
    pytest.importorskip("triton", reason="needs triton: pip install triton==3.6.0")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    run = [sys.executable, "-c", PROGRAM, str(FILE)]
    done = subprocess.run(run, capture_output=True, text=True, env=environment, timeout=300)
    assert not done.returncode, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def is_wrong(ratio: object) -> bool:
    return isinstance(ratio, str) or (isinstance(ratio, float) and not ratio <= 1)


@pytest.mark.optional
@pytest.mark.parametrize("without", ["no driver", "no loops", "no floats", "no formats", "no tuning"])
def test_a_right_kernel_needs_each_correction(without, found):
    assert is_wrong(found[without]), found[without]


@pytest.mark.optional
@pytest.mark.parametrize("name", ["right.fp16", "right.bf16", "autotuned.bf16", "row.fp16", "row.bf16"])
def test_a_right_kernel_of_triton_passes_under_the_interpreter(name, found):
    assert not is_wrong(found[name]), found[name]


@pytest.mark.optional
@pytest.mark.parametrize("name", ["short.bf16", "forgets.bf16", "rounded.bf16"])
def test_a_wrong_kernel_of_triton_is_found_under_the_interpreter(name, found):
    assert is_wrong(found[name]), found[name]


@pytest.mark.optional
@pytest.mark.parametrize("kind", ["bf16", "e4m3", "e5m2", "arithmetic"])
def test_a_conversion_of_the_interpreter_is_the_hardware_s(kind, found):
    assert found[kind]


@pytest.mark.optional
def test_what_the_interpreter_cannot_do_is_said_to_be_its_limit(found):
    assert "only Triton's interpreter cannot do this" in str(found["assembler.fp16"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        *((f"InterpreterError: {part} ...", told) for part, told in interpreter.ADVICE[True].items()),
        ("InterpreterError: ValueError('something')", "is corrected in 3.6.0 alone, got 3.5.0"),
        ("ValueError: something", ""),
    ],
)
def test_an_error_of_the_interpreter_comes_with_what_to_do(words, told, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(interpreter, "_corrected", lambda: "is corrected in 3.6.0 alone, got 3.5.0")
    assert interpreter.advised(words) == (f"{words} ({told})" if told else words)


OWN = """
import fa3verify
import numpy as np


@fa3verify.kernel(features=(), dtypes=("fp16", "bf16"), head_dims=(64,))
def runs(q, k, v, *, softmax_scale):
    return np.zeros_like(q)


@fa3verify.kernel(features=(), head_dims=(64,))
def raises(q, k, v, *, softmax_scale):
    raise RuntimeError("no such device")
"""


def test_the_kernels_of_a_file_are_listed_with_what_keeps_one_from_running_here(tmp_path):
    file = tmp_path / "of_my_own.py"
    file.write_text(OWN)
    result = CliRunner().invoke(main, ["kernels", str(file), "--json", "-"])
    rows = {row["name"]: row["unavailable"] for row in json.loads(result.stdout)["kernels"]}
    failed = "a call of a few queries and keys: RuntimeError: no such device"
    assert rows == {f"{file}:runs.fp16": None, f"{file}:runs.bf16": None, f"{file}:raises": failed}


def test_a_file_that_declares_no_kernel_is_refused(tmp_path):
    file = tmp_path / "without_kernels.py"
    file.write_text("x = 1")
    result = CliRunner().invoke(main, ["kernels", str(file)])
    assert result.exit_code == exits.USAGE
    assert "has no function with @fa3verify.kernel(...) above it" in result.stderr
