"""Hypothesis strategies for recipes, and the lengths at the edges of tiles, where kernels break.

Only small things are drawn: a family name, parameters, a seed, a few edits; the recipe draws the arrays. Every choice
lists its plainest value first, and no plain recipe takes more choices than an odd one, so that a failure shrinks
towards ``normal`` with seed 0 and no edit.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import strategies as st

from fa3_reference.problem import AttentionProblem
from fa3verify.inputs import activations
from fa3verify.inputs.distributions import DISTRIBUTIONS, Parameter
from fa3verify.inputs.edits import Edit, EditKind
from fa3verify.inputs.recipe import FAMILIES, Family, Recipe
from fa3verify.inputs.streams import Tensor

__all__ = ["edits", "recipes"]

TENSORS: tuple[Tensor, ...] = ("q", "k", "v")
TILE_EDGES = (1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 383, 384, 385, 511, 512, 513)
WINDOW_EDGES = (-1, 0, 1, 63, 64, 127, 128)
# All kinds of edits with tensor and value, plainest first. They are one choice, as Hypothesis deletes at most five
# consecutive choices at once.
_EDITS: tuple[tuple[EditKind, Tensor, float], ...] = (
    *(("set", tensor, value) for value in (0.0, 1.0, -8.0, 100.0) for tensor in TENSORS),
    *(("constant_row", tensor, value) for value in (0.0, 1.0, -8.0, 100.0) for tensor in TENSORS),
    *(("copy_row", tensor, 0.0) for tensor in TENSORS),
    *(("scale_row", tensor, value) for value in (0.0, -1.0, 0.25, 4.0) for tensor in TENSORS),
    *(("scale_channel", tensor, value) for value in (0.0, -1.0, 0.25, 4.0) for tensor in TENSORS),
    *(("needle", "q", value) for value in (20.0, 8.0)),
)
# Edits that would leave the range of the format in extreme distributions, or with a smaller std: a needle divides by
# the size of its key.
_SCALING: tuple[EditKind, ...] = ("scale_row", "scale_channel", "needle")
_EXTREME = ("huge", "tiny", "subnormals")
_LEAST_STD = 2.0**-14


@cache
def _values(parameter: Parameter) -> st.SearchStrategy[Any]:
    if parameter.options is not None:
        return st.sampled_from(parameter.options())
    low = parameter.low
    high = parameter.high
    free = st.integers(int(low), int(high)) if parameter.is_integer else st.floats(low, high, allow_subnormal=False)
    return st.one_of(st.just(parameter.default), free)


@st.composite
def edits(draw: st.DrawFn, problem: AttentionProblem, distribution: str = "normal", std: float = 1.0) -> Edit:
    """Draw one edit that fits the problem and keeps the drawn values, of size ``std``, inside every format.

    The problem must hold a key; NaN and infinities are never drawn (the NaN policy has its own tests).
    """
    barred = _SCALING if distribution in _EXTREME or std < _LEAST_STD else ()
    kind, tensor, value = draw(st.sampled_from([choice for choice in _EDITS if choice[0] not in barred]))
    heads = problem.nheads if tensor == "q" else problem.nheads_kv
    full = [seq for seq in problem.sequences() if seq.seqlen_q and seq.seqlen_k]
    seq, head = draw(st.sampled_from([(seq, head) for seq in full for head in range(heads)]))
    rows = seq.seqlen_q if tensor == "q" else seq.seqlen_k
    pos = 0 if kind == "scale_channel" else draw(st.integers(0, rows - 1))
    channel = source = 0
    if kind in ("set", "scale_channel"):
        channel = draw(st.integers(0, (problem.head_dim_v if tensor == "v" else problem.head_dim) - 1))
    elif kind in ("copy_row", "needle"):
        source = draw(st.integers(0, (seq.seqlen_k if kind == "needle" else rows) - 1))
    return Edit(kind, tensor, seq.index, pos, head, channel, source, value)


def _families(names: tuple[str, ...] | None) -> tuple[Family, ...]:
    known = {family.name: family for family in FAMILIES}
    for name in names or ():
        if name not in known:
            raise ValueError(f"family must be one of {', '.join(known)}, got {name!r}")
    return FAMILIES if names is None else tuple(family for family in FAMILIES if family.name in names)


@st.composite
def recipes(
    draw: st.DrawFn,
    families: tuple[str, ...] | None = None,
    *,
    problem: AttentionProblem | None = None,
    max_edits: int = 3,
) -> Recipe:
    """Draw a recipe of the named families (all by default), with the parameters that they leave open.

    Parameters
    ----------
    families : tuple of str, optional
        Family names. Without them ``activations`` is left out when a problem is given, as it needs its own.
    problem : AttentionProblem, optional
        Where the edits must fit; without it no edits are drawn.
    max_edits : int
        At most so many edits.
    """
    chosen = _families(families)
    if families is None and problem is not None:
        chosen = tuple(family for family in chosen if family.name != "activations")
    family = draw(st.sampled_from(chosen))
    drawn_values = {p.name: draw(_values(p)) for p in DISTRIBUTIONS[family.distribution].parameters}
    settings = drawn_values | dict(family.params)
    if "tokens" in settings:
        settings["tokens"] = min(int(settings["tokens"]), activations.find(str(settings["name"])).seqlen)
    seed = draw(st.integers(0, 2**64 - 1))
    drawn: list[Edit] = []
    if problem is not None and any(seq.seqlen_q and seq.seqlen_k for seq in problem.sequences()):
        drawn = draw(st.lists(edits(problem, family.distribution, float(settings.get("std", 1.0))), max_size=max_edits))
    return Recipe(family.distribution, settings, seed, tuple(drawn))
