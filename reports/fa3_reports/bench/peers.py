"""Peers as records that bench times, and our backwards, which are prepared in the same way.

A kernel that does not load stays in the list, with the reason why it is missing. Our forwards stand in
:mod:`fa3_reports.bench.kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fa3_reference.bounds import KernelModel
from fa3_reports.bench import cudnn_fp8
from fa3_reports.bench.cells import Cell
from fa3_reports.bench.kernels import TimedKernel
from fa3verify.bench import kernels
from fa3verify.bench.planned import refusal
from fa3verify.known import launches
from fa3verify.known.libraries import Unsupported
from fa3verify.known.peers import BACKWARDS, PEERS, SIXTEEN
from fa3verify.operations import FORWARD

RIVALS = PEERS | {"cudnn.fp8": cudnn_fp8.PEER}
OUR_BACKWARDS = {
    "gluon": "this package, parts of dQ added in any order",
    "gluon.deterministic": "this package, parts of dQ added in a fixed order",
}


def _options(name: str, cell: Cell) -> dict[str, int]:
    """Let a library choose the number of splits for decoding and for chunks, if it can."""
    chooses = cell.grid == "decode" or cell.line
    return {"num_splits": 0} if chooses and "num_splits" in RIVALS[name].choices else {}


def model_of(name: str, cell: Cell) -> KernelModel:
    """Return the order of operations whose bound a peer's output must keep: its own, or any order where its family's
    twin does not know the problem.
    """
    return kernels.model_of(RIVALS[name], cell.problem, _options(name, cell))


def _loaded(name: str, operation: str) -> Callable[..., Any]:
    """Load a kernel into this process."""
    return launches.loaded(name, operation) if name in PEERS or operation != FORWARD else cudnn_fp8.load()


def _why_not(name: str, operation: str) -> str | None:
    """Load a kernel into this process; return why it does not load, None if it does."""
    try:
        _loaded(name, operation)
    except Exception as error:  # a third party's library may raise anything
        text = " ".join(str(error).split())[:200]
        return text if isinstance(error, Unsupported) else f"{type(error).__name__}: {text}"
    return None


def _belongs(name: str, cell: Cell) -> bool:
    """Tell whether a kernel is timed in a cell.

    Builds that serve are timed on problems in lines alone, and cuDNN in FP8, of which nothing says what it refuses, on
    none of these.
    """
    only_in_lines = name in PEERS and PEERS[name].serves
    return not only_in_lines if not cell.line else name != "cudnn.fp8"


def kernel(name: str, operation: str) -> TimedKernel:
    """Load a kernel now, and return its record; if that fails, ``missing`` has the reason."""
    missing = _why_not(name, operation)
    is_forward = operation == FORWARD

    def prepare(cell: Cell, inputs: Sequence[Any]) -> Callable[[int], Any]:
        if missing:
            raise Unsupported(missing)
        if cell.line and (reason := refusal(name, (cell.problem, operation))):
            raise Unsupported(reason)
        try:
            if is_forward and name in PEERS:
                return kernels.peer_launch(name, cell.problem, inputs, _options(name, cell))
            prepared = [_loaded(name, operation)(cell.problem, x, {}) for x in inputs]
            prepared[0]()  # a backward may refuse a problem only when it is launched
        except ValueError as error:
            raise Unsupported(str(error)) from None
        return lambda i: prepared[i % len(prepared)]()

    return TimedKernel(
        name,
        OUR_BACKWARDS.get(name) or f"{RIVALS[name].about}, {RIVALS[name].version or launches.version(name)}",
        RIVALS[name].dtypes if is_forward else SIXTEEN,
        prepare,
        model=(lambda cell: model_of(name, cell)) if is_forward else None,
        operation=operation,
        missing=missing,
        belongs=lambda cell: _belongs(name, cell),
    )


def peers(wants: Callable[[str], bool] = lambda name: True, operation: str = FORWARD) -> list[TimedKernel]:
    """Load the peers that are timed and wanted by name, and return their records; for gradients ours as well.

    Others are neither loaded nor returned.
    """
    rivals = [name for name, peer in RIVALS.items() if peer.is_timed]
    names = rivals if operation == FORWARD else [*OUR_BACKWARDS, *BACKWARDS]
    return [kernel(name, operation) for name in names if wants(name)]
