"""The proof whether a row's bits depend on more than the row: :func:`prove`, and the records of its answer.

The verb compare calls it; :mod:`fa3verify.compare.proof.words` prints the answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from fa3_reference.cache import Cache
from fa3_reference.rules import require
from fa3verify.compare.proof.classes import BatchLimits, Enumerated, Stretch, enumerate_calls, with_batches
from fa3verify.compare.proof.confirm import can_run, confirm, is_little
from fa3verify.compare.proof.plans import Batch, Change, Lengths, Planner, RowBits, Rows, planner
from fa3verify.compare.run import RECIPES, Compared
from fa3verify.files import Json
from fa3verify.version import __version__

SCHEMA = "fa3verify.proof/1"
SIZES: dict[str, Any] = {"nheads": 32, "nheads_kv": 8, "head_dim": 128, "causal": True}  # unless somebody chooses
_RUN = 3  # batches that run as a whole, and refuting ones that are told, at most


@dataclass(frozen=True, slots=True)
class CallClass:
    """Holds one class of calls.

    Parameters
    ----------
    bits : tuple of str
        How the bits of one query arise in this class, in words; several if heads of a group differ.
    ranges : mapping of str to tuple of (int, int)
        Ranges of its calls, by name of the statistic; a statistic that says nothing about the class is left out.
    is_exact : bool
        Whether all calls with statistics in these ranges are of the class; otherwise its calls are among them.
    batch : Batch, optional
        The smallest of its calls that was planned as a whole; None if none was.
    confirmed : tuple of Compared
        Runs that compare a call of the class with the call alone, and two calls of the class.
    """

    bits: tuple[str, ...]
    ranges: Mapping[str, tuple[Stretch, ...]]
    is_exact: bool
    batch: Batch | None
    confirmed: tuple[Compared, ...]


@dataclass(frozen=True, slots=True)
class AxisAnswer:
    """Holds the answer for one thing that changes between calls.

    Parameters
    ----------
    change : {"neighbours", "batch", "chunk"}
    row : int
        The query whose bits are described: the first whose bits differ between classes.
    classes : tuple of CallClass
        The class of the call alone first.
    cases : int
        How many cases were planned.
    is_complete : bool
        Whether they stand for all calls within the limits.
    smallest : Batch, optional
        The smallest call that leaves the first class; None where none does.
    from_keys : int
        Fewest keys of the row's sequence with which the smallest call changes its bits; 0 without such a call.
    checked, ran : int
        How many batches were planned as a whole, to check that only the statistics matter, and how many of them ran as
        a whole, to check that equal plans give equal bits.
    against : tuple of Batch
        Batches that failed one of these checks.
    remedies : tuple of str
        Choices of a caller with which there is one class; empty if there are none, or none is needed.
    """

    change: Change
    row: int
    classes: tuple[CallClass, ...]
    cases: int
    is_complete: bool
    smallest: Batch | None
    from_keys: int
    checked: int
    ran: int
    against: tuple[Batch, ...]
    remedies: tuple[str, ...]

    @property
    def is_invariant(self) -> bool | None:
        """Tell whether every call is in the first class.

        None if that is not decided: a check failed, or no call outside was found although there are several classes or
        the cases do not stand for all calls.
        """
        if self.against or (self.smallest is None and (len(self.classes) > 1 or not self.is_complete)):
            return None
        return self.smallest is None


@dataclass(frozen=True, slots=True)
class BitsProof:
    """Holds what the bits of a row depend on beside its own operands.

    Parameters
    ----------
    kernel : str
    sizes : mapping
        Fields of the problem that no call changes.
    own : (int, int)
        Queries and keys of the row's sequence.
    limits : BatchLimits
    answers : tuple of AxisAnswer
    """

    kernel: str
    sizes: Mapping[str, Any]
    own: Lengths
    limits: BatchLimits
    answers: tuple[AxisAnswer, ...]

    @property
    def is_invariant(self) -> bool | None:
        """Tell whether there is one class in every answer; None if that is not decided."""
        each = {answer.is_invariant for answer in self.answers}
        return False if False in each else None if None in each else True

    def to_json(self) -> Json:
        """Return its JSON values."""
        answers = [asdict(answer) | {"is_invariant": answer.is_invariant} for answer in self.answers]
        body = asdict(self) | {"answers": answers, "is_invariant": self.is_invariant}
        return {"schema": SCHEMA, "version": __version__, **body}


def prove(
    kernel: str,
    *,
    seqlen_q: int = 1,
    seqlen_k: int = 2000,
    changes: Iterable[Change] = (),
    limits: BatchLimits = BatchLimits(),  # noqa: B008 (a value)
    runs: bool = True,
    page_size: int = 0,
    **sizes: Any,
) -> BitsProof:
    """Decide whether the bits of a row depend on more than the row, by enumerating plans.

    Parameters
    ----------
    kernel : str
        Name of a twin or of a kernel that has one, maybe with choices in brackets.
    seqlen_q, seqlen_k : int
        Queries and keys of the row's own sequence.
    changes : tuple of {"neighbours", "batch", "chunk"}
        What changes between calls; by default the batch, and the neighbours if the kernel takes packed sequences.
    limits : BatchLimits
        The batches that the proof is about; they are widened to the lengths of the row's own sequence.
    runs : bool
        Whether calls of each class are run as well, and compared with the call alone and with each other.
    page_size : int
        Keys of a page; 0 where keys lie in one piece.
    **sizes : int, bool or tuple
        Fields of the problem that no call changes; by default those of :data:`SIZES`.

    Returns
    -------
    BitsProof
        It holds for finite operands and for batches within the limits.

    Raises
    ------
    ValueError
        For a kernel whose plan is not known, and for sizes that it does not take.

    Examples
    --------
    >>> sizes = {"nheads": 8, "nheads_kv": 2, "limits": BatchLimits(8, 64, 1024)}
    >>> prove("twin.bf16", seqlen_k=300, changes=("neighbours",), runs=False, **sizes).is_invariant
    True
    >>> prove("vllm.e4m3", seqlen_k=300, runs=False, page_size=16, **sizes).answers[0].smallest
    Batch(lengths=((1, 300), (17, 17)), behind=0)
    """
    own = (seqlen_q, seqlen_k)
    require(
        min(own) >= 1 and limits.sequences >= 2,
        f"a row needs a query, a key and two sequences at most, got {own} and {limits.sequences}",
    )
    limits = BatchLimits(limits.sequences, max(limits.queries, seqlen_q), max(limits.keys, seqlen_k))
    base = planner(kernel, SIZES | sizes | ({"cache": Cache(page_size)} if page_size else {}))
    is_packed = "varlen" in base.kernel.features
    changes = tuple(changes) or (("neighbours", "batch") if is_packed else ("batch",))
    require(
        "neighbours" not in changes or is_packed,
        f"{kernel} takes no packed sequences, so that it has no neighbours; --over batch asks the rest",
    )
    answers = tuple(_answer(replace(base, change=change, known={}), own, limits, runs) for change in changes)
    return BitsProof(kernel, base.sizes, own, limits, answers)


def _answer(planner: Planner, own: Lengths, limits: BatchLimits, runs: bool) -> AxisAnswer:
    """Return the answer for the change of a planner."""
    found = enumerate_calls(planner, own, limits)
    is_any_batch = planner.change == "neighbours"
    if is_any_batch:
        found = with_batches(found, own, limits)
    ran = _ran(found) if runs and is_any_batch else {}
    by_query = list(zip(*found.classes, strict=True))
    row = next((n for n, each in enumerate(by_query) if len(set(each)) > 1), len(by_query) - 1)
    cases = [case for each in found.classes.values() for case in each]
    call = found.leaves
    return AxisAnswer(
        change=planner.change,
        row=row,
        classes=tuple(_class(found, bits, row, cases, runs) for bits in found.classes),
        cases=len(cases),
        is_complete=found.is_complete,
        smallest=call,
        from_keys=_from_keys(found, call) if call else 0,
        checked=len(found.batches) if is_any_batch else 0,
        ran=len(ran),
        against=(*found.against[:_RUN], *(batch for batch, is_equal in ran.items() if not is_equal)),
        remedies=tuple(_remedies(planner, own, limits)) if call else (),
    )


def _ran(found: Enumerated) -> dict[Batch, bool]:
    """Run a few batches as a whole whose plan of the row is that of the call alone; tell of each whether its bits are.

    Batches of which nothing could run are left out.
    """
    base = found.batches[found.alone]
    alike = [batch for batch, bits in found.batches.items() if bits == base and len(batch.lengths) > 1]
    little = [batch for batch in alike if is_little(found.planner, batch)]
    chosen = little[:: max(1, len(little) // _RUN)][:_RUN]
    results = {batch: confirm(found.planner, found.alone, batch, RECIPES[1:2], is_whole=True) for batch in chosen}
    return {batch: result.first is None for batch, result in results.items() if result.outputs}


def _class(found: Enumerated, bits: Rows, row: int, cases: list[tuple[Stretch, ...]], runs: bool) -> CallClass:
    """Return the record of one class; ``cases`` are those of all classes, ``row`` is the query that is described."""
    batches = [batch for batch, known in found.batches.items() if known == bits]
    base = next(iter(found.classes))
    runnable = [batch for batch in batches if can_run(found.planner, batch)]
    pairs = [(found.alone, runnable[0])] if runnable and bits != base else []
    pairs += [(runnable[0], runnable[-1])] if len(runnable) > 1 else []
    own = found.classes[bits]
    columns = list(zip(found.names, zip(*own, strict=True), zip(*cases, strict=True), strict=False))
    return CallClass(
        bits=tuple(sorted(each.told() for each in bits[row])),
        ranges={name: _merged(values) for name, values, every in columns if _merged(values) != _merged(every)},
        is_exact=math.prod(len(set(values)) for _, values, _ in columns) == len(own),
        batch=batches[0] if batches else None,
        confirmed=tuple(confirm(found.planner, *pair) for pair in pairs if runs),
    )


def _merged(ranges: tuple[Stretch, ...]) -> tuple[Stretch, ...]:
    """Return ranges with neighbours joined."""
    joined: list[Stretch] = []
    for each in sorted(set(ranges)):
        if joined and each.first <= joined[-1].last + 1:
            each = Stretch(joined[-1].first, max(joined.pop().last, each.last))
        joined.append(each)
    return tuple(joined)


def _from_keys(found: Enumerated, call: Batch) -> int:
    """Return the fewest keys of the row's sequence with which a call changes its bits."""
    was = found.alone.lengths[0]

    def bits(batch: Batch, keys: int) -> list[set[RowBits]]:
        """Return the bits of each query, but for the merge of a single part: it changes the sign of a zero at most."""
        (queries, _), *rest = batch.lengths
        own = (queries, keys + batch.behind)
        rows = found.planner.bits(Batch(found.planner.around(own, rest), batch.behind))
        return [{replace(each, is_merged=each.is_merged and len(each.parts) > 1) for each in row} for row in rows]

    return next((n for n in range(was[0], was[1]) if bits(call, n) != bits(found.alone, n)), was[1])


def _remedies(planner: Planner, own: Lengths, limits: BatchLimits) -> Iterator[str]:
    """Yield choices of a caller with which there is one class: each single one; if none, a least max_seqlen_q."""

    def is_one_class(changed: Planner) -> bool:
        return len(enumerate_calls(changed, own, limits).classes) == 1

    is_cut = any(config.num_splits > 1 for config in planner.known.values())
    known = planner.config(1, own).traits.choices if is_cut else frozenset[str]()
    choices = [x for x in (("num_splits", 1), ("pack_gqa", False), ("pack_gqa", True)) if x[0] in known]
    single = [f"{name}={str(value).lower()}" for name, value in choices if is_one_class(planner.chosen(name, value))]
    yield from single
    if single or planner.change == "batch":
        return
    unsplit = planner.chosen("num_splits", 1) if "num_splits" in known else planner
    words = "num_splits=1 and " if "num_splits" in known else ""
    configs = {unsplit.config(2, (n, own[1])): n for n in range(limits.queries, own[0], -1)}
    for floor in sorted(configs.values()):  # the fewest queries of each configuration
        if is_one_class(replace(unsplit, declared=(floor, 0), known={})):
            yield f"{words}a max_seqlen_q of at least {floor} given in every call"
            return
