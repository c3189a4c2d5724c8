"""The backward pass: dQ, dK and dV, and with sinks or a bias theirs, from q, k, v, dO, and a forward's out and lse.

Out and lse are exact up to their last rounding, so that a backward is judged by itself, whatever forward belongs to it.
The gradient of the output, dO, is drawn like V, for a problem whose keys are the queries, by the same recipe with the
complementary seed. With real activations it is that of a real loss (:mod:`fa3verify.inputs.loss`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Literal

import numpy as np

from fa3_kernels.faults.table import BackwardFault
from fa3_kernels.plan.backward import BackwardConfig, backward_config, backward_of, check_reproduced
from fa3_kernels.plan.config import Setting
from fa3_reference.attention import Attention, attention
from fa3_reference.attention_bwd import attention_bwd, sinks_gradient
from fa3_reference.bounds.model import BackwardModel
from fa3_reference.formats import FORMATS, encode
from fa3_reference.problem import AttentionProblem, BackwardOperands, Dtype, Operands
from fa3_reference.quantize import Quantized, QuantScheme
from fa3_reference.score_term import KINDS
from fa3verify.inputs.loss import readout_dout
from fa3verify.inputs.recipe import Recipe
from fa3verify.inputs.terms import draw_served, format_of
from fa3verify.operations.operation import (
    FEATURES,
    PACKED,
    TWIN,
    Accumulator,
    Arrays,
    ForwardOf,
    Operation,
    Output,
    Outputs,
)

# Grouped heads and a diagonal that is not square; more key blocks than two; a window and a softcap at the largest
# head_dim, whose tiles are the smallest; packed sequences of which some end inside a tile; a head_dim that is padded.
_SHAPES = (
    AttentionProblem(1, 4, 2, 129, 161, 64, causal=True),
    AttentionProblem(1, 1, 1, 64, 1030, 128),
    AttentionProblem(1, 1, 1, 65, 200, 256, window=(40, 7), softcap=4.0),
    PACKED,
    AttentionProblem(2, 2, 2, 200, 300, 96, causal=True),
)
_QUICK = 3
BIASES = ("bias", "bias_fp32")  # terms of scores that have a gradient
LSE_GRADIENT = "lse_gradient"  # the feature of a kernel that takes a gradient of lse beside that of the output
_REAL = ("activations", "captured")  # distributions of real activations
_FAMILY = "flash3.dew"  # the family of the twin's backward unless another is named


@dataclass(frozen=True, slots=True)
class GradientConfig:
    """The configuration of a backward kernel of which only the formats are known.

    ``forward`` is "given" if it reads the out and lse that it gets; "own" if it computes its own, as automatic
    differentiation does: its gradients are then compared with those of the exact out and lse.
    """

    dtype: Dtype
    forward: Literal["given", "own"] = "given"


def model_of(config: BackwardConfig) -> BackwardModel:
    """Return the order of operations of a configuration's family."""
    return config.model


class Backward(Operation):
    """dQ, dK, dV, dsinks and dbias of sum(out * dout) + sum(lse * dlse), judged against the operands, out and lse the
    kernel saw."""

    name = "backward"
    outputs = (
        Output("dq", lambda problem, config: problem.q_shape, lambda config: config.dtype),
        Output("dk", lambda problem, config: problem.k_shape, lambda config: config.dtype),
        Output("dv", lambda problem, config: problem.v_shape, lambda config: config.dtype),
        Output(
            "dsinks",
            lambda problem, config: (problem.nheads,),
            lambda config: "fp32",
            main=False,
            optional=True,
            needs="sinks",
        ),
        *(
            Output(
                f"d{kind}",
                lambda problem, config: problem.term_shape if problem.term else None,
                (lambda config: config.dtype) if kind == "bias" else (lambda config: "fp32"),
                main=False,
                optional=True,
                needs=kind,
            )
            for kind in BIASES
        ),
    )
    config = BackwardConfig
    features = FEATURES - {"block_descale"} | {LSE_GRADIENT}
    serving = frozenset({"sinks", *KINDS})
    faults = BackwardFault
    has_orders = True

    def features_of(self, changes: Mapping[str, Setting]) -> frozenset[str]:
        return self.features & backward_of(str(changes.get("family", _FAMILY))).features

    def configure(self, problem: AttentionProblem, **changes: Any) -> BackwardConfig:
        config = backward_config(problem, family=changes.pop("family", _FAMILY))
        check_reproduced(problem, config)
        return replace(config, **changes) if changes else config

    def twin(
        self,
        problem: AttentionProblem,
        operands: Operands,
        config: BackwardConfig,
        package: str = TWIN,
    ) -> Any:
        backward = import_module(f"{package}.backward").backward
        assert isinstance(operands, BackwardOperands)
        return backward(problem, operands, config)

    def draw(self, problem: AttentionProblem, recipe: Recipe) -> Arrays:
        q, k, v, *further = draw_served(problem, recipe)
        plain = replace(problem, sinks=False, term=None)
        is_real = recipe.distribution in _REAL
        dout = readout_dout(plain, q, k, v, recipe.seed) if is_real else drawn_dout(plain, recipe)
        return q, k, v, dout, *further

    def prepare(
        self, problem: AttentionProblem, arrays: Arrays, scheme: QuantScheme | None, changes: Mapping[str, Setting]
    ) -> Quantized:
        q, k, v, dout = (encode(x, FORMATS[problem.dtype], "ieee") for x in arrays[:4])
        sinks = arrays[4].astype(np.float32) if problem.sinks else None
        term = arrays[-1].astype(format_of(problem)) if problem.term else None
        out, lse = attention(problem, *(x.astype(np.float64) for x in (q, k, v, sinks, term) if x is not None))
        rounded = encode(out, FORMATS[problem.dtype], "ieee")
        lse = lse.astype(np.float32)
        return Quantized(BackwardOperands(q, k, v, dout=dout, out=rounded, lse=lse, sinks=sinks, term=term))

    def truth(
        self, problem: AttentionProblem, arrays: Arrays, config: BackwardConfig | GradientConfig, got: Outputs
    ) -> Outputs:
        """Return the exact gradients for the out and lse in ``arrays``.

        For a kernel with a forward of its own, and before operands were rounded, they are those of the exact out and
        lse.
        """
        q, k, v, dout, *rest = arrays
        term = [rest.pop()] if problem.term else []
        sinks = [rest.pop()] if problem.sinks else []
        returned = rest[:2]
        dlse = rest[2] if len(rest) > 2 else None
        if isinstance(config, GradientConfig) and config.forward == "own":
            returned = []
        forward = Attention(*returned) if returned else attention(problem, q, k, v, *sinks, *term)
        dbias = {f"d{kind}": np.zeros(problem.term_shape) for kind in problem.serving.intersection(BIASES)}
        found = attention_bwd(problem, q, k, v, dout, forward, dlse, *term, *dbias.values())._asdict() | dbias
        return found if not sinks else found | {"dsinks": sinks_gradient(problem, sinks[0], dout, forward, dlse)}

    def hypothesis_names(self, forward: ForwardOf) -> tuple[str, ...]:
        """Return those of its forward: a function whose gradients are "autograd" or "own" has one of its own."""
        return tuple(BackwardModel.hypotheses("fp16", forward))

    def hypotheses(self, config: BackwardConfig | GradientConfig, accumulator: Accumulator) -> dict[str, BackwardModel]:
        return BackwardModel.hypotheses(config.dtype, getattr(config, "forward", "given"), accumulator)

    def bound(self, problem: AttentionProblem, operands: Operands, assumed: BackwardModel, got: Outputs) -> Outputs:
        from fa3_reference.bounds.backward import backward_bound
        from fa3_reference.bounds.gradient_further import bias_gradient_bound, sinks_gradient_bound

        assert isinstance(operands, BackwardOperands)
        bound = backward_bound(problem, operands, assumed)._asdict()
        bound |= {
            f"d{kind}": bias_gradient_bound(problem, operands, assumed) for kind in problem.serving.intersection(BIASES)
        }
        return bound if not problem.sinks else bound | {"dsinks": sinks_gradient_bound(problem, operands, assumed)}

    def shapes(self, of_forward: tuple[AttentionProblem, ...], *, is_quick: bool) -> tuple[AttentionProblem, ...]:
        return _SHAPES[:_QUICK] if is_quick else _SHAPES


def drawn_dout(problem: AttentionProblem, recipe: Recipe) -> np.ndarray:
    """Draw the gradient of the output, float64 of the problem's out_shape."""
    queries = {"seqlen_k": problem.seqlen_q, "seqlens_k": problem.seqlens_q, "nheads_kv": problem.nheads}
    square = replace(problem, causal=False, window=(-1, -1), **queries)
    return replace(recipe, seed=2**64 - 1 - recipe.seed, edits=()).draw(square)[2]
