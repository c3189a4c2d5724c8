"""Runs that confirm a proof: calls of one class return equal bits, calls of two classes do not.

A kernel on a GPU runs whole batches. A twin computes one kv head of the row's sequence by the plan of either call; only
a few batches that are little work run as a whole on a twin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from fa3_reference.problem import AttentionProblem, Operands
from fa3verify.compare.axes import Pair
from fa3verify.compare.proof.plans import Batch, Planner
from fa3verify.compare.run import RECIPES, Compared, call_of, compare_pairs
from fa3verify.inputs.recipe import Recipe
from fa3verify.kernels.twins import is_twin
from fa3verify.operations import Outputs
from fa3verify.properties.law import Setup

MOST_WORK = 1 << 22  # of a batch that a twin runs as a whole: elements of K plus a 64th of the products
WHOLE = "calls as they are"
ONE_HEAD = "one kv head of the row's sequence"
MOST_DRAWN = 1 << 26  # elements of Q, or of K, of a batch that a kernel on a GPU runs


def confirm(
    planner: Planner,
    alone: Batch,
    batch: Batch,
    recipes: tuple[Recipe, ...] = RECIPES,
    *,
    is_whole: bool = False,
) -> Compared:
    """Run the row of two calls on several families of inputs, until an output differs.

    Parameters
    ----------
    planner : Planner
    alone, batch : Batch
        Two calls that share a row of the first sequence, or all of its rows.
    recipes : tuple of Recipe
        The families of inputs.
    is_whole : bool
        Whether a twin runs all of the batch instead of one head of its first sequence; a kernel on a GPU always does.
    """
    is_whole = is_whole or not is_twin(planner.kernel.name)

    def pairs(_: None, recipe: Recipe) -> Iterator[Pair]:
        plain, changed = (_called if is_whole else _computed)(planner, (alone, batch), recipe)
        yield Pair(plain, changed, partial(_cut, planner, alone), partial(_cut, planner, batch))

    return compare_pairs(WHOLE if is_whole else ONE_HEAD, (None,), recipes, pairs)


def can_run(planner: Planner, batch: Batch) -> bool:
    """Tell whether a batch can be run: always by a twin, which computes one head, else if arrays are not too large."""
    queries, keys = map(sum, zip(*batch.lengths, strict=True))
    most = max(planner.sizes["nheads"] * queries, planner.sizes["nheads_kv"] * keys) * planner.sizes["head_dim"]
    return is_twin(planner.kernel.name) or most <= MOST_DRAWN


def is_little(planner: Planner, batch: Batch) -> bool:
    """Tell whether a batch is little work for a twin."""
    work = sum(planner.sizes["nheads_kv"] * k + planner.sizes["nheads"] * q * k // 64 for q, k in batch.lengths)
    return work * planner.sizes["head_dim"] <= MOST_WORK


def _own(calls: tuple[Batch, ...]) -> tuple[int, int, int]:
    """Return the most queries of a call up to and with the shared row, the most behind it, and the keys it sees."""
    (_, keys), behind = calls[0].lengths[0], calls[0].behind
    return max(x.lengths[0][0] - x.behind for x in calls), max(x.behind for x in calls), keys - behind


def _called(planner: Planner, calls: tuple[Batch, Batch], recipe: Recipe) -> list[Setup]:
    """Return two whole calls whose first sequences are cut from one, and whose other sequences are their own."""
    before, behind, keys = _own(calls)
    own = (before + behind, keys + behind)
    rest = (*calls[0].lengths[1:], *calls[1].lengths[1:])
    setup = call_of(planner.kernel, planner.problem(planner.around(own, rest)), recipe)
    made = []
    start = 1
    for call in calls:
        stop = before + call.behind
        picked = [0, *range(start, start + len(call.lengths) - 1)]
        rows = ((stop - call.lengths[0][0], stop), (0, call.lengths[0][1]))
        problem = planner.problem(call.lengths)
        config = planner.kernel.config_for(problem)
        made.append(setup._replace(problem=problem, operands=_picked(setup, picked, rows), config=config))
        start = start + len(call.lengths) - 1
    return made


def _picked(setup: Setup, picked: list[int], rows: tuple[tuple[int, int], tuple[int, int]]) -> Operands:
    """Return the operands of the picked sequences; ``rows`` are the queries and the keys that stay of the first."""
    operands = setup.operands
    sequences = [each for each in setup.problem.sequences() if each.index in picked]
    cut = {}
    for name, (start, stop) in zip("qkv", (rows[0], rows[1], rows[1]), strict=True):
        x = getattr(operands, name)
        if setup.problem.is_varlen:
            ends = [(s.q_start, s.seqlen_q) if name == "q" else (s.k_start, s.seqlen_k) for s in sequences[1:]]
            x = np.concatenate([x[start:stop], *(x[a : a + n] for a, n in ends)])
        else:
            x = x[picked, start:stop]
        descale = getattr(operands, f"{name}_descale")
        cut |= {name: x, f"{name}_descale": descale and replace(descale, values=descale.values[picked])}
    return replace(operands, **cut)


def _computed(planner: Planner, calls: tuple[Batch, Batch], recipe: Recipe) -> list[Setup]:
    """Return one kv head of the first sequence as a call of its own, in the configuration of either batch's plan."""
    sizes = {name: value for name, value in planner.sizes.items() if name != "cache"}
    sizes |= {"nheads": sizes["nheads"] // sizes["nheads_kv"], "nheads_kv": 1}
    before, behind, keys = _own(calls)
    problem = AttentionProblem(1, seqlen_q=before + behind, seqlen_k=keys + behind, **sizes)
    setup = call_of(planner.kernel, problem, recipe)
    made = []
    for call in calls:
        queries, seqlen_k = call.lengths[0]
        stop = before + call.behind
        config = planner.config(len(call.lengths), planner.longest(call.lengths))
        one = setup._replace(
            problem=replace(problem, seqlen_q=queries, seqlen_k=seqlen_k),
            operands=_picked(setup, [0], ((stop - queries, stop), (0, seqlen_k))),
            config=replace(config, num_splits=planner.splits(config, call.lengths)),
        )
        made.append(one)
    return made


def _cut(planner: Planner, call: Batch, outputs: Outputs) -> Outputs:
    """Return the outputs of the rows that are asked about."""
    asked = planner.asked(call.behind, call.lengths[0])
    rows = slice(asked.start, asked.stop)
    out = outputs["out"] if outputs["out"].ndim == 3 else outputs["out"][0]
    lse = outputs["lse"] if outputs["lse"].ndim == 2 else outputs["lse"][0]
    return {"out": out[rows], "lse": lse[:, rows]}
