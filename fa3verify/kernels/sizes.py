"""The sizes of calls that a kernel takes, as it declares them: no others are asked of it or counted as missing.

:meth:`Sizes.misfit` tells whether a problem has them, :meth:`Sizes.fitted` makes a problem that does of any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from fa3_reference.problem import AttentionProblem
from fa3_reference.rules import is_integer, require
from fa3_reference.score_term import KINDS
from fa3verify.files import Json
from fa3verify.operations.operation import needed_features

# What a call has that always has a feature, where it is drawn without it.
PRESENT: Mapping[str, Json] = {
    "causal": {"causal": True},
    "softcap": {"softcap": 30.0},
    "sinks": {"sinks": True},
    "varlen": {},
}
# What a call has that lacks a feature.
ABSENT: Mapping[str, Json] = {
    "causal": {"causal": False},
    "window": {"window": (-1, -1)},
    "softcap": {"softcap": 0.0},
    "attention_chunk": {"attention_chunk": 0},
    "sinks": {"sinks": False},
    "varlen": {"seqlens_q": None, "seqlens_k": None},
    **{kind: {"term": None} for kind in KINDS},
}
# What a cache has that lacks a feature.
WITHOUT: Mapping[str, Json] = {
    "paged": {"page_size": 0},
    "append": {"new": (), "rotary_dim": 0},
    "rotary": {"rotary_dim": 0},
    "leftpad": {"leftpad": ()},
    "batch_idx": {"indexed": False},
    "fp8_cache": {"fp8": ""},
    "fp8_rows": {"fp8": ""},
}
COMBINATIONS = frozenset(
    f"{name} {word} {other}"
    for name in (*ABSENT, *WITHOUT)
    for other in (*ABSENT, *WITHOUT, "seqused_k", "gqa", "head_dim_v")
    for word in ("with", "without")
    if name != other
)
LIMITED = ("seqlen_q", "seqlen_k", "batch", "nheads", "group")
MOST_EQUAL = 1100  # keys of a call that gets as many queries: with more it would take many seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of calls that a kernel takes; by default all.

    Parameters
    ----------
    always : tuple of str
        Features that every call has, among those of :data:`PRESENT`: with "causal" none is without a causal mask, with
        "varlen" all are packed.
    combinations : tuple of str
        Rules of two features, "FEATURE with OTHER" or "FEATURE without OTHER", such as "window with causal" or
        "leftpad without paged": a call that has the first has, or lacks, the other.
    slopes_by_head, finite_biases : bool
        Whether slopes are (nheads,) alone, and whether no bias is -inf.
    equal_lengths : bool
        Whether every sequence has as many queries as keys.
    queries_within_keys : bool
        Whether no sequence has more queries than keys, as where those of the queries are appended to a cache.
    seqlen_multiple, seqlen_q_multiple, seqlen_k_multiple : int
        Lengths of queries and keys, of queries, and of keys are multiples of it.
    min_seqlen : int
        The fewest queries and keys of a sequence; with 0 there are sequences without keys too.
    max_seqlen_q, max_seqlen_k, max_batch, max_nheads, max_group : int, optional
        The most queries and keys of a sequence, sequences, heads of q, and heads of q that share one of k.
    softmax_scale : float, (float, float) or "default", optional
        The only scale, the least and the largest one, or 1 / sqrt(head_dim) alone.
    head_dims_v : tuple of (int, int)
        Pairs of a head_dim of Q and K and the only one of V that goes with it.

    Raises
    ------
    ValueError
        For an unknown feature or combination, a count below 1, and a scale that is none.
    """

    always: tuple[str, ...] = ()
    combinations: tuple[str, ...] = ()
    slopes_by_head: bool = False
    finite_biases: bool = False
    equal_lengths: bool = False
    queries_within_keys: bool = False
    seqlen_multiple: int = 1
    seqlen_q_multiple: int = 1
    seqlen_k_multiple: int = 1
    min_seqlen: int = 0
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    max_batch: int | None = None
    max_nheads: int | None = None
    max_group: int | None = None
    softmax_scale: Any = None
    head_dims_v: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if unknown := [name for name in self.always if name not in PRESENT]:
            raise ValueError(f"always must be among {', '.join(PRESENT)}, got {unknown[0]!r}")
        if unknown := set(self.combinations) - COMBINATIONS:
            raise ValueError(
                f"a combination is FEATURE with OTHER or FEATURE without OTHER, of "
                f"{', '.join((*ABSENT, *WITHOUT))}, and OTHER of seqused_k, gqa and head_dim_v too, "
                f"got {unknown.pop()!r}"
            )
        for name, value in self.said.items():
            least = 0 if name == "min_seqlen" else 1
            is_count = name.startswith(("max_", "min_")) or name.endswith("multiple")
            rule = f"{name} must be an integer of at least {least}, got {value!r}"
            require(is_integer(value, least) or not is_count, rule)
        low, high = self._scales(64)
        require(
            0 < low <= high, f"softmax_scale must be positive, a range of two or default, got {self.softmax_scale!r}"
        )

    @property
    def said(self) -> Json:
        """Return what was declared, by field."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    @property
    def leaves_out(self) -> bool:
        """Tell whether whole kinds of calls are left out, and not lengths alone that others are rounded to."""
        return bool(self.said.keys() - {"min_seqlen", "seqlen_multiple", "seqlen_q_multiple", "seqlen_k_multiple"})

    def _scales(self, head_dim: int) -> tuple[float, float]:
        """Return the least and the largest softmax_scale for a head_dim."""
        given = self.softmax_scale
        if given is None:
            return 1e-300, math.inf
        if given == "default":
            return 1 / math.sqrt(head_dim), 1 / math.sqrt(head_dim)
        try:
            low, high = given if isinstance(given, (tuple, list)) else (given, given)
            return float(low), float(high)
        except (TypeError, ValueError):
            return 0.0, 0.0

    def queries(self, n: int) -> int:
        """Return the number of queries of a sequence that is nearest to ``n``: larger if there is one, else smaller."""
        return self._length(n, self.seqlen_q_multiple, self.max_seqlen_q)

    def keys(self, n: int) -> int:
        """Return the number of keys of a sequence that is nearest to ``n``: larger if there is one, else smaller."""
        return self._length(n, self.seqlen_k_multiple, self.max_seqlen_k)

    def _length(self, n: int, multiple: int, most: int | None) -> int:
        step = math.lcm(self.seqlen_multiple, multiple)
        n = math.ceil(max(n, self.min_seqlen) / step) * step
        return n if most is None or n <= most else most // step * step

    def misfit(self, problem: AttentionProblem) -> str | None:
        """Return the declared rule that a problem breaks, in words; None if it has all declared sizes."""
        return next((rule for is_broken, rule in self._rules(problem) if is_broken), None)

    def _rules(self, problem: AttentionProblem) -> Iterator[tuple[object, str]]:
        """Yield every declared rule: whether a problem breaks it, and its words with the value."""
        yield from ((not _has(problem, name), f"every call must have {name}") for name in self.always)
        yield from ((True, f"every call must have {rule}") for rule in self._broken(problem))
        for q, k in dict.fromkeys((seq.seqlen_q, seq.seqlen_k) for seq in problem.sequences()):
            yield self.equal_lengths and q != k, f"a sequence must have as many queries as keys, got {q} and {k}"
            yield self.queries_within_keys and q > k, f"a sequence must have no more queries than keys, got {q} and {k}"
            for name, n, multiple in (("seqlen_q", q, self.seqlen_q_multiple), ("seqlen_k", k, self.seqlen_k_multiple)):
                yield n % self.seqlen_multiple, f"lengths must be multiples of {self.seqlen_multiple}, got {n}"
                yield n < self.min_seqlen, f"lengths must be at least {self.min_seqlen}, got {n}"
                yield n % multiple, f"{name} must be a multiple of {multiple}, got {n}"
        for name in LIMITED:
            most, n = getattr(self, f"max_{name}"), getattr(problem, name)
            yield most is not None and n > most, f"{name} must be at most {most}, got {n}"
        low, high = self._scales(problem.head_dim)
        is_outside = not low * (1 - 1e-9) <= problem.softmax_scale <= high * (1 + 1e-9)
        yield is_outside, f"softmax_scale must be {written(self.softmax_scale)}, got {problem.softmax_scale:g}"
        head_dim_v = dict(self.head_dims_v).get(problem.head_dim, problem.head_dim_v)
        yield (
            problem.head_dim_v != head_dim_v,
            f"head_dim_v must be {head_dim_v} with head_dim {problem.head_dim}, got {problem.head_dim_v}",
        )

    def _broken(self, problem: AttentionProblem) -> dict[str, Json]:
        """Return the rules of features and terms that a problem breaks, each with the change that mends it."""
        has = needed_features(problem)
        cache = problem.cache
        broken: dict[str, Json] = {
            rule: (PRESENT.get(other) if word == "with" else None)
            or ABSENT.get(name)
            or {"cache": cache and replace(cache, **WITHOUT[name])}
            for rule in self.combinations
            for name, word, other in [rule.split()]
            if name in has and (word == "with") != (other in has)
        }
        if self.slopes_by_head and problem.term and "alibi" in has and not problem.term.shared:
            broken["slopes of heads alone"] = {"term": replace(problem.term, shared="b")}
        if self.finite_biases and problem.term and has & {"bias", "bias_fp32"} and "visible" in problem.term.values:
            broken["finite biases"] = {"term": replace(problem.term, values="plain")}
        return broken

    def fitted(self, problem: AttentionProblem) -> AttentionProblem:
        """Return the problem nearest to one that has all declared sizes; ValueError where there is none."""
        if self.misfit(problem) is None:
            return problem
        queries, keys = (
            of or (n,) * problem.batch
            for of, n in ((problem.seqlens_q, problem.seqlen_q), (problem.seqlens_k, problem.seqlen_k))
        )
        queries, keys = tuple(map(self.queries, queries)), tuple(map(self.keys, keys))
        if self.queries_within_keys:
            keys = tuple(map(self.keys, map(max, queries, keys)))
            queries = tuple(map(min, queries, keys))
        if self.equal_lengths:
            queries = keys = tuple(self.queries(self.keys(min(n, MOST_EQUAL) or 1)) for n in keys)
        group = min(problem.group, self.max_group or problem.group, self.max_nheads or problem.nheads)
        nheads_kv = min(problem.nheads_kv, max(1, (self.max_nheads or problem.nheads) // group))
        batch = min(problem.batch, self.max_batch or problem.batch)
        is_packed = problem.is_varlen or "varlen" in self.always
        low, high = self._scales(problem.head_dim)
        changes: Json = {
            "batch": batch,
            "nheads": group * nheads_kv,
            "nheads_kv": nheads_kv,
            "seqlen_q": max(queries[:batch]),
            "seqlen_k": max(keys[:batch]),
            "seqlens_q": queries[:batch] if is_packed else None,
            "seqlens_k": keys[:batch] if is_packed else None,
            "softmax_scale": min(max(problem.softmax_scale, low), high),
            "head_dim_v": dict(self.head_dims_v).get(problem.head_dim, problem.head_dim_v),
        }
        for name in self.always:
            if not _has(problem, name):
                changes |= PRESENT[name]
        problem = replace(problem, **changes)
        for rule in self._broken(problem):  # what mends one may mend another
            problem = replace(problem, **self._broken(problem).get(rule, {}))
        return problem


def _has(problem: AttentionProblem, feature: str) -> bool:
    return problem.is_varlen if feature == "varlen" else bool(getattr(problem, feature))


SIZES: Json = {field.name: field.default for field in fields(Sizes)}


def gathered(facts: Mapping[str, object]) -> Json:
    """Return facts about a kernel with those that are fields of :class:`Sizes` gathered in one, under ``sizes``."""
    own: Json = {name: facts[name] for name in SIZES if name in facts}
    return {name: fact for name, fact in facts.items() if name not in own} | ({"sizes": Sizes(**own)} if own else {})


def written(value: object) -> str:
    """Return a declared value as a kernel's name has it: the parts of several with a + between them, switches small."""
    if isinstance(value, (tuple, list, frozenset)):
        return "+".join(map(written, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def read(name: str, text: str) -> Any:
    """Return the value of a field that a kernel's name has, as :func:`written` writes it.

    Raises
    ------
    ValueError
        If it is none of the field.
    """
    default = SIZES[name]
    if isinstance(default, tuple):
        return tuple(text.split("+"))
    if isinstance(default, bool):
        return {"true": True, "false": False}[text]
    if name == "softmax_scale":
        parts = text.split("+")
        return text if text == "default" else tuple(map(float, parts)) if len(parts) > 1 else float(text)
    return int(text)
