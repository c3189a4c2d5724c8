"""What is timed: our kernels and their peers behind one face, each either ready or missing with its reason."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

from fa3_kernels.config import Config
from fa3verify.bench.cells import Cell
from fa3verify.bench.timing import GraphTimed, Timed


class Unsupported(Exception):
    """A kernel does not take a cell, or cannot be loaded; the message is the reason that every output shows."""


class Inputs(NamedTuple):
    """One set of operands on the GPU: (batch, seqlen, nheads, head_dim), and for e4m3 one factor per operand."""

    q: Any
    k: Any
    v: Any
    q_descale: float = 1.0
    k_descale: float = 1.0
    v_descale: float = 1.0


class Output(NamedTuple):
    """``out`` (batch, seqlen, nheads, head_dim) times ``scale`` is the result; ``lse`` (batch, nheads, seqlen) or None."""

    out: Any
    lse: Any = None
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Run:
    """A kernel prepared for a cell: how it is timed, and its output for the first set of inputs."""

    timed: Timed
    output: Callable[[], Output]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that can be timed.

    Parameters
    ----------
    name : str
        As in every table.
    about : str
        What it is and which version.
    dtypes : tuple of str
    prepare : callable
        ``prepare(cell, inputs) -> Run``; :class:`Unsupported` for a cell it does not take.
    configure : callable, optional
        Ours only: ``configure(cell) -> Config``, with which the twin must give the same bits.
    options : callable, optional
        Ours only: the launch options for a cell.
    missing : str, optional
        Why it cannot be loaded here.
    """

    name: str
    about: str
    dtypes: tuple[str, ...]
    prepare: Callable[[Cell, Sequence[Inputs]], Run]
    configure: Callable[[Cell], Config] | None = None
    options: Callable[[Cell], dict[str, Any]] | None = None
    missing: str | None = None
    grids: tuple[str, ...] = ()

    def takes(self, cell: Cell) -> bool:
        """Whether the kernel belongs in this cell's table at all."""
        return cell.dtype in self.dtypes and (not self.grids or cell.grid in self.grids)


def graph_run(launch: Callable[[Inputs], Any], inputs: Sequence[Inputs], output: Callable[[Any], Output]) -> Run:
    """Prepare a function of torch tensors that can be captured in a CUDA graph; inputs are used in turn."""
    return Run(GraphTimed(lambda i: launch(inputs[i % len(inputs)])), lambda: output(launch(inputs[0])))


def draw(cell: Cell, copies: int, seed: int) -> list[Inputs]:
    """Draw sets of N(0, 1) operands on the GPU, V with the cell's mean; e4m3 operands by amax / 448 per tensor."""
    torch = import_module("torch")
    generator = torch.Generator("cuda").manual_seed(seed)
    drawn = []
    for _ in range(copies):
        problem, tensors, factors = cell.problem, [], []
        for shape, mean in ((problem.q_shape, 0.0), (problem.k_shape, 0.0), (problem.v_shape, cell.v_mean)):
            x = torch.randn(shape, device="cuda", dtype=torch.float32, generator=generator) + mean
            factor = 1.0
            if cell.dtype == "e4m3":
                factor = float(x.abs().max()) / 448
                x = x / factor
            tensors.append(x.to(torch_dtype(cell.dtype)))
            factors.append(factor)
        drawn.append(Inputs(*tensors, *factors))
    return drawn


def torch_dtype(name: str) -> Any:
    torch = import_module("torch")
    return {"fp16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}[name]


def descales(cell: Cell, given: Inputs) -> dict[str, Any]:
    """Factors in the layout of FlashAttention-3, float32 (batch, nheads_kv); empty for 16-bit operands."""
    if cell.dtype != "e4m3":
        return {}
    torch = import_module("torch")
    shape = (cell.batch, cell.nheads_kv)
    names = ("q_descale", "k_descale", "v_descale")
    return {n: torch.full(shape, getattr(given, n), dtype=torch.float32, device="cuda") for n in names}


def _ours(name: str, about: str, dtypes: tuple[str, ...], grids: tuple[str, ...] = (), **options: Any) -> Kernel:
    """One of our kernels, or a variant of it by launch options."""

    def configure(cell: Cell) -> Config:
        choose = import_module("fa3_kernels.gluon.choose")
        torch = import_module("torch")
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        return choose.config_of(cell.problem, num_sms=sms, **(_defaults(cell) | options))

    def prepare(cell: Cell, inputs: Sequence[Inputs]) -> Run:
        forward = import_module("fa3_kernels.gluon.launch").forward
        keywords = _defaults(cell) | options
        factors = [descales(cell, x) for x in inputs]
        if unknown := sorted({*keywords, *factors[0]} - set(inspect.signature(forward).parameters)):
            raise Unsupported(f"the kernels of this version have no option {', '.join(unknown)}")

        def launch(i: int):
            x = inputs[i % len(inputs)]
            return forward(x.q, x.k, x.v, causal=cell.causal, **factors[i % len(inputs)], **keywords)

        try:
            launch(0)
        except ValueError as error:
            raise Unsupported(str(error)) from None
        return Run(GraphTimed(launch), lambda: Output(*launch(0)))

    return Kernel(name, about, dtypes, prepare, configure, lambda cell: _defaults(cell) | options, grids=grids)


def _defaults(cell: Cell) -> dict[str, Any]:
    """Split counts are chosen from the shape where one query token leaves most of the GPU idle."""
    return {"num_splits": 0} if cell.grid == "decode" else {}


def ours() -> list[Kernel]:
    """Our kernels: as shipped, FP8 without promotion, and with parts of the schedule switched off."""
    rest = ("fp16", "bf16")
    off = ("ablation",)
    return [
        _ours("gluon", "this package, as shipped", ("fp16", "bf16", "e4m3")),
        _ours("gluon.chained", "this package, FP8 without promotion to fp32", ("e4m3",), promotion_interval=0),
        _ours("gluon.one_split", "this package, keys not split", (*rest, "e4m3"), ("decode",), num_splits=1),
        _ours("gluon.no_pingpong", "this package, warpgroups not taking turns", rest, off, pingpong=False),
        _ours("gluon.no_overlap", "this package, softmax not under the GEMMs", rest, off, intra_wg_overlap=False),
        _ours("gluon.no_specialisation", "this package, no producer warp", rest, off, warp_specialize=False),
    ]
