"""Keys of meaning: names, places and words keep them; arithmetic, constants, tables and the plan's values do not."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from inspect import getsource
from pathlib import Path

import pytest

import fa3_kernels
import fa3_reference
import fa3_reports
from fa3_kernels.plan.config import default_config
from fa3_kernels.plan.families import FAMILIES
from fa3_kernels.plan.families.record import Shipped
from fa3_kernels.twin.forward import forward
from fa3_reference.problem import AttentionProblem
from fa3_reports import merkle, recordings
from fa3_reports.evidence_keys import FORWARD, ONE_QUERY, code_key, launch_key
from fa3verify.cases.case import Case
from fa3verify.inputs.recipe import Recipe

RECORDINGS = Path(__file__).parents[2] / "reports/h100/recordings"

A = '''"""A module."""
import numpy as np
from fa3_kernels import b
from fa3_kernels.b import Mode, State, scaled

SIZE = 3
ROWS = {"x": 1}


def unused(x):
    return x


def helper(x, y):
    """Subtract."""
    total = x - y  # in this order
    return total


def twin(x: float, *, mode=Mode.FAST) -> float:
    state = State(x, 0.0)
    if mode is Mode.SLOW:
        raise ValueError("slow")
    values = [helper(x=i, y=SIZE) for i in range(SIZE)]
    return scaled(state.doubled(), values) + np.float32(ROWS["x"]) + b.TABLE["c"]
'''
B = """import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

TABLE = json.loads(Path(__file__).with_name("table.json").read_text())


class Mode(Enum):
    FAST = 1
    SLOW = 2
    OTHER = 3


@dataclass
class State:
    x: float
    y: float = 1.0

    def doubled(self):
        return 2 * self.x

    def never_read(self):
        return 7 * self.x


def scaled(value, others):
    return value * sum(others)
"""

DOUBLED = """    def doubled(self):
        return 2 * self.x

"""
MIXIN = f"class Doubled:\n    __slots__ = ()\n    x: float\n\n{DOUBLED}\n"
B_MIXED = B.replace(DOUBLED, "").replace("@dataclass", MIXIN + "@dataclass").replace("State:", "State(Doubled):")


def key_of(tmp_path: Path, files: dict[str, str], module: str = "a", name: str = "twin") -> str:
    folder = tmp_path / str(len(list(tmp_path.iterdir()))) / "kernels" / "fa3_kernels"
    folder.mkdir(parents=True)
    for file, text in ({"__init__.py": ""} | files).items():
        (folder / file).write_text(text)
    return code_key(f"fa3_kernels.{module}", name, folder.parents[1])


FILES = {"a.py": A, "b.py": B, "table.json": '{"c": 5, "d": [1, 2]}'}
KEPT: dict[str, Callable[[dict[str, str]], dict[str, str]]] = {
    "a comment": lambda f: f | {"a.py": A.replace("in this order", "y from x")},
    "a docstring": lambda f: f | {"a.py": A.replace('"""Subtract."""', '"""Take y from x."""')},
    "an annotation": lambda f: f | {"a.py": A.replace("total = x", "total: float = x").replace("-> float", "-> int")},
    "the text of an error": lambda f: f | {"a.py": A.replace('"slow"', '"too slow"')},
    "the order of imports and definitions": lambda f: (
        f | {"a.py": re.sub(r"(?s)(import numpy as np\n)(.*?\n)(\nSIZE = 3\n)(.*)", r"\2\1\4\3", A)}
    ),
    "the name of a function": lambda f: {name: re.sub(r"\bhelper\b", "difference", text) for name, text in f.items()},
    "the name of a class": lambda f: {name: re.sub(r"\bState\b", "Running", text) for name, text in f.items()},
    "the names of a parameter and of its arguments": lambda f: (
        f | {"a.py": A.replace("(x, y)", "(x, other)").replace("x - y", "x - other").replace("y=SIZE", "other=SIZE")}
    ),
    "the names of a local and of a constant": lambda f: (
        f | {"a.py": A.replace("total", "found").replace("SIZE", "COUNT").replace("np", "numpy_")}
    ),
    "the place of a function": lambda f: (
        f
        | {
            "a.py": "from fa3_kernels.c import helper\n" + re.sub(r"(?s)def helper.*?return total\n", "", A),
            "c.py": re.search(r"(?s)def helper.*?return total\n", A)[0],  # type: ignore[index]
        }
    ),
    "the place of a module": lambda f: {
        "a.py": A.replace("from fa3_kernels import b\n", "from fa3_kernels import e as b\n").replace("s.b", "s.e"),
        "e.py": B,
        "table.json": f["table.json"],
    },
    "methods that move to a base": lambda f: f | {"b.py": B_MIXED},
    "a function that is not called": lambda f: f | {"a.py": A.replace("    return x\n", "    return -x\n")},
    "a method that is not read": lambda f: f | {"b.py": B.replace("7 *", "8 *")},
    "a member of an enumeration that is not read": lambda f: f | {"b.py": B.replace("OTHER = 3", "OTHER = 4")},
    "the layout of a table": lambda f: f | {"table.json": '{"d": [1,  2],\n "c": 5}'},
}
CHANGED: dict[str, tuple[str, str, str]] = {
    "the order of operands": ("b.py", "2 * self.x", "self.x * 2"),
    "arithmetic of a callee": ("a.py", "x - y", "x + y"),
    "the operands of a callee": ("a.py", "x - y", "y - x"),
    "a constant": ("a.py", "SIZE = 3", "SIZE = 4"),
    "a constant's item": ("a.py", "\n\n\ndef unused", '\nROWS["x"] = 2\n\n\ndef unused'),
    "an argument": ("a.py", "y=SIZE", "y=2 * SIZE"),
    "parameters that change places while their arguments do not": ("a.py", "(x, y)", "(y, x)"),
    "a default": ("a.py", "mode=Mode.FAST", "mode=Mode.SLOW"),
    "a default of a field": ("b.py", "y: float = 1.0", "y: float = 2.0"),
    "a member of an enumeration that is read": ("b.py", "SLOW = 2", "SLOW = 4"),
    "a method that is read": ("b.py", "return 2 *", "return 3 *"),
    "a condition": ("a.py", "mode is Mode.SLOW", "mode is not Mode.SLOW"),
    "an entry of a table": ("table.json", '"c": 5', '"c": 6'),
    "a base with a field": (
        "b.py",
        "class State:",
        "@dataclass\nclass Base:\n    z: float = 0.0\n\n\nclass State(Base):",
    ),
    "a decorator": ("a.py", "def helper", "@np.vectorize\ndef helper"),
    "a name that hides another": ("a.py", "    values =", "    scaled = helper\n    values ="),
    "a function of another package": ("a.py", "np.float32", "np.float64"),
}


@pytest.mark.parametrize("what", KEPT)
def test_a_key_outlives_what_decides_no_bit(what, tmp_path):
    files = KEPT[what](FILES)
    assert files != FILES
    assert key_of(tmp_path, files) == key_of(tmp_path, FILES)


@pytest.mark.parametrize("what", CHANGED)
def test_a_key_changes_with_what_may_decide_a_bit(what, tmp_path):
    file, old, new = CHANGED[what]
    assert old in FILES[file]
    assert key_of(tmp_path, FILES | {file: FILES[file].replace(old, new)}) != key_of(tmp_path, FILES)


def test_mappings_that_are_unpacked_count_in_their_order(tmp_path):
    text = "def twin(a, b):\n    return dict(**a, **b, **a)\n"
    swapped = text.replace("**a, **b, **a", "**b, **a, **a")
    assert len({key_of(tmp_path, {"a.py": text}) for _ in range(20)}) == 1
    assert key_of(tmp_path, {"a.py": swapped}) != key_of(tmp_path, {"a.py": text})


def test_a_name_that_no_module_defines_is_refused():
    with pytest.raises(ValueError, match=r"fa3_kernels\.twin\.forward defines no 'backwards'"):
        code_key("fa3_kernels.twin.forward", "backwards")


@pytest.fixture
def tree(tmp_path) -> Path:
    """A copy of the sources whose names keys are of."""
    for package in (fa3_kernels, fa3_reference, fa3_reports):
        room = package.__name__.partition("_")[2]
        shutil.copytree(
            package.__path__[0],
            tmp_path / room / package.__name__,
            ignore=shutil.ignore_patterns("__pycache__", "gluon", "audit"),
        )
    return tmp_path


def test_a_redesign_of_the_tree_keeps_the_twins_keys(tree):
    """A function and a module are renamed and moved, and every file has another comment."""
    kernels = tree / "kernels" / "fa3_kernels"
    (kernels / "plan" / "tiles.py").rename(kernels / "twin" / "row_tiles.py")
    for path in tree.rglob("*.py"):
        text = path.read_text().replace("fa3_kernels.plan.tiles", "fa3_kernels.twin.row_tiles")
        text = re.sub(r"\b_run_tile\b", "_tile", re.sub(r"\bsplit_ranges\b", "parts_of", text))
        path.write_text(f"{text}\n# A comment.\n")
    place = kernels / "twin" / "forward.py"
    text = place.read_text()
    padded = re.search(r"(?s)def _padded\(.*?\n\n\n", text)[0]  # type: ignore[index]
    place.write_text(
        text.replace(padded, "").replace("import numpy", "from fa3_kernels.twin.pad import _padded\nimport numpy")
    )
    (kernels / "twin" / "pad.py").write_text(f'"""Zeros."""\nimport numpy as np\n\n\n{padded}')
    for root in (FORWARD, ONE_QUERY):
        assert code_key(*root, tree) == code_key(*root)


EDITS = [  # a file, what stands there, what is put there instead, and whose bits that may change
    ("kernels/fa3_kernels/twin/wgmma.py", "_COLUMN_BLOCK = ", "_COLUMN_BLOCK = 1 + ", {FORWARD, ONE_QUERY}),
    ("reports/fa3_reports/one_query.py", "SHORT = 256", "SHORT = 128", {ONE_QUERY}),
    ("reference/fa3_reference/problem/shapes.py", "def rows_lse", "@np.copy\n    def rows_lse", {FORWARD}),
    ("kernels/fa3_kernels/plan/config.py", "self.tile_m // WARPGROUP_ROWS", "self.tile_m // 2", set()),
]


@pytest.mark.parametrize(("name", "old", "new", "changed"), EDITS, ids=[f"{x[0]}: {x[1]}" for x in EDITS])
def test_an_edit_of_the_tree_changes_the_keys_of_those_whose_bits_it_may_change(tree, name, old, new, changed):
    text = (tree / name).read_text()
    assert old in text
    (tree / name).write_text(text.replace(old, new))
    assert {root for root in (FORWARD, ONE_QUERY) if code_key(*root, tree) != code_key(*root)} == changed


def entered() -> set[tuple[str, str]]:
    """Functions of ours that a launch with most features enters: their files and names."""
    problem = AttentionProblem(1, 2, 1, 3, 600, 40, causal=True, softcap=5.0, dtype="bf16")
    rooms = tuple(str(path) for package in (fa3_kernels, fa3_reference) for path in package.__path__)
    operands = Case("twin.flash3.bf16", problem, Recipe("normal")).operands()
    config = default_config(problem, family="flash3", num_splits=2)
    found = set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(rooms):
            found.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        forward(problem, operands, config)
    finally:
        sys.setprofile(None)
    return found


def test_every_function_that_a_launch_enters_is_in_the_key_or_of_the_plan():
    folders = {x.__name__: Path(x.__path__[0]) for x in (fa3_kernels, fa3_reference)}
    code = merkle.Code(merkle.Sources(folders))
    code.key(*FORWARD)
    known = {(str(code.path(module)), name) for module, name in code.keys}
    known |= {
        (str(code.path(module)), f"{one.name}.{member}")
        for (module, _), one in code.classes.items()
        for member, _ in merkle._members(one)
        if member in code.attributes or member.startswith("__")
    }
    functions = entered()
    assert len(functions) > 80
    for file, function in functions:
        outer = function.partition(".<")[0]
        is_of_plan = "plan" in Path(file).parts and not file.endswith("tiles.py")
        refuses = outer in {"AttentionProblem.check_plain", "AttentionProblem.serving"}  # and decides no bit
        is_made = refuses or outer.endswith(("__init__", "__post_init__", "__new__")) or outer.startswith("<")
        assert is_of_plan or is_made or (file, outer) in known, f"{file}: {function}"


def test_whatever_the_twin_reads_of_a_configuration_is_in_the_key_of_its_launch():
    twin = Path(fa3_kernels.__path__[0]) / "twin"
    text = "".join((twin / f"{name}.py").read_text() for name in ("forward", "arithmetic", "softmax", "combine"))
    read = {*re.findall(r"(?<=\bconfig\.)\w+|(?<=\btraits\.)\w+", text)} - {"traits", "check_reproduced"}
    assert {"tile_n", "num_splits", "order", "sequence_splits"} < read
    in_key = getsource(launch_key)
    assert not [name for name in read if f".{name}" not in in_key]
    assert all(re.search(rf"\b{name}\b", text) for name in merkle.BY_VALUE - {"traits_of", "Traits", "cache_directory"})


def key(**changes) -> str:
    problem = AttentionProblem(1, 2, 1, 300, 600, 64, dtype="bf16")
    return launch_key(problem, default_config(problem, family="flash3", **changes))


def test_a_launch_has_another_key_for_another_value_and_not_for_another_schedule():
    assert key() == key(pingpong=False)
    assert len({key(), key(tile=(128, 64)), key(num_splits=2), key(pack_gqa=True)}) == 4


def test_an_order_of_operations_with_another_switch_changes_the_keys_of_its_family(monkeypatch):
    before = key()
    other = replace(FAMILIES["flash3"], order=replace(FAMILIES["flash3"].order, lse_empty=0.0))
    monkeypatch.setitem(FAMILIES, "flash3", other)
    assert key() != before


def test_another_tile_in_the_plan_changes_the_launches_that_take_it_and_no_other(monkeypatch):
    launches = recordings.read(RECORDINGS / "flash3.corners.xz").launches[::7]
    sizes = dict(FAMILIES["flash3"].sizes)
    sizes[False, 64] = replace(sizes[False, 64], shipped=Shipped(128, 64), other=Shipped(128, 64))
    patched = replace(FAMILIES["flash3"], sizes=sizes, tile=lambda problem, size: size.shipped)
    plain = replace(FAMILIES["flash3"], tile=lambda problem, size: size.shipped)
    monkeypatch.setitem(FAMILIES, "flash3", plain)
    before = [recordings.keys_of("flash3", launch)[1] for launch in launches]
    monkeypatch.setitem(FAMILIES, "flash3", patched)
    after = [recordings.keys_of("flash3", launch)[1] for launch in launches]
    takes = [x.case.problem.dtype != "e4m3" and x.case.problem.head_dim <= 64 for x in launches]
    assert {True, False} == set(takes)
    assert [a != b for a, b in zip(before, after, strict=True)] == takes


def test_a_value_without_json_is_refused():
    problem = AttentionProblem(1, 1, 1, 8, 8, 64)
    config = default_config(problem)
    object.__setattr__(config, "pack_gqa", object())
    with pytest.raises(TypeError, match="not JSON serializable"):
        launch_key(problem, config)


def test_every_table_that_a_twin_reads_is_in_its_key(tree):
    table = tree / "kernels/fa3_kernels/twin/mufu_tables.json"
    body = json.loads(table.read_text())
    name = next(iter(body))
    body[name]["rc"] += 1
    table.write_text(json.dumps(body))
    assert code_key(*FORWARD, tree) != code_key(*FORWARD)
