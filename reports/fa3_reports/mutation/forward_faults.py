"""Bugs that released forward kernels have shipped with, planted around or in the twin.

A mistake is a planted fault of the twin, a :class:`~fa3_kernels.faults.table.Rewrite` of its source, or a function of
problem, operands, configuration and the sound twin's run that returns what the mistaken kernel would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from fa3_kernels.faults.table import Fault
from fa3_reference.problem import AttentionProblem, Descale, Operands
from fa3verify.operations.forward import Result

Run = Callable[..., Result]
Mistake = Callable[[AttentionProblem, Operands, Any, Run], Result]


def where(fault: Fault, holds: Callable[[AttentionProblem], bool]) -> Mistake:
    """A planted fault in one branch of the dispatch only."""
    return lambda problem, operands, config, run: run(fault=fault if holds(problem) else None)


def posed(change: Callable[[AttentionProblem], dict[str, Any]]) -> Mistake:
    """Another problem is computed than the one that was asked for."""
    return lambda problem, operands, config, run: run(p=replace(problem, **change(problem)))


def fed(change: Callable[[AttentionProblem, Operands], dict[str, Any]]) -> Mistake:
    """Other operands are read than those that were given."""
    return lambda problem, operands, config, run: run(o=replace(operands, **change(problem, operands)))


def narrower(problem: AttentionProblem) -> dict[str, Any]:
    """A window whose left side is one key short."""
    left, right = problem.window
    return {"window": (left - 1, right)} if left > 0 else {}


def nan_in_last_tile(problem: AttentionProblem, operands: Operands, config: Any, run: Run) -> Result:
    """Rows of K beyond the last key hold NaN, and the mask adds -inf to what they give."""
    found = run()
    out = found.out.copy()
    lse = np.array(found.lse)
    for seq in problem.sequences():
        if seq.seqlen_k % config.tile_n:
            problem.rows_q(out, seq)[...] = np.nan
            problem.rows_lse(lse, seq)[...] = np.nan
    return Result(out, lse)


def first_stride(problem: AttentionProblem, operands: Operands, config: Any, run: Run) -> Result:
    """The lse of packed sequences is written as if each began where the first one's length says."""
    found = run()
    lse = np.array(found.lse)
    if problem.is_varlen:
        starts = [seq.index * (problem.seqlens_q or (0,))[0] for seq in problem.sequences()]
        written = lse.copy()
        for start, seq in zip(starts, problem.sequences()):
            rows = problem.rows_lse(np.array(found.lse), seq)
            places = (start + np.arange(rows.shape[-1])) % max(lse.shape[-1], 1)
            written[..., places] = rows
        lse = written
    return Result(found.out, lse)


def descale_of_k(problem: AttentionProblem, operands: Operands) -> dict[str, Any]:
    """Q takes the first descale of its K."""
    q = operands.q_descale
    k = operands.k_descale
    if q is None or k is None:
        return {}
    heads = np.arange(q.values.shape[1]) * k.values.shape[1] // q.values.shape[1]
    values = np.broadcast_to(k.values[:, heads, :1], q.values.shape)
    return {"q_descale": Descale(np.ascontiguousarray(values), q.block_rows)}


def one_descale(problem: AttentionProblem, operands: Operands) -> dict[str, Any]:
    """Descales of every sequence and head are those of the first."""
    return {
        name: Descale(np.full_like(given.values, given.values[0, 0, 0]), given.block_rows)
        for name in ("q_descale", "k_descale", "v_descale")
        if (given := getattr(operands, name)) is not None
    }


def in_higher_precision(problem: AttentionProblem, operands: Operands, config: Any, run: Run) -> Result:
    """FP8 is turned into wider numbers first, and the products are those of another instruction: better, and not what
    was asked for."""
    from fa3_kernels.twin.forward import forward

    return Result(*forward(problem, operands, config, ideal=frozenset(("scores", "p_rounding", "pv"))))


def tile_of_batch(problem: AttentionProblem, operands: Operands, config: Any, run: Run) -> Result:
    """The key tile is another one where there are several sequences."""
    return run(c=replace(config, tile_n=64)) if problem.batch > 1 and config.tile_n % 64 == 0 else run()


def first_kv_head(problem: AttentionProblem, operands: Operands) -> dict[str, Any]:
    """All query heads read kv head 0, unless groups are as many as heads in one."""
    if problem.group == problem.nheads_kv:
        return {}
    return {name: np.ascontiguousarray(np.broadcast_to(x[..., :1, :], x.shape)) for name, x in _keys(operands)}


def head_of_tile_start(problem: AttentionProblem, operands: Operands) -> dict[str, Any]:
    """Two kv heads in a tile of packed heads: all its rows read the first."""
    heads = np.arange(problem.nheads_kv)
    return {name: np.ascontiguousarray(x[..., heads - heads % 2, :]) for name, x in _keys(operands)}


def _keys(operands: Operands) -> tuple[tuple[str, np.ndarray], ...]:
    return ("k", operands.k), ("v", operands.v)


def third_sequence(problem: AttentionProblem, operands: Operands, config: Any, run: Run) -> Result:
    """A loop over sequences that takes two at a time is not gone through again: the third reads where the first is."""
    found = run()
    out = found.out.copy()
    sequences = list(problem.sequences())
    for seq in sequences[2:]:
        rows = problem.rows_q(out, seq)
        first = problem.rows_q(found.out, sequences[0])
        rows[: len(first)] = first[: len(rows)]
    return Result(out, found.lse)


def one_nan(problem: AttentionProblem, operands: Operands, config: Any, run: Run) -> Result:
    """One element is NaN, which a comparator that takes NaN for anything would pass."""
    found = run()
    out = found.out.copy()
    out.reshape(-1)[: 1 if out.size else 0] = np.nan
    return Result(out, found.lse)
