"""Programs whose kernels Triton's interpreter runs on a CPU, each in a process of its own.

The interpreter is chosen when Triton is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys

_PATCHED = """
from triton.runtime import interpreter

patch = interpreter._patch_lang_tensor


def of_one_element(tensor, scope):
    # numpy 2.4 converts no array of one element to an integer, as Triton 3.6 asks it to
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = of_one_element
"""


def check_equal(program: str, seed: int) -> None:
    """Run a program, in which SEED is the seed, that prints "equal" when all its assertions have held."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    run = [sys.executable, "-c", _PATCHED + program.replace("SEED", str(seed))]
    found = subprocess.run(run, capture_output=True, text=True, env=environment, timeout=300)
    assert found.stdout.strip() == "equal", found.stderr[-2000:]
