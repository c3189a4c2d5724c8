"""Problems as people write them in a line: ``28/4 8 x 1 x 7700 d128 page 16``. docs/bench.md has the table of words.

``bench`` times the problems of such lines, and ``python -m fa3_reports bits`` compares bits over them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np

from fa3_reference.layout import Cache
from fa3_reference.problem import AttentionProblem
from fa3_reference.rules import require
from fa3verify.cases.practice import models
from fa3verify.files import Json

Asked = tuple[AttentionProblem, str]  # a problem, and "forward" or "backward"
_PAIR = r"(\d+)(?:/(\d+))?"
_LENGTHS = r"\d+(?:-\d+|(?:,\d+)+)?"  # one, a range of them, or a list
_NUMBER = r"(\d+(?:\.\d+)?(?:e-?\d+)?)"
# Words as they are listed for users, each with its pattern and the fields of a problem that it states; "sizes" and
# "operation" are read apart.
_WORDS: dict[str, tuple[str, Callable[..., Json]]] = {
    "HEADS[/KV]": (_PAIR, lambda heads, kv: {"nheads": int(heads), "nheads_kv": int(kv or heads)}),
    "BATCH x [QUERIES x] KEYS": (rf"(\d+(?:x{_LENGTHS}){{1,2}})", lambda sizes: {"sizes": sizes}),
    "dHEAD_DIM[/V]": (f"d{_PAIR}", lambda dim, v: {"head_dim": int(dim), "head_dim_v": int(v or dim)}),
    "fp16|bf16|e4m3": ("(fp16|bf16|e4m3)", lambda dtype: {"dtype": dtype}),
    "causal": ("causal", lambda: {"causal": True}),
    "window LEFT[,RIGHT]": (
        r"window (-1|\d+)(?:,(-1|\d+))?",
        lambda left, right: {"window": (int(left), int(right or 0))},
    ),
    "chunk KEYS": (r"chunk (\d+)", lambda keys: {"attention_chunk": int(keys)}),
    "softcap CAP": (f"softcap {_NUMBER}", lambda cap: {"softcap": float(cap)}),
    "scale FACTOR": (f"scale {_NUMBER}", lambda factor: {"softmax_scale": float(factor)}),
    "packed": ("packed", lambda: {"cache": None}),
    "page KEYS": (r"page (\d+)", lambda keys: {"cache": Cache(int(keys))}),
    "rows": ("rows", lambda: {"cache": Cache()}),
    "backward": ("backward", lambda: {"operation": "backward"}),
}


def read_line(line: str, seed: int = 0) -> Asked:
    """Return the problem that a line describes, and what is computed of it.

    Parameters
    ----------
    line : str
        Words in any order, as docs/bench.md lists them. Heads and sizes must be there; the rest is head_dim 128 in
        bf16, dense.
    seed : int
        Draws the lengths that a line gives as a range; all batches of as many sequences get the same.

    Returns
    -------
    AttentionProblem
        Packed where lengths are a list or a range, where keys lie in a cache, and where the line says so.
    {"forward", "backward"}

    Raises
    ------
    ValueError
        For a word that is not understood, or that states again what another one did, which the message names; and for
        sizes that do not fit.

    >>> problem, operation = read_line("28/4 8 x 1 x 7700 d128 page 16")
    >>> problem.group, problem.q_shape, problem.seqlens_k[:2], problem.cache.page_size, operation
    (7, (8, 28, 128), (7700, 7700), 16, 'forward')
    """
    try:
        said = {"head_dim": 128, "dtype": "bf16", "operation": "forward"} | _said(line)
        batch, *parts = said.pop("sizes").split("x")
        operation = said.pop("operation")
        rng = np.random.default_rng([seed, int(batch)])
        lengths = [_lengths(part, int(batch), rng) for part in parts]
        is_packed = "cache" in said or re.search("[,-]", "".join(parts))
        packed = AttentionProblem.varlen(lengths[0], lengths[-1], **said)
        require(packed.cache is None or operation == "forward", "keys in page or rows of a cache have no backward")
    except ValueError as error:
        raise ValueError(f"problem {line!r}: {error}") from None
    return (packed if is_packed else replace(packed, seqlens_q=None, seqlens_k=None)), operation


def _said(line: str) -> Json:
    """Return the fields that a line states, with the sizes as they are written."""
    rest = re.sub(r"(?<=\d)\s*([x/])\s*(?=\d)", r"\1", line.lower())
    said: Json = {}
    while rest := rest.lstrip(" ,"):
        tried = ((re.match(rf"{pattern}(?=[\s,]|$)", rest), fields) for pattern, fields in _WORDS.values())
        word, more = next(((x[0], fields(*x.groups())) for x, fields in tried if x), (rest.split()[0], {}))
        require(bool(more), f"{word!r} is not understood; words are {', '.join(_WORDS)}")
        require(not more.keys() & said.keys(), f"{word!r} states again what another word did")
        said |= more
        rest = rest[len(word) :]
    require({"nheads", "sizes"} <= said.keys(), "heads and sizes must be there, as in 28/4 8 x 1 x 4096")
    return said


def _lengths(part: str, batch: int, rng: np.random.Generator) -> tuple[int, ...]:
    """Return a length for each sequence."""
    if "-" in part:
        low, high = map(int, part.split("-"))
        return tuple(rng.integers(low, high, batch, endpoint=True).tolist())
    lengths = tuple(map(int, part.split(",")))
    require(len(lengths) in (1, batch), f"a list must have a length for each of {batch} sequences, got {part!r}")
    return lengths * (batch // len(lengths))


def lines_in(path: Path) -> list[str]:
    """Return the lines of a file of problems; what stands behind # is a comment."""
    lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


def lines_of_models(pages: Sequence[int] = (16,)) -> Iterator[str]:
    """Yield a line for each kind of call that the public models make: steps of decoding and prompts, over pages.

    Batches are of 1, 8 and 64 sequences with lengths of their own: up to 13,000 keys, or the context of the model.
    Models that are not causal have no cache, and read packed sequences. Those with equal layers have the same lines.
    """
    for model in models():
        x = model.share
        keys = min(13000, x.context)
        lengths = f"{keys * 3 // 13}-{keys} d{x.head_dim}/{x.head_dim_v or x.head_dim}"
        layer = (
            lengths + f" softcap {x.softcap}" * (x.softcap > 0) + f" scale {x.softmax_scale}" * bool(x.softmax_scale)
        )
        window = f" window {x.window - 1}" * (x.window >= 0)
        for batch, page in product((1, 8, 64), pages):
            start = f"{x.nheads}/{x.nheads_kv} {batch} x"
            if x.causal:
                yield f"{start} 1 x {layer}{window} page {page}"
            yield f"{start} {layer}" + (f"{window or ' causal'} page {page}" if x.causal else "")
