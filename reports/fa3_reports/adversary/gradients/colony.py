"""Islands, which are shapes, and colonies: the individuals of one island that are judged at once.

An individual is a whole problem, one sequence of a batch: what a query head, or a group of them, reads of a backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fa3_kernels.plan.order import BackwardOrder
from fa3_reference.attention import attention
from fa3_reference.bounds.device import TANH_REL
from fa3_reference.bounds.model import BackwardModel
from fa3_reference.formats import FORMATS, decode
from fa3_reference.problem import AttentionProblem, BackwardOperands, Dtype
from fa3verify.files import Json
from fa3verify.search.colony import Colony, Environment, Place, Rng, rounded

HEAD_DIM = 64
GENES = ("q", "k", "v", "dout", "out", "lse")


@dataclass(frozen=True, slots=True)
class GradientIsland:
    """Holds one shape.

    Parameters
    ----------
    rows, keys, tile_n : int
        Queries and keys, multiples of 16, and keys of a block; every block adds a part to dQ.
    heads : int
        Query heads that share K and V; every head adds a part to dK and dV.
    weights : {"", "fp32"}
        Format of P and dS as they enter products: the operands', or none, so that the smaller errors before stand out.
    softcap : {"", "ex2", "tanh"}
        How scores are capped, as :class:`fa3_kernels.plan.order.BackwardOrder` has it, if they are.
    problems : int
        Individuals of a colony.
    """

    name: str
    dtype: Dtype
    rows: int
    keys: int
    tile_n: int = 16
    heads: int = 1
    causal: bool = False
    weights: Literal["", "fp32"] = ""
    softcap: Literal["", "ex2", "tanh"] = ""
    problems: int = 16

    @property
    def order(self) -> BackwardOrder:
        """Return the order of FlashAttention-3."""
        return replace(BackwardOrder(), softcap=self.softcap or "tanh")

    @property
    def model(self) -> BackwardModel:
        """Return what the bound assumes, before the last rounding: the order of FlashAttention-3's D at head_dim 64."""
        model = BackwardModel(self.dtype, self.tile_n, dots_depth=10, out_dtype="fp32", weights=self.weights)
        return replace(model, tanh_error=TANH_REL if self.softcap == "tanh" else 0.0)

    def problem(self, softmax_scale: float, softcap: float) -> AttentionProblem:
        sizes = (self.problems, self.heads, 1, self.rows, self.keys, HEAD_DIM)
        return AttentionProblem(
            *sizes, dtype=self.dtype, causal=self.causal, softmax_scale=softmax_scale, softcap=softcap
        )


@dataclass(slots=True)
class GradientColony(Colony):
    """Holds genes of one island, float64, an individual per first index, values of the operands' format.

    ``q``, ``dout`` and ``out`` are (problems, rows, heads, head_dim), ``k`` and ``v`` (problems, keys, 1, head_dim);
    ``lse`` (problems, heads, rows) holds values of binary32; all share softmax_scale and the softcap, 0 without one.
    """

    AXES = dict.fromkeys(GENES, 0)

    island: GradientIsland
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    out: np.ndarray
    lse: np.ndarray

    @classmethod
    def normal(cls, island: GradientIsland, rng: Rng) -> GradientColony:
        """Return standard normal operands and the forward of them."""
        problem = island.problem(HEAD_DIM**-0.5, 1.0 if island.softcap else 0.0)
        shapes = (problem.q_shape, problem.k_shape, problem.v_shape, problem.out_shape)
        q, k, v, dout = (rounded(rng.standard_normal(shape), island.dtype) for shape in shapes)
        environment = Environment(problem.softmax_scale, problem.softcap)
        colony = cls(island, environment, q, k, v, dout, np.zeros_like(dout), np.zeros(problem.lse_shape))
        colony.complete(np.arange(island.problems))
        return colony

    @property
    def operands(self) -> BackwardOperands:
        """Return the arrays a kernel sees."""
        storage = FORMATS[self.island.dtype].dtype
        q, k, v, dout, out = (getattr(self, name).astype(storage) for name in GENES[:5])
        return BackwardOperands(q, k, v, dout=dout, out=out, lse=self.lse.astype(np.float32))

    def complete(self, chosen: np.ndarray) -> None:
        """Give some individuals the out and lse of their own forward."""
        problem = replace(self.problem, batch=len(chosen))
        with np.errstate(all="ignore"):
            found = attention(problem, self.q[chosen], self.k[chosen], self.v[chosen])
            self.out[chosen] = rounded(found.out, self.island.dtype)
            self.lse[chosen] = np.nan_to_num(found.lse.astype(np.float32), nan=0.0, neginf=-np.inf)

    def alone(self, place: Place) -> tuple[GradientColony, Place]:
        """Return one individual as a colony of one."""
        one = self.taken(np.array(place[:1]))
        return replace(one, island=replace(self.island, problems=1)), (0, place[1])

    def to_json(self, place: Place) -> Json:
        """Return one individual, exactly, operands as codes; :func:`individual` reads it back."""
        operands = self.operands
        arrays = {name: getattr(operands, name)[place[0]] for name in GENES}
        codes = {name: x.view(f"u{x.itemsize}").tolist() for name, x in arrays.items()}
        named = {"dtype": self.island.dtype, "island": self.island.name}
        shared = {"softmax_scale": self.environment.softmax_scale, "softcap": self.environment.softcap}
        return named | shared | codes


def individual(values: Json) -> tuple[GradientColony, Place]:
    """Return an individual of :meth:`GradientColony.to_json` as a colony of one, and its place there.

    Raises
    ------
    ValueError
        For an unknown island or values that do not fit it.
    """
    try:
        named = [island for island in ISLANDS if (island.dtype, island.name) == (values["dtype"], values["island"])]
        if not named:
            raise ValueError(f"there is no island {values['island']!r} of gradients for {values['dtype']!r}")
        island = replace(named[0], problems=1)
        colony = GradientColony.normal(island, np.random.default_rng(0))
        softcap = float(values.get("softcap", 0.0))  # older files have none
        colony.environment = Environment(float(values["softmax_scale"]), softcap)
        for name in GENES[:5]:
            getattr(colony, name)[0] = decode(np.array(values[name]), FORMATS[island.dtype])
        colony.lse[0] = np.array(values["lse"], np.uint32).view(np.float32)
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"an individual is incomplete or damaged: {error}") from None
    return colony, (0, 0)


# Few pairs let a single operation's error stand alone, several blocks and heads add parts, many rows are a long chain;
# of 48 rows before 32 keys some see no key and one sees a single one.
_OF_FP16 = (
    GradientIsland("few", "fp16", 16, 16),
    GradientIsland("blocks", "fp16", 16, 80),
    GradientIsland("rows", "fp16", 96, 16),
    GradientIsland("heads", "fp16", 16, 16, heads=3),
    GradientIsland("causal", "fp16", 32, 48, causal=True),
    GradientIsland("few, unrounded weights", "fp16", 16, 16, weights="fp32"),
    GradientIsland("blocks, unrounded weights", "fp16", 16, 48, weights="fp32"),
    GradientIsland("softcap", "fp16", 16, 16, softcap="ex2"),
    GradientIsland("softcap by tanh", "fp16", 16, 16, softcap="tanh"),
    GradientIsland("softcap, blocks", "fp16", 16, 48, heads=2, softcap="ex2"),
    GradientIsland("softcap, empty rows", "fp16", 48, 32, causal=True, softcap="ex2"),
    GradientIsland("softcap, unrounded weights", "fp16", 16, 16, weights="fp32", softcap="ex2"),
    GradientIsland("softcap by tanh, unrounded weights", "fp16", 16, 16, weights="fp32", softcap="tanh"),
)
ISLANDS: tuple[GradientIsland, ...] = (*_OF_FP16, *(replace(island, dtype="bf16") for island in _OF_FP16))
