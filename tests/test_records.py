"""Records are frozen and slotted, the few that grow while something runs are named here; no two share a name."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("fa3verify", "simulator/fa3_simulator", "kernels/fa3_kernels", "reference/fa3_reference")
GROW = {
    "Access",
    "Colony",
    "Elimination",
    "Findings",
    "ForwardColony",
    "Phase",
    "RowState",
    "Stream",
    "Warps",
}
HAVE_A_DICTIONARY = {
    "AttentionCall",
    "CheckedRows",
    "Layer",
}  # they remember what they work out, or others inherit
NAMED_BASES = {"NamedTuple", "TypedDict", "Protocol"}


def _records() -> Iterator[tuple[str, set[str]]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                for mark in node.decorator_list if isinstance(node, ast.ClassDef) else ():
                    if ast.unparse(mark).startswith("dataclass"):
                        given = mark.keywords if isinstance(mark, ast.Call) else []
                        assert isinstance(node, ast.ClassDef)
                        yield node.name, {str(word.arg) for word in given if ast.unparse(word.value) == "True"}


def test_records_are_frozen_and_slotted():
    records = list(_records())
    assert len(records) > 100
    assert {name for name, marks in records if "frozen" not in marks} == GROW
    assert {name for name, marks in records if "slots" not in marks} == HAVE_A_DICTIONARY


def test_no_two_records_share_a_name():
    trees = [ast.parse(path.read_text()) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    names = Counter(
        node.name
        for node in classes
        if any("dataclass" in ast.unparse(mark) for mark in node.decorator_list)
        or NAMED_BASES & set(map(ast.unparse, node.bases))
    )
    assert not {name for name, count in names.items() if count > 1}
