"""Official FlashAttention-3 in FP16 and BF16, from a library of XLA custom calls (wheel dew-flash-attn-cu13)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fa3_reference.problem import AttentionProblem
from fa3verify.known.launches import Backward, Forward, Given, GivenBackward, Gradients, Launch, LaunchOutput, Options
from fa3verify.known.libraries import library
from fa3verify.known.peers import PEERS
from fa3verify.known.xla_call import Call, Runtime, handler

TARGET = "dew_flash3_mha_fwd"
TARGET_BACKWARD = "dew_flash3_mha_bwd"


def load(name: str) -> Forward:
    """Load the forward; preparing raises ValueError but for batches of one head_dim, without softcap and options."""
    function = handler(library(PEERS[name].binary), TARGET)

    def prepare(problem: AttentionProblem, given: Given, options: Options) -> Launch:
        if options.keys() - {"lse"} or problem.is_varlen or problem.softcap or problem.head_dim_v != problem.head_dim:
            raise ValueError("this build is called for batches of one head_dim, without softcap and options")
        out = torch.empty(problem.out_shape, dtype=given.q.dtype, device="cuda")
        shapes = (problem.lse_shape, (1, 1, 1, 1), (1, 1, 1))  # the last two: partials of split keys, unused
        lse, *partials = (torch.empty(shape, dtype=torch.float32, device="cuda") for shape in shapes)
        call = Call(function, given[:3], (out, lse, *partials), _attributes(problem), runtime())

        def launch() -> LaunchOutput:
            call()
            return LaunchOutput(out, lse)

        return launch

    return prepare


def _attributes(problem: AttentionProblem) -> dict[str, float]:
    attributes: dict[str, float] = {"softmax_scale": problem.softmax_scale, "is_causal": problem.causal}
    return attributes | {"window_size_left": problem.window[0], "window_size_right": problem.window[1]}


def load_backward(name: str) -> Backward:
    """Load the backward; preparing raises ValueError but for batches of one head_dim, without softcap and options."""
    function = handler(library(PEERS[name].binary), TARGET_BACKWARD)

    def prepare(problem: AttentionProblem, x: GivenBackward, options: Options) -> Callable[[], Gradients]:
        if options or problem.is_varlen or problem.softcap or problem.head_dim_v != problem.head_dim:
            raise ValueError("this build is called for batches of one head_dim, without softcap")
        tokens = problem.batch * problem.seqlen_q
        gradients = [torch.empty_like(y) for y in x[:3]]
        # Scratch for sum(dout * out) and for the lse in log2 units, rows of float32 with padding to tiles of 128 rows.
        rows = problem.nheads * (tokens + 128 * (problem.batch + 1))
        scratch = [torch.zeros(rows, dtype=torch.float32, device=x.q.device) for _ in range(2)]
        operands = (x.dout, x.q, x.k, x.v, x.out, x.lse)
        call = Call(function, operands, (*gradients, *scratch), _attributes(problem), runtime())

        def launch() -> Gradients:
            call()
            return tuple(gradients)

        return launch

    return prepare


def runtime() -> Runtime:
    """Return a runtime on torch's current stream and allocator, which keeps scratch memory as long as it lives."""
    scratch: list[torch.Tensor] = []

    def allocate(size: int) -> int:
        scratch.append(torch.empty(max(size, 1), dtype=torch.uint8, device="cuda"))
        return scratch[-1].data_ptr()

    return Runtime(lambda: torch.cuda.current_stream().cuda_stream, allocate)
