"""The verb compare: comparisons as tasks of a pool, and their results as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from fa3_reference.problem import AttentionProblem
from fa3_reference.rules import require
from fa3verify.campaign.cover import cover
from fa3verify.campaign.pool import AN_HOUR_S, processes
from fa3verify.campaign.tasks import CallTask, execute
from fa3verify.cases.space import claimed, head_dims
from fa3verify.compare.axes import AXES, PAIR, Fields, axis_of
from fa3verify.compare.run import Compared, compare_kernels, compare_over
from fa3verify.files import Json
from fa3verify.kernels.names import KernelName
from fa3verify.known.registry import find
from fa3verify.operations import FORWARD
from fa3verify.version import __version__

SCHEMA = "fa3verify.compare/1"
# Dimensions of cases that are not compared here: they concern inputs or configurations, and each of two kernels has its
# own.
_OTHERS = {"inputs", "splits", "packing", "output", "promotion", "descales", "rotation", "centring", "scaling"}


def compare_axis(kernel: str, axis: str, values: list[Any], sizes: Fields) -> Compared | None:
    """Compare one kernel over one axis as a task; None where it does not have what the axis needs."""
    return compare_named(kernel, axis, values, sizes) if axis_of(axis).fits(find(kernel)) else None


def compare_named(kernel: str, axis: str, values: list[Any], sizes: Fields) -> Compared:
    """Compare one kernel over an axis that somebody named; ValueError where it does not have what the axis needs."""
    return compare_over(find(kernel), axis_of(axis), values, sizes=sizes)


def compare_pair(a: str, b: str, sizes: Fields, field: str, values: list[Any]) -> Compared:
    """Compare two kernels as a task.

    With a ``field`` the problems have ``sizes`` and one of ``values`` in that field; without one (empty), they are
    problems that cover what both kernels claim. ValueError if the kernels take no common head_dim.
    """
    one, other = find(a), find(b)
    dims = [sizes["head_dim"]] if "head_dim" in sizes else [d for d in head_dims(one) if d in head_dims(other)]
    both = replace(one, features=one.features & other.features, head_dims=tuple(dims))
    require(dims, f"two kernels must take a common head_dim, got {head_dims(one)} and {head_dims(other)}")
    if field:
        chosen: Fields = {
            "head_dim": 128 if 128 in dims else dims[0],
            "nheads_kv": 1 if "gqa" in both.features else sizes["nheads"],
            **sizes,
        }
        problems = [(f"{field} {n}", AttentionProblem(**chosen | {field: n}, dtype=one.dtype)) for n in values]
        words = ", ".join(f"{name} {x}" for name, x in (chosen | {field: values}).items())
    else:
        cases = {case.problem: replace(case, changes=()).describe() for _, case in cover(both, 2, 0) if case}
        problems = [(words.partition(" | ")[0], p) for p, words in cases.items() if not other.misfit(p)]
        classes = {name: of for name, of in claimed(both).items() if name not in _OTHERS}
        words = "; ".join(f"{name} {', '.join(of)}" for name, of in classes.items())
    result = compare_kernels(one, other, problems)
    return replace(result, what=f"{result.what}, {words}") if result.is_equal else result


def run(
    tasks: Iterable[CallTask], workers: int = 0, progress: Callable[[str], None] = lambda label: None
) -> list[Compared | None]:
    """Run comparisons in processes; if a kernel crashes its process, the result says that nothing ran, and why."""
    with processes(workers, AN_HOUR_S) as executor:
        outcomes = execute(list(tasks), executor, progress=lambda outcome: progress(outcome.task.label))
    return [
        Compared(outcome.task.label, 0, 0, refused=outcome.error) if outcome.error else outcome.value
        for outcome in outcomes
    ]


def tasks_of(kernel: str, axes: Mapping[str, list[Any]] | None = None, sizes: Fields | None = None) -> list[CallTask]:
    """Return the comparisons of a kernel over axes, all with their own values and sizes by default.

    ValueError for an unknown axis or kernel, and for a value or a size that an axis does not take. A user's module is
    not imported here but in the process that runs it, so that it is checked only there.
    """
    chosen = axes or {axis.name: [] for axis in AXES}
    known = None if KernelName.parse(kernel).is_reference else find(kernel)
    for name, values in chosen.items():
        axis = axis_of(name)
        axis.check_values(values)
        if known and known.operation == FORWARD and axis.fits(known):
            for value in values or axis.values:
                axis.problem_for(known, value, sizes or {})
    given = {"kernel": kernel, "sizes": dict(sizes or {})}
    return [
        CallTask(
            f"{kernel} {name}",
            compare_named if axes else compare_axis,
            given | {"axis": name, "values": values},
            kernel=kernel,
        )
        for name, values in chosen.items()
    ]


def pairs_of(kernel: str, other: str, axes: Mapping[str, list[Any]], sizes: Fields) -> list[CallTask]:
    """Return the comparisons of two kernels: a task for each axis, or one for the problem of ``sizes``.

    Without axes and sizes they are compared on what both claim. ValueError for an unknown kernel, and for axes and
    values that a comparison of two kernels does not have.
    """
    for name in (kernel, other):
        if not KernelName.parse(name).is_reference:  # somebody's own is loaded where it runs
            find(name)
    known = sorted(set(PAIR) - {"causal"})
    for name, values in axes.items():
        require(name in known, f"two kernels are compared over a size, one of {', '.join(known)}, got {name!r}")
        if values and name in sizes:
            raise ValueError(f"{name} is given by --over or as a size, got {sizes[name]} beside {len(values)} values")
        if wrong := [value for value in values if type(value) is not int]:
            raise ValueError(f"values of {name} must be numbers, got {str(wrong[0]).lower()}")
    chosen = PAIR | sizes
    ranges = {name: values or [chosen[name]] for name, values in axes.items()}
    if is_sized := bool(axes or set(sizes) - {"head_dim"}):
        ranges = ranges or {"seqlen_k": [chosen["seqlen_k"]]}
    # What both take is chosen where they are loaded, unless somebody chose.
    chosen_sizes = {
        name: chosen[name] for name in PAIR if name in sizes or (is_sized and name not in ("head_dim", "nheads_kv"))
    }
    arguments = {"a": kernel, "b": other, "sizes": chosen_sizes}
    return [
        CallTask(f"{kernel} and {other}", compare_pair, arguments | {"field": name, "values": values})
        for name, values in (ranges or {"": []}).items()
    ]


def body(found: list[Compared | None], tasks: list[CallTask]) -> Json:
    """Return the comparisons in JSON."""
    rows = [task.arguments | {"found": each and asdict(each)} for task, each in zip(tasks, found, strict=True)]
    return {"schema": SCHEMA, "version": __version__, "comparisons": rows}
