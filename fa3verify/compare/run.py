"""Go over inputs and values: equal over everything that ran, or the first value, row and bit that differ, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from fa3_reference.problem import AttentionProblem
from fa3_reference.quantize import QuantScheme
from fa3verify.calls import Refused
from fa3verify.candidates import Candidate, find, twin
from fa3verify.cases import Case
from fa3verify.compare.axes import Axis, Pair, problem_of
from fa3verify.compare.bits import First, first_difference, size_of
from fa3verify.compare.reasons import reason
from fa3verify.inputs.recipe import Recipe
from fa3verify.operations import FORWARD, Outputs
from fa3verify.properties.law import Setup, Untaken, set_up

# Sums of two orders may agree on kind inputs; large terms that cancel, outliers and few large weights tell them apart.
RECIPES: tuple[Recipe, ...] = (
    Recipe("normal"),
    Recipe("cancelling_v"),
    Recipe("fa3_outliers"),
    Recipe("peaky"),
    Recipe("block_scaled"),
)


@dataclass(frozen=True, slots=True)
class Compared:
    """What a comparison found.

    Parameters
    ----------
    what : str
        What changed between the calls.
    outputs, pairs : int
        Outputs that were compared until the first difference, and pairs of calls.
    refused : str, optional
        Why some pair could not run, where one could not.
    value
        Of the axis, at the first difference.
    first : First, optional
        None where all outputs are equal.
    because, inputs : str
        What of the two launches differs, and what the first differing inputs were.
    """

    what: str
    outputs: int
    pairs: int
    refused: str | None = None
    value: Any = None
    first: First | None = None
    because: str = ""
    inputs: str = ""

    @property
    def is_equal(self) -> bool | None:
        """None where nothing ran."""
        return None if not self.outputs else self.first is None

    def told(self) -> str:
        """One line."""
        if self.is_equal is None:
            return f"{self.what}: nothing ran; {self.refused}"
        if self.first is None:
            rest = f"; not all ran: {self.refused}" if self.refused else ""
            return f"{self.what}: equal over everything it ran, {self.outputs:,} outputs of {self.pairs:,} pairs{rest}"
        return (
            f"{self.what}: differs first at {self.value}, {self.first.told()}, because {self.because} [{self.inputs}]"
        )


def compare_over(
    candidate: Candidate, axis: Axis, values: Iterable[Any] = (), recipes: tuple[Recipe, ...] = RECIPES
) -> Compared:
    """Compare one kernel with itself over an axis, in the configurations that it takes.

    Parameters
    ----------
    candidate : Candidate
        A forward kernel.
    axis : Axis
    values : iterable
        Of the axis, rising; its own by default.
    recipes : tuple of Recipe
        Inputs of every value.

    Raises
    ------
    ValueError
        If the kernel is not of the forward or does not have what the axis needs.
    """
    _check_forward(candidate)
    if not axis.fits(candidate):
        lacking = ", ".join(sorted((axis.needs - candidate.features) | (axis.changes - candidate.changeable)))
        raise ValueError(f"{candidate.name} cannot be compared over {axis.name}: it does not claim {lacking}")

    def pairs(value: Any, recipe: Recipe) -> Iterator[Pair]:
        setup = _set_up(candidate, problem_of(candidate, axis.problem(value)), recipe)
        yield from axis.pairs(candidate, setup, value)

    return _compare(axis.words, (candidate, candidate), tuple(values) or axis.values, recipes, pairs)


def compare_kernels(
    a: Candidate,
    b: Candidate,
    problems: Iterable[tuple[Any, AttentionProblem]],
    recipes: tuple[Recipe, ...] = RECIPES,
) -> Compared:
    """Compare two kernels, or two configurations of one, on the same operands.

    Parameters
    ----------
    problems : iterable of (value, AttentionProblem)
        With what each is called, such as its length.

    Raises
    ------
    ValueError
        If one is not of the forward or their dtypes differ.
    """
    _check_forward(a)
    _check_forward(b)
    if a.dtype != b.dtype:
        raise ValueError(f"kernels must have one dtype, got {a.dtype} and {b.dtype}")
    by_value = dict(problems)

    def pairs(value: Any, recipe: Recipe) -> Iterator[Pair]:
        plain, other = (_set_up(each, by_value[value], recipe) for each in (a, b))
        yield Pair(plain, other, lambda result: result, lambda result: result)

    return _compare(f"{a.name} and {b.name}", (a, b), tuple(by_value), recipes, pairs)


def _check_forward(candidate: Candidate) -> None:
    if candidate.operation != FORWARD:
        raise ValueError(f"only forward kernels are compared, {candidate.name} computes {candidate.operation}")


def _set_up(candidate: Candidate, problem: AttentionProblem, recipe: Recipe) -> Setup:
    scheme = QuantScheme("head") if candidate.dtype == "e4m3" else None
    return set_up(candidate, Case(candidate.name, problem, recipe, scheme))


def _compare(
    what: str,
    kernels: tuple[Candidate, Candidate],
    values: tuple[Any, ...],
    recipes: tuple[Recipe, ...],
    pairs: Callable[[Any, Recipe], Iterator[Pair]],
) -> Compared:
    outputs = count = 0
    refused: str | None = None
    for value in values:
        for recipe in recipes:
            done: dict[int, tuple[Setup, Outputs]] = {}  # calls that several pairs share, kept so that ids stay theirs

            def result(setup: Setup, kernel: Candidate, done: dict[int, tuple[Setup, Outputs]] = done) -> Outputs:
                if id(setup) not in done:
                    done[id(setup)] = setup, setup.run(kernel)
                return done[id(setup)][1]

            try:
                for pair in pairs(value, recipe):
                    a = pair.of_plain(result(pair.plain, kernels[0]))
                    b = pair.of_changed(result(pair.changed, kernels[1]))
                    outputs, count = outputs + size_of(a, b), count + 1
                    if first := first_difference(a, b):
                        launches = (pair.plain.config, pair.changed.config)
                        because = reason(*launches, (pair.plain.problem, pair.changed.problem))
                        return Compared(what, outputs, count, refused, value, first, because, recipe.describe())
            except (Refused, Untaken) as error:
                refused = str(error)
    return Compared(what, outputs, count, refused)


def configured(name: str) -> Candidate:
    """Return a kernel by name, with fields of its configuration changed where brackets say so.

    A twin's family is asked for the changed configuration: ``twin.flash3.fp16[num_splits=0]`` splits as the library
    chooses.

    >>> configured("twin.e4m3[tile_n=96,promotion_interval=96]").config_for(AttentionProblem(
    ...     1, 1, 1, 1, 97, 128, dtype="e4m3")).tile_n
    96
    """
    plain, bracket, rest = name.partition("[")
    candidate = find(plain)
    if not bracket:
        return candidate
    if not rest.endswith("]"):
        raise ValueError(f"a configuration is KERNEL[FIELD=VALUE,...], got {name!r}")
    changes = dict(_change(each, name) for each in rest[:-1].split(","))
    side = getattr(candidate.run, "__self__", None)
    if candidate.name.startswith("twin.") and side is not None:  # its family then fits what else a change asks for
        changed = dict(side.changes) | changes
        rebuilt = twin(candidate.dtype, name=name, fault=side.fault, operation=candidate.operation, **changed)
        return replace(candidate, name=name, run=rebuilt.run, configure=rebuilt.configure)
    own = candidate.configure
    return replace(candidate, name=name, configure=lambda problem: _replaced(own(problem), changes, plain))


def _replaced(config: Any, changes: dict[str, Any], kernel: str) -> Any:
    try:
        return replace(config, **changes)
    except TypeError:
        raise ValueError(f"{kernel} has no configuration with {', '.join(changes)}") from None


def _change(text: str, name: str) -> tuple[str, Any]:
    """A field and its value: an integer, a switch or a word."""
    key, equals, value = text.partition("=")
    if not key or not equals or not value:
        raise ValueError(f"a configuration is KERNEL[FIELD=VALUE,...], got {name!r}")
    if value in ("true", "false"):
        return key, value == "true"
    return key, int(value) if value.lstrip("-").isdigit() else value
