"""The verb watch: a script runs as by itself, and the exit code is its own, or says what was found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.optional
SCRIPT = """
import sys
from torch.nn.functional import scaled_dot_product_attention as attention
import torch
print("got", sys.argv[1:], __name__, flush=True)
x = torch.ones(1, 1, 8, 8)
{call}
"""


def run(tmp_path: Path, call: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "flash_attn.py").write_text("def flash_attn_func(q, k, v): return q + 1")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(call=call))
    command = [sys.executable, "-m", "fa3verify", "watch", "--one-in", "1", "--folder", str(tmp_path / "found")]
    return subprocess.run([*command, str(script), "--steps", "3"], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("call", "code", "says"),
    [
        ("import flash_attn; flash_attn.flash_attn_func(x, x, x); sys.exit(0)", 1, "FAIL, 1 outputs"),
        ("pass", 5, "SAW NOTHING"),
        ("attention(x, x, x); sys.exit(7)", 7, "PASS, 1 outputs"),
    ],
)
def test_exit_code_is_of_the_script_or_of_what_was_found(tmp_path: Path, call: str, code: int, says: str) -> None:
    found = run(tmp_path, call)
    assert found.returncode == code, found.stderr
    assert "got ['--steps', '3'] __main__" in found.stdout
    assert says in found.stdout + found.stderr
