"""One launch of a kernel on a GPU, forward or backward: by tensors for the bench, by numpy operands for verify.

A module of this package that holds kernels has ``load(name)``, which returns a :data:`Forward`, and where it holds
gradients as well ``load_backward(name)``, which returns a :data:`Backward`.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from fa3_kernels.plan.config import Setting
from fa3_reference.cache import check_written, serve
from fa3_reference.problem import AttentionProblem, BackwardOperands, Descale, Operands
from fa3verify import operations
from fa3verify.kernels.handed import unchanged
from fa3verify.known.libraries import Unsupported, library
from fa3verify.known.peers import PEERS
from fa3verify.tensors.convert import to_gpu, to_numpy

_OURS = "device"  # the module of this package's own kernels


class Given(NamedTuple):
    """Tensors of one call: q, k and v in the shapes of the problem; descales float32 (batch, nheads_kv), None of 16
    bits; where packed sequences start, int32, None of batches."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_descale: torch.Tensor | None = None
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None


class GivenBackward(NamedTuple):
    """Tensors of one call of a backward, in the shapes of the problem; out and lse are those of a forward, dlse is
    taken by ours.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dlse: torch.Tensor | None = None


class LaunchOutput(NamedTuple):
    """``out`` in the shape of the problem's, times ``scale``: the result; ``lse`` likewise, or None."""

    out: torch.Tensor
    lse: torch.Tensor | None = None
    scale: float = 1.0


# A kernel is prepared for a problem, tensors and options, such as num_splits, and returns what launches it: a forward
# gives its output, a backward dq, dk and dv in the shapes of q, k and v. Options that a library does not have, and
# problems that it does not take, raise ValueError. ``lse=False`` leaves out an LSE that costs time.
Options = Mapping[str, Setting]
Keywords = dict[str, Any]  # of our own launches, such as fields of fa3_kernels.plan.request.Choices, by name
Launch = Callable[[], LaunchOutput]
Forward = Callable[[AttentionProblem, Given, Options], Launch]
Gradients = tuple[torch.Tensor, ...]
Backward = Callable[[AttentionProblem, GivenBackward, Options], Callable[[], Gradients]]


@cache
def loaded(name: str, operation: str = operations.FORWARD) -> Callable[[AttentionProblem, Any, Options], Any]:
    """Load a kernel into this process, a :data:`Forward` or a :data:`Backward`; whatever goes wrong is raised.

    Parameters
    ----------
    name : str
        Of a row of :data:`fa3verify.known.peers.PEERS`, or of gradients "gluon" or "gluon.deterministic".
    operation : {"forward", "backward"}

    Raises
    ------
    Unsupported
        Where what gradients need is missing.
    """
    peer = PEERS.get(name)
    if operation == operations.FORWARD:
        return importlib.import_module(f"fa3verify.known.{PEERS[name].module}").load(name)
    if peer and (reason := peer.missing()):
        raise Unsupported(reason)
    return importlib.import_module(f"fa3verify.known.{peer.module if peer else _OURS}").load_backward(name)


def given(problem: AttentionProblem, operands: Operands) -> Given | GivenBackward:
    """Copy operands to the GPU; those of a forward with one descale for each kv head, and where packed sequences
    start.
    """
    kind = GivenBackward if isinstance(operands, BackwardOperands) else Given
    arrays = {name: getattr(operands, name, None) for name in kind._fields}
    if kind is Given and problem.is_varlen:
        arrays |= {name: getattr(problem, name) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    numbers = {name: x.by_kv_head(problem.nheads_kv) if isinstance(x, Descale) else x for name, x in arrays.items()}
    return kind(**{name: to_gpu(x) for name, x in numbers.items() if x is not None})


def _starts(problem: AttentionProblem, lengths: tuple[int, ...] | None, seqlen: int) -> np.ndarray:
    """Return where packed sequences start, and their end; those of a batch are as long as each other."""
    return np.cumsum([0, *(lengths or (seqlen,) * problem.batch)], dtype=np.int32)


def served(problem: AttentionProblem, operands: Operands) -> dict[str, torch.Tensor]:
    """Copy to the GPU what a build that serves is called with: the arrays of :func:`fa3_reference.cache.serve`, where
    sequences start in Q, and in K and V that lie in no cache, and descales by kv head.
    """
    arrays = serve(problem, operands) | {"cu_seqlens_q": _starts(problem, problem.seqlens_q, problem.seqlen_q)}
    if problem.cache is None:
        arrays["cu_seqlens_k"] = _starts(problem, problem.seqlens_k, problem.seqlen_k)
    descales = {name: getattr(operands, name) for name in ("q_descale", "k_descale", "v_descale")}
    arrays |= {name: x.by_kv_head(problem.nheads_kv) for name, x in descales.items() if x is not None}
    return {name: to_gpu(x) for name, x in arrays.items()}


def run(name: str, problem: AttentionProblem, operands: Operands, options: Options) -> tuple[Any, ...]:
    """Run a kernel once, a backward on operands of one.

    Parameters
    ----------
    options : mapping
        What the library is not to choose for itself, such as num_splits and pack_gqa.

    Returns
    -------
    tuple of ndarray
        out and lse as the twin returns them, lse None where the library has none; or dq, dk and dv.
    """
    operation = "backward" if isinstance(operands, BackwardOperands) else operations.FORWARD
    serves = name in PEERS and PEERS[name].serves
    tensors = served(problem, operands) if serves else given(problem, operands)
    named = tensors if isinstance(tensors, dict) else tensors._asdict()
    with unchanged(named):
        output = loaded(name, operation)(problem, tensors, options)()
        torch.cuda.synchronize()
    if problem.cache is not None:
        after = (to_numpy(named["k_cache"]), to_numpy(named["v_cache"]))
        check_written(problem, operands, serve(problem, operands), after)
    found = output[:2] if isinstance(output, LaunchOutput) else output
    return tuple(None if x is None else to_numpy(x) for x in found)


def version(name: str) -> str:
    """Version of a peer; what comes with torch has torch's."""
    return PEERS[name].version or f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"


def identity(name: str) -> dict[str, str | None]:
    """Return what identifies a peer: its version, and the hash of its binary where it has one of its own."""
    found: dict[str, str | None] = {"version": version(name)}
    binary = PEERS[name].binary
    if binary:
        found |= {"file": binary, "sha256": hashlib.sha256(library(binary).read_bytes()).hexdigest()}
    return found


def device_name() -> str:
    """The GPU on which peers run."""
    return torch.cuda.get_device_name()
