"""One launch of a peer, by tensors on a GPU for the bench, by numpy operands for verify and record.

A module of this package that holds peers has ``load(name)``, which returns a :data:`Forward`.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from fa3_reference.problem import AttentionProblem, Operands
from fa3verify.adapters.libraries import library
from fa3verify.adapters.peers import PEERS
from fa3verify.adapters.tensors import to_gpu, to_numpy


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


class Output(NamedTuple):
    """``out`` in the shape of the problem's, times ``scale``: the result; ``lse`` likewise, or None."""

    out: torch.Tensor
    lse: torch.Tensor | None = None
    scale: float = 1.0


# A forward is prepared for a problem, tensors and options, such as num_splits, and returns what launches it; options
# that a library does not have raise ValueError. ``lse=False`` leaves out an LSE that costs time.
Launch = Callable[[], Output]
Forward = Callable[[AttentionProblem, Given, Mapping[str, Any]], Launch]


@cache
def loaded(name: str) -> Forward:
    """Load a peer into this process; whatever goes wrong is raised."""
    return importlib.import_module(f"fa3verify.adapters.{PEERS[name].module}").load(name)


def given(problem: AttentionProblem, operands: Operands) -> Given:
    """Copy operands to the GPU."""
    found = Given(to_gpu(operands.q), to_gpu(operands.k), to_gpu(operands.v))
    for name in ("q_descale", "k_descale", "v_descale"):
        if (descale := getattr(operands, name)) is not None:
            found = found._replace(**{name: to_gpu(descale.by_kv_head(problem.nheads_kv))})
    if problem.is_varlen:
        starts = {name: to_gpu(getattr(problem, name)) for name in ("cu_seqlens_q", "cu_seqlens_k")}
        found = found._replace(**starts)
    return found


def run(
    name: str, problem: AttentionProblem, operands: Operands, options: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray | None]:
    """Run a peer once.

    Parameters
    ----------
    options : mapping
        What the library is not to choose for itself, such as num_splits and pack_gqa.

    Returns
    -------
    out, lse : ndarray
        As the twin returns them; lse is None where the library has none.
    """
    output = loaded(name)(problem, given(problem, operands), options)()
    torch.cuda.synchronize()
    return to_numpy(output.out), None if output.lse is None else to_numpy(output.lse)


def version(name: str) -> str:
    """Version of a peer; what comes with torch has torch's."""
    return PEERS[name].version or f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"


def identity(name: str) -> dict[str, Any]:
    """Return what identifies a peer: its version, and the hash of its binary where it has one of its own."""
    found, binary = {"version": version(name)}, PEERS[name].binary
    if binary:
        found |= {"file": binary, "sha256": hashlib.sha256(library(binary).read_bytes()).hexdigest()}
    return found


def device_name() -> str:
    """The GPU on which peers run."""
    return torch.cuda.get_device_name()
