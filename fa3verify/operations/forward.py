"""The forward pass: out and lse of attention on operands that are already in the kernel's format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fa3_kernels.faults.table import Fault
from fa3_kernels.plan.choose import config_of
from fa3_kernels.plan.config import Config, Setting, default_config
from fa3_kernels.plan.families import OURS, traits_of
from fa3_reference.attention import attention
from fa3_reference.bounds.model import KernelModel
from fa3_reference.problem import Array, AttentionProblem, Dtype, Operands
from fa3_reference.quantize import Quantized, QuantScheme, prepare
from fa3_reference.scales import SHARING, can_rotate
from fa3verify.inputs.terms import draw_served, format_of
from fa3verify.operations.operation import (
    FEATURES,
    SERVED_BLOCKS,
    SERVING,
    TWIN,
    Accumulator,
    Arrays,
    Chosen,
    Configure,
    Descales,
    ForwardOf,
    Names,
    Operation,
    Output,
    Outputs,
)

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn

    from fa3verify.inputs.recipe import Recipe

# One scheme per shape, in turn: a fault of scales may hide under any single one.
_SCHEMES = (QuantScheme("block"), QuantScheme("head"), QuantScheme("block", hadamard_seed=0))
# One set of changes per shape, in turn: P V of e4m3 in two chunks of a tile; combined splits and packed heads; P V
# chained and the other output format. Chained sums lose more the longer they are, so the shapes that have them are
# short, of 200 and 500 keys. The causal shape of three tiles has neither splits nor packed heads: mistakes between
# tiles, and in rows that have seen no key yet, would hide under them.
_CHANGES: tuple[dict[str, Setting], ...] = (
    {"promotion_interval": 64},
    {"num_splits": 3, "pack_gqa": True},
    {"promotion_interval": 0, "out_dtype": "fp16"},
    {},
)
_FP16_SMALLEST = 2.0**-14  # the smallest normal number


@dataclass(frozen=True, slots=True)
class ForwardConfig:
    """The configuration of a forward kernel of binary32, of which only the formats are known.

    Our launches have none like it. The last three fields are what properties choose lengths by, and try to change.
    """

    dtype: Dtype = "fp32"
    out_dtype: str = "fp32"
    tile_n: int = 128
    num_splits: int = 1
    promotion_interval: int = 0


class Result(NamedTuple):
    """Holds what a forward kernel returns.

    Parameters
    ----------
    out : array of shape ``problem.out_shape``
        In the kernel's output format: float16, float32, or bfloat16 of ml_dtypes.
    lse : float32 array of shape ``problem.lse_shape``, optional
        Natural logarithm of the sum of exponentials; None where the kernel returns none.
    """

    out: Array
    lse: NDArray[np.float32] | None

    @property
    def outputs(self) -> dict[str, Array]:
        """Return what there is, by name."""
        return {name: x for name, x in self._asdict().items() if x is not None}


def changeable(dtype: Dtype, fixed: Iterable[str] = (), family: str = OURS) -> frozenset[str]:
    """Return the fields of the configuration that a campaign may change, without the ``fixed`` ones of a kernel."""
    only_fp8 = set() if dtype == "e4m3" else {"promotion_interval", "out_dtype"}
    return traits_of(family).choices - only_fp8 - frozenset(fixed)


def order_of_family(config: Config) -> KernelModel:
    """Return the order of operations of a configuration's family."""
    return config.kernel_model()


class Forward(Operation):
    """out = softmax(scale Q K^T) V and lse = log sum exp, judged against the operands the kernel saw."""

    name = "forward"
    outputs = (
        Output("out", lambda problem, config: problem.out_shape, lambda config: config.out_dtype),
        Output(
            "lse",
            lambda problem, config: problem.lse_shape,
            lambda config: "fp32",
            main=False,
            optional=True,
            unit="nat",
            margins={
                "max": (0.50, 2e-6, "one element decides; fp16 lse errors are near 1e-6"),
                "rms": (0.10, 1e-8, "all elements decide; reordering moves it by less than 9 %"),
            },
        ),
    )
    config = Config
    features = FEATURES
    serving = SERVING | {"narrow_sinks"}  # that a kernel takes sinks in its operands' format: no problem needs it
    faults = Fault
    has_orders = True

    def features_of(self, changes: Mapping[str, Setting]) -> frozenset[str]:
        return self.features & traits_of(str(changes.get("family", OURS))).features

    def configure(self, problem: AttentionProblem, **changes: Any) -> Config:
        is_launch_choice = changes.get("family", OURS) == OURS and changes.get("num_splits") == 0
        config = config_of(problem, **changes) if is_launch_choice else default_config(problem, **changes)
        config.traits.check_reproduced(problem)
        return config

    def twin(
        self,
        problem: AttentionProblem,
        operands: Operands,
        config: Config,
        package: str = TWIN,
    ) -> Result:
        return Result(*import_module(f"{package}.forward").forward(problem, operands, config))

    def draw(self, problem: AttentionProblem, recipe: Recipe) -> Arrays:
        is_plain = not (problem.further or problem.qv)
        return recipe.draw(problem) if is_plain else draw_served(problem, recipe)

    def prepare(
        self, problem: AttentionProblem, arrays: Arrays, scheme: QuantScheme | None, changes: Mapping[str, Setting]
    ) -> Quantized:
        q, k, v, *further = arrays
        prepared = prepare(problem, q, k, v, scheme)
        if problem.cache is not None and problem.cache.fp8:
            plain = replace(problem, dtype="e4m3", cache=None)
            stored = prepare(plain, q, k, v, QuantScheme(problem.cache.fp8)).operands
            prepared = prepared._replace(operands=replace(stored, q=prepared.operands.q, q_descale=None))
        dtypes = {"sinks": np.dtype(np.float32)} | ({"term": format_of(problem)} if problem.term else {})
        given = {name: x.astype(dtypes[name]) for name, x in zip(problem.further, further, strict=True)}
        return prepared._replace(operands=replace(prepared.operands, **given)) if given else prepared

    def truth(self, problem: AttentionProblem, arrays: Arrays, config: Config, got: Outputs) -> Outputs:
        return attention(problem, *arrays)._asdict()

    def hypothesis_names(self, forward: ForwardOf) -> tuple[str, ...]:
        return tuple(KernelModel.hypotheses("fp16", "fp16"))

    def hypotheses(self, config: Config | ForwardConfig, accumulator: Accumulator) -> Mapping[str, KernelModel]:
        return KernelModel.hypotheses(config.dtype, config.out_dtype, accumulator)

    def bound(self, problem: AttentionProblem, operands: Operands, assumed: KernelModel, got: Outputs) -> Outputs:
        from fa3_reference.bounds.calls import call_bound
        from fa3_reference.bounds.forward import forward_bound

        bound = forward_bound if problem.cache is None else call_bound
        return bound(problem, operands, assumed)._asdict()

    def enclosure(
        self, problem: AttentionProblem, operands: Operands, assumed: KernelModel
    ) -> Mapping[str, tuple[np.ndarray, np.ndarray]]:
        from fa3_reference.bounds.enclosure import can_enclose, forward_enclosure

        is_known = (
            can_enclose(assumed) and not problem.further and (problem.cache is None or not problem.changes_operands)
        )
        return forward_enclosure(problem, operands, assumed)._asdict() if is_known else {}

    def shapes(self, of_forward: tuple[AttentionProblem, ...], *, is_quick: bool) -> tuple[AttentionProblem, ...]:
        return of_forward

    def choices(
        self, problem: AttentionProblem, recipe: Recipe, index: int, features: Names, changeable: Names
    ) -> Chosen:
        """Return the scheme and the changes of the index-th shape.

        There is no scheme for 16 bits. Scales are per head if the kernel takes no blocks, and operands are rotated if
        head_dim allows it. Heads are packed only where some share a kv head, and outputs are fp16 only where it holds
        them.
        """
        is_faint = float(recipe.settings.get("std", 1.0)) < _FP16_SMALLEST
        idle = {"pack_gqa": problem.group == 1, "out_dtype": is_faint}
        changes = _CHANGES[index % len(_CHANGES)].items()
        taken = ((name, x) for name, x in changes if name in changeable and not idle.get(name, False))
        chosen = tuple(sorted(taken))
        if problem.dtype != "e4m3":
            return None, chosen
        scheme = _SCHEMES[index % len(_SCHEMES)]
        if not can_rotate(problem.head_dim):
            scheme = replace(scheme, hadamard_seed=None)
        is_taken = SHARING[scheme.granularity].claim(problem.group) <= features
        return (scheme if is_taken else replace(scheme, granularity="head")), chosen

    def draw_choices(
        self, draw: DrawFn, problem: AttentionProblem, features: Names, configure: Configure, descales: Descales
    ) -> Chosen:
        from fa3verify.operations.schemes import small_schemes

        return draw(small_schemes(problem, features, configure, descales)) if problem.dtype == "e4m3" else None, ()

    def descales_of(
        self, problem: AttentionProblem, scheme: QuantScheme | None, changes: Mapping[str, Setting]
    ) -> frozenset[str]:
        if scheme is None:
            return frozenset()
        claim = SHARING[scheme.granularity].claim(problem.group)
        return claim | {SERVED_BLOCKS} if "block_descale" in claim and problem.serving else claim

    def check(self, problem: AttentionProblem, scheme: QuantScheme | None) -> None:
        if (problem.dtype == "e4m3") != (scheme is not None):
            raise ValueError(f"a quantisation scheme goes with e4m3 and only e4m3, got {problem.dtype} and {scheme}")
