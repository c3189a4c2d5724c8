"""The text of an issue about somebody else's kernel: what its script says of itself, the script, and what it prints."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def issue(script: Path, arguments: Sequence[str] = ()) -> str:
    """Run a script of ``reports/findings/scripts`` and return a text for the tracker of its library, in Markdown.

    Parameters
    ----------
    script : Path
    arguments : sequence of str
        What the script is run with, such as the path of the library.

    Raises
    ------
    ValueError
        For a script that begins with no description of a title and a paragraph, or that ends by an error of its own.
    OSError
        For a file that cannot be read.
    """
    head = description(script)
    ended = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, check=False)
    if ended.returncode not in (0, 1) or "Traceback" in ended.stderr:
        said = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
        raise ValueError(f"{script} failed by itself: {said[-1]}")
    state = "mended: the script ends with 0" if ended.returncode == 0 else "not as expected"
    return f"{head}It prints ({state}):\n\n```\n{ended.stdout.strip()}\n```\n"


def description(script: Path) -> str:
    """Return the title, what happens, what one expects, and the script, without running it; ValueError as above."""
    source = script.read_text(encoding="utf-8")
    title, _, expected = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")
    if not expected:
        raise ValueError(f"{script} must begin with a description: a title, an empty line and what one expects")
    code = source.split('"""', 2)[2].strip()
    return f"# {title.rstrip('.')}\n\n{expected}\n\n```python\n{code}\n```\n\n"
