"""Peers as the bench times them, and our backwards, which are prepared as theirs are: one that does not load is kept in
the list, missing, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fa3_reference.bounds import KernelModel
from fa3verify.bench.kernels import TimedKernel
from fa3verify.known import launches
from fa3verify.known.libraries import Unsupported
from fa3verify.known.peers import BACKWARDS, PEERS, SIXTEEN
from fa3verify.operations import FORWARD
from fa3verify.timed.cells import Cell

OUR_BACKWARDS = {
    "gluon": "this package, parts of dQ added in any order",
    "gluon.deterministic": "this package, parts of dQ added in a fixed order",
}


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


def _why_not(name: str, operation: str) -> str | None:
    """Load a kernel; why it does not load, None if it does."""
    try:
        launches.loaded(name, operation)
    except Exception as error:  # a third party's library may raise anything
        text = " ".join(str(error).split())[:200]
        return text if isinstance(error, Unsupported) else f"{type(error).__name__}: {text}"
    return None


def kernel(name: str, operation: str) -> TimedKernel:
    """Load a kernel now; whatever goes wrong is its reason to be missing."""
    missing = _why_not(name, operation)
    is_forward = operation == FORWARD

    def prepare(cell: Cell, inputs: Sequence[Any]) -> Callable[[int], Any]:
        if missing:
            raise Unsupported(missing)
        options = {"lse": False, **_options(name, cell)} if is_forward else {}
        try:
            made = [launches.loaded(name, operation)(cell.problem, x, options) for x in inputs]
            if not is_forward:
                made[0]()
        except ValueError as error:
            raise Unsupported(str(error)) from None
        return lambda i: made[i % len(made)]()

    return TimedKernel(
        name,
        OUR_BACKWARDS.get(name) or f"{PEERS[name].about}, {launches.version(name)}",
        PEERS[name].dtypes if is_forward else SIXTEEN,
        prepare,
        model=(lambda cell: model_of(name, cell)) if is_forward else None,
        operation=operation,
        missing=missing,
    )


def peers(wants: Callable[[str], bool] = lambda name: True, operation: str = FORWARD) -> list[TimedKernel]:
    """Load those that are timed and whose names are wanted, of gradients ours as well; the others are not loaded and
    not returned.
    """
    rivals = [name for name, peer in PEERS.items() if peer.is_timed]
    names = rivals if operation == FORWARD else [*OUR_BACKWARDS, *BACKWARDS]
    return [kernel(name, operation) for name in names if wants(name)]
