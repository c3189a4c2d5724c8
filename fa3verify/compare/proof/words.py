"""A proof in words, for the verb compare; :mod:`fa3verify.compare.proof.answers` finds it, and writes its JSON."""

from __future__ import annotations

from collections.abc import Iterator

from fa3verify.compare.proof.answers import AxisAnswer, BitsProof, CallClass
from fa3verify.compare.proof.classes import ANY, Stretch
from fa3verify.compare.proof.plans import Batch, Change, Lengths
from fa3verify.compare.run import Compared

WORDS: dict[Change, str] = {
    "neighbours": "beside any sequences of a packed call",
    "batch": "in any number of sequences of equal lengths",
    "chunk": "however its prompt is cut into calls",
}
_SHOWN = 12  # classes at most; JSON has all
_FEW = 4  # ranges of one statistic at most


def headline(found: BitsProof) -> str:
    """Return the answer in one line."""
    verdict = {True: "invariant", False: "NOT invariant", None: "not decided"}[found.is_invariant]
    sizes = found.sizes
    mask = "causal" if sizes.get("causal") else "dense"
    heads = f"{sizes['nheads']} heads on {sizes['nheads_kv']}, head_dim {sizes['head_dim']}, {mask}"
    if "cache" in sizes:
        heads += f", pages of {sizes['cache'].page_size} keys"
    limits = found.limits
    within = f"up to {limits.sequences} sequences of {limits.queries:,} queries and {limits.keys:,} keys"
    return f"{found.kernel}: {verdict}; {_row(found.own)}, {heads}; {within}"


def lines(answer: AxisAnswer, own: Lengths) -> Iterator[str]:
    """Yield the lines of an answer: its classes, the smallest call outside the first, remedies, and the checks.

    ``own`` are queries and keys of the row's sequence.
    """
    count = len(answer.classes)
    least = "" if answer.is_complete else "at least "
    query = f", shown of query {answer.row}" if own[0] > 1 and answer.change != "chunk" else ""
    classes = f"{least}{_count(count, 'class')} of equal bits{query}"
    yield f"{WORDS[answer.change]}: {classes}, over {answer.cases:,} cases of the plan"
    table = [_class(chr(ord("A") + n), each, count) for n, each in enumerate(answer.classes[:_SHOWN])]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        yield "  " + "  ".join(text.ljust(width) for text, width in zip(cells, widths, strict=True)).rstrip()
    if count > _SHOWN:
        yield f"  and {count - _SHOWN} more, which --json has"
    if refused := {each.refused for call_class in answer.classes for each in call_class.confirmed if each.refused}:
        yield f"  not run: {', '.join(refused).replace('ValueError: ', '')}"
    if answer.smallest:
        since = f"; it differs from {answer.from_keys:,} keys of the row on" if answer.from_keys > 1 else ""
        yield f"  the smallest call that leaves A: {call(answer.smallest, answer.change)}{since}"
        yield f"  one class with {', or with '.join(answer.remedies) or 'no choice of a caller'}"
    if answer.checked:
        against = "; ".join(call(batch, answer.change) for batch in answer.against)
        result = f"AGAINST: {against}" if against else "none against"
        tried = f"{answer.checked:,} batches planned and {answer.ran} run as a whole"
        yield f"  that bits follow from these statistics: {tried}, {result}"


def _class(name: str, each: CallClass, count: int) -> tuple[str, str, str, str]:
    """Return a row of the table of ``count`` classes: name, bits, the calls of the class, results of runs."""
    texts = {what: _ranges(each.ranges[what], each.is_exact) for what in each.ranges if set(each.ranges[what]) != {ANY}}
    where = ", ".join(f"{what} {text}" for what, text in texts.items()) or "every call"
    if count > 1 and not each.is_exact:
        where = f"some with {where}" if texts else "some calls"
    results = ", ".join(dict.fromkeys(map(_result, each.confirmed)))
    return name, " or ".join(each.bits), where, results if each.batch else "no such call was found"


def _result(found: Compared) -> str:
    if not found.outputs:
        return "not run"
    if found.first is None:
        return f"{found.outputs:,} outputs equal"
    return f"{found.first.differing:,} of {found.first.compared:,} outputs unlike A"


def _ranges(ranges: tuple[Stretch, ...], is_exact: bool) -> str:
    """Return ranges of a statistic in words; if other classes share them, one range from the first to the last."""
    if not is_exact:
        ranges = (Stretch(ranges[0].first, ranges[-1].last),)
    words = [f"{a:,}" if a == b else f"{a:,}-{b:,}" for a, b in ranges[:_FEW]]
    return " ".join(words) + " ..." * (len(ranges) > _FEW)


def _row(lengths: Lengths) -> str:
    return f"{_count(lengths[0], 'query')} over {_count(lengths[1], 'key')}"


def call(batch: Batch, change: Change) -> str:
    """Return a call in words.

    >>> call(Batch(((1, 9), (1, 9), (1, 9), (17, 40))), "neighbours")
    '2 neighbours of 1 query over 9 keys, 1 neighbour of 17 queries over 40 keys'
    >>> call(Batch(((17, 40),), 3), "chunk")
    '17 queries over 40 keys, 3 of them behind'
    """
    own, *rest = batch.lengths
    if change == "batch":
        return _count(len(batch.lengths), "sequence")
    if change == "chunk":
        return _row(own) + (f", {batch.behind:,} of them behind" if batch.behind else "")
    words = [f"{_count(rest.count(each), 'neighbour')} of {_row(each)}" for each in dict.fromkeys(rest)]
    return ", ".join(words) or "alone"


def _count(n: int, what: str) -> str:
    many = {"query": "queries", "class": "classes"}.get(what, f"{what}s")
    return f"{n:,} {what if n == 1 else many}"
