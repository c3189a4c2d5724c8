"""A twin's closure holds all that it runs and nothing else: what changes its bits changes its hash."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

import fa3_kernels
import fa3_reference
from fa3_kernels.plan.config import default_config
from fa3_kernels.twin.forward import forward
from fa3_kernels.twin.one_query import one_query
from fa3_reference.problem import AttentionProblem
from fa3_reports import closure
from fa3verify.cases import Case
from fa3verify.inputs.recipe import Recipe

FAMILIES = frozenset({"flash3", "flash3.dew", "cudnn", "flash2"})
# Each: a file of fa3_kernels, words in it, words in their place, and the families whose bits that may change.
EDITS = [
    ("twin/wgmma.py", "_COLUMN_BLOCK = ", "_COLUMN_BLOCK = 1 + ", FAMILIES),
    ("twin/softmax.py", "def finalize(", "def finalize(\n    # a comment\n", frozenset()),
    ("twin/forward.py", '"""Run the arithmetic of a forward kernel.', '"""Run it.', frozenset()),
    ("twin/mufu_tables.json", "{", '{"more": 0,', FAMILIES),
    ("twin/backward.py", "np.float32", "np.float64", frozenset()),
    ("twin/quantize.py", "np.float32", "np.float64", frozenset()),
    ("plan/backward.py", "16", "32", frozenset()),
    ("plan/order.py", "scales_ds: bool = False", "scales_ds: bool = True", frozenset()),
    ("plan/order.py", "hides_nan: bool = False", "hides_nan: bool = True", FAMILIES),
    ("plan/traits.py", "128: ((80, 128), (64, 128))", "128: ((64, 128), (64, 128))", frozenset()),
    ("plan/traits.py", 'row_sum="block_serial"', 'row_sum="block_pairs"', frozenset({"cudnn"})),
    (
        "plan/traits.py",
        "(True, 256, 256, Shipped(128, 128)",
        "(True, 256, 256, Shipped(128, 64)",
        {"flash3", "flash3.dew"},
    ),
    ("plan/traits.py", 'dtypes=("fp16", "bf16"),\n        sizes', 'dtypes=("fp16",),\n        sizes', {"flash3.dew"}),
    ("twin/one_query.py", "SHORT, UNSPLIT = 256", "SHORT, UNSPLIT = 128", frozenset({"cudnn"})),
    ("plan/heuristics.py", "keys = 256 if", "keys = 128 if", frozenset({"flash2"})),
    ("plan/family.py", "tanh_error=TANH_REL", "tanh_error=2 * TANH_REL", frozenset()),
    ("plan/config.py", "self.tile_m // WARPGROUP_ROWS", "self.tile_m // 2", FAMILIES),
]


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """Look definitions up in a copy of one file, which a test has edited."""

    def edit(name: str, old: str, new: str) -> None:
        source = Path(fa3_kernels.__path__[0]) / name
        module = f"fa3_kernels.{name.removesuffix('.py').replace('/', '.')}"
        if source.suffix == ".json":
            module = "fa3_kernels.twin.mufu_exact"
            (tmp_path / "mufu_exact.py").write_text(source.with_name("mufu_exact.py").read_text())
        text = source.read_text()
        assert old in text
        (tmp_path / source.name).write_text(text.replace(old, new))
        place, path = tmp_path / source.name, closure._path
        here = place.with_name("mufu_exact.py") if source.suffix == ".json" else place
        monkeypatch.setattr(closure, "_path", lambda x: here if x == module else path(x))
        closure._statements.cache_clear()

    yield edit
    closure._statements.cache_clear()


@pytest.fixture(scope="module")
def hashes() -> dict[str, str]:
    return {family: closure.twin_hash(family) for family in FAMILIES}


@pytest.mark.parametrize(("name", "old", "new", "changed"), EDITS, ids=[f"{x[0]}: {x[1]}" for x in EDITS])
def test_an_edit_changes_the_hashes_of_those_whose_bits_it_may_change(edited, hashes, name, old, new, changed):
    edited(name, old, new)
    assert {family for family in FAMILIES if closure.twin_hash.__wrapped__(family) != hashes[family]} == changed


def entered(family: str, problem: AttentionProblem) -> set[tuple[str, str]]:
    """Functions of ours that a launch enters, and one of a single query of cuDNN: their files and names."""
    rooms = tuple(str(path) for package in (fa3_kernels, fa3_reference) for path in package.__path__)
    operands, found = Case(f"twin.{family}.bf16", problem, Recipe("normal")).operands(), set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(rooms):
            found.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    single = replace(problem, seqlen_q=1, causal=False)
    few = Case(f"twin.{family}.bf16", single, Recipe("normal")).operands()
    sys.setprofile(note)
    try:
        forward(problem, operands, default_config(problem, family=family))
        if family == "cudnn":
            one_query(single, few)
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_function_that_a_launch_enters_is_in_the_closure(family):
    softcap = 5.0 if family == "flash3" else 0.0
    functions = entered(family, AttentionProblem(1, 2, 1, 3, 600, 40, causal=True, softcap=softcap, dtype="bf16"))
    texts = {(str(closure._path(name.module)), name.name): text for name, text in closure.definitions(family).items()}
    assert len(functions) > 80
    for file, function in functions:
        if "/bounds/" in file:
            continue
        outer, *inner = function.replace(".<locals>", "").split(".")
        if not outer.startswith("<") and inner[:1] != ["<lambda>"]:
            assert (file, outer) in texts, f"{file}: {function}"
            named = [x for x in inner[:1] if not x.startswith(("<", "__"))]
            assert all(f"name='{x}'" in texts[file, outer] for x in named), f"{file}: {function}"


def test_the_problem_is_in_the_closure_and_nothing_of_the_bounds():
    modules = {name.module for name in closure.definitions("flash3")}
    assert "fa3_reference.problem" in modules
    assert not [module for module in modules if module.startswith("fa3_reference.bounds")]
