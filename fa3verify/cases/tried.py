"""Which sizes a kernel was called with: the ranges that a verdict rests on, and in words what was not tried.

Coverage (:mod:`fa3verify.cases.coverage`) counts classes, and one case is enough for a class. This module records the
sizes themselves, of calls that returned and whose outputs were compared with something. Properties collect them in a
:class:`Tried`, :mod:`fa3verify.campaign.summary` concludes, and reports print them by :func:`in_words` or :func:`line`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fa3_reference.problem import AttentionProblem
from fa3verify.operations.operation import needed_features
from fa3verify.records import OLDER

SIZES = ("head_dim", "head_dim_v", "group", "nheads", "sequences", "seqlen_q", "seqlen_k")
_LONGEST = ("nheads", "seqlen_q", "seqlen_k")  # sizes of which only the largest is kept
_FEATURES = {  # words for features that a problem may need
    "causal": "causal masks",
    "window": "windows",
    "softcap": "softcap",
    "varlen": "packed sequences",
    "gqa": "grouped heads",
    "head_dim_v": "another head_dim of V",
}
LAYOUT = "contiguous"
REPEATED = ("repeated_run_is_identical", "calls_leave_no_trace")  # the properties that compare runs of one call


@dataclass(frozen=True, slots=True)
class SizesTried:
    """Sizes of calls that returned and were compared, each in rising order.

    Parameters
    ----------
    calls : int
        Number of calls.
    head_dim, group, sequences : tuple of int
        Every value that occurred; ``sequences`` is the batch.
    head_dim_v : tuple of (int, int)
        Every pair of head_dim and head_dim_v that occurred.
    nheads, seqlen_q, seqlen_k : tuple of int
        Only the largest value that occurred, or nothing.
    features : tuple of str
        Features that some call needed of the kernel.
    layout : str
        In words, how tensors lay in memory.
    repeated_runs : bool
        Whether runs of the same call were compared.
    not_tried : tuple of str
        In words, what was not tried; empty before :func:`concluded`.
    layouts : tuple of (str, str)
        Arguments that a kernel got as views, each with how it lay in memory.
    asked : tuple of (str, str)
        Sizes that were asked one by one, and what else was changed of calls, each in words.
    """

    calls: int = 0
    head_dim: tuple[int, ...] = ()
    head_dim_v: tuple[tuple[int, int], ...] = ()
    group: tuple[int, ...] = ()
    nheads: tuple[int, ...] = ()
    sequences: tuple[int, ...] = ()
    seqlen_q: tuple[int, ...] = ()
    seqlen_k: tuple[int, ...] = ()
    features: tuple[str, ...] = ()
    layout: str = LAYOUT
    repeated_runs: bool = False
    not_tried: tuple[str, ...] = ()
    layouts: tuple[tuple[str, str], ...] = field(default=(), metadata=OLDER)
    asked: tuple[tuple[str, str], ...] = field(default=(), metadata=OLDER)


class Tried:
    """A collector of calls: how many there were, of which sizes, and with which features."""

    def __init__(self) -> None:
        self.calls = 0
        self.sizes: dict[str, set[Any]] = {name: set() for name in (*SIZES, "features", "layouts", "asked")}

    def add(self, problem: AttentionProblem) -> None:
        """Note one call."""
        self.update(
            SizesTried(
                calls=1,
                head_dim=(problem.head_dim,),
                head_dim_v=((problem.head_dim, problem.head_dim_v),),
                group=(problem.group,),
                nheads=(problem.nheads,),
                sequences=(problem.batch,),
                seqlen_q=(problem.seqlen_q,),
                seqlen_k=(problem.seqlen_k,),
                features=tuple(needed_features(problem)),
            )
        )

    def update(self, other: SizesTried) -> None:
        """Add the calls that another collector noted."""
        self.calls += other.calls
        for name, known in self.sizes.items():
            known.update(getattr(other, name))

    def noted(self) -> SizesTried:
        """Return what was noted as a record."""
        sizes: Any = {name: tuple(sorted(known)) for name, known in self.sizes.items()}
        return SizesTried(self.calls, **sizes | {name: sizes[name][-1:] for name in _LONGEST})


def concluded(
    tried: SizesTried,
    *,
    features: Iterable[str],
    head_dims: Sequence[int] | None,
    outputs: Mapping[str, tuple[int, int]],
    properties: Collection[str],
    is_forward: bool,
    refused: str | None = None,
) -> SizesTried:
    """Return the sizes that were tried of a kernel, completed by ``layout``, ``repeated_runs`` and ``not_tried``.

    Parameters
    ----------
    tried : SizesTried
        Sizes of its calls.
    features : iterable of str
        Features that kernels of its operation may have.
    head_dims : sequence of int, optional
        The head dims that it declares; None where it declares none.
    outputs : mapping
        By name of an optional output, in how many judged cases it was returned, and in how many it was due.
    properties : collection of str
        Names of the properties that were checked.
    is_forward : bool
        Whether it is a forward, whose gradients are another kernel.
    refused : str, optional
        Why it refuses a problem of the campaign; None if it takes all.
    """
    is_repeated = any(name in properties for name in REPEATED)
    fixed = _fixed(tried.layouts)
    left = sorted(set(head_dims or ()) - set(tried.head_dim))
    missing = {
        **{words: name in features and name not in tried.features for name, words in _FEATURES.items()},
        **{
            f"{name} in {due - n} of {due} cases" if n else f"{name}, which was not returned": n < due
            for name, (n, due) in outputs.items()
        },
        f"head_dim {', '.join(map(str, left))}": bool(left),
        "other head_dims, of which the kernel declares none": head_dims is None,
        "gradients": is_forward,
        f"{' and '.join(fixed) if len(fixed) < 3 else 'tensors'} that are not contiguous": bool(fixed),
        "repeated runs": not is_repeated,
        f"what the kernel refuses: {refused}": bool(refused),
    }
    return replace(
        tried,
        repeated_runs=is_repeated,
        layout=_laid(tried.layouts),
        not_tried=tuple(words for words, is_missing in missing.items() if is_missing),
    )


def _fixed(layouts: Iterable[tuple[str, str]]) -> list[str]:
    """Return which of Q, K and V were contiguous in every call."""
    return sorted({"q", "k", "v"} - {name.removesuffix("_cache") for name, _ in layouts})


def _laid(layouts: Iterable[tuple[str, str]]) -> str:
    """Return how tensors lay, in words.

    >>> _laid([("q", "unaligned"), ("k", "unaligned"), ("k", "expanded")]), _laid([])
    ('contiguous and viewed (k in 2 ways and q in 1)', 'contiguous')
    """
    counts = Counter(name for name, _ in layouts)
    if not counts:
        return LAYOUT
    ways = [f"{name} in {n}{' ways' * (i == 0)}" for i, (name, n) in enumerate(sorted(counts.items()))]
    return f"{LAYOUT} and viewed ({' and '.join(filter(None, (', '.join(ways[:-1]), ways[-1])))})"


def common(found: Sequence[SizesTried]) -> SizesTried:
    """Return what was tried of each of several kernels: values that all have, and the fewest calls.

    Of sizes whose largest is kept, it is the largest that every kernel reached.
    """
    first, *others = found
    if not others:
        return first
    shared: Any = {
        name: tuple(x for x in getattr(first, name) if all(x in getattr(other, name) for other in others))
        for name in (*SIZES, "layouts", "asked")
    }
    shared |= {name: (min(max(getattr(each, name), default=0) for each in found),) for name in _LONGEST}
    shared |= {"layout": _laid(shared["layouts"]), "repeated_runs": all(each.repeated_runs for each in found)}
    return SizesTried(min(each.calls for each in found), **shared)


def line(found: Sequence[SizesTried | None]) -> str:
    """Return one line that says what the verdict over kernels rests on; empty where one has no compared call.

    Parameters
    ----------
    found : sequence of SizesTried
        The sizes of every kernel, None where unknown; for several kernels the line says what was tried of each.
    """
    ran = [each for each in found if each and each.calls]
    if not ran or len(ran) < len(found):
        return ""
    shared = common(ran)
    calls = f"{shared.calls:,} calls"
    if len(ran) > 1:
        calls = f"at least {calls} each"
    words = in_words(shared)
    same = "the same" * any(width == dim for dim, width in shared.head_dim_v)
    widths = ", ".join(map(str, sorted({width for dim, width in shared.head_dim_v if width != dim})))
    return (
        f"tried{' of each kernel' if len(ran) > 1 else ''} head_dim {words['head_dim']}; "
        f"V {' or '.join(filter(None, (same, widths)))}; keys {words['seqlen_k']}; "
        f"groups {words['group']}; sequences {words['sequences']}; {calls}; {words['layout']} tensors; "
        f"repeated runs {words['repeated_runs']}"
    )


def in_words(tried: SizesTried) -> dict[str, str]:
    """Return what was tried in words, by the name of the field; "none" where nothing was."""
    return {
        "head_dim": _by_eights(tried.head_dim),
        "head_dim_v": _of_v(tried.head_dim_v),
        "seqlen_q": _up_to(tried.seqlen_q),
        "seqlen_k": _up_to(tried.seqlen_k),
        "group": spans(tried.group),
        "nheads": _up_to(tried.nheads),
        "sequences": spans(tried.sequences),
        "calls": f"{tried.calls:,}",
        "layout": tried.layout,
        "repeated_runs": "compared" if tried.repeated_runs else "not compared",
    }


def _by_eights(dims: Sequence[int]) -> str:
    """Write head dims, with more than three successive multiples of 8 as a range.

    >>> _by_eights([8, 16, 24, 32, 64]), _by_eights([64, 128])
    ('8 to 32 by 8, 64', '64, 128')
    """
    if any(d % 8 for d in dims):
        return ", ".join(map(str, dims))
    return _as_ranges(dims, 8, 3, " by 8")


def _of_v(pairs: Iterable[Sequence[int]]) -> str:
    """Write head dims of V: "the same" where equal to that of Q and K, each with the head_dim it was tried for."""
    dims: dict[str, list[int]] = {}
    for dim, width in sorted(pairs, key=lambda pair: (pair[0] != pair[1], pair[1], pair[0])):
        dims.setdefault("the same" if width == dim else str(width), []).append(dim)
    return "; ".join(f"{width} for {', '.join(map(str, of))}" for width, of in dims.items()) or "none"


def _up_to(sizes: Sequence[int]) -> str:
    return f"up to {max(sizes):,}" if sizes else "none"


def spans(numbers: Iterable[int]) -> str:
    """Write whole numbers, with more than two successive ones as a range.

    >>> spans([1, 2, 3, 4, 8]), spans([1, 2]), spans([])
    ('1 to 4, 8', '1, 2', 'none')
    """
    return _as_ranges(numbers, 1, 2, "")


def _as_ranges(numbers: Iterable[int], step: int, most: int, suffix: str) -> str:
    """Write numbers; more than ``most`` of them that follow each other by ``step`` are a range, then ``suffix``."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][-1] + step:
            runs[-1].append(n)
        else:
            runs.append([n])
    written = (f"{run[0]} to {run[-1]}{suffix}" if len(run) > most else ", ".join(map(str, run)) for run in runs)
    return ", ".join(written) or "none"
