"""What a kernel claims, what of it was tried, and how a problem is adapted to what it takes.

A class is one thing that a kernel claims: a feature, a head_dim, a size, a family of inputs, a property. A verdict
rests on the classes that ran; where less than :data:`REQUIRED` of any kind of them did, it is inconclusive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from fa3_reference.problem import AttentionProblem
from fa3verify.candidates import Candidate, needed_descales, needed_features
from fa3verify.operations import DESCALES, LSE_GRADIENT

REQUIRED = 0.75  # share of the claimed classes of each kind; quick leaves out one of four head_dims
HEAD_DIMS = (64, 96, 128, 256)  # asked of a kernel that declares none
TILE = 128  # keys of a tile in most kernels
LONG = 1024


@dataclass(frozen=True, slots=True)
class Size:
    """A class of lengths: whether a sequence is in it, and an example of (queries, keys)."""

    name: str
    holds: Callable[[int, int], bool]
    example: tuple[int, int]


# Kernels fail in their last tile, between tiles, over many tiles, with one query and without a key.
SIZES: tuple[Size, ...] = (
    Size("single_query", lambda q, k: q == 1, (1, 1)),
    Size("within_a_tile", lambda q, k: 0 < k <= TILE, (1, TILE)),
    Size("several_tiles", lambda q, k: TILE < k < LONG, (TILE, 2 * TILE)),
    Size("long_rows", lambda q, k: k >= LONG, (TILE, LONG)),
    Size("partial_tile", lambda q, k: k % TILE > 0, (1, TILE + 1)),
    Size("no_key", lambda q, k: q > 0 and k == 0, (1, 0)),
)


def classes_of(problem: AttentionProblem) -> frozenset[str]:
    """Return the features, the head_dim and the sizes that a problem has.

    >>> sorted(classes_of(AttentionProblem(1, 1, 1, 1, 300, 64, causal=True)))
    ['feature causal', 'head_dim 64', 'size partial_tile', 'size several_tiles', 'size single_query']
    """
    lengths = [(seq.seqlen_q, seq.seqlen_k) for seq in problem.sequences()]
    sizes = {f"size {size.name}" for size in SIZES if any(size.holds(q, k) for q, k in lengths)}
    features = {f"feature {name}" for name in needed_features(problem)}
    return frozenset({*features, *sizes, f"head_dim {problem.head_dim}"})


def classes_of_case(case: Any) -> frozenset[str]:
    """Return the classes of a case's problem, and of what its scales ask of a kernel."""
    return classes_of(case.problem) | {f"feature {name}" for name in needed_descales(case)}


def claims(candidate: Candidate, properties: Iterable[str], families: Iterable[str]) -> tuple[str, ...]:
    """Return every class that a kernel claims, with the properties and families that are for its kind of kernel."""
    features = candidate.features if candidate.dtype == "e4m3" else candidate.features - DESCALES
    return (
        *(f"feature {name}" for name in sorted(features - {LSE_GRADIENT})),  # which a property tries, and no problem
        *(f"head_dim {n}" for n in head_dims(candidate)),
        *(f"size {size.name}" for size in SIZES if _takes(candidate, size)),
        *(f"property {name}" for name in properties),
        *(f"family {name}" for name in families),
    )


def _takes(candidate: Candidate, size: Size) -> bool:
    """Whether some lengths of a size fit what the kernel declares."""
    q, k = size.example
    return size.holds(_fitting(q, candidate), _fitting(k, candidate))


def judged(claimed: Iterable[str], tried: Iterable[str], constraint: str | None) -> dict[str, Any]:
    """Return coverage in JSON: claimed classes by kind, those that were not tried, the least share and its kind.

    ``constraint`` is what kept the kernel from problems of the campaign, if anything did.
    """
    claimed, tried = tuple(claimed), set(tried)
    kinds = list(dict.fromkeys(name.split()[0] for name in claimed))
    counts = {}
    for kind in kinds:
        mine = [name for name in claimed if name.split()[0] == kind]
        counts[kind] = {"claimed": len(mine), "tried": sum(name in tried for name in mine)}
    least = min(kinds, key=lambda kind: counts[kind]["tried"] / counts[kind]["claimed"], default=None)
    share = counts[least]["tried"] / counts[least]["claimed"] if least else 0.0
    return {
        "kinds": counts,
        "not_tried": [name for name in claimed if name not in tried],
        "least": least,
        "share": share,
        "required": REQUIRED,
        "constraint": constraint,
    }


def inconclusive(coverage: dict[str, Any]) -> str | None:
    """Return why a verdict cannot be given, None if enough ran."""
    if coverage["share"] >= coverage["required"]:
        return None
    counts = coverage["kinds"].get(coverage["least"], {"claimed": 0, "tried": 0})
    because = f"; the kernel refuses: {coverage['constraint']}" if coverage["constraint"] else ""
    missing = [name for name in coverage["not_tried"] if name.split()[0] == coverage["least"]]
    names = ", ".join(name.partition(" ")[2] for name in missing[:6]) + (", ..." if len(missing) > 6 else "")
    what = f"{counts['tried']} of {counts['claimed']} claimed classes of kind {coverage['least']} ran"
    return f"{what}, {coverage['required']:.0%} are required; not tried: {names}{because}"


def head_dims(candidate: Candidate) -> tuple[int, ...]:
    """Return the head_dims that a kernel declares, or those of :data:`HEAD_DIMS` that it does not refuse."""
    if candidate.head_dims is not None:
        return candidate.head_dims
    n = _fitting(TILE, candidate)
    plain = {"batch": 1, "nheads": 1, "nheads_kv": 1, "seqlen_q": n, "seqlen_k": n, "dtype": candidate.dtype}
    return tuple(d for d in HEAD_DIMS if candidate.refusal(AttentionProblem(head_dim=d, **plain)) is None)


def _fitting(n: int, candidate: Candidate) -> int:
    """The smallest length that a kernel takes and that is no smaller."""
    return math.ceil(max(n, candidate.min_seqlen) / candidate.seqlen_multiple) * candidate.seqlen_multiple


def adapted(candidate: Candidate, problem: AttentionProblem) -> AttentionProblem:
    """Return a problem that has nothing a kernel does not claim: no other feature, head_dim or length.

    A feature that is not claimed is left out; another head_dim becomes the next larger one, or the largest; lengths
    grow to what the kernel takes, and are equal under a causal mask aligned top-left. A problem that the kernel takes
    comes back as it is.
    """
    if candidate.supports(problem):
        return problem
    needs = needed_features(problem) - candidate.features
    changes: dict[str, Any] = {"head_dim": _nearest(head_dims(candidate), problem.head_dim)}
    if "head_dim_v" in needs or problem.head_dim_v == problem.head_dim:
        changes["head_dim_v"] = 0
    if math.isclose(problem.softmax_scale * math.sqrt(problem.head_dim), 1.0):
        changes["softmax_scale"] = None
    plain = {"causal": {"causal": False}, "window": {"window": (-1, -1)}, "softcap": {"softcap": 0.0}}
    plain["gqa"] = {"nheads_kv": problem.nheads}
    for name in needs & plain.keys():
        changes |= plain[name]
    lengths: list[tuple[int, ...]] = [
        tuple(_fitting(n, candidate) for n in of)
        for of in (problem.seqlens_q or (problem.seqlen_q,), problem.seqlens_k or (problem.seqlen_k,))
    ]
    if candidate.policy.causal == "top_left" and problem.causal and "causal" not in needs:
        lengths[1] = lengths[0]
    changes |= {"seqlen_q": max(lengths[0]), "seqlen_k": max(lengths[1])}
    packed = problem.is_varlen and "varlen" not in needs
    changes |= {"seqlens_q": lengths[0] if packed else None, "seqlens_k": lengths[1] if packed else None}
    return replace(problem, **changes)


def _nearest(dims: tuple[int, ...], wanted: int) -> int:
    return min((n for n in dims if n >= wanted), default=max(dims, default=wanted))
