"""Official FlashAttention-3 in FP16 and BF16, from a library of XLA custom calls (wheel dew-flash-attn-cu13)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fa3_reference.problem import AttentionProblem
from fa3verify.known.launches import Forward, Given, Launch, LaunchOutput, Options
from fa3verify.known.libraries import library
from fa3verify.known.peers import PEERS
from fa3verify.known.xla_call import Call, Runtime, handler

TARGET = "dew_flash3_mha_fwd"


def load(name: str) -> Forward:
    """Load the forward: batches of one head_dim, without softcap and options."""
    function = handler(library(PEERS[name].binary), TARGET)

    def prepare(problem: AttentionProblem, given: Given, options: Options) -> Launch:
        if options.keys() - {"lse"} or problem.is_varlen or problem.softcap or problem.head_dim_v != problem.head_dim:
            raise ValueError("this build is called for batches of one head_dim, without softcap and options")
        call, out, lse = call_of(function, problem, given[:3], runtime())

        def launch() -> LaunchOutput:
            call()
            return LaunchOutput(out, lse)

        return launch

    return prepare


def call_of(
    function: Any, problem: AttentionProblem, tensors: Sequence[torch.Tensor], made: Runtime
) -> tuple[Call, torch.Tensor, torch.Tensor]:
    """Prepare a launch on q, k and v; returns it with the tensors of O and LSE that it fills."""
    out = torch.empty(problem.out_shape, dtype=tensors[0].dtype, device="cuda")
    shapes = (problem.lse_shape, (1, 1, 1, 1), (1, 1, 1))  # the last two: partials of split keys, unused
    rest = [torch.empty(shape, dtype=torch.float32, device="cuda") for shape in shapes]
    attributes = {"softmax_scale": problem.softmax_scale, "is_causal": problem.causal}
    attributes |= {"window_size_left": problem.window[0], "window_size_right": problem.window[1]}
    return Call(function, tensors, (out, *rest), attributes, made), out, rest[0]


def runtime() -> Runtime:
    """A runtime on torch's current stream and allocator; scratch memory is kept as long as the runtime."""
    scratch: list[torch.Tensor] = []

    def allocate(size: int) -> int:
        scratch.append(torch.empty(max(size, 1), dtype=torch.uint8, device="cuda"))
        return scratch[-1].data_ptr()

    return Runtime(lambda: torch.cuda.current_stream().cuda_stream, allocate)
