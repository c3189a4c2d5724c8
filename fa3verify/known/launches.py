"""How any kernel on a GPU is loaded, prepared and launched, forward or backward.

bench prepares launches on tensors of its own (:func:`loaded`); verify calls :func:`run` on numpy operands. Each
library has a module in this package with ``load(name)``, which returns a :data:`Forward`, and if it has gradients
``load_backward(name)``, which returns a :data:`Backward`.
"""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from fa3_kernels.plan.config import Setting
from fa3_reference.cache import check_written, serve
from fa3_reference.problem import AttentionProblem, BackwardOperands, Descale, Operands
from fa3verify import operations
from fa3verify.kernels.handed import current, unchanged
from fa3verify.known.libraries import Unsupported, library
from fa3verify.known.peers import PEERS
from fa3verify.tensors.convert import to_gpu, to_numpy

_OURS = "device"  # the module of this package's own kernels


class Given(NamedTuple):
    """Tensors of one call: q, k and v in the shapes of the problem; descales, float32 (batch, nheads_kv), None for
    16-bit operands; and the starts of packed sequences, int32 (batch + 1,), None for batches.

    ``served`` has the same rows where :func:`placed` puts them for a call over a cache; None until it is asked.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_descale: torch.Tensor | None = None
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    served: Mapping[str, torch.Tensor] | None = None


class GivenBackward(NamedTuple):
    """Tensors of one call of a backward, in the shapes of the problem; out and lse are those of a forward. Only our own
    kernels take dlse.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dlse: torch.Tensor | None = None


class LaunchOutput(NamedTuple):
    """Outputs of a launch: the result is ``out``, in the problem's shape, times ``scale``; lse may be left out."""

    out: torch.Tensor
    lse: torch.Tensor | None = None
    scale: float = 1.0


# A kernel is prepared for a problem, tensors and options, such as num_splits. Preparing returns a function that
# launches it and returns its output, or of a backward dq, dk and dv in the shapes of q, k and v. Preparing raises
# ValueError for options that a library does not have and for problems that it does not take. The option ``lse=False``
# leaves out an LSE that costs time.
Options = Mapping[str, Setting]
Keywords = dict[str, Any]  # of our own launches, such as fields of fa3_kernels.plan.request.Choices, by name
Launch = Callable[[], LaunchOutput]
Forward = Callable[[AttentionProblem, Given, Options], Launch]
Gradients = tuple[torch.Tensor, ...]
Backward = Callable[[AttentionProblem, GivenBackward, Options], Callable[[], Gradients]]


@cache
def loaded(name: str, operation: str = operations.FORWARD) -> Callable[[AttentionProblem, Any, Options], Any]:
    """Load a kernel into this process: return its :data:`Forward` or :data:`Backward`.

    Parameters
    ----------
    name : str
        A key of :data:`fa3verify.known.peers.PEERS`; for a backward also "gluon" or "gluon.deterministic".
    operation : {"forward", "backward"}

    Raises
    ------
    Unsupported
        If a file or a package is missing.
    Exception
        Whatever a library raises while it is loaded.
    """
    peer = PEERS.get(name)
    if operation == operations.FORWARD:
        return importlib.import_module(f"fa3verify.known.{PEERS[name].module}").load(name)
    if peer and (reason := peer.missing()):
        raise Unsupported(reason)
    return importlib.import_module(f"fa3verify.known.{peer.module if peer else _OURS}").load_backward(name)


def given(problem: AttentionProblem, operands: Operands) -> Given | GivenBackward:
    """Copy operands to the GPU; for a forward also descales by kv head and the starts of packed sequences."""
    kind = GivenBackward if isinstance(operands, BackwardOperands) else Given
    arrays = {name: getattr(operands, name, None) for name in kind._fields if name != "served"}
    if kind is Given and problem.is_varlen:
        arrays |= {name: getattr(problem, name) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    numbers = {name: x.by_kv_head(problem.nheads_kv) if isinstance(x, Descale) else x for name, x in arrays.items()}
    tensors: Keywords = {name: to_gpu(x) for name, x in numbers.items() if x is not None}
    return kind(**tensors)


def _starts(problem: AttentionProblem, lengths: tuple[int, ...] | None, seqlen: int) -> np.ndarray:
    """Return the starts of sequences in a packed array, and its end, int32 (batch + 1,).

    Without ``lengths`` every sequence has ``seqlen``.
    """
    return np.cumsum([0, *(lengths or (seqlen,) * problem.batch)], dtype=np.int32)


def served(problem: AttentionProblem, operands: Operands) -> dict[str, torch.Tensor]:
    """Copy to the GPU the arguments of a serving build (``Peer.serves``), by name.

    These are the arrays of :func:`fa3_reference.cache.serve`, descales by kv head, slopes of ALiBi, and the starts of
    sequences in Q, and in K where it lies in no cache.
    """
    arrays = serve(problem, operands) | {"cu_seqlens_q": _starts(problem, problem.seqlens_q, problem.seqlen_q)}
    if problem.cache is None:
        arrays["cu_seqlens_k"] = _starts(problem, problem.seqlens_k, problem.seqlen_k)
    descales = {name: getattr(operands, name) for name in ("q_descale", "k_descale", "v_descale")}
    arrays |= {name: x.by_kv_head(problem.nheads_kv) for name, x in descales.items() if x is not None}
    if operands.term is not None:  # the only term of packed sequences
        arrays["alibi_slopes"] = operands.term
    return {name: to_gpu(x) for name, x in arrays.items()}


def placed(problem: AttentionProblem, given: Given) -> dict[str, torch.Tensor]:
    """Return what :func:`served` returns, of tensors on the GPU, which alone moves their rows.

    Places of a cache that no key has hold keys of others.
    """
    shapes = {"q": problem.q_shape, "k": problem.k_shape, "v": problem.v_shape}
    numbers: Keywords = {
        name: np.arange(math.prod(shape[:-2])).reshape(*shape[:-2], 1, 1) for name, shape in shapes.items()
    }
    tensors = served(problem, Operands(**numbers))
    for name in tensors.keys() & {"q", "k", "v", "k_cache", "v_cache"}:
        rows = tensors[name][..., 0, 0]
        x = getattr(given, name[0])
        tensors[name] = x[rows % len(x)] if "cache" in name else x.view(*rows.shape, *x.shape[-2:])
    return tensors | {name: x for name, x in given._asdict().items() if name.endswith("descale") and x is not None}


def run(name: str, problem: AttentionProblem, operands: Operands, options: Options) -> tuple[Any, ...]:
    """Run a kernel once on numpy operands and copy its outputs back; BackwardOperands mean its backward.

    Parameters
    ----------
    options : mapping
        Choices that are not left to the library, such as num_splits and pack_gqa.

    Returns
    -------
    tuple of ndarray
        out and lse as the twin returns them, lse None where the library has none; or dq, dk and dv.

    Raises
    ------
    ValueError
        If the library does not take the problem or an option.
    WrongOutput
        If it changed its inputs.
    RuntimeError
        If it left another cache than it should.
    """
    operation = "backward" if isinstance(operands, BackwardOperands) else operations.FORWARD
    serves = name in PEERS and PEERS[name].serves
    tensors = served(problem, operands) if serves else given(problem, operands)
    arrangement = current()
    if arrangement.slack:
        raise ValueError("outputs of libraries have the shape of the problem, without tokens behind the last sequence")
    known = tensors if isinstance(tensors, dict) else {key: x for key, x in tensors._asdict().items() if x is not None}
    named = arrangement.given = arrangement.give(known)
    tensors = named if isinstance(tensors, dict) else type(tensors)(**named)
    with unchanged(named):
        output = arrangement.call(loaded(name, operation)(problem, tensors, options))
        torch.cuda.synchronize()
    if problem.cache is not None:
        after = (to_numpy(named["k_cache"]), to_numpy(named["v_cache"]))
        check_written(problem, operands, serve(problem, operands), after)
    results = arrangement.returned = output[:2] if isinstance(output, LaunchOutput) else output
    return tuple(None if x is None else to_numpy(x) for x in results)


def version(name: str) -> str:
    """Return the version of a peer; a kernel that comes with torch has torch's and cuDNN's."""
    return PEERS[name].version or f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"


def identity(name: str) -> dict[str, str | None]:
    """Return what identifies a peer: its version, and the hash of its binary where it has one of its own."""
    facts: dict[str, str | None] = {"version": version(name)}
    binary = PEERS[name].binary
    if binary:
        facts |= {"file": binary, "sha256": hashlib.sha256(library(binary).read_bytes()).hexdigest()}
    return facts


def device_name() -> str:
    """The GPU on which peers run."""
    return torch.cuda.get_device_name()
