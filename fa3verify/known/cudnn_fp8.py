"""cuDNN's FP8 attention through its frontend: e4m3 operands and e4m3 output (16-bit outputs need Blackwell).

:mod:`fa3verify.known.launches` loads this module for the peer "cudnn.fp8", which only bench runs. cuDNN's 16-bit
attention is called through torch, in :mod:`fa3verify.known.torch_sdpa`.
"""

from __future__ import annotations

from typing import Any

import torch

from fa3_reference.problem import AttentionProblem
from fa3verify.known.launches import Forward, Given, Launch, LaunchOutput, Options
from fa3verify.known.libraries import make_importable
from fa3verify.known.peers import PEERS

P_SCALE = 256.0  # probabilities are multiplied by this before they are rounded to e4m3, as in the other FP8 kernels
LARGEST = 440.0  # stored value of the largest output: close to 448, where e4m3 ends


class _Plan:
    """One cuDNN graph with its tensors, built for one problem; its output is scaled to fill e4m3.

    Raises ValueError where an operand has no descale or several; cuDNN raises errors of its own for a problem that it
    does not support.
    """

    def __init__(self, cudnn: Any, problem: AttentionProblem, x: Given) -> None:
        self.cudnn = cudnn
        self.handle = self.cudnn.create_handle()
        float32 = self.cudnn.data_type.FLOAT
        graph = self.cudnn.pygraph(
            io_data_type=self.cudnn.data_type.FP8_E4M3,
            intermediate_data_type=float32,
            compute_data_type=float32,
            handle=self.handle,
        )
        self.out = torch.empty_like(x.q)
        self.out_scale, self.out_amax = self._scalar(1.0), self._scalar(0.0)
        operands = {name: _tensor(graph, self.cudnn, getattr(x, name)) for name in "qkv"}
        # In the order of ``values`` below; s are the probabilities, o the output.
        names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
        scalars = {name: graph.tensor(dim=[1] * 4, stride=[1] * 4, data_type=float32) for name in names}
        results = graph.sdpa_fp8(
            **operands,
            **scalars,
            attn_scale=problem.softmax_scale,
            use_causal_mask=problem.causal,
            generate_stats=False,
        )
        out, _, p_amax, out_amax = results  # the second, statistics for a backward, is not generated
        view = self.out.transpose(1, 2)
        out.set_output(True).set_dim(list(view.shape)).set_stride(list(view.stride()))
        out.set_data_type(self.cudnn.data_type.FP8_E4M3)
        for amax in (p_amax, out_amax):
            amax.set_output(True).set_dim([1] * 4).set_stride([1] * 4).set_data_type(float32)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([self.cudnn.heur_mode.A, self.cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        factors = (*map(_one, (x.q_descale, x.k_descale, x.v_descale)), 1 / P_SCALE, P_SCALE)
        values = [*map(self._scalar, factors), self.out_scale]
        self.pack = {operands[name]: getattr(x, name) for name in "qkv"} | dict(zip(scalars.values(), values))
        self.pack |= {out: self.out, p_amax: self._scalar(0.0), out_amax: self.out_amax}
        self.workspace = torch.empty(max(graph.get_workspace_size(), 16), device="cuda", dtype=torch.uint8)
        self.graph = graph
        # A first run at scale 1 measures the largest |output|, from which the scale of all further runs is chosen.
        self.run()
        self.out_scale.fill_(LARGEST / max(float(self.out_amax), 1e-6))  # 1e-6: an output of zeros

    def _scalar(self, value: float) -> torch.Tensor:
        return torch.full((1, 1, 1, 1), value, device="cuda", dtype=torch.float32)

    def run(self) -> torch.Tensor:
        """Launch on torch's current stream; return the output, e4m3 times ``out_scale``, the same tensor every time."""
        self.cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream().cuda_stream)
        self.graph.execute(self.pack, self.workspace, handle=self.handle)
        return self.out


def _tensor(graph: Any, cudnn: Any, x: Any) -> Any:
    """Declare an e4m3 operand to a graph, with heads in front of the sequence, as cuDNN wants them."""
    view = x.transpose(1, 2)
    return graph.tensor(dim=list(view.shape), stride=list(view.stride()), data_type=cudnn.data_type.FP8_E4M3)


def _one(descale: torch.Tensor | None) -> float:
    """Return the value that all descales of an operand have; ValueError if they differ or there is none.

    A graph has room for one scalar per operand.
    """
    if descale is None or (descale != descale.flatten()[0]).any():
        raise ValueError("its operands are e4m3 with one descale each")
    return float(descale.flatten()[0])


def load(name: str) -> Forward:
    """Import cuDNN's frontend, installed or from its wheel in the peers' folder."""
    make_importable(PEERS[name].wheel, "cudnn")
    import cudnn  # pyright: ignore[reportMissingImports]

    def prepare(problem: AttentionProblem, given: Given, options: Options) -> Launch:
        """Prepare a call. The output's scale is chosen from its largest value, so that nothing is clipped."""
        plan = _Plan(cudnn, problem, given)
        scale = 1 / float(plan.out_scale)
        return lambda: LaunchOutput(plan.run(), None, scale)

    return prepare
