"""The interface of an operation: what the harness must know to judge its kernels.

That is its outputs, truth, error bound, twin and inputs. Judging, gate, laws, campaigns and reports go through this
interface, so that another operation is a file in this folder and a row in ``fa3verify.operations.OPERATIONS``. The
methods take the problem, the operands that a kernel was given, and its configuration; ``got`` is what the kernel
returned, for operations whose truth depends on a choice of the kernel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fa3_kernels.plan.config import Setting
from fa3_reference.formats import FORMATS
from fa3_reference.problem import Array, AttentionProblem, Operands
from fa3_reference.quantize import Quantized, QuantScheme
from fa3_reference.score_term import KINDS

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn

    from fa3_kernels.faults.table import AnyFault
    from fa3verify.inputs.recipe import Recipe


@np.errstate(divide="ignore", invalid="ignore")
def error_ratio(error: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """Return |error| / bound with 0/0 = 0; a NaN error is infinitely wrong unless the bound is infinite."""
    ratio = np.abs(error) / bound
    ratio = np.where((error == 0) & (bound == 0), 0.0, ratio)
    ratio = np.where(np.isnan(error), np.inf, ratio)
    return np.where(np.isinf(bound), 0.0, ratio)


@np.errstate(invalid="ignore")
def difference(got: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Return got - truth where an infinity equals itself; any other infinity is infinitely wrong."""
    got = got.astype(np.float64)
    return np.where(got == truth, 0.0, np.where(np.isinf(got), np.inf, got - truth))


@np.errstate(invalid="ignore", over="ignore")
def error_over_bound(got: np.ndarray, truth: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """Return |got - truth| / bound of each element, as :func:`error_ratio` has it; -inf equals -inf."""
    return error_ratio(difference(got, truth), bound)


# Features of kernels that take finer descales than one per sequence and kv head.
DESCALES = frozenset({"query_head_descale", "block_descale"})
TWIN = "fa3_kernels.twin"
# Features that calls which serve need of a kernel. A forward's truth and error bound know all of them. A twin computes
# those that its family has (:attr:`fa3_kernels.plan.families.record.Traits.serving`), but does not claim them.
CACHES = frozenset({"seqused_k", "paged", "append", "rotary", "leftpad", "batch_idx", "fp8_cache", "fp8_rows"})
SERVING = frozenset({"sinks", "attention_chunk", "qv", "mods", *KINDS}) | CACHES
FEATURES = frozenset({"causal", "window", "softcap", "varlen", "gqa", "head_dim_v"}) | DESCALES
# The feature that descales of blocks need in a call that serves. It is one of its own, as FlashAttention-3's function
# for caches cannot take them: a kernel may claim caches, and take such descales in other calls only.
SERVED_BLOCKS = "served_block_descale"
Outputs = Mapping[str, Array]  # by name; what a kernel or a configuration does not have is absent
Arrays = tuple[NDArray[np.float64], ...]  # q, k and v, and further inputs of the operation
Chosen = tuple[QuantScheme | None, tuple[tuple[str, Setting], ...]]  # the scheme and the changes of a case
Descales = Literal["any", "uniform", "blocks"]  # to draw for e4m3: of any kind, one for each head, always of blocks
Names = frozenset[str]
Configure = Callable[[AttentionProblem], Any]  # returns the configuration that a kernel chooses
Accumulator = Literal["fp32", "wgmma", "either", "tf32"]  # how a kernel that states no order adds products
ForwardOf = Literal["given", "own"]  # whether gradients belong to the given out and lse, or to a forward of its own
# Packed sequences, some of which end inside a tile, for the operations that quantise or differentiate.
PACKED = AttentionProblem.varlen((40, 70, 1), (200, 33, 129), nheads=2, nheads_kv=1, head_dim=128)


def needed_features(problem: AttentionProblem) -> frozenset[str]:
    """Return the features of :data:`FEATURES` and :data:`SERVING` that a problem needs from a kernel."""
    needs = {
        "causal": problem.causal,
        "window": problem.window != (-1, -1),
        "softcap": problem.softcap > 0,
        "varlen": problem.is_varlen and (problem.cache is None or not problem.has_equal_queries),
        "gqa": problem.group > 1,
        "head_dim_v": problem.head_dim_v != problem.head_dim and not problem.qv,
    }
    return problem.serving | frozenset(name for name, needed in needs.items() if needed)


@dataclass(frozen=True, slots=True)
class Output:
    """One array that kernels of an operation return.

    Parameters
    ----------
    name : str
    shape : callable
        ``shape(problem, config)``, or None if this configuration does not return it.
    format : callable
        ``format(config)``: name of its number format.
    main : bool
        Whether all figures of error are computed for it; another output has only its largest error, and that over the
        bound.
    optional : bool
        Whether a kernel may leave it out.
    needs : str
        The element of a problem's ``serving`` without which there is no such output; empty if every problem has it.
    unit : str
        Unit of its largest error.
    ratio : callable
        ``ratio(got, truth, bound)``: error / bound of each element, float64; above 1 is wrong.
    margins : mapping of str to (float, float, str)
        For outputs that are not main: by how much its "max" and its "rms" error may exceed a baseline's, relative and
        absolute, and why.
    """

    name: str
    shape: Callable[[AttentionProblem, Any], tuple[int, ...] | None]
    format: Callable[[Any], str]
    main: bool = True
    optional: bool = False
    needs: str = ""
    unit: str = "1"
    ratio: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray] = error_over_bound
    margins: Mapping[Literal["max", "rms"], tuple[float, float, str]] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """Return its name as texts have it."""
        return self.name.replace("_", " ")

    def is_due(self, problem: AttentionProblem) -> bool:
        """Tell whether a kernel may return it for a problem."""
        return not self.needs or self.needs in problem.serving

    def figure(self, of: Literal["ratio", "max", "rms"]) -> str:
        """Return the name of a figure: its largest error / bound, its largest error or its root mean square error."""
        return f"ratio_{self.name}_max" if of == "ratio" else f"{self.name}_{of}_error"


class WrongOutput(ValueError):
    """A kernel left out an output, returned one of the wrong type, dtype or shape, or changed its operands."""


class Operation(ABC):
    """One operation, as a subclass states it.

    ``config`` is the dataclass of a kernel's configuration, whose fields a case may change. ``features`` are those of
    :data:`FEATURES` that the twin takes, ``serving`` those of :data:`SERVING` that kernels may have as well, ``faults``
    the mistakes that can be planted in the twin. ``has_orders`` says that the error bound assumes an order of
    operations; ``judges_choices`` that truth and bound depend on what the kernel returned, and so are computed after
    its run.
    """

    name: ClassVar[str]
    outputs: ClassVar[tuple[Output, ...]]
    config: ClassVar[type]
    features: ClassVar[frozenset[str]]
    serving: ClassVar[frozenset[str]] = frozenset()
    faults: ClassVar[type[AnyFault]]
    has_orders: ClassVar[bool] = False
    judges_choices: ClassVar[bool] = False

    def features_of(self, changes: Mapping[str, Setting]) -> frozenset[str]:
        """Return the features of the twin with a changed configuration."""
        return self.features

    @abstractmethod
    def configure(self, problem: AttentionProblem, **changes: Any) -> Any:
        """Return the twin's configuration for a problem; ValueError if the twin does not take it."""

    def twin(self, problem: AttentionProblem, operands: Operands, config: Any, package: str = TWIN) -> Any:
        """Run the twin of a package: the sound one, or one with a mistake (:mod:`fa3_kernels.faults`).

        ValueError for an operation without a twin, which has no ``faults`` either.
        """
        raise ValueError(f"{self.name} has no twin")

    def draw(self, problem: AttentionProblem, recipe: Recipe) -> Arrays:
        """Return the float64 inputs that a recipe stands for: q, k and v, unless an operation needs more."""
        return recipe.draw(problem)

    @abstractmethod
    def prepare(
        self, problem: AttentionProblem, arrays: Arrays, scheme: QuantScheme | None, changes: Mapping[str, Setting]
    ) -> Quantized:
        """Return the operands that a kernel gets for float64 inputs, rounded or quantised.

        ``operands.dequantized`` returns their values in the order of ``arrays``.
        """

    @abstractmethod
    def truth(self, problem: AttentionProblem, arrays: Arrays, config: Any, got: Outputs) -> Outputs:
        """Return the exact outputs in float64, by name; main outputs are always there."""

    def hypothesis_names(self, forward: ForwardOf) -> tuple[str, ...]:
        """Return the names of the hypotheses about a kernel that states no order; none without orders."""
        return ()

    def hypotheses(self, config: Any, accumulator: Accumulator) -> Mapping[str, Any]:
        """Return the models that the error bound may assume of a kernel that states no order, by hypothesis."""
        return {}

    @abstractmethod
    def bound(self, problem: AttentionProblem, operands: Operands, assumed: Any, got: Outputs) -> Outputs:
        """Return the a-priori bound of the absolute error of every output, in the shapes of :meth:`truth`."""

    def enclosure(
        self, problem: AttentionProblem, operands: Operands, assumed: Any
    ) -> Mapping[str, tuple[np.ndarray, np.ndarray]]:
        """Return by output the least and the largest value that a stated order of operations can give.

        It is empty if the order is not known exactly.
        """
        return {}

    @abstractmethod
    def shapes(self, of_forward: tuple[AttentionProblem, ...], *, is_quick: bool) -> tuple[AttentionProblem, ...]:
        """Return the problems of a campaign, which are run in each kernel's own dtype; a forward's are given."""

    def choices(
        self, problem: AttentionProblem, recipe: Recipe, index: int, features: Names, changeable: Names
    ) -> Chosen:
        """Return the scheme and the changes of the index-th case of a family; none by default.

        ``features`` are the kernel's, and ``changeable`` the fields of its configuration that may be changed.
        """
        return None, ()

    def draw_choices(
        self, draw: DrawFn, problem: AttentionProblem, features: Names, configure: Configure, descales: Descales
    ) -> Chosen:
        """Draw scheme and changes for a small case of a kernel; none by default."""
        return None, ()

    def descales_of(
        self, problem: AttentionProblem, scheme: QuantScheme | None, changes: Mapping[str, Setting]
    ) -> frozenset[str]:
        """Return the features that a kernel needs for the descales of a case: of :data:`DESCALES`, and
        :data:`SERVED_BLOCKS`. None are needed by default.
        """
        return frozenset()

    def check(self, problem: AttentionProblem, scheme: QuantScheme | None) -> None:
        """Raise ValueError unless a quantisation scheme fits the problem; by default only None does."""
        if scheme is not None:
            raise ValueError(f"a case of {self.name} has no quantisation scheme, got {scheme}")

    @property
    def sides(self) -> tuple[Output, ...]:
        """Return the outputs that are not main."""
        return tuple(output for output in self.outputs if not output.main)

    def check_changes(self, changes: Mapping[str, Setting]) -> None:
        """Raise ValueError unless all changes are fields of the configuration."""
        known = {f.name for f in fields(self.config)}
        if unknown := [name for name in changes if name not in known]:
            raise ValueError(f"changes must be configuration fields, got {unknown}")

    def named(self, returned: Any, problem: AttentionProblem, config: Any) -> dict[str, np.ndarray]:
        """Return the outputs of a kernel by name, from a mapping, attributes, or a tuple in the order of outputs.

        Outputs that the configuration or the problem does not have are left out, and optional ones that are None.

        Raises
        ------
        WrongOutput
            If an output is missing, is no array of numpy, or has the wrong shape or dtype. Strides do not matter.
        """
        named = {}
        if type(returned) is tuple:
            returned = dict(zip((output.name for output in self.outputs), returned))
        for output in self.outputs:
            shape = output.shape(problem, config)
            if shape is None or not output.is_due(problem):
                continue
            array = returned.get(output.name) if isinstance(returned, Mapping) else getattr(returned, output.name, None)
            if array is None and not output.optional:
                raise WrongOutput(f"returned no {output.name}")
            if array is None:
                continue
            if not isinstance(array, np.ndarray):
                raise WrongOutput(f"returned {output.name} as {type(array).__name__}, expected a numpy array")
            if array.shape != shape:
                raise WrongOutput(f"returned {output.name} of shape {array.shape}, expected {shape}")
            if array.dtype != (declared := np.dtype(FORMATS[output.format(config)].dtype)):
                raise WrongOutput(f"returned {output.name} of dtype {array.dtype}, expected {declared}")
            named[output.name] = array
        return named
