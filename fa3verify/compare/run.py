"""Compare two calls bit for bit over many inputs: all their outputs were equal, or the first that differs, and why.

:mod:`fa3verify.compare.tasks` runs such comparisons in processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from fa3_kernels.plan.config import Config
from fa3_reference.problem import AttentionProblem
from fa3_reference.rules import require
from fa3verify.cases.case import Case
from fa3verify.compare.axes import Axis, Fields, Pair
from fa3verify.inputs.recipe import Recipe
from fa3verify.judging.metrics import bits_of, other_bits
from fa3verify.kernels import twins
from fa3verify.kernels.calls import Refused
from fa3verify.kernels.record import Kernel
from fa3verify.operations import FORWARD, Outputs
from fa3verify.operations.operation import needed_features
from fa3verify.properties.law import Setup, Untaken, set_up
from fa3verify.text import plural


@dataclass(frozen=True, slots=True)
class First:
    """Says where two results differ first.

    Parameters
    ----------
    output : str
    index : tuple of int
        Place in the array; in a batched out (sequence, row, head, channel).
    values, bits : (float, float), (str, str)
        The value in both results, and its bits in hexadecimal.
    differing, compared : int
        How many elements of all outputs differ, and how many were compared.
    largest : float
        Largest |a - b| of this output; infinite where one is NaN.
    """

    output: str
    index: tuple[int, ...]
    values: tuple[float, float]
    bits: tuple[str, str]
    differing: int
    compared: int
    largest: float

    def told(self) -> str:
        """One line: place, values, bits, and how many differ by how much.

        >>> First("out", (0, 3), (1.0, 1.5), ("0x3c00", "0x3e00"), 1, 8, 0.5).told()
        'out[0, 3] 1.0 (0x3c00) against 1.5 (0x3e00); 1 of 8 differ, by 0.5 at most'
        """
        (a, b), (x, y) = self.values, self.bits
        counts = f"{self.differing:,} of {self.compared:,} differ, by {self.largest:.3g} at most"
        return f"{self.output}{list(self.index)} {a!r} ({x}) against {b!r} ({y}); {counts}"


def first_difference(a: Outputs, b: Outputs) -> First | None:
    """Compare the outputs that both results have bit for bit; None if all are equal.

    Every NaN equals every NaN, -0 is not +0. ValueError for arrays of other dtypes or shapes.
    """
    names = [name for name in a if name in b]
    for name in names:
        if a[name].dtype != b[name].dtype or a[name].shape != b[name].shape:
            kinds = " and ".join(f"{x[name].dtype} {x[name].shape}" for x in (a, b))
            raise ValueError(f"results must agree in dtype and shape, got {kinds}")
    masks = {name: other_bits(a[name], b[name]) for name in names}
    name = next((name for name in names if masks[name].any()), None)
    if name is None:
        return None
    index = tuple(int(i) for i in np.argwhere(masks[name])[0])
    x, y = (side[name].astype(np.float64) for side in (a, b))
    with np.errstate(invalid="ignore"):
        apart = np.abs(x - y)[masks[name]]
    words = tuple(f"{int(bits_of(side[name])[index]):#0{2 + 2 * side[name].itemsize}x}" for side in (a, b))
    return First(
        output=name,
        index=index,
        values=(float(x[index]), float(y[index])),
        bits=(words[0], words[1]),
        differing=int(sum(mask.sum() for mask in masks.values())),
        compared=size_of(a, b),
        largest=float(np.max(np.where(np.isnan(apart), np.inf, apart))),
    )


def size_of(a: Outputs, b: Outputs) -> int:
    """Return how many outputs both have."""
    return sum(int(a[name].size) for name in a if name in b)


# Sums of two orders may agree on kind inputs; large terms that cancel, outliers and few large weights tell them apart.
RECIPES: tuple[Recipe, ...] = (
    Recipe("normal"),
    Recipe("cancelling_v"),
    Recipe("fa3_outliers"),
    Recipe("peaky"),
    Recipe("block_scaled"),
)


Splits = tuple[int | None, int | None]  # of the two calls of a pair; None where a kernel does not say


@dataclass(frozen=True, slots=True)
class Compared:
    """Holds the result of a comparison.

    Parameters
    ----------
    what : str
        What changed between the calls.
    outputs, pairs : int
        Outputs that were compared until the first difference, and pairs of calls.
    refused : str, optional
        Why a pair could not run; None if all ran.
    value
        The value of the axis at the first difference.
    first : First, optional
        None where all outputs are equal.
    because, inputs : str
        How the two launches differ, and which inputs gave the first difference; empty where all outputs are equal.
    splits : tuple of (int or None, int or None)
        Into how many parts the keys of a compared row were cut in the two calls of a pair; each combination once, None
        where the kernel does not say.
    """

    what: str
    outputs: int
    pairs: int
    refused: str | None = None
    value: Any = None
    first: First | None = None
    because: str = ""
    inputs: str = ""
    splits: tuple[Splits, ...] = ()

    @property
    def is_equal(self) -> bool | None:
        """Tell whether all outputs are equal; None if nothing ran."""
        return None if not self.outputs else self.first is None

    def told(self) -> str:
        """Return the result in one line."""
        if self.is_equal is None:
            return f"{self.what}: nothing ran; {self.refused}"
        if self.first is None:
            rest = f"; not all ran: {self.refused}" if self.refused else ""
            ran = f"{self.outputs:,} outputs of {self.pairs:,} pairs"
            return f"{self.what}: equal over everything it ran, {ran}{self.launched()}{rest}"
        return (
            f"{self.what}: differs first at {self.value}, {self.first.told()}, because {self.because} [{self.inputs}]"
        )

    def launched(self) -> str:
        """Return the splits in words, so that "equal" is not read as a claim about others; empty if none were noted.

        >>> Compared("", 8, 2, splits=((1, 1), (4, 3))).launched()
        ', splits 1 and 1, 4 and 3'
        """
        words = [" and ".join("unknown" if n is None else str(n) for n in pair) for pair in self.splits]
        return f", splits {', '.join(words)}" if words else ""


def compare_over(
    kernel: Kernel,
    axis: Axis,
    values: Iterable[Any] = (),
    recipes: tuple[Recipe, ...] = RECIPES,
    sizes: Fields | None = None,
) -> Compared:
    """Compare one kernel with itself over an axis, in the configurations that it takes.

    Parameters
    ----------
    kernel : Kernel
        A forward kernel.
    axis : Axis
    values : iterable
        Values of the axis, rising; its own by default.
    recipes : tuple of Recipe
        Inputs of every value.
    sizes : mapping, optional
        Fields of the problem, among :data:`fa3verify.compare.axes.SIZES`, instead of the axis's own; lengths are
        those of the compared sequence.

    Raises
    ------
    ValueError
        If the kernel is not of the forward or does not have what the axis needs, for a value of another kind, and for a
        size that the axis sets itself.
    """
    _check_forward(kernel)
    if not axis.fits(kernel):
        lacking = ", ".join(sorted((axis.needs - kernel.features) | (axis.changes - kernel.changeable)))
        raise ValueError(f"{kernel.name} cannot be compared over {axis.name}: it does not claim {lacking}")

    def pairs(value: Any, recipe: Recipe) -> Iterator[Pair]:
        yield from axis.pairs(call_of(kernel, axis.problem_for(kernel, value, sizes or {}), recipe), value)

    return compare_pairs(axis.words, tuple(values) or axis.values, recipes, pairs)


def compare_kernels(
    a: Kernel,
    b: Kernel,
    problems: Iterable[tuple[Any, AttentionProblem]],
    recipes: tuple[Recipe, ...] = RECIPES,
) -> Compared:
    """Compare two kernels, or two configurations of one, on the same operands.

    Parameters
    ----------
    problems : iterable of (value, AttentionProblem)
        The problems, each with the value that a message names, such as its length.

    Raises
    ------
    ValueError
        If one is not of the forward or their dtypes differ.
    """
    _check_forward(a)
    _check_forward(b)
    require(a.dtype == b.dtype, f"kernels must have one dtype, got {a.dtype} and {b.dtype}")
    by_value = dict(problems)

    def pairs(value: Any, recipe: Recipe) -> Iterator[Pair]:
        plain, other = (call_of(each, by_value[value], recipe) for each in (a, b))
        yield Pair(plain, other)

    return compare_pairs(f"{a.name} and {b.name}", by_value, recipes, pairs)


def _check_forward(kernel: Kernel) -> None:
    require(
        kernel.operation == FORWARD, f"only forward kernels are compared, {kernel.name} computes {kernel.operation}"
    )


def call_of(kernel: Kernel, problem: AttentionProblem, recipe: Recipe) -> Setup:
    """Return a call on the inputs of a recipe; Untaken or Refused where the kernel does not take the problem."""
    if missing := needed_features(problem) - kernel.features:
        raise Untaken(f"{kernel.name} does not claim {', '.join(sorted(missing))}")
    return set_up(kernel, Case.plain(kernel, problem, recipe))


def compare_pairs(
    what: str,
    values: Iterable[Any],
    recipes: Iterable[Recipe],
    pairs: Callable[[Any, Recipe], Iterator[Pair]],
) -> Compared:
    """Run the pairs of calls of every value and recipe until an output differs.

    If a kernel does not take a call, the other pairs of this value and recipe are left out, and the result says why.
    """
    outputs = count = 0
    refused: str | None = None
    splits: dict[Splits, None] = {}
    for value in values:
        for recipe in recipes:
            done: dict[int, tuple[Setup, Outputs]] = {}  # calls that several pairs share, kept so that ids stay theirs

            def result(setup: Setup, done: dict[int, tuple[Setup, Outputs]] = done) -> Outputs:
                if id(setup) not in done:
                    done[id(setup)] = setup, setup.run()
                return done[id(setup)][1]

            try:
                for pair in pairs(value, recipe):
                    a = pair.of_plain(result(pair.plain))
                    b = pair.of_changed(result(pair.changed))
                    outputs = outputs + size_of(a, b)
                    count = count + 1
                    launches = _launch(pair.plain), _launch(pair.changed)
                    problems = pair.plain.problem, pair.changed.problem
                    splits[splits_of(launches[0], problems[0]), splits_of(launches[1], problems[1])] = None
                    if first := first_difference(a, b):
                        because = reason(*launches, problems)
                        inputs = recipe.describe()
                        return Compared(what, outputs, count, refused, value, first, because, inputs, tuple(splits))
            except (Refused, Untaken) as error:
                refused = str(error)
    return Compared(what, outputs, count, refused, splits=tuple(splits))


def _launch(setup: Setup) -> Any:
    """Return the configuration of a call's launch; None for a kernel without a twin, which states only its formats."""
    return setup.config if twins.is_twin(setup.kernel.name) or setup.kernel.twin is not None else None


def reason(a: Any, b: Any, problems: tuple[AttentionProblem, AttentionProblem]) -> str:
    """Return in words which differences of two launches change bits, or that none is known.

    Configurations that are no :class:`Config` say nothing of a launch, which the answer says.

    >>> problem = AttentionProblem(1, 1, 1, 1, 97, 128, dtype="e4m3")
    >>> reason(Config("e4m3", tile_n=96), Config("e4m3", tile_n=192), (problem, problem))
    'a tile has 96 keys against 192, so 97 keys are 2 tiles against 1'
    """
    if not isinstance(a, Config) or not isinstance(b, Config):
        return "the kernels do not say how they are launched"
    return "; ".join(_differences(a, b, problems)) or "nothing that is known of the two launches differs"


def _differences(a: Config, b: Config, problems: tuple[AttentionProblem, AttentionProblem]) -> Iterator[str]:
    """Yield what two launches have different: order of operations, tiles, parts of the keys, formats."""
    orders = a.traits.order, b.traits.order
    differing = [f.name for f in fields(orders[0]) if getattr(orders[0], f.name) != getattr(orders[1], f.name)]
    if differing:
        yield f"families {a.family} and {b.family} differ in {', '.join(differing)}"
    if a.tile_n != b.tile_n:
        keys = min(problem.seqlen_k for problem in problems)
        counts = [-(-keys // config.tile_n) for config in (a, b)]
        split = f"{keys} keys are {plural(counts[0], 'tile')} against {counts[1]}"
        yield f"a tile has {a.tile_n} keys against {b.tile_n}, so {split}"
    splits = [x.traits.sequence_splits(problem, x)[0] for x, problem in zip((a, b), problems, strict=True)]
    lengths = [(problem.seqlen_q, problem.seqlen_k) for problem in problems]
    if splits[0] != splits[1]:
        yield f"keys are cut into {plural(splits[0], 'part')} against {splits[1]}"
    elif splits[0] != 1 and problems[0].causal and lengths[0] != lengths[1]:
        # The same number of parts of other ranges: a row's tile sees other keys where the lengths differ.
        yield f"either cuts the keys that a row's tile sees into {splits[0]} parts, and the tile is another"
    words = {"promotion_interval": "keys of a promoted sum", "out_dtype": "the output format", "dtype": "the dtype"}
    for name, what in words.items():
        if getattr(a, name) != getattr(b, name):
            yield f"{what} {'is' if 'the' in what else 'are'} {getattr(a, name)} against {getattr(b, name)}"


def splits_of(config: Any, problem: AttentionProblem) -> int | None:
    """Return the splits of the first sequence, which packed ones may share unevenly; None where they are not known.

    >>> from fa3_kernels.plan.config import default_config
    >>> problem = AttentionProblem.varlen((1,) * 9, (4000,) + (3000,) * 8, nheads=32, nheads_kv=32, head_dim=128)
    >>> splits_of(default_config(problem, family="flash3", num_splits=4), problem)
    1
    """
    return config.traits.sequence_splits(problem, config)[0] if isinstance(config, Config) else None
