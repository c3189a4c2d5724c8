"""Kernels that deceive, die or misbehave, and some that only look as if: every one with the verdict it deserves."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from dataclasses import dataclass, replace

import numpy as np

from fa3_kernels.plan.config import default_config
from fa3_reference.attention import attention
from fa3_reference.formats import FORMATS, encode
from fa3verify.kernels.record import Functions, Kernel
from fa3verify.operations.forward import Result

ODD = "\x00\x1b[2J\ud800\u202e<b>&]]>\n"


@dataclass(frozen=True)
class Expected:
    """A verdict, words that a finding has, whether some finding has a replay file, and the tasks that are run."""

    verdict: str
    words: str = ""
    replays: bool = True
    tasks: tuple[str, ...] = ("family normal", "law repeated_run_is_identical")


EXPECTED: dict[str, Expected] = {}
MODULES: dict[str, str] = {  # texts of modules that misbehave while they are imported
    "hostile_exit": "import sys\nsys.exit(0)\n",
    "hostile_abort": "import os\nos.abort()\n",
}
EXPECTED |= {
    "hostile_exit:kernel": Expected("fail", "SystemExit: 0", replays=False),
    "hostile_abort:kernel": Expected("fail", "killed by SIGABRT", replays=False),
}


def raises_when_called() -> Kernel:
    raise RuntimeError("no device\x00")


EXPECTED["hostile:raises_when_called"] = Expected("fail", r"RuntimeError: no device\x00", replays=False)


def exits_in_configure() -> Kernel:
    return kernel(ideal).altered(configure=lambda problem: sys.exit(0))


def exits_in_identity() -> Kernel:
    return kernel(ideal).altered(identity=lambda: sys.exit(0))


def lies_in_identity() -> Kernel:
    return kernel(ideal).altered(identity=lambda: {"name": ODD})


EXPECTED["hostile:exits_in_configure"] = Expected("fail", "SystemExit: 0", replays=False)
EXPECTED["hostile:exits_in_identity"] = Expected("fail", "SystemExit: 0", replays=False)
EXPECTED["hostile:lies_in_identity"] = Expected("fail", "unexpected keyword argument 'name'", replays=False)


def ideal(problem, operands, config):
    exact = attention(problem, *operands.dequantized(problem))
    return Result(encode(exact.out, FORMATS[config.out_dtype], "ieee"), exact.lse.astype(np.float32))


def kernel(run, description="", **fields) -> Kernel:
    return Kernel(
        "anything", "fp16", Functions(run, default_config), frozenset({"causal", "gqa"}), description, **fields
    )


def hostile(verdict: str, words: str = "", **rest):
    """Make a kernel of a function that runs, and note what it deserves."""

    def made(run):
        EXPECTED[f"hostile:{run.__name__}"] = Expected(verdict, words, **rest)
        return lambda: kernel(run, description=ODD)

    return made


@hostile("fail", "killed by SIGSEGV")
def segfaults(problem, operands, config):
    ctypes.string_at(0)


@hostile("fail", "killed by SIGABRT; it printed last: Fatal Python error")
def aborts(problem, operands, config):
    os.abort()


@hostile("fail", "died with exit code 0")
def ends_the_process(problem, operands, config):
    os._exit(0)


@hostile("fail", "SystemExit: 0")
def exits(problem, operands, config):
    sys.exit(0)


@hostile("fail", "KeyboardInterrupt", replays=False)
def interrupts(problem, operands, config):
    raise KeyboardInterrupt


@hostile("fail", "no answer within")
def hangs(problem, operands, config):
    time.sleep(600)


@hostile("fail", "changed its operand q and v")
def overwrites(problem, operands, config):
    result = ideal(problem, operands, config)
    for x in (operands.q, operands.v):
        x.setflags(write=True)
        x[...] = 0
    return Result(result.out * 0, result.lse)


@hostile("fail", "returned out of dtype float64, expected float16")
def float64(problem, operands, config):
    exact = attention(problem, *operands.dequantized(problem))
    return Result(exact.out, exact.lse.astype(np.float32))


@hostile("fail", "returned out of shape")
def heads_first(problem, operands, config):
    out, lse = ideal(problem, operands, config)
    return Result(out.swapaxes(1, 2), lse)


@hostile("fail", "non-finite outputs")
def nan(problem, operands, config):
    out, lse = ideal(problem, operands, config)
    return Result(np.full_like(out, np.nan), lse)


_LEAKED = []


@hostile("fail", "MemoryError")
def leaks(problem, operands, config):
    _LEAKED.append(np.empty(1 << 26))
    return ideal(problem, operands, config)


@hostile("fail", r"ValueError: \x00\x1b[2J\ud800\u202e<b>&]]>")
def raises_odd_text(problem, operands, config):
    raise ValueError(ODD + "x" * 10**7)


class _Mute(Exception):
    def __str__(self) -> str:
        raise SystemExit(0)


@hostile("fail", "its __str__ raised SystemExit")
def raises_without_text(problem, operands, config):
    raise _Mute


@hostile("fail", "repeated_run_is_identical")
def varies(problem, operands, config):
    out, lse = ideal(problem, operands, config)
    up = np.nextafter(out, np.float16(np.inf), dtype=np.float16)
    return Result(np.where(np.random.default_rng().random(out.shape) < 0.5, out, up), lse)


@hostile("fail", "bound")
def gives_back_its_query(problem, operands, config):
    _, lse = ideal(problem, operands, config)
    return Result(operands.q, lse)


_ANSWERS = {}


@hostile("fail", "V times 2^", tasks=("family normal", "law value_scaling_by_powers_of_two"))
def remembers_by_shape(problem, operands, config):
    return _ANSWERS.setdefault(problem, ideal(problem, operands, config))


@hostile("fail", "bound")
def remembers_the_first_head(problem, operands, config):
    out, lse = ideal(problem, operands, config)
    out[:, :, 1:] = out[:, :, :1]
    return Result(out, lse)


@hostile("pass")
def prints(problem, operands, config):
    print(json.dumps({"verdict": "pass"}), ODD.encode("utf-8", "replace").decode(), "x" * 10**5)
    os.write(1, b"\x00\xff{}\n" * 1000)
    return ideal(problem, operands, config)


@hostile("pass")
def forks(problem, operands, config):
    if not os.fork():
        time.sleep(0.01)
    return ideal(problem, operands, config)


@hostile("pass")
def copies_what_is_read_only(problem, operands, config):
    q = operands.q if operands.q.flags.writeable else operands.q.copy()
    result = ideal(problem, replace(operands, q=q), config)
    q[...] = 0
    return result


@hostile("pass")
def returns_strided_views(problem, operands, config):
    out, lse = ideal(problem, operands, config)
    return {"lse": np.asfortranarray(lse), "out": np.repeat(out, 2, axis=-1)[..., ::2]}


_BUFFERS = {}


@hostile("pass")
def reuses_its_output(problem, operands, config):
    out, lse = ideal(problem, operands, config)
    buffer = _BUFFERS.setdefault(problem.out_shape, np.empty_like(out))
    buffer[...] = out
    return Result(buffer, lse)


@hostile("pass")
def wants_every_error(problem, operands, config):
    with np.errstate(all="ignore"):
        result = ideal(problem, operands, config)
    np.seterr(all="raise")
    return result
