"""A colony: the individuals of one island that are judged at once, how they start and how one of them is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from fa3_reference.bounds.device import FP32_MAX
from fa3_reference.bounds.steps import LOG2_E
from fa3_reference.formats import FORMATS, decode
from fa3_reference.problem import AttentionProblem, Descale, Operands
from fa3verify.search.forward.islands import Island

FP32_LEAST = 2.0**-149


@cache
def max_finite(dtype: str) -> float:
    return FORMATS[dtype].max_finite


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """Nearest finite values of a format, float64; values that are too large saturate, NaN becomes 0."""
    largest = max_finite(dtype)
    return np.clip(np.where(np.isnan(x), 0.0, x), -largest, largest).astype(FORMATS[dtype].dtype).astype(np.float64)


def positive(x: Any) -> Any:
    """Nearest positive finite binary32 number."""
    return np.clip(x, FP32_LEAST, FP32_MAX).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Environment:
    """Holds what all individuals of a colony share; descales are float32 (descales,) and 1 for 16-bit operands."""

    softmax_scale: float
    softcap: float
    k_descale: np.ndarray
    v_descale: np.ndarray


@dataclass(slots=True)
class Colony:
    """Genes of one island, values of its operand format as float64.

    ``q`` (problems, width), ``k`` (problems, keys, width) and ``q_descale`` float32 (problems,) make a row's scores,
    ``v`` (columns, keys) holds channels of V. A row with a channel is one individual, and all pairs are judged.
    """

    island: Island
    q: np.ndarray
    k: np.ndarray
    q_descale: np.ndarray
    v: np.ndarray
    environment: Environment

    @classmethod
    def normal(cls, island: Island, rng: np.random.Generator) -> Colony:
        """Standard normal operands, times powers of two that the descales take back.

        K stays below 2, as a bound may charge a product of the Q of another row, which is 0, by the exponent of K.
        """
        is_fp8 = island.dtype == "e4m3"
        gain = 64.0 if is_fp8 else 1.0

        def draw(gain: float, *shape: int) -> np.ndarray:
            return rounded(gain * rng.standard_normal(shape), island.dtype)

        def descale(gain: float, count: int) -> np.ndarray:
            return np.full(count, 1 / gain if is_fp8 else 1.0, np.float32)

        softcap = float(np.exp2(rng.uniform(-6, 6))) if island.softcap else 0.0
        scale = (1.0 if is_fp8 else 2.0) * island.width**-0.5
        return cls(
            island,
            draw(gain, island.problems, island.width),
            draw(0.5, island.problems, island.keys, island.width),
            descale(gain, island.problems),
            draw(gain, island.columns, island.keys),
            Environment(scale, softcap, descale(0.5, island.descales), descale(gain, island.descales)),
        )

    @property
    def problem(self) -> AttentionProblem:
        return self.island.problem(self.environment.softmax_scale, self.environment.softcap)

    @property
    def operands(self) -> Operands:
        """The arrays a kernel sees."""
        island = self.island
        storage = FORMATS[self.island.dtype].dtype
        batch = island.batch
        rows = island.rows
        q = np.zeros((batch, rows, rows, island.width), storage)
        q[:, np.arange(rows), np.arange(rows)] = self.q.reshape(batch, rows, island.width)
        k = self.k.reshape(batch, rows, island.keys, island.width).transpose(0, 2, 1, 3).astype(storage)
        v = np.repeat(self.v.T.astype(storage)[None, :, None], batch, axis=0)
        arrays = (q.reshape(batch, rows, 1, -1), k.reshape(batch, island.keys, 1, -1), v)
        if island.dtype != "e4m3":
            return Operands(*arrays)
        block = island.tile_n * island.descale_tiles
        shared = (self.environment.k_descale, self.environment.v_descale)
        k_descale, v_descale = (Descale(np.tile(values, (batch, 1, 1)), block) for values in shared)
        return Operands(*arrays, Descale(self.q_descale.reshape(batch, 1, rows), 1), k_descale, v_descale)

    @property
    def raw_scores(self) -> np.ndarray:
        """q . k, float64 (problems, keys)."""
        return np.einsum("rw,rkw->rk", self.q, self.k)

    def per_key(self, descale: np.ndarray) -> np.ndarray:
        """Descale of every key, float64 (keys,)."""
        block = self.island.tile_n * self.island.descale_tiles or self.island.keys
        return np.repeat(descale.astype(np.float64), block)[: self.island.keys]

    @property
    def factors(self) -> np.ndarray:
        """Return what takes raw scores to log2 units before the softcap, float64 (problems, keys)."""
        scale = self.environment.softmax_scale * LOG2_E
        return scale * self.q_descale.astype(np.float64)[:, None] * self.per_key(self.environment.k_descale)

    def adopt(self, other: Colony, row: int, column: int) -> None:
        """Make an individual of another colony of this island the first row and channel, and take what it shares."""
        self.environment = other.environment
        for name, index in (("q", row), ("k", row), ("q_descale", row), ("v", column)):
            getattr(self, name)[0] = getattr(other, name)[index]

    def copied(self) -> Colony:
        arrays = {name: getattr(self, name).copy() for name in ("q", "k", "q_descale", "v")}
        return replace(self, **arrays)

    def taken(self, rows: np.ndarray, columns: np.ndarray) -> Colony:
        """These rows and columns, in this order; a causal row sees other keys wherever it comes to stand."""
        return replace(self, q=self.q[rows], k=self.k[rows], q_descale=self.q_descale[rows], v=self.v[columns])

    def alone(self, row: int, column: int) -> Colony:
        """One individual in its place; zeros elsewhere."""
        lone = self.copied()
        others = np.arange(self.island.problems) != row
        channels = np.arange(self.island.columns) != column
        lone.q[others] = 0
        lone.k[others] = 0
        lone.q_descale[others] = 1
        lone.v[channels] = 0
        return lone

    def to_json(self, row: int, column: int) -> dict[str, Any]:
        """One individual, exactly, operands as codes; :func:`individual` reads it back."""
        environment = self.environment
        fmt = FORMATS[self.island.dtype]
        operands = {"q": self.q[row], "k": self.k[row], "v": self.v[column]}
        return {
            "island": asdict(self.island),
            "row": row,
            "column": column,
            "softmax_scale": environment.softmax_scale,
            "softcap": environment.softcap,
            "q_descale": float(self.q_descale[row]),
            "k_descale": environment.k_descale.tolist(),
            "v_descale": environment.v_descale.tolist(),
        } | {name: x.astype(fmt.dtype).view(fmt.bits_dtype).tolist() for name, x in operands.items()}


def individual(values: Mapping[str, Any]) -> tuple[Colony, int, int]:
    """Return an individual of :meth:`Colony.to_json` in its place, its row and its column.

    Raises
    ------
    ValueError
        For an island that is none, or values that do not fit it.
    """
    try:
        island = Island(**values["island"])
        row = int(values["row"])
        column = int(values["column"])
        colony = Colony.normal(island, np.random.default_rng(0)).alone(row, column)
        for target, name in ((colony.q[row], "q"), (colony.k[row], "k"), (colony.v[column], "v")):
            target[...] = decode(np.array(values[name]), FORMATS[island.dtype])
        colony.q_descale[row] = values["q_descale"]
        descales = (np.array(values[name], np.float32) for name in ("k_descale", "v_descale"))
        colony.environment = Environment(values["softmax_scale"], values["softcap"], *descales)
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"an individual is incomplete or damaged: {error}") from None
    return colony, row, column
