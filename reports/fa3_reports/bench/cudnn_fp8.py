"""cuDNN's FP8 attention through its frontend: e4m3 operands and e4m3 output (16-bit outputs need Blackwell).

verify has no bound of outputs that are e4m3 with a scale of their own, so that it is a rival on our grids alone, where
the bench checks it. The frontend is installed, or lies in the peers' folder as ``nvidia_cudnn_frontend*.whl``. cuDNN's
16-bit attention is called through torch, in :mod:`fa3verify.known.torch_sdpa`.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fa3_kernels.plan.config import Config
from fa3_reference.bounds import KernelModel
from fa3_reference.problem import AttentionProblem
from fa3verify.known.launches import Forward, Given, Launch, LaunchOutput, Options
from fa3verify.known.libraries import Unsupported, folder, why_not_importable
from fa3verify.known.peers import PEERS, Peer

P_SCALE = 256.0  # probabilities are multiplied by this before they are rounded to e4m3, as in the other FP8 kernels
WHEEL = "nvidia_cudnn_frontend*.whl"
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


def _chained(config: Config) -> KernelModel:
    """Return the model of torch's compiled attention with sums that stay in the tensor core.

    The caller chooses the factor of P, so that P is at most 256. P is assumed to be rescaled by the running maximum at
    every block, as in every known kernel for Hopper.
    """
    return replace(PEERS["cuda.flex"].model(config), accumulator="wgmma")


PEER = Peer(
    "cuDNN's attention by its frontend, e4m3 in and out",
    module="",  # :func:`load` loads it
    version="nvidia-cudnn-frontend 1.18.0",
    dtypes=("e4m3",),
    order=_chained,
    package="cudnn",
)


def _make_importable() -> None:
    """Make cuDNN's frontend importable from a wheel in the peers' folder if it is not installed; Unsupported without
    both.
    """
    if (reason := why_not_importable(PEER.package)) is None:
        return
    where = folder()
    wheels = sorted(where.glob(WHEEL)) if where else []
    if not wheels:
        raise Unsupported(f"{reason} and no {WHEEL} is in the peers' folder")
    site = Path(tempfile.mkdtemp(prefix="fa3verify-peers-"))
    with zipfile.ZipFile(wheels[-1]) as archive:
        archive.extractall(site)
    sys.path.insert(0, str(site))


def load() -> Forward:
    """Import cuDNN's frontend, installed or from its wheel in the peers' folder."""
    _make_importable()
    import cudnn  # pyright: ignore[reportMissingImports]

    def prepare(problem: AttentionProblem, given: Given, options: Options) -> Launch:
        """Prepare a call. The output's scale is chosen from its largest value, so that nothing is clipped."""
        plan = _Plan(cudnn, problem, given)
        scale = 1 / float(plan.out_scale)
        return lambda: LaunchOutput(plan.run(), None, scale)

    return prepare
