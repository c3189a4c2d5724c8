"""What may change between two calls of a serving stack: each axis makes the pairs of calls whose rows must agree.

Operands are given, not quantised again: what a cache holds does not change with the call that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from fa3_reference.problem import AttentionProblem
from fa3verify.candidates import Candidate
from fa3verify.operations import Outputs
from fa3verify.properties.law import Setup
from fa3verify.properties.transforms import part, part_of_result, reordered

Picked = Callable[[Outputs], Outputs]


class Pair(NamedTuple):
    """Two calls and what of their results must agree: the plain call first."""

    plain: Setup
    changed: Setup
    of_plain: Picked
    of_changed: Picked


@dataclass(frozen=True, slots=True)
class Axis:
    """One thing that changes.

    Parameters
    ----------
    name, words : str
        What the command calls it, and what a reader is told.
    values : tuple
        What is tried unless somebody says otherwise, rising.
    problem : callable
        ``problem(value)``: fields of the problem that the pair is cut from, beside those of :func:`base`.
    pairs : callable
        ``pairs(candidate, setup, value)``.
    needs : frozenset of str
        Features that a kernel must have.
    changes : frozenset of str
        Fields of its configuration that a caller must be able to choose.
    """

    name: str
    words: str
    values: tuple[Any, ...]
    problem: Callable[[Any], dict[str, Any]]
    pairs: Callable[[Candidate, Setup, Any], Iterator[Pair]]
    needs: frozenset[str] = frozenset()
    changes: frozenset[str] = frozenset()

    def fits(self, candidate: Candidate) -> bool:
        """Whether a kernel has what the axis needs; a tile is no choice of a caller, but of whoever builds a twin."""
        is_twin = candidate.name.startswith("twin.")
        return self.needs <= candidate.features and (is_twin or self.changes <= candidate.changeable)


def own_choice(candidate: Candidate, setup: Setup) -> Setup:
    """The same call in the configuration that the kernel takes for its problem."""
    return setup._replace(config=candidate.config_for(setup.problem))


def _whole(result: Outputs) -> Outputs:
    return result


def _of(setup: Setup, index: int, rows: slice | None = None) -> Picked:
    """What a whole result has of some rows of one sequence, as a call of its own returns them."""
    seq = list(setup.problem.sequences())[index]
    return lambda result: part_of_result(setup, result, seq, rows=rows)


def _packed(setup: Setup) -> Setup:
    """A batched call of one sequence as a packed one."""
    p, o = setup.problem, setup.operands
    problem = replace(p, seqlens_q=(p.seqlen_q,), seqlens_k=(p.seqlen_k,))
    return setup._replace(problem=problem, operands=replace(o, q=o.q[0], k=o.k[0], v=o.v[0]))


def _batched(result: Outputs) -> Outputs:
    """A packed result of one sequence as a batched one."""
    return {name: x[None] for name, x in result.items()}


def _alone(candidate: Candidate, setup: Setup, value: int) -> Iterator[Pair]:
    whole = own_choice(candidate, setup)
    for seq in setup.problem.sequences():
        yield Pair(own_choice(candidate, part(setup, seq)), whole, _whole, _of(setup, seq.index))


def _moved(candidate: Candidate, setup: Setup, value: int) -> Iterator[Pair]:
    order = np.roll(np.arange(setup.problem.batch), value)
    problem = setup.problem
    moved = reordered(setup, order, np.arange(problem.nheads_kv), np.arange(problem.group))
    yield Pair(setup, moved, lambda result: {name: x[order] for name, x in result.items()}, _whole)


def _neighbours(candidate: Candidate, setup: Setup, value: int) -> Iterator[Pair]:
    first = next(iter(setup.problem.sequences()))
    alone = own_choice(candidate, _packed(part(setup, first)))
    yield Pair(alone, own_choice(candidate, setup), _batched, _of(setup, 0))


def _cut(candidate: Candidate, whole: Setup, rows: slice, keys: int) -> Pair:
    """Some rows of a causal call in a call of their own, with the keys up to the last of them."""
    first = next(iter(whole.problem.sequences()))
    cut = own_choice(candidate, part(whole, first, rows=rows, keys=slice(0, keys)))
    return Pair(whole, cut, _of(whole, 0, rows), _whole)


PROMPT = 40  # tokens of a prompt that is padded


def _padded(candidate: Candidate, setup: Setup, value: int) -> Iterator[Pair]:
    pair = _cut(candidate, own_choice(candidate, setup), slice(0, PROMPT), PROMPT)
    yield Pair(pair.changed, pair.plain, pair.of_changed, pair.of_plain)


def _chunked(candidate: Candidate, setup: Setup, value: int) -> Iterator[Pair]:
    whole, tokens = own_choice(candidate, setup), setup.problem.seqlen_q
    for start in range(0, tokens, value):
        stop = min(start + value, tokens)
        yield _cut(candidate, whole, slice(start, stop), stop)


def _decoded(candidate: Candidate, setup: Setup, value: int) -> Iterator[Pair]:
    yield _cut(candidate, own_choice(candidate, setup), slice(value - 1, value), value)


def _configured(name: str) -> Callable[[Candidate, Setup, Any], Iterator[Pair]]:
    def pairs(candidate: Candidate, setup: Setup, value: Any) -> Iterator[Pair]:
        if getattr(setup.config, name) == value:  # it is the plain call
            return
        changes = {name: value}
        if name == "tile_n" and setup.config.promotion_interval:
            changes["promotion_interval"] = next(n for n in (128, 96, 64, 32) if value % n == 0)
        yield Pair(setup, setup.configured(**changes), _whole, _whole)

    return pairs


def base(candidate: Candidate) -> dict[str, Any]:
    """Fields of the problems of all axes: two kv heads, grouped where the kernel takes that."""
    group = 2 if "gqa" in candidate.features else 1
    dims = candidate.head_dims or (128,)
    return {"nheads": 2 * group, "nheads_kv": 2, "head_dim": dims[0], "dtype": candidate.dtype}


def _causal(tokens: int) -> dict[str, Any]:
    return {"batch": 1, "seqlen_q": tokens, "seqlen_k": tokens, "causal": True, "nheads": 2, "nheads_kv": 1}


def _dense(keys: int, *, rows: int = 8, batch: int = 1) -> dict[str, Any]:
    return {"batch": batch, "seqlen_q": rows, "seqlen_k": keys}


def _packed_lengths(neighbour: int) -> dict[str, Any]:
    return {
        **{"batch": 2, "seqlen_q": 40, "seqlen_k": max(LONG, neighbour)},
        **{"seqlens_q": (40, min(40, neighbour)), "seqlens_k": (LONG, neighbour)},
    }


LONG = 2000  # keys, enough for FlashAttention-3 to split them by itself
EDGES = (1, 2, 63, 64, 65, 96, 97, 127, 128, 129, 160, 176, 177, 192, 193, 224, 225, 256, 257, 353, 449, 700, 881, 1500)
AXES: tuple[Axis, ...] = (
    Axis("batch", "batch size", (2, 3, 24), lambda b: _dense(LONG, rows=2, batch=b), _alone),
    Axis("position", "place in the batch", (1, 2), lambda v: _dense(LONG, batch=3), _moved),
    Axis(
        "neighbours", "lengths of other sequences", (1, 9, 10, 129, 3000), _packed_lengths, _neighbours,
        needs=frozenset({"varlen"}),
    ),
    Axis(
        "seqlen_k", "padding of a prompt", (41, 64, 129, 192, 300, 1500), _causal, _padded,
        needs=frozenset({"causal"}),
    ),
    Axis("chunk", "chunked prefill", (64, 128, 177), lambda v: _causal(1000), _chunked, needs=frozenset({"causal"})),
    Axis("decode", "decode instead of prefill", EDGES, _causal, _decoded, needs=frozenset({"causal"})),
    Axis(
        "num_splits", "number of splits", (2, 3, 8), lambda v: _dense(LONG), _configured("num_splits"),
        changes=frozenset({"num_splits"}),
    ),
    Axis(
        "pack_gqa", "packed heads", (False, True), lambda v: _dense(LONG, rows=70), _configured("pack_gqa"),
        needs=frozenset({"gqa"}), changes=frozenset({"pack_gqa"}),
    ),
    Axis(
        "tile_m", "query rows of a tile", (64, 128, 192), lambda v: _dense(700, rows=200), _configured("tile_m"),
        changes=frozenset({"tile_m"}),
    ),
    Axis(
        "tile_n", "keys of a tile", (64, 96, 128, 160, 192, 224), lambda v: _dense(LONG), _configured("tile_n"),
        changes=frozenset({"tile_n"}),
    ),
)  # fmt: skip


def axis_of(name: str) -> Axis:
    """Return an axis by name; ValueError names what exists."""
    for axis in AXES:
        if axis.name == name:
            return axis
    raise ValueError(f"axis must be one of {', '.join(axis.name for axis in AXES)}, got {name!r}")


def problem_of(candidate: Candidate, fields: dict[str, Any]) -> AttentionProblem:
    """Return the problem of these fields for a kernel; grouped heads become equal ones where it takes no groups."""
    merged = base(candidate) | fields
    if "gqa" not in candidate.features:
        merged["nheads_kv"] = merged["nheads"]
    return AttentionProblem(**merged)
