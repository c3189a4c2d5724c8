"""The records of a law, a trial, a violation and a call.

A law is a relation that the outputs of correct kernels obey: it compares a kernel with itself, or with what mathematics
says about the result, on transformed problems. A trial is one such comparison: small, JSON, and enough to repeat it
anywhere. Laws are written with :func:`fa3verify.properties.trials.law` and run by :mod:`fa3verify.properties.runner`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from hypothesis.strategies import SearchStrategy

from fa3_reference.problem import AttentionProblem, Operands
from fa3_reference.rules import require
from fa3verify import operations
from fa3verify.cases.case import Case
from fa3verify.files import Json, of_schema
from fa3verify.judging import hypotheses
from fa3verify.judging.verdict import Seen
from fa3verify.kernels import calls
from fa3verify.kernels.calls import KernelError as KernelError, Refused as Refused
from fa3verify.kernels.policy import freed
from fa3verify.kernels.record import Kernel
from fa3verify.operations import Operation, Outputs
from fa3verify.text import Failure, one_line

SCHEMA = "fa3verify.trial/1"
Drawn = dict[str, object]  # parameters of a trial by name: JSON values, which the law checks when it reads them
Walk = Generator["Trial", bool, None]
Kind = Literal["exact", "invariant", "agreement", "bounded"]


@dataclass(frozen=True, slots=True)
class Trial:
    """One check of a law: the law's name, a case and the parameters of the transformation."""

    law: str
    case: Case
    parameters: Drawn = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in self.parameters.items():
            require(
                isinstance(name, str) and _is_json(value),
                f"trial parameter {name!r} must be a JSON value, got {value!r}",
            )

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
        """Return law, parameters and case in one line."""
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
        require(set(values) == keys, f"trial must have the keys {sorted(keys)}, got {sorted(map(str, values))}")
        require(
            isinstance(values["law"], str) and isinstance(values["parameters"], dict),
            "trial must name its law by a string and its parameters by an object",
        )
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
        A message that needs no context: what was compared, where it differs most, got, expected, bound.
    seen : Seen, optional
        The worst element; None if no single element is wrong, or the kernel failed.
    failure : Failure, optional
        How the kernel failed, if it raised or returned something of the wrong shape; else None.
    """

    message: str
    seen: Seen | None = None
    failure: Failure | None = None

    @property
    def ratio(self) -> float:
        """Return error / bound; infinite for an exact law."""
        return math.inf if self.seen is None or self.seen.ratio is None else self.seen.ratio


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
        ``exact`` laws demand exact bits of every kernel, ``bounded`` ones an error within a bound. ``invariant`` laws
        demand equal bits of calls that differ in shape, order or scale, or of repeated calls. Correct kernels may break
        them, so only kernels that claim them are checked. ``agreement`` laws demand equal bits of kernels that claim
        them; of all others, that the calls differ by no more than the sum of their bounds.
    needs : callable
        Tells whether a kernel has what the law needs.
    draw : callable, optional
        Returns the Hypothesis strategy of trials for a kernel; None for a law that chooses them itself.
    check : callable
        Returns None if the law holds. It may raise :class:`KernelError`, which the runner makes a violation of, and
        :class:`Untaken`.
    operations : tuple of str
        Operations whose kernels obey it.
    walk : callable, optional
        Of a law that chooses its trials: ``walk(kernel, examples)`` yields them one after the other, for a time that
        grows with the examples of a campaign. It is sent whether the last one failed, and then yields smaller ones or
        ends.
    asked : callable, optional
        Returns fields of :class:`fa3verify.cases.tried.SizesTried` that say what trials that hold have asked.
    """

    name: str
    statement: str
    kind: Kind
    needs: Callable[[Kernel], bool]
    draw: Callable[[Kernel], SearchStrategy[Trial]] | None
    check: Callable[[Kernel, Trial], Violation | None]
    operations: tuple[str, ...] = (operations.FORWARD,)
    walk: Callable[[Kernel, int], Walk] | None = None
    asked: Callable[[list[Trial]], Json] | None = None

    def is_claimed(self, kernel: Kernel) -> bool:
        """Tell whether the law is checked on a kernel: unless it cannot be asked, or is "invariant" and not claimed."""
        return self.name not in kernel.unasked and (self.kind != "invariant" or kernel.claims(self.name))

    def applies(self, kernel: Kernel) -> bool:
        """Tell whether the law is one of the kernel's operation and the kernel has what it needs."""
        return kernel.operation in self.operations and self.needs(kernel)


class Untaken(Exception):
    """The kernel does not take a size, descales or a configuration that a law needs: the trial says nothing."""


class Setup(NamedTuple):
    """A call that can be run: a kernel with its problem, operands and configuration."""

    kernel: Kernel
    problem: AttentionProblem
    operands: Operands
    config: Any

    @property
    def operation(self) -> Operation:
        """Return what the kernel computes."""
        return operations.find(self.kernel.operation)

    def run(self) -> Outputs:
        """Run the kernel by :func:`fa3verify.kernels.calls.run`, which may raise KernelError.

        Untaken if the kernel does not take the problem, or no caller can have the configuration.
        """
        if words := self.kernel.refusal(self.problem) or self.kernel.unreachable(self.problem, self.config):
            raise Untaken(words)
        return calls.run(self.kernel, self.problem, self.operands, self.config)

    def truth(self, got: Outputs | None = None) -> Outputs:
        """Return the exact outputs on the operands as stored, float64.

        ``got`` is what the kernel returned, for operations whose truth depends on it.
        """
        return self.operation.truth(self.problem, self.operands.dequantized(self.problem), self.config, got or {})

    def bound(self, got: Outputs | None = None) -> Outputs:
        """Return the bound of the absolute error of each output, infinite where the kernel's policy promises nothing.

        ``got`` is what the kernel returned, for operations whose bound depends on it.
        """
        assumed = hypotheses.assumed(self.kernel, self.config)
        bound = self.operation.bound(self.problem, self.operands, assumed, got or {})
        return freed(self.kernel.policy, self.problem, bound, math.inf, self.operands.term)

    def configured(self, **changes: Any) -> Setup:
        """Return the same call with fields of the configuration changed; Refused if no such configuration is legal."""
        try:
            return self._replace(config=replace(self.config, **changes))
        except ValueError as error:
            raise Refused(f"ValueError: {error}") from error

    def fed(self, **operands: Any) -> Setup:
        """Return the same call with other operands."""
        return self._replace(operands=replace(self.operands, **operands))


def set_up(kernel: Kernel, case: Case) -> Setup:
    """Return the call that a case describes; Untaken if the kernel refuses the problem, descales or configuration."""
    try:
        case.check_descales(kernel)
        config = kernel.config_for(case.problem, case.changes)
    except ValueError as error:
        raise Untaken(one_line(error)) from None
    return Setup(kernel, case.problem, kernel.given(case.operands()), config)
