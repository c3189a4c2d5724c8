"""What a law is: a relation that the outputs of a kernel obey, how trials of it are drawn, and how one
is checked.

A law compares a kernel with itself, or with what mathematics says about the result, on transformed problems. A trial is
one such comparison: small, JSON, and enough to repeat it anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from hypothesis.strategies import SearchStrategy

from fa3_reference.problem import AttentionProblem, Operands
from fa3verify import operations
from fa3verify.cases.case import Case
from fa3verify.files import Json, of_schema
from fa3verify.judging import hypotheses
from fa3verify.kernels import calls
from fa3verify.kernels.calls import KernelError as KernelError
from fa3verify.kernels.calls import Refused as Refused
from fa3verify.kernels.policy import freed
from fa3verify.kernels.record import Kernel
from fa3verify.operations import Operation, Outputs
from fa3verify.text import one_line

SCHEMA = "fa3verify.trial/1"
Drawn = dict[str, object]  # parameters of a law: JSON values, which the law checks when it reads them
Kind = Literal["exact", "invariant", "agreement", "bounded"]


@dataclass(frozen=True, slots=True)
class Trial:
    """One check of a law: the law's name, a case and the parameters of the transformation."""

    law: str
    case: Case
    parameters: Drawn = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in self.parameters.items():
            if not isinstance(name, str) or not _is_json(value):
                raise ValueError(f"trial parameter {name!r} must be a JSON value, got {value!r}")

    def integer(self, name: str, least: int, most: int) -> int:
        """Return an integer parameter; ValueError unless it lies in [least, most]."""
        value = self.parameters.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError(f"{self.law}: {name} must be an integer in [{least}, {most}], got {value!r}")
        return value

    def choice(self, name: str, options: tuple[str, ...]) -> str:
        """Return a text parameter; ValueError unless it is one of the options."""
        value = self.parameters.get(name)
        if not isinstance(value, str) or value not in options:
            raise ValueError(f"{self.law}: {name} must be one of {', '.join(options)}, got {value!r}")
        return value

    def describe(self) -> str:
        """One line: law, parameters, case."""
        settings = ", ".join(f"{name}={value!r}" for name, value in self.parameters.items())
        return f"{self.law}({settings}) on {self.case.describe()}"

    def to_json(self) -> Json:
        """Return the trial as JSON values; :meth:`from_json` reads it back exactly."""
        return {
            "schema": SCHEMA,
            "law": self.law,
            "case": self.case.to_json(),
            "parameters": dict(self.parameters),
        }

    @classmethod
    def from_json(cls, values: Any) -> Trial:
        """Read a trial; ValueError names what is wrong with a damaged or foreign one."""
        values = of_schema(values, SCHEMA, "not a trial")
        keys = {"schema", "law", "case", "parameters"}
        if set(values) != keys:
            raise ValueError(f"trial must have the keys {sorted(keys)}, got {sorted(map(str, values))}")
        if not isinstance(values["law"], str) or not isinstance(values["parameters"], dict):
            raise ValueError("trial must name its law by a string and its parameters by an object")
        return cls(values["law"], Case.from_json(values["case"]), dict(values["parameters"]))


def _is_json(value: object) -> bool:
    if isinstance(value, list):
        return all(_is_json(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_json(item) for name, item in value.items())
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool | int | str)


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken law.

    Parameters
    ----------
    message : str
        Self-contained: what was compared, where it differs most, got, expected, bound.
    kind : {"violated", "crashed"}
        ``crashed``: the kernel raised or returned something of the wrong shape.
    where : str
        Worst element, such as ``out[0, 3, 1, 17]``.
    ratio : float
        Error over bound; infinite for an exact law.
    traceback : dict, optional
        Of the exception that a kernel raised, as :func:`fa3verify.text.of_traceback` gives it.
    """

    message: str
    kind: Literal["violated", "crashed"] = "violated"
    where: str = ""
    ratio: float = math.inf
    traceback: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Law:
    """A property every correct kernel has.

    Parameters
    ----------
    name : str
        Subject and relation: ``value_scaling_by_powers_of_two``.
    statement : str
        One line: what holds, when, and exactly or within which bound.
    kind : {"exact", "invariant", "agreement", "bounded"}
        ``exact`` laws demand bits, ``bounded`` ones a bound. ``invariant`` ones demand equal bits of calls that differ
        in shape, order or scale, or of repeated ones: correct kernels may break them, so that they are checked on
        kernels that claim them. ``agreement`` ones demand the same of kernels that claim them, and of all others that
        the calls differ by no more than the sum of their bounds.
    needs : callable
        Whether a kernel has what the law needs.
    draw : callable
        Hypothesis strategy of trials for a kernel.
    check : callable
        None when the law holds. May raise :class:`KernelError`; the runner makes a violation of it.
    operations : tuple of str
        Operations whose kernels obey it.
    """

    name: str
    statement: str
    kind: Kind
    needs: Callable[[Kernel], bool]
    draw: Callable[[Kernel], SearchStrategy[Trial]]
    check: Callable[[Kernel, Trial], Violation | None]
    operations: tuple[str, ...] = (operations.FORWARD,)

    def is_claimed(self, kernel: Kernel) -> bool:
        """Tell whether the kernel claims the law, if it is one that not every kernel has."""
        return self.kind != "invariant" or kernel.claims(self.name)

    def applies(self, kernel: Kernel) -> bool:
        """Tell whether the law is one of the kernel's operation and the kernel has what it needs."""
        return kernel.operation in self.operations and self.needs(kernel)


class Untaken(Exception):
    """A law led to a size, descales or a configuration that the kernel does not take: the trial says nothing."""


class Setup(NamedTuple):
    """Holds a kernel, and what it is called with."""

    kernel: Kernel
    problem: AttentionProblem
    operands: Operands
    config: Any

    @property
    def operation(self) -> Operation:
        """Return what the kernel computes."""
        return operations.find(self.kernel.operation)

    def run(self) -> Outputs:
        """Run the kernel by :func:`fa3verify.kernels.calls.run`; Untaken where it does not take the call."""
        if words := self.kernel.refusal(self.problem) or self.kernel.unreachable(self.problem, self.config):
            raise Untaken(words)
        return calls.run(self.kernel, self.problem, self.operands, self.config)

    def truth(self, got: Outputs | None = None) -> Outputs:
        """Exact outputs of this call on the operands as they are; ``got`` for operations whose truth depends on it."""
        return self.operation.truth(self.problem, self.operands.dequantized(self.problem), self.config, got or {})

    def bound(self, got: Outputs | None = None) -> Outputs:
        """Rounding-error bound of this call; ``got`` for operations whose bound depends on it."""
        assumed = hypotheses.assumed(self.kernel, self.config)
        bound = self.operation.bound(self.problem, self.operands, assumed, got or {})
        return freed(self.kernel.policy, self.problem, bound, math.inf)

    def configured(self, **changes: Any) -> Setup:
        """Return the same call with another configuration; Refused where there is none such."""
        try:
            return self._replace(config=replace(self.config, **changes))
        except ValueError as error:
            raise Refused(f"ValueError: {error}") from error

    def fed(self, **operands: Any) -> Setup:
        """Return the same call with other operands."""
        return self._replace(operands=replace(self.operands, **operands))


def set_up(kernel: Kernel, case: Case) -> Setup:
    """Return the call a case describes; Untaken where the kernel does not take its descales, or refuses it."""
    try:
        case.check_descales(kernel)
        config = kernel.config_for(case.problem, case.changes)
    except ValueError as error:
        raise Untaken(one_line(error)) from None
    return Setup(kernel, case.problem, case.operands(), config)
