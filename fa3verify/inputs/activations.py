"""Real attention inputs: Q, K and V of pretrained heads, shipped as package data and verified by checksum.

There are 18 float16 files (50 query heads) of SmolLM2-135M-Instruct (causal, 3 query heads on 1 kv head, head_dim 64)
and all-MiniLM-L6-v2 (full attention, head_dim 32), taken after projection and rotary embedding. Attribution:
``data/activations/NOTICE``. Files of users are read by :mod:`fa3verify.inputs.captures`.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fa3_reference.problem import AttentionProblem, Dtype, Floats
from fa3_reference.rules import require

_FOLDER = files("fa3verify") / "data" / "activations"
SUFFIX = ".npz"
_LARGEST = 65504.0  # the largest float16, and so an upper limit of all values that ship


@dataclass(frozen=True, slots=True)
class Capture:
    """Facts of one file of q, k and v, without its arrays.

    ``file`` is the path as it was given, or the name of a file that ships; ``sha256`` identifies its content. ``whole``
    is the problem of all its tokens, in fp16. No magnitude in the arrays is above ``largest``.
    """

    file: str
    sha256: str
    whole: AttentionProblem
    largest: float

    @property
    def name(self) -> str:
        """Return the file name without its suffix, with an underscore for any unusual character."""
        return re.sub(r"[^A-Za-z0-9._+-]", "_", Path(self.file).name.removesuffix(SUFFIX))

    @property
    def seqlen(self) -> int:
        return self.whole.seqlen_k

    def problem(self, *, dtype: Dtype = "fp16", tokens: int = 0) -> AttentionProblem:
        """Return the problem of the first ``tokens`` tokens (0: all); ValueError if the format does not hold them."""
        from fa3_reference.formats import FORMATS

        limit = FORMATS[dtype].max_finite
        require(
            dtype == "e4m3" or self.largest <= limit,  # e4m3 is scaled to fit
            f"{self.file} holds values up to {self.largest:g}, {dtype} ends at {limit:g}",
        )
        rows = self.rows(tokens)
        return replace(self.whole, dtype=dtype, seqlen_q=rows, seqlen_k=rows)

    def rows(self, tokens: int) -> int:
        """Return how many rows ``tokens`` selects, all for 0; ValueError unless 0 <= tokens <= seqlen."""
        require(
            0 <= tokens <= self.seqlen, f"tokens of {self.file} must be between 0 (all) and {self.seqlen}, got {tokens}"
        )
        return tokens or self.seqlen


class Captured(NamedTuple):
    """A file and its arrays as stored, read-only."""

    capture: Capture
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


@dataclass(frozen=True, slots=True)
class ActivationCase(Capture):
    """One file that ships, with what its manifest entry says of the model and of the heads in it."""

    model: str
    layer: int
    q_heads: tuple[int, ...]


class Activation(NamedTuple):
    """A problem with its unrounded inputs.

    Parameters
    ----------
    problem : AttentionProblem
        The attention that the model computes.
    q, k, v : float64 arrays (1, seqlen, heads, head_dim)
        Values as stored: those that ship are float16 numbers.
    """

    problem: AttentionProblem
    q: NDArray[np.float64]
    k: NDArray[np.float64]
    v: NDArray[np.float64]

    @classmethod
    def of(cls, problem: AttentionProblem, arrays: Iterable[Floats]) -> Activation:
        """Cut q, k and v to the tokens of their problem.

        Parameters
        ----------
        problem : AttentionProblem
            The attention of the tokens that are kept; their number is its ``seqlen_q``.
        arrays : iterable of float arrays (heads, tokens, head_dim)
            In this order q, k and v.

        Returns
        -------
        Activation
            The first tokens, in the layout of the problem. Exact.
        """
        q, k, v = (x[None, :, : problem.seqlen_q].transpose(0, 2, 1, 3).astype(np.float64) for x in arrays)
        return cls(problem, q, k, v)


@lru_cache(maxsize=1)
def list_activations() -> tuple[ActivationCase, ...]:
    """Return every stored case, sorted by name.

    >>> case = list_activations()[-1]
    >>> case.model, case.whole.head_dim, case.whole.group
    ('SmolLM2-135M-Instruct', 64, 3)
    """
    cases = []
    for entry in json.loads(_read("MANIFEST.json"))["entries"]:
        whole = AttentionProblem(
            batch=1,
            nheads=len(entry["q_heads"]),
            nheads_kv=len(entry["kv_heads"]),
            seqlen_q=entry["seqlen"],
            seqlen_k=entry["seqlen"],
            head_dim=entry["head_dim"],
            causal=entry["causal"],
        )
        name = entry["file"].removesuffix(SUFFIX)
        facts = (entry["model"], entry["layer"], tuple(entry["q_heads"]))
        cases.append(ActivationCase(name, entry["npz_sha256"], whole, _LARGEST, *facts))
    return tuple(sorted(cases, key=lambda case: case.name))


def find(name: str) -> ActivationCase:
    """Return the case called ``name``; ValueError if there is none."""
    cases = {case.name: case for case in list_activations()}
    if name not in cases:
        raise ValueError(f"activation name must be one of {', '.join(cases)}, got {name!r}")
    return cases[name]


@lru_cache(maxsize=4)
def load_arrays(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return q, k and v of one file as stored, after checking the checksum of the file.

    Returns
    -------
    q, k, v : float16 (heads, seqlen, head_dim), read-only
        Exact. All values are finite.

    Raises
    ------
    ValueError
        If the name is unknown, or a file is missing, damaged or not the one in the manifest.
    """
    file = f"{name}{SUFFIX}"
    wanted = find(name).sha256
    data = _read(file)
    got = hashlib.sha256(data).hexdigest()
    require(got == wanted, f"{file} must have sha256 {wanted[:16]}..., got {got[:16]}...: the file is damaged")
    with np.load(io.BytesIO(data), allow_pickle=False) as held:
        q, k, v = (held[key] for key in "qkv")
    for array in (q, k, v):
        array.setflags(write=False)
    return q, k, v


def stored(name: str) -> Captured:
    """Return one stored case with its arrays; raises as :func:`load_arrays` does."""
    return Captured(find(name), *load_arrays(name))


def _read(filename: str) -> bytes:
    try:
        return (_FOLDER / filename).read_bytes()
    except OSError as error:
        raise ValueError(f"package data {filename} must be readable: {error.strerror or error}") from error
