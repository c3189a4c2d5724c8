"""Gradients of a call: dQ of some queries, dK and dV of some keys of one kv head, against float64 and their bound.

A row of dQ needs its own query and all keys. A row of dK or dV needs its own key and all queries if the backward reads
the lse of the forward and takes D from its out, and else all pairs. Each such block of pairs is a problem of its own,
whose mask is written out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Literal

import numpy as np

from fa3_reference.attention_bwd import AttentionGradients, attention_bwd
from fa3_reference.bounds.backward import BackwardBound, backward_bound, returned_by
from fa3_reference.bounds.model import BackwardModel
from fa3_reference.problem import AttentionProblem, BackwardOperands, Dtype
from fa3_reference.score_term import ScoreTerm
from fa3_reference.terms import added
from fa3verify.checking.call import AttentionCall, on_host
from fa3verify.checking.checked import CheckedRows, largest
from fa3verify.operations.operation import Accumulator

NAMES = ("dq", "dk", "dv")
CPU_EXP_ERROR = 2.0**-13  # of an exponential of torch's kernels for CPUs in 16 bits, 2^-13.2 measured (AVX-512)
_CPU_BLOCK = 256  # rows and keys of a block there, of which each adds to gradients in 16 bits
SOME_ROWS = 16  # queries, and keys, that are checked of a kv head
MOST_PAIRS = 1 << 23  # of queries and keys of all heads of a group, that are computed where rows are sampled


Judged = tuple[list[CheckedRows], str, bool]  # rows; what was checked, in words; whether a hypothesis is left open


def judged_gradients(
    call: AttentionCall,
    *,
    seed: int | None,
    accumulator: Accumulator,
    is_of_cpu: bool = False,
    is_brief: bool = False,
) -> Judged:
    """Judge gradients of a call under the hypothesis that fits them best.

    Parameters
    ----------
    call : AttentionCall
        One that has dout and at least one of dq, dk and dv.
    seed : int, optional
        Draws the rows that are checked of the first kv head of the sequence with fewest keys and of the last kv head of
        that with most; None checks all rows of all heads.
    accumulator : {"either", "fp32", "wgmma", "tf32"}
        What adds the products.
    is_of_cpu : bool
        Allow the roundings that torch's kernels for CPUs have beside those of any order.
    is_brief : bool
        Look at no further row under a hypothesis that one has refuted.

    Returns
    -------
    list of CheckedRows, str, bool
        A backward that reads out and lse is assumed if the call has its lse, and if that does not fit, or without
        one, a backward with a forward of its own; the words say which. The last is whether a hypothesis that would need
        all pairs of queries and keys was not tried to its end, where the others do not fit.
    """
    forwards: tuple[Literal["given", "own"], ...] = ("own",) if call.lse is None else ("given", "own")
    dtype: Dtype = call.formats[0]  # type: ignore[assignment]
    found: list[Judged] = []
    for forward in forwards:
        for name, model in BackwardModel.hypotheses(dtype, forward, accumulator).items():
            if is_of_cpu:
                model = replace(model, exp_error=CPU_EXP_ERROR, parts=dtype, tile_m=_CPU_BLOCK, tile_n=_CPU_BLOCK)
            rows = []
            for x in chain.from_iterable(_judged(call, place, model, seed) for place in _places(call, seed)):
                rows.append(x)
                if is_brief and x.largest > 1:
                    break
            left = sorted({x for x in NAMES if getattr(call, x) is not None} - {x.name for x in rows}) if rows else []
            words = f"gradients: {_counts(rows, left)}; {name}"
            if largest(rows) <= 1 and not left:
                return rows, words, False
            found.append((rows, words, bool(left)))
    whole = [x for x in found if not x[2]]
    rows, words, _ = min(whole or found, key=lambda x: largest(x[0]))
    return rows, words, bool(whole) and any(is_left and largest(own) <= 1 for own, _, is_left in found)


def _counts(rows: list[CheckedRows], left: list[str]) -> str:
    """Say how many rows of which gradients were checked, and which gradients were not."""
    counts = {name: sum(x.beyond.size for x in rows if x.name == name) for name in NAMES}
    told = [f"{n:,} rows of {name}" for name, n in counts.items() if n]
    told += [f"not {' and '.join(left)}, which need lse or rows='all' at this length"] if left else []
    return ", ".join(told)


def _places(call: AttentionCall, seed: int | None) -> list[tuple[int, int]]:
    """Return pairs of a sequence and a kv head."""
    if seed is None:
        return [(i, head) for i in call.asked for head in range(call.nheads_kv)]
    return list(dict.fromkeys([(call.asked[0], 0), (call.asked[-1], call.nheads_kv - 1)])) if call.asked else []


def _judged(
    call: AttentionCall, place: tuple[int, int], model: BackwardModel, seed: int | None
) -> Iterator[CheckedRows]:
    """Yield the rows that are judged of one kv head of a sequence; all of them where there is no seed."""
    sequence, head_kv = place
    heads = call.heads_of(head_kv)
    rows, keys = (np.arange(n[sequence]) for n in (call.lengths_q, call.lengths_k))
    some_rows, some_keys = (x if seed is None else _some(x, seed) for x in (rows, keys))
    if call.dq is not None:
        got = on_host(call.queries(call.dq, sequence)[some_rows][:, heads])
        truth, bound = _truth_and_bound(*_block(call, place, some_rows, keys), model)
        yield CheckedRows(
            name="dq",
            sequence=sequence,
            head=heads.start,
            rows=some_rows,
            got=got,
            truth=truth.dq[0],
            bound=bound.dq[0],
        )
    is_local = (model.forward, model.dots) == ("given", "out")  # a row of dK or dV then needs no other key
    if seed is not None and not is_local and call.group * rows.size * keys.size > MOST_PAIRS:
        return
    truth, bound = _truth_and_bound(*_block(call, place, rows, some_keys if is_local else keys), model)
    at = slice(None) if is_local else some_keys
    for name, given in (("dk", call.dk), ("dv", call.dv)):
        if given is not None:
            yield CheckedRows(
                name=name,
                sequence=sequence,
                head=head_kv,
                rows=some_keys,
                got=on_host(call.keys(given, sequence, head_kv))[some_keys, None],
                truth=getattr(truth, name)[0, at],
                bound=getattr(bound, name)[0, at],
            )


def _some(positions: np.ndarray, seed: int) -> np.ndarray:
    """Return the first and the last of them, and others that are drawn."""
    if len(positions) <= SOME_ROWS:
        return positions
    rng = np.random.default_rng(seed)
    return np.unique(np.append(rng.choice(positions, SOME_ROWS - 2, replace=False), positions[[0, -1]]))


def _block(
    call: AttentionCall, place: tuple[int, int], rows: np.ndarray, keys: np.ndarray
) -> tuple[AttentionProblem, BackwardOperands]:
    """Return the pairs of some queries and keys of a kv head as a problem, whose mask is written out."""
    sequence, head_kv = place
    heads = call.heads_of(head_kv)
    problem, given, _, out, lse = call.part(sequence, heads, rows)
    first, stop = problem.visible_keys(rows, problem.seqlen_q, problem.seqlen_k)
    hidden = (keys < first[:, None]) | (keys >= stop[:, None])
    scores = np.where(hidden, -np.inf, 0.0)[None]
    if given.term is not None:
        (whole,) = problem.sequences()
        terms = [added(problem, given.term, whole, head, rows)[:, keys] for head in range(problem.nheads)]
        scores = np.where(hidden, -np.inf, np.stack(terms))
    is_bias = problem.term is not None and problem.term.kind.startswith("bias")
    term = ScoreTerm("bias_fp32" if is_bias else "attn_mask", "b" if len(scores) > 1 else "bh")
    block = replace(
        problem,
        seqlen_q=len(rows),
        seqlen_k=len(keys),
        causal=False,
        top_left=False,
        window=(-1, -1),
        term=term,
    )
    return block, BackwardOperands(
        q=given.q[:, rows],
        k=given.k[:, keys],
        v=given.v[:, keys],
        sinks=given.sinks,
        term=scores.astype(np.float32)[None] if is_bias else ~np.isneginf(scores)[None],
        dout=on_host(call.queries(call.dout, sequence)[rows][:, heads])[None],
        out=out[None],
        lse=np.zeros((1, problem.nheads, len(rows)), np.float32) if lse is None else lse[None].astype(np.float32),
    )


def _truth_and_bound(
    problem: AttentionProblem, operands: BackwardOperands, model: BackwardModel
) -> tuple[AttentionGradients, BackwardBound]:
    """Return the exact gradients for the out and lse that the kernel used, and their bound."""
    term = operands.term
    assert term is not None
    q, k, v, dout = (x.astype(np.float64) for x in (operands.q, operands.k, operands.v, operands.dout))
    forward = returned_by(problem, operands, model)
    truth = attention_bwd(problem, q, k, v, dout, forward, None, term)
    return truth, backward_bound(problem, operands, model)
