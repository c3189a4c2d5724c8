"""Captured activations: Q, K and V of a user's own model, one npz file for each layer and sequence.

A file holds q (nheads, seqlen, head_dim), k and v (nheads_kv, seqlen, head_dim or head_dim_v), in any floating format
of numpy, after projection and rotary embedding. It may hold ``causal``, ``window``, ``softcap`` and ``softmax_scale``
as :class:`fa3_reference.problem.AttentionProblem` takes them, and nothing else.

Recipes name a file by its path and the start of its SHA-256, so that another file in its place is refused. Files that
ship are read by :mod:`fa3verify.inputs.activations`.
"""

from __future__ import annotations

import hashlib
import io
import re
import zipfile
import zlib
from functools import lru_cache
from pathlib import Path

import numpy as np

from fa3_reference.problem import AttentionProblem, Dtype
from fa3_reference.rules import require
from fa3verify.files import Json
from fa3verify.inputs import activations
from fa3verify.inputs.activations import SUFFIX, Activation, Capture as Capture, Captured
from fa3verify.text import of_error

DIGITS = 16  # hex digits of the SHA-256 that identify a file's content
_TENSORS = ("q", "k", "v")
_SEMANTICS = ("causal", "window", "softcap", "softmax_scale")
# Exceptions that numpy and zipfile raise for damaged files, and our own ValueError.
_DAMAGE = (ValueError, KeyError, OSError, EOFError, MemoryError, RuntimeError, zipfile.BadZipFile, zlib.error)


def read(file: str, sha256: str = "") -> Captured:
    """Read one file.

    Parameters
    ----------
    file : str
        Path.
    sha256 : str, optional
        Start of the SHA-256 that the file must have, :data:`DIGITS` hex digits.

    Returns
    -------
    Captured
        Exact. All values are finite.

    Raises
    ------
    ValueError
        If the file cannot be read, is no npz of numbers, lacks q, k or v, holds other keys, shapes that do not fit
        together, NaN or infinities, or has another SHA-256. The message names the file.
    """
    wanted = f" (sha256 {sha256}...)" if sha256 else ""
    try:
        data = Path(file).read_bytes()
    except OSError as error:
        raise ValueError(f"activations {file}{wanted} cannot be read: {error.strerror}") from None
    got = hashlib.sha256(data).hexdigest()[:DIGITS]
    require(
        not sha256 or got == sha256,
        f"activations {file} must have sha256 {sha256}..., got {got}...: it is another file",
    )
    try:
        return _parsed(file, got, data)
    except _DAMAGE as error:
        raise ValueError(f"activations {file} must be an npz file of q, k and v: {of_error(error)}") from None


@lru_cache(maxsize=2)
def pinned(file: str, sha256: str) -> Captured:
    """Return :func:`read` of the file of a recipe; ValueError also if ``sha256`` is no SHA-256."""
    require(
        re.fullmatch(f"[0-9a-f]{{{DIGITS}}}", sha256),
        f"captured: sha256 must be the first {DIGITS} hex digits of the file's, got {sha256!r}",
    )
    return read(file, sha256)


def _parsed(file: str, sha256: str, data: bytes) -> Captured:
    with zipfile.ZipFile(io.BytesIO(data)), np.load(io.BytesIO(data), allow_pickle=False) as stored:
        legal = (*_TENSORS, *_SEMANTICS)
        if unknown := sorted(set(stored.files) - set(legal)):
            raise ValueError(f"unknown key {unknown[0]!r} (legal: {', '.join(legal)})")
        q, k, v = (_heads(name, stored[name]) for name in _TENSORS)
        semantics = {name: stored[name].tolist() for name in _SEMANTICS if name in stored.files}
    if len({x.shape[1] for x in (q, k, v)}) > 1 or k.shape[0] != v.shape[0] or q.shape[2] != k.shape[2]:
        shapes = ", ".join(str(x.shape) for x in (q, k, v))
        raise ValueError(
            f"q, k and v must have the same tokens, k and v the same heads, q and k one head_dim: {shapes}"
        )
    sizes: Json = {"batch": 1, "nheads": q.shape[0], "nheads_kv": k.shape[0], "head_dim": q.shape[2]}
    sizes |= {"seqlen_q": q.shape[1], "seqlen_k": q.shape[1], "head_dim_v": v.shape[2]}
    problem = AttentionProblem.from_json(sizes | semantics)
    largest = max(float(np.max(np.abs(x))) for x in (q, k, v))
    return Captured(Capture(file, sha256, problem, largest), q, k, v)


def _heads(name: str, x: np.ndarray) -> np.ndarray:
    """Return one tensor, read-only; ValueError unless it is finite, (heads, tokens, head_dim), and numpy floats."""
    if x.dtype.kind != "f":
        hint = "; store bfloat16 as float32" if x.dtype.kind == "V" else ""
        raise ValueError(f"{name} must be float16, float32 or float64, got {x.dtype}{hint}")
    require(
        x.ndim == 3 and 0 not in x.shape, f"{name} must be (heads, tokens, head_dim), none of them 0, got {x.shape}"
    )
    require(np.isfinite(x).all(), f"{name} must be finite, got NaN or Inf")
    x.setflags(write=False)
    return x


def list_captures(path: str | Path) -> tuple[Capture, ...]:
    """Return every npz file of a folder, sorted by name, or the one file.

    Raises
    ------
    ValueError
        If there is none, one of them is damaged or foreign, or two have one name.
    """
    path = Path(path)
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    require(files, f"activations: {path} holds no {SUFFIX} file")
    captures = tuple(read(str(file)).capture for file in files)
    names = [capture.name for capture in captures]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"activations: two files of {path} are called {twice[0]}")
    return captures


def load(source: str | Path, *, dtype: Dtype = "fp16", tokens: int = 0) -> Activation:
    """Return activations as a problem and its inputs: shipped ones by name, or those of a file of one's own.

    Parameters
    ----------
    source : str or Path
        A name in :func:`fa3verify.inputs.activations.list_activations`, or an npz file.
    dtype : {"fp16", "bf16", "e4m3"}
        Operand format of the problem; the inputs stay unrounded.
    tokens : int
        Use the first ``tokens`` rows of Q, K and V; 0 means all.

    Returns
    -------
    Activation
        Problem and float64 q, k, v in the problem's shapes. Exact.

    Raises
    ------
    ValueError
        If the name is unknown, ``tokens`` too large, a value beyond the format, or the file missing, damaged or
        foreign.

    Examples
    --------
    >>> problem, q, k, v = load("smollm2_dev-prose2_n129_L08_kv2", tokens=16)
    >>> problem.group, q.shape
    (3, (1, 16, 3, 64))
    """
    name = str(source)
    is_shipped = isinstance(source, str) and not name.endswith(SUFFIX)
    capture, *arrays = activations.stored(name) if is_shipped else read(name)
    return Activation.of(capture.problem(dtype=dtype, tokens=tokens), arrays)
