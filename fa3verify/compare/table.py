"""The table of what may change in a serving stack without changing a bit, and the comparisons as tasks of a pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from fa3_reference.problem import AttentionProblem
from fa3verify import __version__
from fa3verify.adversary.run import isolating_pool
from fa3verify.campaign.tasks import Task, execute
from fa3verify.compare.axes import AXES, Axis, axis_of
from fa3verify.compare.bits import First
from fa3verify.compare.run import RECIPES, Compared, compare_kernels, compare_over, configured

SCHEMA = "fa3verify.compare/1"
KERNELS = (  # of the table, unless somebody names others; num_splits 0 is what the library itself chooses
    *("twin.fp16", "twin.bf16", "twin.e4m3", "twin.flash3.fp16", "twin.flash3.bf16", "twin.flash3.e4m3"),
    *("twin.flash3.fp16[num_splits=0]", "twin.flash3.e4m3[num_splits=0]"),
)


def compare_axis(kernel: str, axis: str, values: list[Any]) -> dict[str, Any] | None:
    """Compare one kernel over one axis as a task; None where it does not have what the axis needs."""
    candidate, chosen = configured(kernel), axis_of(axis)
    return asdict(compare_over(candidate, chosen, values)) if chosen.fits(candidate) else None


def compare_pair(a: str, b: str, problem: dict[str, Any], field: str, values: list[int]) -> dict[str, Any]:
    """Compare two kernels as a task, on problems that differ in one field."""
    problems = [(f"{field} {n}", replace(AttentionProblem(**problem), **{field: n})) for n in values]
    return asdict(compare_kernels(configured(a), configured(b), problems))


def compared(values: Mapping[str, Any]) -> Compared:
    """Read what a task returned."""
    first = values["first"]
    return Compared(**{**values, "first": first and First(**first)})


def run(
    tasks: Iterable[Task], workers: int = 0, progress: Callable[[str], None] = lambda label: None
) -> list[Compared | None]:
    """Run comparisons on processes; what a kernel crashes on is told as a comparison of which nothing ran."""
    with isolating_pool(workers) as executor:
        outcomes = execute(list(tasks), executor, progress=lambda outcome: progress(outcome.task.label))
    return [
        Compared(outcome.task.label, 0, 0, refused=outcome.error)
        if outcome.error
        else outcome.value and compared(outcome.value)
        for outcome in outcomes
    ]


def tasks_of(kernels: Sequence[str], axes: Mapping[str, list[Any]] | None = None) -> list[Task]:
    """Return the comparisons of kernels over axes, all with their own values by default.

    ValueError for an unknown axis or kernel; a stranger's module is loaded where it runs.
    """
    chosen = axes or {axis.name: [] for axis in AXES}
    for axis in chosen:
        axis_of(axis)
    for kernel in kernels:
        if ":" not in kernel:
            configured(kernel)
    return [
        Task("compare", f"{kernel} {axis}", compare_axis, {"kernel": kernel, "axis": axis, "values": values})
        for kernel in kernels
        for axis, values in chosen.items()
    ]


def cell(found: Compared | None) -> str:
    """What a table says of one comparison."""
    if found is None:
        return "-"
    if found.is_equal is None:
        return f"did not run: {found.refused}"
    if found.first is None:
        return f"equal over {found.outputs:,}"
    return f"**differs** first at {found.value}: {found.because}"


def page(kernels: list[str], axes: list[str], found: list[Compared | None], version: str = __version__) -> str:
    """Return the table in Markdown, what changes in rows and kernels in columns; ``version`` compared them."""
    by_place = {
        (kernel, axis): found[i * len(axes) + j] for i, kernel in enumerate(kernels) for j, axis in enumerate(axes)
    }
    rows = [_row(axis_of(axis), [cell(by_place[kernel, axis]) for kernel in kernels]) for axis in axes]
    head = f"| what changes | tried | {' | '.join(f'`{kernel}`' for kernel in kernels)} |\n"
    rule = "|---" * (len(kernels) + 2) + "|\n"
    inputs = ", ".join(recipe.distribution for recipe in RECIPES)
    return (
        "# What may change in a serving stack without changing a bit\n\n"
        f"Written by `fa3verify compare`, version {version}. Operands are given, not quantised again; inputs: "
        f"{inputs}. Equal is said of the outputs that ran, and proves nothing of others.\n\n"
        f"{head}{rule}{''.join(rows)}"
    )


def _row(axis: Axis, cells: list[str]) -> str:
    values = ", ".join(map(str, axis.values))
    return f"| {axis.words} (`{axis.name}`) | {values} | {' | '.join(cells)} |\n"


def body(found: list[Compared | None], tasks: list[Task]) -> dict[str, Any]:
    """Return the comparisons in JSON."""
    rows = [task.arguments | {"found": each and asdict(each)} for task, each in zip(tasks, found, strict=True)]
    return {"schema": SCHEMA, "version": __version__, "comparisons": rows}
