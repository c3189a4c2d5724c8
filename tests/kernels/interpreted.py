"""Programs whose kernels Triton's interpreter runs on a CPU, each in a process of its own.

The interpreter is chosen when Triton is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys

_PATCHED = """
from fa3verify.tensors import interpreter

assert interpreter.correct() is None
"""


def check_equal(program: str, seed: int) -> None:
    """Run a program, in which SEED is the seed, that prints "equal" when all its assertions have held."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    run = [sys.executable, "-c", _PATCHED + program.replace("SEED", str(seed))]
    found = subprocess.run(run, capture_output=True, text=True, env=environment, timeout=300)
    assert found.stdout.strip() == "equal", found.stderr[-2000:]
