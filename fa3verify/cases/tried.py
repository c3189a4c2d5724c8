"""This module says which sizes a kernel was called with: the ranges that a verdict rests on, and what nobody asked of
it.

Coverage (:mod:`fa3verify.cases.coverage`) counts classes, of which one case is enough. Here stand the sizes themselves,
of calls that returned and whose outputs were compared with something.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fa3_reference.problem import AttentionProblem
from fa3verify.kernels.record import needed_features

SIZES = ("head_dim", "head_dim_v", "group", "nheads", "sequences", "seqlen_q", "seqlen_k")  # sets in JSON
_LONGEST = ("nheads", "seqlen_q", "seqlen_k")  # of which the largest is told
_FEATURES = {  # in words, by what a problem needs of a kernel
    "causal": "causal masks",
    "window": "windows",
    "softcap": "softcap",
    "varlen": "packed sequences",
    "gqa": "grouped heads",
    "head_dim_v": "another head_dim of V",
}
LAYOUT = "contiguous"  # how every kernel gets its operands: in C order
REPEATED = "repeated_run_is_identical"  # the property that compares runs of one call


class Tried:
    """A collector of calls: how many, of which sizes, and with which features.

    ``head_dim_v`` holds pairs of a head_dim and that of V, ``seqlen_q`` and ``seqlen_k`` the longest of each call.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.sizes: dict[str, set[Any]] = {name: set() for name in (*SIZES, "features")}

    def add(self, problem: AttentionProblem) -> None:
        """Note one call."""
        self.calls += 1
        found: dict[str, Any] = {
            "head_dim": problem.head_dim,
            "head_dim_v": (problem.head_dim, problem.head_dim_v),
            "group": problem.group,
            "nheads": problem.nheads,
            "sequences": problem.batch,
            "seqlen_q": problem.seqlen_q,
            "seqlen_k": problem.seqlen_k,
        }
        for name, value in found.items():
            self.sizes[name].add(value)
        self.sizes["features"] |= needed_features(problem)

    def update(self, other: Mapping[str, Any]) -> None:
        """Add what another collector gave as JSON."""
        self.calls += other["calls"]
        for name, known in self.sizes.items():
            known.update(tuple(x) if isinstance(x, list) else x for x in other[name])

    def to_json(self) -> dict[str, Any]:
        """Return the calls and every size in rising order; of lengths and heads the largest alone."""
        listed = {name: sorted(known) for name, known in self.sizes.items()}
        listed |= {name: listed[name][-1:] for name in _LONGEST}
        pairs = [list(pair) for pair in listed["head_dim_v"]]
        return {"calls": self.calls, **listed, "head_dim_v": pairs}


def concluded(
    tried: Mapping[str, Any],
    *,
    features: Iterable[str],
    head_dims: Sequence[int] | None,
    outputs: Mapping[str, tuple[int, int]],
    is_repeated: bool,
    is_forward: bool,
) -> dict[str, Any]:
    """Return what was tried of a kernel, as its summary has it.

    Parameters
    ----------
    tried : mapping
        Of :meth:`Tried.to_json`.
    features : iterable of str
        Those that kernels of its operation may have.
    head_dims : sequence of int, optional
        The ones that it declares.
    outputs : mapping
        By name of an output that a kernel need not return: of how many judged cases it was returned, and of how many.
    is_repeated, is_forward : bool
        Whether repeated runs were compared; whether it is a forward, so that gradients are another kernel's.
    """
    missing = [words for name, words in _FEATURES.items() if name in features and name not in tried["features"]]
    missing += [_returned(name, *counts) for name, counts in outputs.items() if counts[0] < counts[1]]
    left = sorted(set(head_dims or ()) - set(tried["head_dim"]))
    missing += [f"head_dim {', '.join(map(str, left))}"] if left else []
    missing += ["other head_dims, of which the kernel declares none"] if head_dims is None else []
    missing += ["gradients"] if is_forward else []
    missing += ["tensors that are not contiguous"]
    missing += [] if is_repeated else ["repeated runs"]
    return {**tried, "layout": LAYOUT, "repeated_runs": is_repeated, "not_tried": missing}


def _returned(name: str, returned: int, cases: int) -> str:
    """Return what is said of an output that was not always returned."""
    return f"{name}, which was not returned" if not returned else f"{name} in {cases - returned} of {cases} cases"


def common(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what was tried of every one of several kernels, of calls the fewest."""
    first, *others = found
    if not others:
        return dict(first)
    shared = {name: [x for x in first[name] if all(x in other[name] for other in others)] for name in SIZES}
    shared |= {name: [min(max(each[name], default=0) for each in found)] for name in _LONGEST}
    calls = min(each["calls"] for each in found)
    return {**shared, "calls": calls, "layout": LAYOUT, "repeated_runs": all(each["repeated_runs"] for each in found)}


def line(kernels: Sequence[Mapping[str, Any]]) -> str:
    """Return one line that says what the verdict over kernels rests on; empty where nothing ran or nobody knows.

    Parameters
    ----------
    kernels : sequence of mapping
        Those of a summary; of several the line says what was tried of each.
    """
    found = [kernel["tried"] for kernel in kernels if kernel.get("tried", {}).get("calls")]
    if not found or len(found) < len(kernels):
        return ""
    shared = common(found)
    calls = f"{shared['calls']:,} calls"
    if len(found) > 1:
        calls = f"at least {calls} each"
    words = in_words(shared)
    widths = sorted({width for dim, width in shared["head_dim_v"] if width != dim})
    same = ["the same"] if any(width == dim for dim, width in shared["head_dim_v"]) else []
    of_v = " or ".join([*same, *([", ".join(map(str, widths))] if widths else [])])
    parts = [f"head_dim {words['head_dim']}", f"V {of_v}", f"keys {words['seqlen_k']}"]
    parts += [f"groups {words['group']}", f"sequences {words['sequences']}", calls, f"{words['layout']} tensors"]
    parts.append(f"repeated runs {words['repeated_runs']}")
    return f"tried{' of each kernel' if len(found) > 1 else ''} {'; '.join(parts)}"


def in_words(tried: Mapping[str, Any]) -> dict[str, str]:
    """Return what was tried in words, by name."""
    return {
        "head_dim": ", ".join(map(str, tried["head_dim"])) or "none",
        "head_dim_v": _of_v(tried["head_dim_v"]),
        "seqlen_q": _up_to(tried["seqlen_q"]),
        "seqlen_k": _up_to(tried["seqlen_k"]),
        "group": spans(tried["group"]),
        "nheads": _up_to(tried["nheads"]),
        "sequences": spans(tried["sequences"]),
        "calls": f"{tried['calls']:,}",
        "layout": tried["layout"],
        "repeated_runs": "compared" if tried["repeated_runs"] else "not compared",
    }


def _of_v(pairs: Iterable[Sequence[int]]) -> str:
    """Head_dims of V in words: the same, and every other one with what it was tried for."""
    dims: dict[str, list[int]] = {}
    for dim, width in sorted(pairs, key=lambda pair: (pair[0] != pair[1], pair[1], pair[0])):
        dims.setdefault("the same" if width == dim else str(width), []).append(dim)
    return "; ".join(f"{width} for {', '.join(map(str, of))}" for width, of in dims.items()) or "none"


def _up_to(sizes: Sequence[int]) -> str:
    return f"up to {max(sizes):,}" if sizes else "none"


def spans(numbers: Iterable[int]) -> str:
    """Write whole numbers, those without a gap as a range.

    >>> spans([1, 2, 3, 4, 8]), spans([1, 2]), spans([])
    ('1 to 4, 8', '1, 2', 'none')
    """
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    written = (f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
    return ", ".join(written) or "none"
