"""Check a call of attention that was made: whether any of some rows of its output is wrong, and why.

The truth of these rows is computed in float64, and the bound is that of a kernel of any order of operations. Users call
it as ``fa3verify.check``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from fa3_reference.attention import Attention, attention
from fa3_reference.bounds.forward import ErrorBound, forward_bound
from fa3_reference.bounds.model import KernelModel
from fa3verify import operations
from fa3verify.checking.call import TERMS, AttentionCall, CallPart
from fa3verify.checking.checked import CheckedCall, Verdict, ranges
from fa3verify.checking.gradients import CPU_EXP_ERROR, GradientSample, judged_gradients
from fa3verify.judging import metrics
from fa3verify.operations.forward import ForwardConfig
from fa3verify.operations.operation import Accumulator
from fa3verify.operations.ratios import error_over_bound

_ROWS_OF_A_PART = 32
_MOST_PARTS = 32
_MOST_KEYS = 1 << 15  # keys, in all parts together, that are read unless a part alone has more
_EDGES = 4  # rows at either end of a sequence that are always among those of a part
CPU_ROUNDS_MORE = (
    "would be right with exponentials that err by up to 2^-13 and gradients of blocks that are added in 16 bits, as "
    "those of torch's kernels for CPUs"
)
_NOT_TRIED = "a backward with a forward of its own was not tried at this length: rows='all' does"
_TILE = 64  # its multiples are row tiles of most kernels


class _CallRows(NamedTuple):
    """Rows of some query heads of one kv head in one sequence."""

    sequence: int
    heads: slice
    rows: np.ndarray


class _Judged(NamedTuple):
    """A part of a call with its truth, and the largest errors over their bounds under one hypothesis."""

    place: _CallRows
    part: CallPart
    truth: Attention
    bound: ErrorBound
    out: np.ndarray  # (rows, heads, channels)
    lse: np.ndarray  # (rows, heads); zeros where the call has none

    @property
    def largest(self) -> float:
        return max(float(np.max(x, initial=0.0)) for x in (self.out, self.lse))

    @property
    def is_of_contract(self) -> np.ndarray:
        """Tell in which rows (rows, heads) no arithmetic says what is due: no key has weight, or NaN is near."""
        without_weight = np.isneginf(self.truth.lse[0][:, self.part.rows].T)
        operands = self.part.operands
        has_nan = not all(np.isfinite(x.astype(np.float32)).all() for x in (operands.k, operands.v))
        return without_weight | (has_nan & np.isnan(self.part.out.astype(np.float32)).any(axis=2))


def check(
    out: object,
    q: object,
    k: object,
    v: object,
    *,
    rows: int | Literal["all"] = 128,
    seed: int = 0,
    accumulator: Accumulator = "either",
    **call: object,
) -> CheckedCall:
    """Check some rows of the output of attention against float64 and the bound of its rounding errors.

    Parameters
    ----------
    out, q, k, v : arrays
        Of numpy, torch or JAX, in fp16, bf16, e4m3 or fp32, as :class:`~fa3verify.checking.call.AttentionCall` has
        them. Only what is checked is copied from a GPU.
    rows : int or "all"
        Rows (one query, one head) to check, of sequences, heads and queries that docs/check.md names or ``seed``
        draws; fewer where they would need too many keys.
    seed : int
        The same seed checks the same rows.
    accumulator : {"either", "fp32", "wgmma", "tf32"}
        What adds the products: Hopper's tensor core or binary32, whichever errs more, by default, and binary32 for
        operands of fp32; "fp32" is sharper and fits a CPU.
    **call : fields of AttentionCall
        ``layout``, masks, scales, lse, packed sequences and caches.

    Returns
    -------
    CheckedCall
        Its truth value is "nothing wrong". Values whose operands hold NaN or infinities are counted and not judged.

    Raises
    ------
    ValueError
        For arrays that do not fit each other, with the rule.

    Examples
    --------
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 2, 100, 64)).astype(np.float16)
    >>> p = np.exp(q.astype(np.float32) @ k.astype(np.float32).swapaxes(-1, -2) / 8)
    >>> out = (p @ v.astype(np.float32) / p.sum(-1, keepdims=True)).astype(np.float16)
    >>> bool(check(out, q, k, v, layout="bhsd")), check(1.01 * out, q, k, v, layout="bhsd").verdict
    (True, 'fail')
    """
    made = AttentionCall(out=out, q=q, k=k, v=v, **call)  # type: ignore[arg-type]
    dtype, out_dtype = made.formats
    sums = "fp32" if dtype == "fp32" and accumulator == "either" else accumulator
    models = KernelModel.hypotheses(dtype, out_dtype, sums)  # type: ignore[arg-type]
    places = tuple(_all(made) if rows == "all" else _sampled(made, rows, seed))
    judged, assumed = _under_best(made, places, models)
    sample = GradientSample(is_all=rows == "all", seed=seed, accumulator=sums, may_be_cpu=sums == "fp32" != dtype)
    rounds_more = {name: replace(model, exp_error=CPU_EXP_ERROR) for name, model in models.items()}
    explained = ("", False)
    if not _passes(judged):
        if sample.may_be_cpu and _passes(_under_best(made, places, rounds_more)[0]):
            explained = (CPU_ROUNDS_MORE, True)
        else:
            explained = _explanation(made, lambda call: _passes(_under_best(call, places, models)[0]))
    told = _told(made, judged, f"any order, {assumed}, sums in {sums}", *explained)
    if not made.has_gradients:
        return told
    return _with_gradients(told, made, sample)


def assert_attention(out: object, q: object, k: object, v: object, **given: object) -> None:
    """Raise AssertionError with what :func:`check` says if something is wrong; its arguments are those of it.

    Parameters
    ----------
    out, q, k, v : arrays
        As :func:`check` takes them.
    **given : keywords of check
        The rest.

    Raises
    ------
    AssertionError
        If an output leaves its bound; another contract than FlashAttention-3's is none.
    ValueError
        As :func:`check` does.

    Examples
    --------
    >>> one = np.ones((1, 1, 1, 16), np.float16)
    >>> assert_attention(one, one, one, one, layout="bhsd")
    """
    checked = check(out, q, k, v, **given)  # type: ignore[arg-type]
    if not checked:
        raise AssertionError(str(checked))


def _all(call: AttentionCall) -> Iterator[_CallRows]:
    group = call.nheads // call.nheads_kv
    for sequence, n in enumerate(call.lengths_q):
        for head in range(0, call.nheads if n else 0, group):
            yield _CallRows(sequence, slice(head, head + group), np.arange(n))


def _sampled(call: AttentionCall, rows: int, seed: int) -> Iterator[_CallRows]:
    """Yield parts until there are enough rows: of the sequences with most and fewest keys, then of others."""
    rng = np.random.default_rng(seed)
    group = call.nheads // call.nheads_kv
    asked = sorted((i for i, n in enumerate(call.lengths_q) if n), key=lambda i: call.lengths_k[i])
    pairs = [(i, head) for i in asked for head in range(call.nheads)]
    # The last head of the first group and the first of the last are those that a wrong map of heads to kv heads moves.
    named = [(asked[-1], group - 1), (asked[0], call.nheads - group)] if asked else []
    units = [
        (i, head, 1) if call.lengths_q[i] > 2 * _EDGES else (i, head - head % group, group)  # heads that share keys
        for i, head in [*named, *(pairs[at] for at in rng.permutation(len(pairs)))]
    ]
    left = rows
    keys = 0
    for i, (sequence, head, count) in enumerate(list(dict.fromkeys(units))[:_MOST_PARTS]):
        keys += call.lengths_k[sequence]
        if left <= 0 or (i > 1 and keys > _MOST_KEYS):
            return
        chosen = _rows(call.lengths_q[sequence], min(left, _ROWS_OF_A_PART), rng)
        left -= len(chosen) * count
        yield _CallRows(sequence, slice(head, head + count), chosen)


def _rows(n: int, most: int, rng: np.random.Generator) -> np.ndarray:
    """Return ascending positions of queries: the first and last ones, those around tiles, and others."""
    if n <= most:
        return np.arange(n)
    edges = _TILE * rng.integers(1, max(2, n // _TILE), most // 8)
    named = np.concatenate([np.arange(_EDGES), np.arange(n - _EDGES, n), edges, edges - 1])
    return np.unique(np.concatenate([named, rng.integers(0, n, n)])[:most].clip(0, n - 1))


def _under_best(
    call: AttentionCall, places: Sequence[_CallRows], models: dict[str, KernelModel]
) -> tuple[list[_Judged], str]:
    """Judge parts under the hypothesis that fits them best; one must fit all of them."""
    parts = [call.part(place.sequence, place.heads, place.rows) for place in places]
    truths = [attention(p.problem, *p.operands.dequantized(p.problem), only=p.rows) for p in parts]
    best: list[_Judged] = []
    name = next(iter(models))
    for each, model in models.items():
        found = [_judged(*x, model) for x in zip(places, parts, truths, strict=True)]
        if not best or _largest(found) < _largest(best):
            best, name = found, each
        if _passes(best):
            break
    return best, name


def _largest(judged: Sequence[_Judged]) -> float:
    return max((x.largest for x in judged), default=0.0)


def _passes(judged: Sequence[_Judged]) -> bool:
    return _largest(judged) <= 1


def _judged(place: _CallRows, part: CallPart, truth: Attention, model: KernelModel) -> _Judged:
    bound = forward_bound(part.problem, part.operands, model, part.rows)
    out = error_over_bound(part.out, truth.out[0, part.rows], bound.out[0, part.rows])
    lse = np.zeros(out.shape[:2])
    if part.lse is not None:
        exact, allowed = (x[0][:, part.rows] for x in (truth.lse, bound.lse))
        lse = error_over_bound(part.lse, exact, allowed).T
    lse = np.where(np.isnan(truth.lse[0][:, part.rows].T), 0.0, lse)
    return _Judged(place=place, part=part, truth=truth, bound=bound, out=out, lse=lse)


def _changes(call: AttentionCall) -> Iterator[tuple[str, bool, dict[str, object]]]:
    """Yield what a call may really have been: in words, whether that is a contract of its own, and the facts."""
    yield f"causal={not call.causal}", False, {"causal": not call.causal}
    if call.causal:
        yield f"top_left={not call.top_left}", True, {"top_left": not call.top_left}
    if call.lse is not None and call.lse_base == "e":
        yield "lse_base=2", True, {"lse_base": 2}
    for scale in (None, 1.0):
        if call.softmax_scale != scale:
            yield f"softmax_scale={scale or '1 / sqrt(head_dim)'}", False, {"softmax_scale": scale}
    if call.softcap:
        yield "softcap=0.0", False, {"softcap": 0.0}
    if call.window != (-1, -1):
        left, right = call.window
        for window in ((-1, -1), (left - 1, right), (left + 1, right), (left, right - 1), (left, right + 1)):
            if min(window) >= -1:
                yield f"window={window}", False, {"window": window}
    if given := [name for name in TERMS if getattr(call, name) is not None]:
        yield f"{given[0]}=None", False, {given[0]: None}


def _explanation(call: AttentionCall, is_right: Callable[[AttentionCall], bool]) -> tuple[str, bool]:
    """Return what one change of the call makes it right, and whether it is a contract; empty if none does."""
    for words, is_contract, change in _changes(call):
        if is_right(replace(call, **change)):
            return f"would be right with {words}", is_contract
    return "", False


def _told(
    call: AttentionCall, judged: Sequence[_Judged], assumed: str, explained: str, is_contract: bool
) -> CheckedCall:
    """Put what was found into words."""
    beyond = [(x.out.max(axis=2, initial=0.0) > 1) | (x.lse > 1) for x in judged]
    if not is_contract and all((~wrong | x.is_of_contract).all() for wrong, x in zip(beyond, judged, strict=True)):
        explained = "rows that see no key, or keys with NaN, hold what FlashAttention-3 does not return there"
        is_contract = True
    verdict: Verdict = "pass" if _passes(judged) else "question" if is_contract else "fail"
    figures = [_figures(call, x) for x in judged]
    counts = [each["outputs"] - each["unbounded"] for each in figures]
    lost = math.fsum(each["bits_lost"] * n for each, n in zip(figures, counts, strict=True) if n)
    worst = max(judged, key=lambda x: x.largest, default=None)
    return CheckedCall(
        verdict=verdict,
        rows=sum(x.lse.size for x in judged),
        rows_of=sum(call.lengths_q) * call.nheads,
        ratio=_largest(judged),
        seen="no query" if worst is None else _place_of(worst),
        wrong="" if _passes(judged) else _where(judged, beyond),
        explained="" if verdict == "pass" else explained,
        bits_lost=lost / (sum(counts) or 1),
        unjudged=int(sum(each["unbounded"] for each in figures)),
        assumed=assumed,
    )


def _with_gradients(told: CheckedCall, call: AttentionCall, sample: GradientSample) -> CheckedCall:
    """Add what is found in the gradients of a call to what was found in its output."""
    judged = judged_gradients(call, sample)
    words = f"gradients: {judged.checked}; {judged.assumed}"
    wrong = "; ".join(x.wrong for x in judged.rows if x.largest > 1)
    if wrong:
        words = f"{words}; leaving their bound: {wrong}"
    found = replace(told, gradients=words)
    if judged.largest > told.ratio:
        worst = max(judged.rows, key=lambda x: x.largest)
        found = replace(found, ratio=worst.largest, seen=worst.place)
    if not wrong or told.verdict == "fail":
        return found
    if sample.may_be_cpu and judged_gradients(call, sample, rounds_more=True).largest <= 1:
        return replace(found, verdict="question", explained=CPU_ROUNDS_MORE)
    if judged.is_open:
        return replace(found, verdict="question", explained=_NOT_TRIED)
    explained, is_contract = _explanation(call, lambda other: judged_gradients(other, sample).largest <= 1)
    return replace(found, verdict="question" if is_contract else "fail", explained=explained)


def _figures(call: AttentionCall, x: _Judged) -> dict[str, float]:
    """Return the figures of error of a part's out, as of a case of a campaign."""
    truth, bound = ({"out": y.out[0, x.part.rows]} for y in (x.truth, x.bound))
    config = ForwardConfig(out_dtype=call.formats[1])
    return metrics.figures(operations.find(operations.FORWARD), {"out": x.part.out}, truth, None, bound, config)


def _place_of(x: _Judged) -> str:
    """Return the place of the largest error of a part, what is there, and what is due."""
    of_lse = x.part.lse is not None and float(np.max(x.lse, initial=0.0)) > float(np.max(x.out, initial=0.0))
    ratio = x.lse if of_lse else x.out
    row, head, *channel = map(int, np.unravel_index(int(np.argmax(ratio)), ratio.shape))
    query = int(x.part.rows[row])
    where = f"sequence {x.place.sequence}, head {x.place.heads.start + head}, query {query}"
    if of_lse and x.part.lse is not None:
        got, exact, bound = x.part.lse[head, row], x.truth.lse[0, head, query], x.bound.lse[0, head, query]
        return f"lse of {where}: got {got:.6g}, expected {exact:.6g}, bound {bound:.3g}"
    at = (0, query, head, channel[0])
    got = f"got {float(x.part.out[row, head, channel[0]]):.6g}, expected {x.truth.out[at]:.6g}"
    return f"out of {where}, channel {channel[0]}: {got}, bound {x.bound.out[at]:.3g}"


def _where(judged: Sequence[_Judged], beyond: Sequence[np.ndarray]) -> str:
    """Return which rows leave their bound: how many, and in which heads, queries and channels."""
    pairs = list(zip(judged, beyond, strict=True))
    heads = {x.place.heads.start + int(i) for x, wrong in pairs for i in np.flatnonzero(wrong.any(axis=0))}
    queries = {int(i) for x, wrong in pairs for i in x.part.rows[wrong.any(axis=1)]}
    channels = {int(i) for x in judged for i in np.flatnonzero((x.out > 1).any(axis=(0, 1)))}
    each = [f"heads {ranges(heads)}", f"queries {ranges(queries)}", f"channels of out {ranges(channels)}"]
    return f"{sum(int(wrong.sum()) for wrong in beyond):,} rows; {'; '.join(each)}"
