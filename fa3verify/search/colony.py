"""A colony: the individuals of one island, which are judged at once; and helpers that draw numbers for mutations.

Individuals are made of genes, arrays whose first index counts them. Genes of one axis are bred together. An individual
of the forward has two axes, a row of scores and a channel of V (:mod:`fa3verify.search.forward.colony`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np

from fa3_reference.bounds.device import FP32_MAX
from fa3_reference.bounds.steps import LOG2_E
from fa3_reference.formats import FORMATS, Format, narrowed
from fa3_reference.problem import AttentionProblem, Dtype
from fa3verify.files import Json

FP32_LEAST = 2.0**-149
Rng = np.random.Generator
Place = tuple[int, int]  # index of an individual on each axis


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """Return finite values of a format, float64, as :func:`narrowed`; too large ones saturate, NaN becomes 0."""
    fmt = FORMATS[dtype]
    finite = np.clip(np.where(np.isnan(x), 0.0, x), -fmt.max_finite, fmt.max_finite)
    return narrowed(finite, fmt).astype(np.float64)


def positive(x: Any) -> Any:
    """Return the nearest positive finite binary32 number."""
    return np.clip(x, FP32_LEAST, FP32_MAX).astype(np.float32)


def full_fractions(x: np.ndarray, fmt: Format, missing: np.ndarray | int = 1) -> np.ndarray:
    """Return numbers with the signs and exponents of ``x`` and fractions of all ones, less ``missing - 1`` units."""
    exponent = np.floor(np.log2(np.maximum(np.abs(x), fmt.min_normal)))
    return np.copysign(np.exp2(exponent) * (2 - fmt.epsilon * missing), x)


def level(fmt: Format, between: tuple[int, int], rng: Rng, *more: tuple[int, int]) -> float:
    """Draw a magnitude of a format: subnormal or just normal, or with an exponent that lies ``between`` two, anywhere
    in the format, or in one of ``more`` ranges.
    """
    least = fmt.min_exponent - fmt.fraction_bits
    largest = int(np.log2(fmt.max_finite))
    ranges = (least, fmt.min_exponent + 1), between, (least, largest + 1), *more
    exponent = rng.integers(*ranges[rng.integers(len(ranges))])
    return np.ldexp(rng.choice([1.0, 2 - fmt.epsilon, rng.uniform(1, 2)]), exponent)


def power_of_two_in_log2_units(rng: Rng) -> float:
    """Return a softmax_scale that is a power of two, or beside one, where scores are in log2 units."""
    return np.exp2(rng.integers(-6, 4)) / LOG2_E * rng.choice([1.0, 1 - 2.0**-20, 1 + 2.0**-20])


@dataclass(frozen=True, slots=True)
class Environment:
    """Holds what all individuals of a colony share; descales are float32 (descales,) and 1 for 16-bit operands."""

    softmax_scale: float
    softcap: float
    k_descale: np.ndarray = field(default_factory=lambda: np.ones(1, np.float32))
    v_descale: np.ndarray = field(default_factory=lambda: np.ones(1, np.float32))


@dataclass(slots=True)
class Colony(ABC):
    """Holds genes of one island, values of its operand format as float64, and what its individuals share."""

    AXES: ClassVar[dict[str, int]]  # the axis of every gene

    island: Any
    environment: Environment

    @property
    def problem(self) -> AttentionProblem:
        return self.island.problem(self.environment.softmax_scale, self.environment.softcap)

    def size(self, axis: int) -> int:
        """Return how many individuals, or halves of them, an axis has."""
        return next(len(getattr(self, name)) for name, own in self.AXES.items() if own == axis)

    def copied(self) -> Self:
        return replace(self, **{name: getattr(self, name).copy() for name in self.AXES})

    def taken(self, *chosen: np.ndarray) -> Self:
        """Return a colony of the chosen indices of each axis, in this order.

        A row that is moved under a causal mask sees the keys of its new place.
        """
        return replace(self, **{name: getattr(self, name)[chosen[axis]] for name, axis in self.AXES.items()})

    def adopt(self, other: Self, place: Place) -> None:
        """Put an individual of another colony of this island into the first place, and take over its environment."""
        self.environment = other.environment
        for name, axis in self.AXES.items():
            getattr(self, name)[0] = getattr(other, name)[place[axis]]

    @abstractmethod
    def alone(self, place: Place) -> tuple[Self, Place]:
        """Return a colony of one individual, and its place there."""

    @abstractmethod
    def to_json(self, place: Place) -> Json:
        """Return one individual as JSON without any rounding: operands are written as codes."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """Holds one child while it mutates: the genes of one index, views of the colony."""

    colony: Any
    index: int
    step: float  # log2 units
    rng: Rng

    @property
    def dtype(self) -> Dtype:
        return self.colony.island.dtype

    @property
    def fmt(self) -> Format:
        return FORMATS[self.dtype]
