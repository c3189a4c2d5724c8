"""Which tests see a term of an error bound that is missing or halved: ``python -m tests.quality.bound_terms``.

The terms are read from the source of the bounds as it stands: what is added or subtracted, the products that have a
name, the arms of maxima, minima and choices, and the constants of each module; half of a factor is half of its product.
Comparisons, which say where nothing is promised, are left out. Each term becomes two mutants, one without it and one
with half of it. A mutant meets the pinned tests of the bounds first and, where these pass, the other fast
tests; the table names the first that fails.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import json
import os
import random
import select
import signal
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest

from fa3verify.files import csv_text, markdown_table, write_text

ROOT = Path(__file__).resolve().parents[2]
ROOM = ROOT / "reference" / "fa3_reference" / "bounds"
MODULES = ("head", "state", "steps", "forward_weights", "forward_sums", "forward", "epilogue")
MODULES += (
    "gradient_steps",
    "backward",
    "quantisation",
    "quantizer",
    "quantises",
    "enclosure",
    "model",
)
TESTS = ROOT / "tests" / "reference" / "bounds"
_SEEN_BY = {  # the pinned tests of each module
    "backward": ("terms_gradients", "terms_backward"),
    "gradient_steps": ("terms_gradients", "terms_backward"),
    "quantisation": ("terms_quantiser",),
    "quantizer": ("terms_quantiser", "quantizer"),
    "quantises": ("quantises",),
    "enclosure": ("terms_ranges", "terms_enclosure"),
    "steps": ("terms_steps", "terms_forward", "terms_backward"),
}
OTHERS = ("corners", "forward", "hypotheses", "gradient_hypotheses", "backward", "quantizer", "enclosure")
GEOMETRY = {"_row_tiles", "key_parts", "tiles", "hidden", "empty", "put", "_tiles"}  # rows and keys, no error
ARMS = {"maximum", "minimum", "fmin", "where", "clip", "max", "min"}
SHAPES = {"range", "slice", "arange", "zeros", "empty", "full", "ones", "cast", "zip", "ValueError"}
EXPLAINED = Path(__file__).with_name("bound_terms.toml")


class Term(NamedTuple):
    """One term of a module: where it stands, and the way to it and to its replacement in the syntax tree."""

    module: str
    function: str
    line: int
    text: str
    kind: str  # "addend", "arm", "value" of a product or "constant"
    path: tuple[tuple[str, int | None], ...]
    other: tuple[tuple[str, int | None], ...] = ()  # what takes the place of the whole where an arm is deleted

    @property
    def key(self) -> str:
        return f"{self.module}.{self.function}: {self.text}"


def _at(tree: ast.AST, path: tuple[tuple[str, int | None], ...]) -> Any:
    node: Any = tree
    for field, index in path:
        node = getattr(node, field)
        node = node if index is None else node[index]
    return node


def _put(tree: ast.AST, path: tuple[tuple[str, int | None], ...], node: ast.AST) -> None:
    parent = _at(tree, path[:-1])
    field, index = path[-1]
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


def _children(node: ast.AST) -> Iterator[tuple[tuple[str, int | None], ast.AST]]:
    for field, value in ast.iter_fields(node):
        if isinstance(value, list):
            yield from (((field, i), x) for i, x in enumerate(value) if isinstance(x, ast.AST))
        elif isinstance(value, ast.AST):
            yield (field, None), value


def _is_sum(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub)


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_number(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return isinstance(node.left, ast.Constant)
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _is_product(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div | ast.FloorDiv)


def _parts(node: ast.AST, path: tuple[tuple[str, int | None], ...]) -> Iterator[tuple[str, tuple, tuple]]:
    """Kinds and places of the terms that a node is made of itself; the replacement of the whole for an arm."""
    if _is_sum(node):
        sides = ("left", "right")
        if not any(isinstance(getattr(node, side), ast.List | ast.Tuple | ast.JoinedStr) for side in sides):
            yield from (("addend", (*path, (side, None)), ()) for side in sides if not _is_sum(getattr(node, side)))
    elif isinstance(node, ast.Assign | ast.Return) and node.value and _is_product(node.value):
        yield "value", (*path, ("value", None)), ()
    elif isinstance(node, ast.AugAssign) and not _is_sum(node.value) and isinstance(node.op, ast.Add | ast.Sub):
        yield "addend", (*path, ("value", None)), ()
    elif isinstance(node, ast.IfExp):
        arms = [(*path, ("body", None)), (*path, ("orelse", None))]
        if not any(isinstance(x, ast.Constant) and not _is_number(x) for x in (node.body, node.orelse)):
            yield from (("arm", arm, arms[1 - i]) for i, arm in enumerate(arms))
    elif isinstance(node, ast.Call) and _name(node.func) in ARMS and len(node.args) > 1:
        first = 1 if _name(node.func) == "where" else 0
        places = [(*path, ("args", i)) for i in range(first, len(node.args))]
        if len(places) == 2:
            yield from (("arm", place, places[1 - i]) for i, place in enumerate(places))


def _is_apart(node: ast.AST, field: str) -> bool:
    """Whether what stands in this field makes shapes, messages, types or the domain, not numbers of a bound."""
    if field in {"annotation", "returns", "slice", "decorator_list", "keywords", "bases", "ifs"}:
        return True
    if isinstance(node, ast.Call) and field == "args":
        return _name(node.func) in SHAPES
    return isinstance(node, ast.Raise | ast.JoinedStr | ast.Compare)


@cache
def terms(module: str) -> list[Term]:
    """Return every term of a module of the bounds, in the order of its lines."""
    tree = ast.parse((ROOM / f"{module}.py").read_text(encoding="utf-8"))
    found = []

    def visit(node: ast.AST, path: tuple[tuple[str, int | None], ...], function: str) -> None:
        if isinstance(node, ast.FunctionDef):
            if node.name in GEOMETRY or node.name == "__post_init__" or (module, node.name) == ("head", "of"):
                return
            function = function or node.name
        if isinstance(node, ast.Assign) and not function and _name(node.targets[0]).strip("_").isupper():
            if _is_number(node.value) or isinstance(node.value, ast.BinOp):
                found.append(_term(module, _name(node.targets[0]), node.value, "constant", (*path, ("value", None))))
            return
        if function:
            for kind, place, other in _parts(node, path):
                found.append(_term(module, function, _at(tree, place), kind, place, other))
        for step, child in _children(node):
            if not _is_apart(node, step[0]):
                visit(child, (*path, step), function)

    visit(tree, (), "")
    return sorted(found, key=lambda term: term.line)


def _term(module: str, function: str, node: Any, kind: str, path: tuple, other: tuple = ()) -> Term:
    return Term(module, function, node.lineno, ast.unparse(node), kind, path, other)


def _changes(term: Term, edit: str) -> bool:
    """Whether an edit changes anything: half of 0 is 0."""
    nothing = {"0.0", "0", "np.inf", "-np.inf", "np.nan", "math.inf"}
    is_same = term.text in nothing or term.text.startswith("np.zeros") or term.text.endswith(", np.inf)")
    return edit == "deleted" or not is_same


def _mutant(term: Term, edit: str) -> CodeType:
    """The module's code with a term deleted or halved."""
    tree = ast.parse((ROOM / f"{term.module}.py").read_text(encoding="utf-8"))
    node = _at(tree, term.path)
    if edit == "deleted" and term.kind == "arm":
        # Twice the other one, not the other one alone: the choice keeps its shape, whose loss any test would see.
        _put(tree, term.path, copy.deepcopy(_at(tree, term.other)))
    else:
        call = ast.Call(ast.Name(f"_{edit}_term", ast.Load()), [node], [])
        _put(tree, term.path, call)
    return compile(ast.fix_missing_locations(tree), str(ROOM / f"{term.module}.py"), "exec")


def _halved_term(x: Any) -> Any:
    """Half of a number or an array; of integers the lower half."""
    return x // 2 if np.asarray(x).dtype.kind in "iub" else x * 0.5


def _deleted_term(x: Any) -> Any:
    return np.zeros_like(x) if isinstance(x, np.ndarray) else type(x)(0)


def codes_of(code: CodeType) -> dict[str, CodeType]:
    """Return every code object in another one, by qualified name."""
    inner = [x for x in code.co_consts if isinstance(x, CodeType)]
    found = {x.co_qualname: x for x in inner}
    for x in inner:
        found |= codes_of(x)
    return found


def functions_of(module: ModuleType) -> Iterator[tuple[FunctionType, bool]]:
    """Yield every function of a module and of its classes, and whether numba compiles it."""
    names = vars(module)
    members = [x for x in names.values() if isinstance(x, type) and x.__module__ == module.__name__]
    for function in [*names.values(), *(x for member in members for x in vars(member).values())]:
        loop = getattr(function, "py_func", None)
        plain = loop or getattr(function, "fget", None) or getattr(function, "__func__", function)
        if isinstance(plain, FunctionType) and plain.__module__ == module.__name__:
            yield plain, loop is not None


def _plant(term: Term, edit: str) -> None:
    """Change the module of the bounds that is loaded here: its functions keep their names and take other code."""
    module = sys.modules[f"fa3_reference.bounds.{term.module}"]
    names = vars(module)
    if term.kind == "constant":
        old = names[term.function]
        value = _halved_term(old) if edit == "halved" else _deleted_term(old)
        for other in [m for name, m in sys.modules.items() if name.startswith("fa3_reference.bounds")]:
            if vars(other).get(term.function) == old:
                setattr(other, term.function, value)
        return
    names.update(_halved_term=_halved_term, _deleted_term=_deleted_term)
    codes = codes_of(_mutant(term, edit))
    for function, is_loop in list(functions_of(module)):
        if function.__code__.co_qualname in codes:
            function.__code__ = codes[function.__code__.co_qualname]
        if is_loop:  # numba would run what it compiled before
            names[function.__name__] = _uncompiled(function)


def _uncompiled(function: Any) -> Any:
    function.py_func = function
    return function


class Survey:
    """Runs the tests that pytest has collected on one mutant after another, each in a process of its own."""

    def __init__(self, mutants: list[tuple[Term, str]], jobs: int, limit_s: float, journal: Path | None) -> None:
        self.mutants = mutants
        self.jobs = jobs
        self.limit_s = limit_s
        self.journal = journal
        self.names: dict[tuple[Term, str], str] = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for module in MODULES:
            importlib.import_module(f"fa3_reference.bounds.{module}")
        if session.testsfailed:
            raise session.Failed("the tests could not be collected")
        # Here, not in a child, so that the children have what numba compiles and the tests keep.
        if (name := _judge(session.items, None)) != "passed":
            raise session.Failed(f"the tests must pass on the code as it is, but {name} fails")
        with ThreadPoolExecutor(self.jobs) as pool:
            jobs = [pool.submit(self._first_failure, session.items, mutant) for mutant in self.mutants]
            self.names = {mutant: job.result() for mutant, job in zip(self.mutants, jobs, strict=True)}
        return True

    def _first_failure(self, items: list[pytest.Item], mutant: tuple[Term, str]) -> str:
        """The first test that fails on a mutant, "" where all pass."""
        receiver, sender = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            os.write(sender, _judge(items, mutant).encode())
            os._exit(0)
        os.close(sender)
        with os.fdopen(receiver, "rb") as end:
            is_done, *_ = select.select([end], [], [], self.limit_s)
            answer = end.read().decode() if is_done else "time limit"
        if not is_done:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        print("." if answer not in ("", "passed") else f"\n{mutant[1]}: {mutant[0].key}", end=" ", flush=True)
        name = answer.removeprefix("passed") or ("" if answer else "crash")
        if self.journal:
            with self.journal.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps([list(_identity(*mutant)), name]) + "\n")
        return name


def _identity(term: Term, edit: str) -> tuple[str, ...]:
    """What tells a mutant from every other one in a journal."""
    return (term.key, str(term.path), edit)


def _judge(items: list[pytest.Item], mutant: tuple[Term, str] | None) -> str:
    try:
        if mutant:
            _plant(*mutant)
        for item in items:
            if not _passes(item):
                return item.nodeid
    except BaseException as error:
        return f"error: {type(error).__name__}"
    return "passed"


def _passes(item: pytest.Item) -> bool:
    """Run one test without a report, whose traceback would take longer than the test."""
    setup = item.session._setupstate
    try:
        setup.setup(item)
        item.runtest()
    except pytest.skip.Exception:
        return True
    except Exception:
        return False
    finally:
        setup.teardown_exact(None)
    return True


def breaks(check: Callable[[], object], term: Term, edit: str) -> bool:
    """Whether a check fails on a mutant, in a process of its own."""
    importlib.import_module(f"fa3_reference.bounds.{term.module}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, none of which the child needs
        child = os.fork()
    if child == 0:
        try:
            _plant(term, edit)
            check()
        except Exception:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


def first_failures(
    mutants: list[tuple[Term, str]],
    files: tuple[str, ...],
    jobs: int = 1,
    limit_s: float = 300,
    journal: Path | None = None,
) -> dict[tuple[Term, str], str]:
    """Return the first test of some files that fails on each mutant, "" where all pass.

    A mutant that the journal knows is not run again.

    Raises
    ------
    RuntimeError
        If a test fails on the code as it is.
    """
    known = _journalled(journal)
    names = {mutant: known[_identity(*mutant)] for mutant in mutants if _identity(*mutant) in known}
    mutants = [mutant for mutant in mutants if mutant not in names]
    if not mutants:
        return names
    survey = Survey(mutants, jobs, limit_s, journal)
    status = pytest.main(["-q", "-s", "-p", "no:cacheprovider", "--rootdir", str(ROOT), *files], plugins=[survey])
    if status not in (0, 5):
        raise RuntimeError(f"the tests of the bounds must pass on the code as it is, got exit status {status}")
    return names | survey.names


def _journalled(journal: Path | None) -> dict[tuple[str, ...], str]:
    if journal is None or not journal.exists():
        return {}
    lines = journal.read_text(encoding="utf-8").splitlines()
    return {tuple(identity): name for identity, name in map(json.loads, lines)}


class Found(NamedTuple):
    """What saw a term deleted and halved: the name of a test, "" for none, None where the edit changes nothing."""

    term: Term
    deleted: str | None
    halved: str | None


def pinned(module: str) -> tuple[str, ...]:
    """Return the files of the tests that pin the numbers of a module."""
    return tuple(
        str(TESTS / f"test_{name}.py")
        for name in _SEEN_BY.get(module, ("terms_states", "terms_corners", "terms_forward"))
    )


def examine(every: list[Term], jobs: int = 1, is_pinned_only: bool = False, work: Path | None = None) -> list[Found]:
    """Plant both mutants of every term; the other tests see those which pass all pinned ones.

    The folder of the work, if any, keeps what was found, so that a survey that was ended goes on from there.
    """
    by_pinned = work and work / "pinned.jsonl"
    by_others = work and work / "others.jsonl"
    edits = ("deleted", "halved")
    seen = {(term, edit): "" for term in every for edit in edits if _changes(term, edit)}
    for files in dict.fromkeys(pinned(term.module) for term in every):
        seen |= first_failures(
            [mutant for mutant in seen if pinned(mutant[0].module) == files], files, jobs, journal=by_pinned
        )
    left = [mutant for mutant, name in seen.items() if not name]
    if left and not is_pinned_only:
        others = tuple(str(TESTS / f"test_{name}.py") for name in OTHERS)
        seen |= first_failures(left, others, jobs, journal=by_others)
    return [Found(term, *(seen.get((term, edit)) for edit in edits)) for term in every]


def explained() -> dict[str, str]:
    """Return why no test can see a term, by its key: what it adds lies below the last bit of float64, or the like."""
    if not EXPLAINED.exists():
        return {}
    return tomllib.loads(EXPLAINED.read_text(encoding="utf-8"))["terms"]


def _cell(name: str | None, why: str) -> str:
    if name is None:
        return "-"
    return name.split("/")[-1] or (f"no change: {why}" if why else "survives")


def table(found: list[Found]) -> str:
    """Return the survey as csv: every term, and which test sees it deleted and halved."""
    reasons = explained()
    rows = []
    for term, deleted, halved in found:
        why = reasons.get(term.key, "")
        text = term.text.replace("\n", " ")
        seen = (_cell(deleted, why), _cell(halved, why))
        rows.append((f"bounds/{term.module}.py", term.line, term.function, text, term.kind, *seen))
    return csv_text(("file", "line", "in", "term", "kind", "deleted", "halved"), rows)


def page(found: list[Found]) -> str:
    """Return the Markdown page of the survey: its sums, and the terms that no test sees."""
    reasons = explained()
    edits = [(x.term, edit, getattr(x, edit)) for x in found for edit in ("deleted", "halved")]
    edits = [(term, edit, name) for term, edit, name in edits if name is not None]
    lines = [
        "# Every term of every bound, deleted and halved",
        "",
        "Made by `python -m tests.quality.bound_terms`. Which test sees which term first: "
        "[bound_terms.csv](bound_terms.csv.xz). It keeps no hash of the bounds and counts as stale.",
        "",
    ]
    for edit in ("deleted", "halved"):
        of_edit = [(term, name) for term, which, name in edits if which == edit]
        seen = sum(bool(name) for _, name in of_edit)
        equal = sum(not name and term.key in reasons for term, name in of_edit)
        total = len(of_edit) - equal
        lines.append(f"- {edit}: {seen} of {total} found; {equal} more change no number, each for the reason given.")
    by = sum("test_terms_" in name for *_, name in edits)
    lines += [f"- {by} of them by a pinned test.", ""]
    unseen = []
    for term, edit, name in edits:
        if not name:
            text = term.text.replace("|", "\\|").replace("\n", " ")
            place = f"bounds/{term.module}.py:{term.line}"
            unseen.append((place, term.function, f"`{text}`", edit, reasons.get(term.key, "**survives**")))
    return "\n".join([*lines, *markdown_table(("place", "in", "term", "edit", "why no test sees it"), unseen)])


def main() -> None:
    """Examine every term of the modules; write the page, and the table beside it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "mutants" / "bound_terms.md")
    parser.add_argument("--modules", nargs="*", default=list(MODULES), choices=MODULES)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--draw", type=int, metavar="N", help="examine N terms alone, drawn by seed 0")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="keep what was found there, and go on from it")
    parser.add_argument("--pinned", action="store_true", help="run the pinned tests alone")
    options = parser.parse_args()
    every = [term for module in options.modules for term in terms(module)]
    if options.draw:
        every = random.Random(0).sample(every, min(options.draw, len(every)))
        every.sort(key=lambda term: (MODULES.index(term.module), term.line))
    if options.work:
        options.work.mkdir(parents=True, exist_ok=True)
    found = examine(every, options.jobs, options.pinned, options.work)
    write_text(options.out, page(found))
    write_text(options.out.with_suffix(".csv.xz"), table(found))
    lost = [x for x in found if "" in (x.deleted, x.halved) and x.term.key not in explained()]
    for x in lost:
        print(f"{x.term.module}.py:{x.term.line} {x.term.function}: {x.term.text} ({x.term.kind}) survives", x[1:])
    print(f"{len(every)} terms, {len(lost)} of which survive an edit")


if __name__ == "__main__":
    main()
