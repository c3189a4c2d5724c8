"""Hypothesis strategies for problems, quantisation schemes and whole cases, as recipes meet them.

Every choice lists its plainest value first, and no plain case takes more choices than an odd one, so that a failure
shrinks to one head, one key, no mask, no edit, ``normal``, seed 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from fa3_reference import scales
from fa3_reference.problem import DTYPES, AttentionProblem, Dtype
from fa3_reference.scales import Granularity, QuantScheme, can_rotate
from fa3verify.files import Json
from fa3verify.inputs import activations
from fa3verify.inputs.recipe import Recipe
from fa3verify.inputs.strategies import TILE_EDGES, WINDOW_EDGES, _families, edits, recipes


@dataclass(frozen=True, slots=True)
class Limits:
    """Says what :func:`problems` may draw; the first dtype and head_dim are the ones it shrinks to.

    Parameters
    ----------
    dtypes : tuple of {"fp16", "bf16", "e4m3"}
        Formats of the operands.
    head_dims : tuple of int
        Channels of a head.
    max_seqlen, max_batch, max_nheads : int
        Largest sizes; the default ``max_seqlen`` holds two tiles of 128 keys and one key more.
    varlen, causal, window, softcap, gqa : bool
        Whether packed sequences, these masks, a softcap and grouped heads may be drawn.
    empty : bool
        Whether sequences may be without keys or queries.
    scale : bool
        Whether other scales than 1 / sqrt(head_dim) may be drawn.

    Raises
    ------
    ValueError
        If a size is below 1, or there is no dtype or head_dim.
    """

    dtypes: tuple[Dtype, ...] = DTYPES
    head_dims: tuple[int, ...] = (64, 128, 256)
    max_seqlen: int = 257
    max_batch: int = 3
    max_nheads: int = 4
    varlen: bool = True
    causal: bool = True
    window: bool = True
    softcap: bool = True
    gqa: bool = True
    empty: bool = True
    scale: bool = True

    def __post_init__(self) -> None:
        for name in ("max_seqlen", "max_batch", "max_nheads"):
            if (size := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if not self.dtypes or not self.head_dims:
            raise ValueError("dtypes and head_dims must each name at least one choice")


DEFAULT_LIMITS = Limits()


class Inputs(NamedTuple):
    """Holds what is computed, on which data, and how it is quantised: ``Case(kernel, *inputs)`` is a case.

    Parameters
    ----------
    problem : AttentionProblem
        What is computed.
    recipe : Recipe
        How q, k and v are drawn.
    scheme : QuantScheme, optional
        How an e4m3 problem is quantised.
    """

    problem: AttentionProblem
    recipe: Recipe
    scheme: QuantScheme | None = None


@cache
def _lengths(maximum: int, empty: bool) -> SearchStrategy[int]:
    edges = [n for n in TILE_EDGES if n <= maximum] + [0] * empty
    return st.one_of(st.integers(1, maximum), st.sampled_from(edges))  # the first choice shrinks to any length


@cache
def _windows() -> SearchStrategy[tuple[int, int]]:
    edge = st.sampled_from(WINDOW_EDGES)
    return st.one_of(st.just((-1, -1)), st.tuples(edge, edge))


@st.composite
def problems(draw: DrawFn, limits: Limits = DEFAULT_LIMITS) -> AttentionProblem:
    """Draw an attention problem within limits.

    Shrinks toward batch 1, one head, lengths 1, the first dtype and head_dim, dense, no window, no softcap.
    """
    nheads_kv = draw(st.integers(1, limits.max_nheads))
    group = draw(st.integers(1, limits.max_nheads // nheads_kv)) if limits.gqa else 1
    causal = limits.causal and draw(st.booleans())
    rest: Json = {
        "dtype": draw(st.sampled_from(limits.dtypes)),
        "head_dim": draw(st.sampled_from(limits.head_dims)),
        "nheads": nheads_kv * group,
        "nheads_kv": nheads_kv,
        "causal": causal,
        "window": draw(_windows()) if limits.window else (-1, -1),
        "softcap": draw(st.sampled_from((0.0, 30.0, 5.0, 50.0))) if limits.softcap else 0.0,
        "softmax_scale": draw(st.sampled_from((None, 0.25, 0.05))) if limits.scale else None,
    }
    batch = draw(st.integers(1, limits.max_batch))
    lengths_k = _lengths(limits.max_seqlen, limits.empty)
    if limits.varlen and draw(st.booleans()):
        lengths_q = [draw(lengths_k) for _ in range(batch)]
        if not any(lengths_q):
            lengths_q[0] = 1
        return AttentionProblem.varlen(tuple(lengths_q), tuple(draw(lengths_k) for _ in range(batch)), **rest)
    seqlen_q = draw(_lengths(limits.max_seqlen, False))
    return AttentionProblem(batch=batch, seqlen_q=seqlen_q, seqlen_k=draw(lengths_k), **rest)


@st.composite
def quant_schemes(
    draw: DrawFn,
    *,
    problem: AttentionProblem | None = None,
    granularities: tuple[Granularity, ...] = tuple(scales.SHARING),
    block_rows: tuple[int, ...] = (128, 64, 32),
) -> QuantScheme:
    """Draw a quantisation scheme; with a problem, one that is legal for it (rotation, K mean)."""
    dim = problem.head_dim if problem is not None else 64
    granularity = draw(st.sampled_from(granularities))
    blocks = [draw(st.sampled_from(block_rows)) for _ in "qkv"]
    if granularity != "block":
        blocks = [block_rows[0]] * 3
    hadamard_seed = draw(st.one_of(st.none(), st.integers(0, 2**32 - 1)))
    power_of_two = draw(st.booleans())
    k_mean = draw(st.booleans())
    return QuantScheme(
        granularity=granularity,
        block_rows_q=blocks[0],
        block_rows_k=blocks[1],
        block_rows_v=blocks[2],
        power_of_two=power_of_two,
        hadamard_seed=hadamard_seed if can_rotate(dim) else None,
        k_mean=k_mean and (problem is None or problem.softcap == 0),
    )


@st.composite
def _activation_cases(
    draw: DrawFn, limits: Limits, like: AttentionProblem, max_edits: int
) -> tuple[AttentionProblem, Recipe]:
    """Mask and dtype are those of a drawn problem, so that shrinking to another family keeps both."""
    stored = [
        case
        for case in activations.list_activations()
        if case.whole.head_dim <= max(limits.head_dims)
        and case.whole.nheads <= limits.max_nheads
        and (limits.causal or not case.whole.causal)
        and (limits.gqa or case.whole.group == 1)
    ]
    if not stored:
        raise ValueError("no stored activations lie within the limits: leave the family 'activations' out")
    case = draw(st.sampled_from([case for case in stored if case.whole.causal == like.causal] or stored))
    tokens = draw(_lengths(min(limits.max_seqlen, case.seqlen), False))
    problem = case.problem(dtype=like.dtype, tokens=tokens)
    drawn = draw(st.lists(edits(problem), max_size=max_edits))
    seed = draw(st.integers(0, 2**64 - 1))
    return problem, Recipe("activations", {"name": case.name, "tokens": tokens}, seed, tuple(drawn))


@st.composite
def cases(
    draw: DrawFn,
    limits: Limits = DEFAULT_LIMITS,
    *,
    families: tuple[str, ...] | None = None,
    max_edits: int = 3,
    schemes: bool = True,
) -> Inputs:
    """Draw a problem, a recipe that fits it and, for e4m3 unless ``schemes`` is false, a scheme.

    Shrinks toward the shortest problem, ``normal`` with default parameters and seed 0, no edits. Problems of
    the family ``activations`` come from the stored heads: first tokens, the model's mask, scale and head_dim.
    """
    family = draw(st.sampled_from(_families(families)))
    problem = draw(problems(limits))
    if family.name == "activations":
        problem, recipe = draw(_activation_cases(limits, problem, max_edits))
    else:
        recipe = draw(recipes((family.name,), problem=problem, max_edits=max_edits))
    scheme = draw(quant_schemes(problem=problem)) if schemes and problem.dtype == "e4m3" else None
    return Inputs(problem, recipe, scheme)
