"""The text of an issue about somebody else's kernel: what its script says of itself, the script, and what it prints."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path


def issue(script: Path) -> str:
    """Run a script of ``reports/findings/scripts`` and return a text for the tracker of its library, in Markdown.

    Raises
    ------
    ValueError
        For a script that begins with no description of a title and a paragraph, or that ends by an error of its own.
    OSError
        For a file that cannot be read.
    """
    source = script.read_text(encoding="utf-8")
    title, _, expected = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")
    if not expected:
        raise ValueError(f"{script} must begin with a description: a title, an empty line and what one expects")
    code = source.split('"""', 2)[2].strip()
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    if ended.returncode not in (0, 1) or "Traceback" in ended.stderr:
        said = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
        raise ValueError(f"{script} failed by itself: {said[-1]}")
    state = "mended: the script ends with 0" if ended.returncode == 0 else "not as expected"
    printed = f"It prints ({state}):\n\n```\n{ended.stdout.strip()}\n```\n"
    return f"# {title.rstrip('.')}\n\n{expected}\n\n```python\n{code}\n```\n\n{printed}"
