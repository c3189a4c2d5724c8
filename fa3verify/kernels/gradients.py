"""A user's gradients as a candidate: a differentiable function of torch tensors, or a backward of arrays.

    from fa3verify.kernels.functions import torch_candidate

    def mine():
        return torch_candidate(my_attention, gradients="autograd", dtypes=("bf16",), features=("causal", "gqa"))

``fa3verify verify mymodule:mine`` judges dQ, dK and dV then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fa3_kernels.twin.backward import Gradients
from fa3_reference.problem import AttentionProblem, BackwardOperands, Operands
from fa3verify.kernels.arrays import ArrayFunction, GradientsOf
from fa3verify.operations.backward import GradientConfig


@dataclass(frozen=True, slots=True)
class GradientFunction(ArrayFunction):
    """The callable side of a candidate for a backward.

    Parameters
    ----------
    function : callable
        ``function(q, k, v, dout, out, lse, *, softmax_scale, ...)`` returns ``(dq, dk, dv)``, with options as
        :class:`fa3verify.kernels.functions.ArrayFunction` gives them; with "autograd", as there.
    gradients : {"autograd", "given", "own"}
        Whether torch's autograd takes the gradients of ``function(q, k, v, ...)``; whether they are of the out and lse
        that are given, or of a forward of its own.
    """

    gradients: GradientsOf = "given"

    def configure(self, problem: AttentionProblem) -> GradientConfig:  # type: ignore[override]
        return GradientConfig(problem.dtype, "given" if self.gradients == "given" else "own")

    def run(  # type: ignore[override]
        self, problem: AttentionProblem, operands: Operands, config: GradientConfig
    ) -> Gradients:
        assert isinstance(operands, BackwardOperands)
        o = operands
        options = self._options(problem, operands)
        q, k, v, dout, out = (self._given(x, problem) for x in (o.q, o.k, o.v, o.dout, o.out))
        found: Any
        if self.gradients == "autograd":
            from fa3verify.tensors.convert import gradients_of

            found = gradients_of(self.function, (q, k, v), dout, **options)
        else:
            found = self.function(q, k, v, dout, out, self._foreign(o.lse), **options)
        return Gradients(*(self._layout(self._array(x), problem) for x in found))
