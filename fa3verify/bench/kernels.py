"""Our forward as it is timed: random operands on the GPU, and launches that take them in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fa3_kernels.gluon.arguments import NO_DESCALES, Descales
from fa3_kernels.gluon.launch import forward
from fa3_kernels.plan.request import Choices, Semantics
from fa3_reference.problem import AttentionProblem
from fa3verify.known.launches import Given
from fa3verify.tensors.convert import TORCH_DTYPES

MAX_COPIES = 3  # sets of inputs used in turn, so that a launch does not find its operands in the L2 cache


def draw(problem: AttentionProblem, copies: int, seed: int, v_mean: float = 0.0) -> list[Given]:
    """Draw sets of N(0, 1) operands on the GPU, V with mean ``v_mean``; e4m3 operands are scaled to an amax of 448."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape_of_factors = (problem.batch, problem.nheads_kv)
    drawn = []
    for _ in range(copies):
        tensors = []
        factors = []
        for shape, mean in ((problem.q_shape, 0.0), (problem.k_shape, 0.0), (problem.v_shape, v_mean)):
            x = torch.randn(shape, device="cuda", dtype=torch.float32, generator=generator) + mean
            if problem.dtype == "e4m3":
                factor = float(x.abs().max()) / 448
                x = x / factor
                factors.append(torch.full(shape_of_factors, factor, dtype=torch.float32, device=x.device))
            tensors.append(x.to(TORCH_DTYPES[problem.dtype]))
        drawn.append(Given(*tensors, *factors))
    return drawn


def our_launch(problem: AttentionProblem, inputs: Sequence[Given], choices: Choices) -> Callable[..., tuple]:
    """Return ``launch(i)`` of our forward, which takes the inputs in turn, and keywords such as ``stamps``."""
    factors = [NO_DESCALES if x.q_descale is None else Descales(*x[3:6]) for x in inputs]
    semantics = Semantics.of(problem)

    def launch(i: int, **more: Any) -> tuple:
        x = inputs[i % len(inputs)]
        factor = factors[i % len(inputs)]
        return forward(x.q, x.k, x.v, semantics, choices, descales=factor, **more)

    return launch
