"""Single edits of the harness, drawn at random and judged by the tests of the README's command.

The edits are cosmic-ray's. A place in the code is drawn first and then one of the edits that are possible there, so
that an operator with many replacements weighs no more than one with a single one. Left out are modules that need torch
or a GPU (the bench, and whatever imports torch or triton), annotations, and decorators that compile or remember.

    python -m tests.quality.harness_mutants --seed 3 --edits 300 --work FOLDER --out reports/mutants
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cosmic_ray.plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

from fa3verify.files import write_text
from tests.quality import mutant_runs
from tests.quality.mutant_runs import Edit, Outcome

SCOPE = ("fa3verify", "simulator/fa3_simulator", "kernels/fa3_kernels/plan", "reference/fa3_reference/bounds")
EDITED = {"operator", "keyword", "number", "comparison", "except_clause", "decorator", "factor", "not_test"}
EDITED |= {"test", "if_stmt", "while_stmt", "assert_stmt", "for_stmt", "and_test", "or_test"}  # parso's names
NEEDS_TORCH = re.compile(r"^(?:import|from) (?:torch|triton)\b", re.MULTILINE)
PUNCTUATION = set("()[]{},.:=;@") | {"->", ":=", "..."}
QUICK_ONLY = {"njit", "jit", "cache", "lru_cache", "cached_property"}  # decorators that change how fast, not what


@dataclass(frozen=True, slots=True)
class Place:
    """Where an edit can be made, and every edit that can be made there: an operator and its occurrence in the file."""

    path: str
    start: tuple[int, int]
    choices: tuple[tuple[str, int], ...]


def modules(root: Path) -> list[Path]:
    """Return the modules of the scope that run without torch."""
    found = []
    for folder in SCOPE:
        for path in sorted((root / folder).rglob("*.py")):
            if "bench" not in path.parts and not NEEDS_TORCH.search(path.read_text()):
                found.append(path)
    return found


def places(path: Path, root: Path) -> list[Place]:
    """Return every place of a module where cosmic-ray has an edit."""
    source = path.read_text()
    nodes = [node for node in ast_nodes(get_ast(source)) if _alive(node)]
    excluded = list(_excluded(ast.parse(source)))
    found: dict[tuple[int, int], list[tuple[str, int]]] = defaultdict(list)
    for name in cosmic_ray.plugins.operator_names():
        operator = cosmic_ray.plugins.get_operator(name)
        if operator.arguments() or name == "core/NoOp":
            continue
        positions = (start for node in nodes for start, _ in operator().mutation_positions(node))
        for occurrence, start in enumerate(positions):
            if not any(first <= start < last for first, last in excluded):
                found[start].append((name, occurrence))
    return [Place(str(path.relative_to(root)), start, tuple(choices)) for start, choices in sorted(found.items())]


def _alive(node: Any) -> bool:
    """Tell whether an operator may have an edit of a node: asking all of them of all nodes takes minutes."""
    return node.type in EDITED and getattr(node, "value", "") not in PUNCTUATION


def _excluded(tree: ast.Module) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield the spans of annotations, of what only a type checker reads, and of decorators that only save time."""
    for node in ast.walk(tree):
        spans: list[ast.expr | ast.stmt | None] = []
        if isinstance(node, ast.arg | ast.AnnAssign):
            spans.append(node.annotation)
        if isinstance(node, ast.FunctionDef):
            spans += [node.returns, *(mark for mark in node.decorator_list if _only_saves_time(mark))]
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            spans.append(node)
        for span in spans:
            if span is not None:
                yield (span.lineno, span.col_offset - 1), (span.end_lineno or 0, span.end_col_offset or 0)


def _only_saves_time(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(called).rpartition(".")[2] in QUICK_ONLY


def draw(root: Path, count: int, seed: int) -> list[Edit]:
    """Return edits that change the syntax tree of their module, in the order in which they were drawn."""
    generator = random.Random(seed)
    everywhere = [place for path in modules(root) for place in places(path, root)]
    generator.shuffle(everywhere)
    edits: list[Edit] = []
    for place in everywhere:
        operator, occurrence = generator.choice(place.choices)
        source = (root / place.path).read_text()
        mutated = mutate_code(source, cosmic_ray.plugins.get_operator(operator)(), occurrence)
        if mutated is not None and _differs(source, mutated):
            edits.append(mutant_runs.edit(place.path, source, mutated))
        if len(edits) == count:
            break
    return edits


def drawn(root: Path, file: Path, count: int, seed: int) -> list[Edit]:
    """Return the edits of a file, which is made by drawing where it does not exist."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps([asdict(edit) for edit in draw(root, count, seed)], indent=1))
    return [Edit(**line) for line in json.loads(file.read_text())]


def _differs(source: str, mutated: str) -> bool:
    """Tell whether an edit is Python and another program."""
    try:
        return ast.dump(ast.parse(source)) != ast.dump(ast.parse(mutated))
    except SyntaxError:
        return False


def page(seed: int, outcomes: list[Outcome], explained: dict[str, str], note: str = "") -> str:
    """Return the Markdown page of a survey: the score by package, what is noted by hand, and every survivor with its
    explanation.
    """
    rows = []
    for package in SCOPE:
        inside = [outcome for outcome in outcomes if outcome.edit.path.startswith(package + "/")]
        found = sum(outcome.found for outcome in inside)
        rows.append(f"| {package} | {len(inside)} | {found} | {_percent(found, len(inside))} |")
    found = sum(outcome.found for outcome in outcomes)
    rows.append(f"| **all** | {len(outcomes)} | {found} | **{_percent(found, len(outcomes))}** |")
    survivors = sorted((outcome.edit for outcome in outcomes if not outcome.found), key=lambda edit: edit.path)
    left = []
    for edit in survivors:
        reason = explained.get(edit.key, "**not explained**")
        left.append(f"| {edit.path} | `{_cell(edit.before)}` | `{_cell(edit.after)}` | {reason} |")
    return "\n".join(
        [
            "# Edits of the harness that the tests find",
            "",
            f"{len(outcomes)} single edits of the code as it stands, drawn with seed {seed} by `python -m"
            f" tests.quality.harness_mutants --seed {seed} --edits {len(outcomes)} --work FOLDER --out reports/mutants`"
            "; an edit is found where a test of the README's command that reaches the edited function fails.",
            "",
            "| package | edits | found | |",
            "|---|--:|--:|--:|",
            *rows,
            "",
            *([note.strip(), ""] if note else []),
            "## Edits that no test finds",
            "",
            "| file | before | after | why it stays |",
            "|---|---|---|---|",
            *left,
            "",
        ]
    )


def write(out: Path, seed: int, outcomes: list[Outcome]) -> None:
    """Write the table of a survey, and the page of it with the reasons that stand beside them by key."""
    rows = [{"key": outcome.edit.key, **asdict(outcome)} for outcome in outcomes]
    write_text(out / "harness.json.xz", json.dumps({"seed": seed, "outcomes": rows}, indent=1) + "\n")
    reasons = tomllib.loads((out / "harness_survivors.toml").read_text())
    (out / "harness.md").write_text(page(seed, outcomes, reasons["survivors"], reasons.get("note", "")))


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="seed of the draw")
    parser.add_argument("--edits", type=int, default=300, help="number of edits")
    parser.add_argument("--workers", type=int, default=2, help="copies of the checkout in which tests run at once")
    parser.add_argument("--work", type=Path, required=True, help="folder for copies and for what the tests reach; kept")
    parser.add_argument("--out", type=Path, help="folder of harness.md and harness.json")
    options = parser.parse_args()
    root = Path(__file__).parents[2]
    edits = drawn(root, options.work / f"edits-{options.seed}-{options.edits}.json", options.edits, options.seed)
    outcomes = mutant_runs.judge(root, edits, options.work, options.workers, list(SCOPE))
    found = sum(outcome.found for outcome in outcomes)
    print(f"{found} of {len(outcomes)} edits found, {_percent(found, len(outcomes))}")
    if options.out:
        write(options.out, options.seed, outcomes)


if __name__ == "__main__":
    main()
