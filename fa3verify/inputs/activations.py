"""Real attention inputs: Q, K and V of pretrained heads, shipped as package data and verified by checksum.

18 float16 files (50 query heads) of SmolLM2-135M-Instruct (causal, 3 query heads on 1 kv head, head_dim 64)
and all-MiniLM-L6-v2 (full attention, head_dim 32), taken after projection and rotary embedding.
Those float16 values are the input of record. Attribution: ``data/activations/NOTICE``.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fa3_reference.problem import AttentionProblem, Dtype, Floats

_FOLDER = files("fa3verify") / "data" / "activations"
_COPIED = ("model", "layer", "seqlen", "head_dim", "causal", "text", "why", "npz_sha256")


@dataclass(frozen=True, slots=True)
class ActivationCase:
    """One stored file, as its manifest entry describes it; ``name`` is the file name without ``.npz``."""

    name: str
    model: str
    layer: int
    q_heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    seqlen: int
    head_dim: int
    causal: bool
    text: str
    why: str
    npz_sha256: str

    @property
    def nheads_kv(self) -> int:
        return len(self.kv_heads)

    @property
    def group(self) -> int:
        """Query heads that share one kv head: 3 for SmolLM2, 1 for MiniLM."""
        return len(self.q_heads) // len(self.kv_heads)

    @property
    def head_dim_v(self) -> int:
        return self.head_dim

    def sidecar(self) -> dict[str, Any]:
        """Return the sidecar: provenance, licence, scale, checksums, statistics, reference results.

        Raises
        ------
        ValueError
            If the file is damaged or contradicts the manifest.
        """
        record = _json(f"{self.name}.json")
        for key in ("model", "layer", "seqlen", "head_dim", "causal", "npz_sha256"):
            if record.get(key) != getattr(self, key):
                want = getattr(self, key)
                got = record.get(key)
                raise ValueError(f"{self.name}.json: {key} must be {want!r} as in the manifest, got {got!r}")
        return record

    def problem(self, *, dtype: Dtype = "fp16", tokens: int = 0) -> AttentionProblem:
        """Return the problem of the first ``tokens`` tokens (0: all), with the model's mask and scale."""
        tokens = self.rows(tokens)
        return AttentionProblem(
            batch=1,
            nheads=len(self.q_heads),
            nheads_kv=self.nheads_kv,
            seqlen_q=tokens,
            seqlen_k=tokens,
            head_dim=self.head_dim,
            dtype=dtype,
            causal=self.causal,
            softmax_scale=float(self.sidecar()["softmax_scale"]),
        )

    def rows(self, tokens: int) -> int:
        """Return the rows that ``tokens`` selects; ValueError unless 0 <= tokens <= seqlen."""
        return rows_of(self.name, tokens, self.seqlen)


def rows_of(name: str, tokens: int, seqlen: int) -> int:
    """Return how many of the ``seqlen`` rows of a file ``tokens`` selects; ValueError unless 0 <= tokens <= seqlen."""
    if not 0 <= tokens <= seqlen:
        raise ValueError(f"tokens of {name} must be between 0 (all) and {seqlen}, got {tokens}")
    return tokens or seqlen


class Activation(NamedTuple):
    """A problem with its unrounded inputs.

    Parameters
    ----------
    problem : AttentionProblem
        What the model computes of them.
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
            What is computed of them; its ``seqlen_q`` is how many tokens are kept.
        arrays : iterable of float arrays (heads, tokens, head_dim)
            In this order q, k and v.

        Returns
        -------
        Activation
            The first tokens, in the layout of the problem. Exact.
        """
        rows = problem.seqlen_q
        q, k, v = (x[None, :, :rows].transpose(0, 2, 1, 3).astype(np.float64) for x in arrays)
        return cls(problem, q, k, v)


@lru_cache(maxsize=1)
def list_activations() -> tuple[ActivationCase, ...]:
    """Return every stored case, sorted by name.

    >>> case = list_activations()[-1]
    >>> case.model, case.head_dim, case.group
    ('SmolLM2-135M-Instruct', 64, 3)
    """
    cases = [
        ActivationCase(
            name=entry["file"].removesuffix(".npz"),
            q_heads=tuple(entry["q_heads"]),
            kv_heads=tuple(entry["kv_heads"]),
            **{key: entry[key] for key in _COPIED},
        )
        for entry in _json("MANIFEST.json")["entries"]
    ]
    return tuple(sorted(cases, key=lambda case: case.name))


def find(name: str) -> ActivationCase:
    """Return the case called ``name``; ValueError if there is none."""
    for case in list_activations():
        if case.name == name:
            return case
    names = ", ".join(case.name for case in list_activations())
    raise ValueError(f"activation name must be one of {names}, got {name!r}")


@lru_cache(maxsize=4)
def load_arrays(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return q, k and v of one file as stored, after checking every checksum.

    Returns
    -------
    q, k, v : float16 (heads, seqlen, head_dim), read-only
        Exact. All values are finite.

    Raises
    ------
    ValueError
        If the name is unknown, or a file is missing, damaged or not the one in the manifest.
    """
    case = find(name)
    data = _read(f"{name}.npz")
    _expect(f"{name}.npz", data, case.npz_sha256)
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as stored:
            arrays = tuple(stored[key] for key in ("q", "k", "v"))
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise ValueError(f"{name}.npz must be an npz file holding q, k and v: {error}") from error
    for key, array in zip("qkv", arrays, strict=True):
        _expect(f"{name}.npz, array {key}", array.tobytes(), case.sidecar()["arrays"][key]["sha256"])
        array.setflags(write=False)
    return arrays[0], arrays[1], arrays[2]


def load(name: str, *, dtype: Dtype = "fp16", tokens: int = 0) -> Activation:
    """Return one stored case as a problem and its inputs.

    Parameters
    ----------
    name : str
        One of the names in :func:`list_activations`.
    dtype : {"fp16", "bf16", "e4m3"}
        Operand format of the problem; the inputs stay unrounded (they are float16 values).
    tokens : int
        Use the first ``tokens`` rows of Q, K and V; 0 means all.

    Returns
    -------
    Activation
        Problem and float64 q, k, v in the problem's shapes. Exact.

    Raises
    ------
    ValueError
        If the name is unknown, ``tokens`` too large, or the file is missing or damaged.
    """
    return Activation.of(find(name).problem(dtype=dtype, tokens=tokens), load_arrays(name))


def _read(filename: str) -> bytes:
    try:
        return (_FOLDER / filename).read_bytes()
    except OSError as error:
        raise ValueError(f"package data {filename} must be readable: {error.strerror or error}") from error


def _json(filename: str) -> dict[str, Any]:
    data = _read(filename)
    try:
        record = json.loads(data)
    except ValueError as error:
        raise ValueError(f"package data {filename} must be valid JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"package data {filename} must hold a JSON object, got {type(record).__name__}")
    return record


def _expect(what: str, data: bytes, sha256: str) -> None:
    got = hashlib.sha256(data).hexdigest()
    if got != sha256:
        raise ValueError(f"{what} must have sha256 {sha256[:16]}..., got {got[:16]}...: the file is damaged")
