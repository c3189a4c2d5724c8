"""Peers loaded into this process by name, and what identifies them."""

from __future__ import annotations

import hashlib
import importlib
from functools import cache

import numpy as np
import torch

from fa3_reference.problem import AttentionProblem, Operands
from fa3verify.known.launches import Forward, Options, given
from fa3verify.known.libraries import library
from fa3verify.known.peers import PEERS
from fa3verify.tensors.convert import to_numpy


@cache
def loaded(name: str) -> Forward:
    """Load a peer into this process; whatever goes wrong is raised."""
    return importlib.import_module(f"fa3verify.known.{PEERS[name].module}").load(name)


def run(
    name: str, problem: AttentionProblem, operands: Operands, options: Options
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
