"""Scripts that show findings about other people's kernels: short, of their library alone, and still true."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from fa3_reports.issue import description, issue

FOLDER = Path(__file__).parents[2] / "reports" / "findings" / "scripts"
SCRIPTS = sorted(FOLDER.glob("*.py"))
TRACKERS = FOLDER.parent / "trackers"
AT_MOST = 40  # lines, so that a maintainer reads it at a glance
# The library that a script for a CPU needs, and how its title begins, by what its name begins with.
LIBRARIES = {
    "torch": ("torch", "torch"),
    "jax": ("jax", "JAX"),
    "openvino": ("openvino", "OpenVINO"),
    "onnxruntime": ("onnxruntime", "ONNX Runtime"),
    "flash": ("flash_attention_jax", "flash-attention-jax"),
    "memory": ("memory_efficient_attention_pytorch", "memory-efficient-attention-pytorch"),
    "ring": ("ring_attention_pytorch", "ring-attention-pytorch"),
    "ringattention": ("ringattention", "ringattention (JAX)"),
}
ON_A_CPU = [script for script in SCRIPTS if script.stem.partition("_")[0] in LIBRARIES]
# What a script imports beside the standard library and its own; torch loads libraries of operators.
IMPORTS = {
    "jax": set[str](),
    "dew": {"jax", "numpy"},
    "triton": {"torch", "triton"},
    "openvino": {"numpy"},
    "onnxruntime": {"numpy", "onnx"},
    "flash": {"jax"},
    "ringattention": {"jax"},
}


def modules(script: Path) -> set[str]:
    """The packages that a script imports."""
    found = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
    return found


each = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)


@each
def test_a_script_is_short_and_needs_its_library_alone(script):
    assert len(script.read_text().splitlines()) <= AT_MOST
    kind = script.stem.partition("_")[0]
    own = {LIBRARIES[kind][0]} if kind in LIBRARIES else set()
    assert modules(script) - set(sys.stdlib_module_names) == IMPORTS.get(kind, {"torch"}) | own


@pytest.mark.parametrize("script", ON_A_CPU, ids=lambda script: script.stem)
def test_a_finding_is_there_still_and_its_text_has_the_script(script):
    library, title = LIBRARIES[script.stem.partition("_")[0]]
    if not importlib.util.find_spec(library):
        pytest.skip("needs the library that it is about")
    text = issue(script)
    assert text.startswith((f"# {title}, ", f"# {title} "))
    assert script.read_text().split('"""', 2)[2].strip() in text
    assert "It prints (not as expected):" in text, "mended? say in which version, in the table beside it"


@pytest.mark.parametrize("script", [x for x in SCRIPTS if x not in ON_A_CPU], ids=lambda script: script.stem)
def test_the_text_of_a_script_that_needs_a_gpu_is_ready_and_has_the_script_as_it_is(script):
    assert (TRACKERS / f"{script.stem}.md").read_text().startswith(description(script))
    assert f"\npython {script.name}" in (FOLDER / "README.md").read_text(), "one line that runs it"
    source = script.read_text()
    assert "shows" in source
    assert "mended" in source
    assert "sha256" in source or script.stem == "cudnn_one_query_and_key", "of the binary"
    assert "__version__" in source


def test_no_text_is_of_a_script_that_is_gone():
    assert {text.stem for text in TRACKERS.glob("*.md")} == {x.stem for x in SCRIPTS if x not in ON_A_CPU}


def test_the_table_has_every_script_its_version_or_the_hash_of_its_binary_and_what_is_known_of_reports():
    rows = [row for row in (FOLDER / "README.md").read_text().splitlines() if row.startswith("| [")]
    assert sorted(row.partition("](")[2].partition(")")[0] for row in rows) == [script.name for script in SCRIPTS]
    seen_in = ""
    for row in rows:
        _, _, binary, reported = row.split(" | ")
        seen_in = seen_in if binary == "the same" else binary
        assert re.search(r"\b[0-9a-f]{12}\b|prints (?:its hash|the hashes)|^[a-z-]+ \d+\.", seen_in), row
        assert re.search(r"not found|\(https://github.com/\S+/(?:issues|pull)/\d+\)", reported), row


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("print(1)\n", "must begin with a description"),
        ('"""A title alone."""\n', "must begin with a description"),
        (
            '"""A title.\n\nExpected: 1.\n"""\nraise RuntimeError("no such operator")\n',
            "RuntimeError: no such operator",
        ),
        ('"""A title.\n\nExpected: 1.\n"""\nimport os\n\nos._exit(3)\n', "exit code 3"),
    ],
)
def test_a_script_that_says_nothing_or_fails_by_itself_makes_no_text(body, says, tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(body)
    with pytest.raises(ValueError, match=says):
        issue(script)


def test_a_mended_finding_says_so(tmp_path):
    script = tmp_path / "mended.py"
    script.write_text('"""A title.\n\nExpected: nothing.\n"""\nprint("all is well")\n')
    assert issue(script) == (
        '# A title\n\nExpected: nothing.\n\n```python\nprint("all is well")\n```\n\n'
        "It prints (mended: the script ends with 0):\n\n```\nall is well\n```\n"
    )
