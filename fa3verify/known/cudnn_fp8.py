"""cuDNN's FP8 attention through its frontend: e4m3 operands and e4m3 output (16-bit outputs need Blackwell)."""

from __future__ import annotations

from typing import Any

import torch

from fa3_reference.problem import AttentionProblem
from fa3verify.known.launches import Forward, Given, Launch, LaunchOutput, Options
from fa3verify.known.libraries import make_importable
from fa3verify.known.peers import PEERS

P_SCALE = 256.0  # probabilities are stored times this, as in the other FP8 kernels
LARGEST = 440.0  # of the output; e4m3 ends at 448


class _Plan:
    """One cuDNN graph with its tensors."""

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
        names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
        scalars = {name: graph.tensor(dim=[1] * 4, stride=[1] * 4, data_type=float32) for name in names}
        results = graph.sdpa_fp8(
            **operands,
            **scalars,
            attn_scale=problem.softmax_scale,
            use_causal_mask=problem.causal,
            generate_stats=False,
        )
        out, _, p_amax, out_amax = results
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
        factors = (*map(_one, x[3:6]), 1 / P_SCALE, P_SCALE)
        values = [*map(self._scalar, factors), self.out_scale]
        self.pack = {operands[name]: getattr(x, name) for name in "qkv"} | dict(zip(scalars.values(), values))
        self.pack |= {out: self.out, p_amax: self._scalar(0.0), out_amax: self.out_amax}
        self.workspace = torch.empty(max(graph.get_workspace_size(), 16), device="cuda", dtype=torch.uint8)
        self.graph = graph
        self.run()  # the output's amax, for its scale
        self.out_scale.fill_(LARGEST / max(float(self.out_amax), 1e-6))

    def _scalar(self, value: float) -> torch.Tensor:
        return torch.full((1, 1, 1, 1), value, device="cuda", dtype=torch.float32)

    def run(self) -> torch.Tensor:
        self.cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream().cuda_stream)
        self.graph.execute(self.pack, self.workspace, handle=self.handle)
        return self.out


def _tensor(graph: Any, cudnn: Any, x: Any) -> Any:
    view = x.transpose(1, 2)
    return graph.tensor(dim=list(view.shape), stride=list(view.stride()), data_type=cudnn.data_type.FP8_E4M3)


def _one(descale: torch.Tensor | None) -> float:
    """The one factor of a tensor: all there is room for; ValueError for several."""
    if descale is None or (descale != descale.flatten()[0]).any():
        raise ValueError("its operands are e4m3 with one descale each")
    return float(descale.flatten()[0])


def load(name: str) -> Forward:
    """Import cuDNN's frontend, installed or from its wheel in the peers' folder."""
    make_importable(PEERS[name].wheel, "cudnn")
    import cudnn  # pyright: ignore[reportMissingImports]

    def prepare(problem: AttentionProblem, given: Given, options: Options) -> Launch:
        """Prepare a call; the output's scale is chosen from its own amax, so that nothing is clipped."""
        plan = _Plan(cudnn, problem, given)
        scale = 1 / float(plan.out_scale)
        return lambda: LaunchOutput(plan.run(), None, scale)

    return prepare
