"""What a kernel claims, what of it was tried, and how a problem is adapted to what it takes.

A class is one thing that a kernel claims: a class of a dimension of :mod:`fa3verify.cases.space`, a family of inputs or
a property. Its kind is the name of the dimension, "family" or "property". A verdict rests on the classes that ran; if
less than :data:`REQUIRED` of the classes of any kind did, it is inconclusive. The pairs of classes that met in a judged
case are counted as well, and decide nothing. :mod:`fa3verify.campaign.summary` draws up the :class:`Coverage`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import combinations

from fa3_reference.problem import AttentionProblem
from fa3verify.cases import space
from fa3verify.cases.case import Case
from fa3verify.files import Json
from fa3verify.kernels.record import Kernel
from fa3verify.kernels.widths import widths
from fa3verify.operations.operation import needed_features
from fa3verify.records import OMITTED

COVER = "cover"  # the family of cases of the covering array and of practice
REQUIRED = 0.75  # share of the claimed classes of each kind
Pair = tuple[tuple[str, str], tuple[str, str]]  # two classes, each as (dimension, class)


def classes_of(kernel: Kernel, case: Case) -> frozenset[str]:
    """Return the classes that a case has, in the words of :func:`claims`; ValueError as :func:`space.point`."""
    return named(space.point(kernel, case))


def named(point: space.Point) -> frozenset[str]:
    """Return the classes of a point in words: each as its dimension and its name, such as ``mask causal``."""
    return frozenset(f"{name} {chosen}" for name, chosen in point.items())


def claims(kernel: Kernel, properties: Iterable[str], families: Iterable[str]) -> tuple[str, ...]:
    """Return every class that a kernel claims, in words: of its dimensions, and the given properties and families.

    A kernel that declares no head_dims claims none: the ones it is judged on are the campaign's own choice.
    """
    dimensions = space.claimed(kernel)
    if kernel.head_dims is None:
        dimensions.pop("head_dim", None)
    return (
        *(f"{name} {chosen}" for name, classes in dimensions.items() for chosen in classes),
        *(f"property {name}" for name in properties),
        *(f"family {name}" for name in families),
    )


@dataclass(frozen=True, slots=True)
class Share:
    """How many classes of one kind are claimed, and how many of them were tried."""

    claimed: int
    tried: int


@dataclass(frozen=True, slots=True)
class PairsOfTwo:
    """How many pairs of classes of two dimensions are feasible, and how many of them met in a judged case."""

    dimensions: tuple[str, ...]
    feasible: int
    tried: int


@dataclass(frozen=True, slots=True)
class PairsTried:
    """How many pairs of classes are feasible, and how many of them met in a judged case: in all, and by two dimensions.

    ``by_dimensions`` is None in an atlas.
    """

    feasible: int
    tried: int
    by_dimensions: tuple[PairsOfTwo, ...] | None = field(default=None, metadata=OMITTED)


@dataclass(frozen=True, slots=True)
class Coverage:
    """What a kernel claims, and what of it was tried.

    Parameters
    ----------
    kinds : dict
        Claimed and tried classes by kind.
    not_tried : tuple of str
        The claimed classes that were not tried.
    least : str, optional
        The kind of which the smallest share was tried; None where nothing is claimed.
    share, required : float
        The share of that kind, and the share that a verdict needs of every kind.
    constraint : str, optional
        Why the kernel refused a problem of the campaign; None if it refused none.
    not_claimed : tuple of str
        What kernels of its operation may claim and this one does not.
    pairs : PairsTried, optional
        None where nobody counted them.
    """

    kinds: dict[str, Share]
    not_tried: tuple[str, ...]
    least: str | None
    share: float
    required: float
    constraint: str | None
    not_claimed: tuple[str, ...] = ()
    pairs: PairsTried | None = field(default=None, metadata=OMITTED)

    @property
    def inconclusive(self) -> str | None:
        """Return why a verdict cannot be given, None if enough ran."""
        if self.share >= self.required:
            return None
        counts = self.kinds.get(self.least or "", Share(0, 0))
        because = f"; the kernel refuses: {self.constraint}" if self.constraint else ""
        missing = [name for name in self.not_tried if name.split()[0] == self.least]
        names = ", ".join(name.partition(" ")[2] for name in missing[:6]) + (", ..." if len(missing) > 6 else "")
        what = f"{counts.tried} of {counts.claimed} claimed classes of kind {self.least} ran"
        return f"{what}, {self.required:.0%} are required; not tried: {names}{because}"


def judged(
    claimed: Iterable[str],
    tried: Iterable[str],
    constraint: str | None,
    not_claimed: Iterable[str] = (),
    pairs: PairsTried | None = None,
) -> Coverage:
    """Return the coverage: which of the claimed classes are among those that were tried.

    All classes are in the words of :func:`claims`; the other arguments are fields of the result.
    """
    claimed = tuple(claimed)
    tried = set(tried)
    of, ran = (Counter(name.split()[0] for name in names) for names in (claimed, [x for x in claimed if x in tried]))
    counts = {kind: Share(n, ran[kind]) for kind, n in of.items()}
    least = min(counts, key=lambda kind: counts[kind].tried / counts[kind].claimed, default=None)
    share = counts[least].tried / counts[least].claimed if least else 0.0
    missing = tuple(name for name in claimed if name not in tried)
    return Coverage(counts, missing, least, share, REQUIRED, constraint, tuple(not_claimed), pairs)


def pairs(points: Iterable[space.Point]) -> frozenset[Pair]:
    """Return the pairs of classes that meet in some point."""
    return frozenset(pair for point in points for pair in combinations(sorted(point.items()), 2))


def paired(feasible: Iterable[space.Point], tried: Iterable[space.Point]) -> PairsTried:
    """Count the pairs of classes that are feasible, and those of them that met in a judged case.

    ``feasible`` are the points of a covering array, in which every pair meets that can; ``tried`` are judged cases'.
    """
    wanted = pairs(feasible)
    met = pairs(tried)
    of, ran = (Counter((a[0], b[0]) for a, b in pairs_of) for pairs_of in (wanted, wanted & met))
    rows = tuple(PairsOfTwo(key, n, ran[key]) for key, n in sorted(of.items()))
    return PairsTried(len(wanted), len(wanted & met), rows)


def adapted(kernel: Kernel, problem: AttentionProblem) -> AttentionProblem:
    """Return a problem adapted to what a kernel claims; one that the kernel takes comes back as it is.

    Features that are not claimed are left out. A head_dim that is not claimed becomes the next larger one, or the
    largest. Sizes become those that the kernel declares, and a causal mask is aligned as the kernel's. The result may
    still be refused.
    """
    problem = kernel.fitted(problem)
    if kernel.supports(problem):
        return problem
    needs = needed_features(problem) - kernel.features
    dims = space.head_dims(kernel)
    nearest = min((n for n in dims if n >= problem.head_dim), default=max(dims, default=problem.head_dim))
    changes: Json = {"head_dim_v": 0} if "head_dim_v" in needs or problem.head_dim_v == problem.head_dim else {}
    changes |= widths(kernel, nearest)
    if math.isclose(problem.softmax_scale * math.sqrt(problem.head_dim), 1.0):
        changes["softmax_scale"] = None
    plain = {"causal": ("causal", False), "window": ("window", (-1, -1)), "softcap": ("softcap", 0.0)}
    plain["gqa"] = ("nheads_kv", problem.nheads)
    changes |= dict(plain[name] for name in needs & plain.keys())
    if "varlen" in needs:
        changes |= {"seqlens_q": None, "seqlens_k": None}
    return kernel.fitted(replace(problem, **changes))
