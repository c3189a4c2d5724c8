"""Peers as the bench times them: one that does not load is kept in the list, missing, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fa3_reference.bounds import KernelModel
from fa3verify.bench.graphs import GraphTimed
from fa3verify.bench.kernels import Prepared, TimedKernel
from fa3verify.known import loaded
from fa3verify.known.launches import Given
from fa3verify.known.libraries import Unsupported
from fa3verify.known.peers import PEERS
from fa3verify.timed.cells import Cell


def _options(name: str, cell: Cell) -> dict[str, int]:
    """Let a library choose the number of splits for decoding, if it can."""
    return {"num_splits": 0} if cell.grid == "decode" and "num_splits" in PEERS[name].choices else {}


def model_of(name: str, cell: Cell) -> KernelModel:
    """Return what a peer's output is judged by: the order that it states, and any where its family's twin knows
    none.
    """
    peer = PEERS[name]
    problem = cell.problem
    try:
        return peer.model(peer.configure(problem, **_options(name, cell)))
    except ValueError:
        out_dtype = "fp16" if problem.dtype == "fp16" else "bf16"
        return KernelModel.any_order(problem.dtype, out_dtype, accumulator="either")


def _why_not(name: str) -> str | None:
    """Load a peer; why it does not load, None if it does."""
    try:
        loaded.loaded(name)
    except Exception as error:  # a third party's library may raise anything
        text = " ".join(str(error).split())[:200]
        return text if isinstance(error, Unsupported) else f"{type(error).__name__}: {text}"
    return None


def kernel(name: str) -> TimedKernel:
    """Load a peer now; whatever goes wrong is its reason to be missing."""
    peer = PEERS[name]
    missing = _why_not(name)

    def prepare(cell: Cell, inputs: Sequence[Given]) -> Prepared:
        if missing:
            raise Unsupported(missing)
        forward = loaded.loaded(name)
        options = {"lse": False, **_options(name, cell)}
        try:
            made = [forward(cell.problem, x, options) for x in inputs]
        except ValueError as error:
            raise Unsupported(str(error)) from None
        return Prepared(GraphTimed(lambda i: made[i % len(made)]()), made[0])

    about = f"{peer.about}, {loaded.version(name)}"
    return TimedKernel(name, about, peer.dtypes, prepare, model=lambda cell: model_of(name, cell), missing=missing)


def peers(wants: Callable[[str], bool] = lambda name: True) -> list[TimedKernel]:
    """Load the peers that are timed and whose names are wanted; the others are not loaded and not returned."""
    return [kernel(name) for name, peer in PEERS.items() if peer.is_timed and wants(name)]
