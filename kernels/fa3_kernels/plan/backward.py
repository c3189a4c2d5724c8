"""This module says what a backward kernel was compiled for: the family's tile for a problem, and what its twin
refuses.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa3_kernels.plan.choose import H200_SMS
from fa3_kernels.plan.config import require
from fa3_kernels.plan.family import Backward
from fa3_kernels.plan.tiles import power_of_two
from fa3_kernels.plan.traits import traits_of
from fa3_reference.bounds.device import TANH_REL
from fa3_reference.bounds.model import BackwardModel
from fa3_reference.problem import AttentionProblem, Dtype


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """One backward kernel of a family.

    Parameters
    ----------
    dtype : {"fp16", "bf16"}
        Of operands and gradients.
    head_dim : int
        Compiled size, to which channels are padded with zeros.
    tile_m, tile_n : int
        Query rows and keys of a tile, multiples of 16. ``tile_n`` changes bits of dQ; ``tile_m`` only where NaN or Inf
        meets hidden rows, or where row blocks are visited in descending order.
    family : str
        A key of :data:`fa3_kernels.plan.traits.FAMILIES` that has a backward.
    num_ctas : int
        Multiprocessors of the GPU. Bits of our kernel depend on them where a head has more key tiles.

    Raises
    ------
    ValueError
        Whenever a field breaks its rule.
    """

    dtype: Dtype
    head_dim: int
    tile_m: int
    tile_n: int
    family: str
    num_ctas: int = H200_SMS

    def __post_init__(self) -> None:
        require(self.dtype in ("fp16", "bf16"), f"dtype must be fp16 or bf16, got {self.dtype!r}")
        sizes = self.backward.tiles
        rule = f"head_dim must be one of {', '.join(map(str, sizes))}, got {self.head_dim}"
        require(self.head_dim in sizes, rule)
        for name, size in (("tile_m", self.tile_m), ("tile_n", self.tile_n)):
            is_size = size % 16 == 0 and 16 <= size <= 256
            require(is_size, f"{name} must be a multiple of 16 in [16, 256], got {size}")

    @property
    def backward(self) -> Backward:
        return backward_of(self.family)

    @property
    def dots_channels(self) -> int:
        """Return the channels over which D is added: of ours a power of two, as its kernel in front holds them."""
        is_power = traits_of(self.family).builds_powers_of_two
        return power_of_two(self.head_dim) if is_power else self.head_dim

    def head_dim_v(self, problem: AttentionProblem) -> int:
        """Return the compiled size of V, dO and dV, at most head_dim; no bit depends on it."""
        return next(d for d in sorted(self.backward.tiles) if d >= problem.head_dim_v)

    @property
    def model(self) -> BackwardModel:
        """Return what the error bound must know: a thread's additions for D, and those between the threads of a row."""
        order = self.backward.order
        channels = self.dots_channels
        threads = (128 if channels % 128 == 0 else 64) // order.dots_run
        depth = channels // threads - 1 + (threads - 1).bit_length()
        tanh_error = TANH_REL if order.softcap == "tanh" else 0.0
        return BackwardModel(self.dtype, self.tile_n, depth, heads=order.heads, tanh_error=tanh_error)


def backward_of(family: str) -> Backward:
    """Return what is known of a family's backward; ValueError where that is nothing."""
    traits = traits_of(family)
    if traits.backward is None:
        raise ValueError(f"no backward of {traits.title} ({traits.version}) is known")
    return traits.backward


def backward_config(problem: AttentionProblem, *, family: str) -> BackwardConfig:
    """Return what a family launches for the gradients of a problem; ValueError where nothing is compiled for it.

    >>> backward_config(AttentionProblem(1, 1, 1, 64, 64, 128, causal=True), family="flash3.dew").tile_m
    64
    """
    problem.check_plain(f"the backward of {family}")
    tiles = backward_of(family).tiles
    head_dim = next((d for d in sorted(tiles) if d >= max(problem.head_dim, problem.head_dim_v)), None)
    if head_dim is None:
        raise ValueError(f"head_dim must be at most {max(tiles)}, got {problem.head_dim}")
    is_masked = problem.causal or problem.window != (-1, -1)
    return BackwardConfig(problem.dtype, head_dim, *tiles[head_dim][is_masked], family)


def check_reproduced(problem: AttentionProblem, config: BackwardConfig) -> None:
    """Raise ValueError for a problem whose gradients' bits the twin does not know."""
    problem.check_plain(f"the twin of the backward of {config.family}")
    if rule := config.backward.refuses(problem):
        raise ValueError(f"the twin of the backward of {config.family} cannot run this: {rule}")
