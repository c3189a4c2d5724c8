"""Check a call of attention that was made: whether any of some rows of its output is wrong, and why.

The truth of these rows is computed in float64, and the bound is that of a kernel of any order of operations. Users call
it as ``fa3verify.check``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Literal

import numpy as np

from fa3_reference.attention import Attention, attention
from fa3_reference.bounds.forward import forward_bound
from fa3_reference.bounds.model import KernelModel
from fa3verify import operations
from fa3verify.checking.call import TERMS, AttentionCall, CallPart
from fa3verify.checking.checked import CheckedCall, CheckedRows, largest, where
from fa3verify.checking.gradients import CPU_EXP_ERROR, Judged, judged_gradients
from fa3verify.judging import metrics
from fa3verify.operations.forward import ForwardConfig
from fa3verify.operations.operation import Accumulator

_ROWS_OF_A_PART = 32  # of one of many
_MOST_PARTS = 32
_MOST_KEYS = 1 << 15  # keys, in all parts together, that are read unless a part alone has more
_THREADS = min(8, os.cpu_count() or 1)  # parts at once
_MOST_SCREENED = 4  # heads of which rows are checked that a GPU names
_EDGES = 4  # rows at either end of a sequence that are always among those of a part
_OF_CPU = (
    "would be right with exponentials that err by up to 2^-13 and gradients of blocks that are added in 16 bits, as "
    "those of torch's kernels for CPUs"
)
_TILE = 64  # its multiples are row tiles of most kernels
Place = tuple[int, slice, np.ndarray]  # a sequence, query heads of one of its kv heads, and positions of queries


def check(
    out: object,
    q: object,
    k: object,
    v: object,
    *,
    rows: int | Sequence[int] | Literal["all"] | None = None,
    seed: int = 0,
    accumulator: Accumulator = "either",
    pairs: int = 1 << 32,
    **call: object,
) -> CheckedCall:
    """Check some rows of the output of attention against float64 and the bound of its rounding errors.

    Parameters
    ----------
    out, q, k, v : arrays
        Of numpy, torch or JAX, in fp16, bf16, e4m3 or fp32, as :class:`~fa3verify.checking.call.AttentionCall` has
        them. Only what is checked is copied from a GPU.
    rows : int, "all" or sequence of int, optional
        Rows (one query, one head) to check: 128 by default, of sequences, heads and queries that docs/check.md names or
        ``seed`` draws; fewer where they would need too many keys. On a GPU 16 by default, which are the farthest from
        what is due of all rows that are computed there. A sequence has positions of queries, of which all heads are
        checked.
    seed : int
        The same seed checks the same rows.
    accumulator : {"either", "fp32", "wgmma", "tf32"}
        What adds the products: Hopper's tensor core or binary32, whichever errs more, by default, and binary32 for
        operands of fp32; "fp32" is sharper and fits a CPU.
    pairs : int
        Pairs of queries and keys that a GPU computes to find the rows to check, of heads that ``seed`` draws: the
        default is 64 heads of 8,192 rows and keys, which take a second of an H200, and 2^27 takes 30 ms.
    **call : fields of AttentionCall
        ``layout``, masks, scales, lse, packed sequences, caches and gradients.

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
    places, screened = _chosen(made, rows, seed, pairs)
    judged, assumed = _under_best(made, places, models)
    judge = partial(judged_gradients, seed=None if rows == "all" else seed, accumulator=sums)
    gradients: Judged = judge(made) if made.has_gradients else ([], "", False)
    may_be_cpu = sums == "fp32" and dtype != "fp32" and not made.is_on_gpu
    reasons = []
    if not _passes(judged):
        reasons.append(_reason_of_output(made, judged, places, models, may_be_cpu))
    if largest(gradients[0]) > 1:
        reasons.append(_reason_of_gradients(made, gradients[2], judge, may_be_cpu))
    told = _told(made, judged, gradients, f"any order, {assumed}, sums in {sums}", reasons)
    return replace(told, screened=screened)


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


def _chosen(
    call: AttentionCall, rows: int | Sequence[int] | Literal["all"] | None, seed: int, pairs: int
) -> tuple[tuple[Place, ...], int]:
    """Return the parts to check, and of how many rows that a GPU computed they are the worst."""
    if isinstance(rows, Sequence):
        return tuple(_of_all_heads(call, rows)), 0
    if call.is_on_gpu:
        from fa3verify.checking.screen import can_screen, worst_rows

        if can_screen(call):
            worst, count = worst_rows(call, seed=seed, rows=rows or 16, heads=_MOST_SCREENED, pairs=pairs)
            return tuple((i, slice(head, head + 1), np.array(own)) for (i, head), own in worst.items()), count
    return tuple(sampled(call, rows or 128, seed)), 0


def _of_all_heads(call: AttentionCall, rows: Sequence[int] | str) -> Iterator[Place]:
    for sequence, n in enumerate(call.lengths_q):
        for head_kv in range(call.nheads_kv if n else 0):
            yield sequence, call.heads_of(head_kv), np.arange(n) if isinstance(rows, str) else np.array(rows)


def sampled(call: AttentionCall, rows: int, seed: int) -> Iterator[Place]:
    """Yield parts until there are ``rows``: of the sequences with most and fewest keys, then of others by the seed."""
    rng = np.random.default_rng(seed)
    pairs = [(i, head) for i in call.asked for head in range(call.nheads)]
    # The last head of the first group and the first of the last are those that a wrong map of heads to kv heads moves.
    named = [(call.asked[-1], call.group - 1), (call.asked[0], call.nheads - call.group)] if call.asked else []
    # Of short sequences all heads that share keys are one part.
    units = [
        (i, head, 1) if call.lengths_q[i] > 2 * _EDGES else (i, head - head % call.group, call.group)
        for i, head in [*named, *(pairs[at] for at in rng.permutation(len(pairs)))]
    ]
    parts = list(dict.fromkeys(units))[:_MOST_PARTS]
    most = max(_ROWS_OF_A_PART, -(-rows // max(1, len(parts))))
    left = rows
    keys = 0
    for i, (sequence, head, count) in enumerate(parts):
        keys += call.lengths_k[sequence]
        if left <= 0 or (i > 1 and keys > _MOST_KEYS):
            return
        chosen = _rows(call.lengths_q[sequence], min(left, most), rng)
        left -= len(chosen) * count
        yield sequence, slice(head, head + count), chosen


def _rows(n: int, most: int, rng: np.random.Generator) -> np.ndarray:
    """Return ascending positions of queries: the first and last ones, those around tiles, and others."""
    if n <= most:
        return np.arange(n)
    edges = _TILE * rng.integers(1, max(2, n // _TILE), most // 8)
    named = np.concatenate([np.arange(_EDGES), np.arange(n - _EDGES, n), edges, edges - 1])
    return np.unique(np.concatenate([named, rng.integers(0, n, n)])[:most].clip(0, n - 1))


def _under_best(
    call: AttentionCall, places: Sequence[Place], models: dict[str, KernelModel]
) -> tuple[list[tuple[CheckedRows, ...]], str]:
    """Judge parts under the hypothesis that fits them best; one must fit all of them."""
    best: list[tuple[CheckedRows, ...]] = []
    name = next(iter(models))
    with ThreadPoolExecutor(_THREADS) as pool:
        parts = list(pool.map(lambda place: call.part(*place), places))
        truths = list(pool.map(truth_of, parts))
        for each, model in models.items():
            found = list(pool.map(partial(rows_of, model=model), places, parts, truths))
            if not best or largest(chain(*found)) < largest(chain(*best)):
                best, name = found, each
            if _passes(best):
                break
    return best, name


def truth_of(part: CallPart) -> Attention:
    """Compute the rows of a part in float64."""
    return attention(part.problem, *part.operands.dequantized(part.problem), only=part.rows)


def _passes(judged: Sequence[tuple[CheckedRows, ...]]) -> bool:
    return largest(chain(*judged)) <= 1


def rows_of(place: Place, part: CallPart, truth: Attention, model: KernelModel) -> tuple[CheckedRows, ...]:
    """Return the rows of out of a part and, where the call has one, of lse."""
    bound = forward_bound(part.problem, part.operands, model, part.rows)
    without_weight = np.isneginf(truth.lse[0][:, part.rows].T)
    has_nan = not all(np.isfinite(x.astype(np.float32)).all() for x in (part.operands.k, part.operands.v))
    out = CheckedRows(
        name="out",
        sequence=place[0],
        head=place[1].start,
        rows=part.rows,
        got=part.out,
        truth=truth.out[0, part.rows],
        bound=bound.out[0, part.rows],
        is_of_contract=without_weight | (has_nan & np.isnan(part.out.astype(np.float32)).any(axis=2)),
    )
    if part.lse is None:
        return (out,)
    exact, allowed = (x[0][:, part.rows].T[:, :, None] for x in (truth.lse, bound.lse))
    allowed = np.where(np.isnan(exact), np.inf, allowed)
    return out, replace(out, name="lse", got=part.lse.T[:, :, None], truth=exact, bound=allowed)


def _changes(call: AttentionCall) -> list[tuple[str, Any, bool]]:
    """Return what a call may really have been: a fact, its value, and whether that is a contract of its own."""
    left, right = call.window
    windows = ((-1, -1), (left - 1, right), (left + 1, right), (left, right - 1), (left, right + 1))
    terms = [name for name in TERMS if getattr(call, name) is not None]
    return [
        ("causal", not call.causal, False),
        *[("top_left", not call.top_left, True)] * call.causal,
        *[("lse_base", 2, True)] * (call.lse is not None and call.lse_base == "e"),
        *(("softmax_scale", scale, False) for scale in (None, 1.0) if call.softmax_scale != scale),
        *[("softcap", 0.0, False)] * bool(call.softcap),
        *(("window", each, False) for each in windows if call.window != (-1, -1) and min(each) >= -1),
        *((name, None, False) for name in terms),
    ]


def _reason_of_output(
    call: AttentionCall,
    judged: Sequence[tuple[CheckedRows, ...]],
    places: Sequence[Place],
    models: dict[str, KernelModel],
    may_be_cpu: bool,
) -> tuple[str, bool]:
    """Return in words what would explain that rows leave their bound, and whether it is a contract of its own."""
    if all((~x.beyond | x.is_of_contract).all() for x in chain(*judged)):
        return "rows that see no key, or keys with NaN, hold what FlashAttention-3 does not return there", True
    of_cpu = {name: replace(model, exp_error=CPU_EXP_ERROR) for name, model in models.items()}
    if may_be_cpu and _passes(_under_best(call, places, of_cpu)[0]):
        return _OF_CPU, True
    return _explanation(call, lambda other: _passes(_under_best(other, places, models)[0]))


def _reason_of_gradients(
    call: AttentionCall, is_open: bool, judge: Callable[..., Judged], may_be_cpu: bool
) -> tuple[str, bool]:
    """Return in words what would explain that gradients leave their bound, and whether it is a contract."""
    if may_be_cpu and largest(judge(call, is_of_cpu=True, is_brief=True)[0]) <= 1:
        return _OF_CPU, True
    if is_open:
        return "a backward with a forward of its own was not tried at this length: rows='all' does", True
    return _explanation(call, lambda other: largest(judge(other, is_brief=True)[0]) <= 1)


def _explanation(call: AttentionCall, is_right: Callable[[AttentionCall], bool]) -> tuple[str, bool]:
    """Return what one change of the call makes it right, and whether it is a contract; empty if none does."""
    for name, value, is_contract in _changes(call):
        if is_right(replace(call, **{name: value})):
            told = "1 / sqrt(head_dim)" if (name, value) == ("softmax_scale", None) else value
            return f"would be right with {name}={told}", is_contract
    return "", False


def _told(
    call: AttentionCall,
    judged: Sequence[tuple[CheckedRows, ...]],
    gradients: Judged,
    assumed: str,
    reasons: Sequence[tuple[str, bool]],
) -> CheckedCall:
    """Put what was found into words."""
    checked = [*chain(*judged), *gradients[0]]
    figures = [_figures(call, out) for out, *_ in judged]
    counts = [each["outputs"] - each["unbounded"] for each in figures]
    lost = math.fsum(each["bits_lost"] * n for each, n in zip(figures, counts, strict=True) if n)
    worst = max(checked, key=lambda x: x.largest, default=None)
    is_contract = all(is_contract for _, is_contract in reasons)
    return CheckedCall(
        verdict="pass" if not reasons else "question" if is_contract else "fail",
        rows=sum(out.beyond.size for out, *_ in judged),
        rows_of=sum(call.lengths_q) * call.nheads,
        ratio=largest(checked),
        seen="no query" if worst is None else worst.place,
        wrong=where(checked),
        explained="; ".join(dict.fromkeys(words for words, _ in reasons if words)),
        bits_lost=lost / (sum(counts) or 1),
        unjudged=int(sum(each["unbounded"] for each in figures)),
        assumed=assumed,
        gradients=gradients[1],
    )


def _figures(call: AttentionCall, out: CheckedRows) -> dict[str, float]:
    """Return the figures of error of rows of out, as of a case of a campaign."""
    config = ForwardConfig(out_dtype=call.formats[1])
    got, truth, bound = ({"out": x} for x in (out.got, out.truth, out.bound))
    return metrics.figures(operations.find(operations.FORWARD), got, truth, None, bound, config)
