"""This module runs both sides of what the plan says: calls of one class return equal bits, calls of two do not.

A kernel on a GPU runs whole batches. Of a twin one kv head of the row's sequence is computed, as either plan has it; a
few batches that are little work run as a whole beside that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fa3_reference.problem import AttentionProblem
from fa3verify.compare.axes import axis_of
from fa3verify.compare.bits import First, first_difference, size_of
from fa3verify.compare.run import RECIPES, call_of
from fa3verify.inputs.recipe import Recipe
from fa3verify.invariance.plans import Batch, Planner
from fa3verify.kernels.calls import Refused
from fa3verify.operations import Outputs
from fa3verify.properties.law import Untaken

MOST_WORK = 1 << 22  # elements of K, and a 64th of the products, of a batch that a twin runs as a whole


@dataclass(frozen=True, slots=True)
class Confirmed:
    """Holds what two calls returned.

    Parameters
    ----------
    outputs : int
        That were compared; 0 where nothing ran.
    is_whole : bool
        Whether the batch ran as a whole.
    first : First, optional
        The first output that differs.
    refused : str
        Why nothing ran.
    """

    outputs: int
    is_whole: bool
    first: First | None = None
    refused: str = ""


def confirm(
    planner: Planner,
    alone: Batch,
    batch: Batch,
    recipes: tuple[Recipe, ...] = RECIPES,
    *,
    is_whole: bool = False,
) -> Confirmed:
    """Run the row of two calls on several families of inputs, until an output differs.

    Parameters
    ----------
    planner : Planner
    alone, batch : Batch
        They share a row of the first sequence, or all of its rows.
    recipes : tuple of Recipe
    is_whole : bool
        Whether all of the batch runs, beside its first sequence alone; on a GPU it always does.
    """
    is_batch = len(batch.lengths) > 1 and alone == Batch(batch.lengths[:1])
    is_whole = is_batch and (is_whole or planner.candidate.device != "cpu")
    outputs = 0
    try:
        for recipe in recipes:
            a, b = _whole(planner, batch, recipe) if is_whole else _rows(planner, alone, batch, recipe)
            outputs = outputs + size_of(a, b)
            if first := first_difference(a, b):
                return Confirmed(outputs, is_whole, first)
    except (Refused, Untaken) as error:
        return Confirmed(0, is_whole, refused=str(error).removeprefix("ValueError: "))
    return Confirmed(outputs, is_whole)


def is_little(planner: Planner, batch: Batch) -> bool:
    """Tell whether a batch is little work for a twin."""
    work = sum(planner.sizes["nheads_kv"] * k + planner.sizes["nheads"] * q * k // 64 for q, k in batch.lengths)
    return work * planner.sizes["head_dim"] <= MOST_WORK


def _whole(planner: Planner, batch: Batch, recipe: Recipe) -> tuple[Outputs, Outputs]:
    setup = call_of(planner.candidate, planner.problem(batch.lengths), recipe)
    axis = axis_of("neighbours" if planner.is_packed else "batch")
    pair = next(axis.pairs(planner.candidate, setup, 0))
    return pair.of_plain(pair.plain.run()), pair.of_changed(pair.changed.run())


def _rows(planner: Planner, alone: Batch, batch: Batch, recipe: Recipe) -> tuple[Outputs, Outputs]:
    """Run one kv head of the first sequence in the configuration of either call, and return the rows of both."""
    sizes = dict(planner.sizes)
    sizes |= {"nheads": sizes["nheads"] // sizes["nheads_kv"], "nheads_kv": 1}
    calls = (alone, batch)
    behind = max(call.behind for call in calls)
    before = max(call.lengths[0][0] - call.behind for call in calls)
    keys = alone.lengths[0][1] - alone.behind
    problem = AttentionProblem(1, seqlen_q=before + behind, seqlen_k=keys + behind, **sizes)
    setup = call_of(planner.candidate, problem, recipe)
    given = setup.operands
    results = []
    for call in calls:
        queries, seqlen_k = call.lengths[0]
        config = planner.config(len(call.lengths), planner.longest(call.lengths))
        stop = before + call.behind
        operands = replace(given, q=given.q[:, stop - queries : stop], k=given.k[:, :seqlen_k], v=given.v[:, :seqlen_k])
        one = setup._replace(
            problem=replace(problem, seqlen_q=queries, seqlen_k=seqlen_k),
            operands=operands,
            config=replace(config, num_splits=planner.splits(config, call.lengths)),
        )
        row = queries - call.behind
        results.append(_cut(one.run(), slice(row - 1 if planner.is_one else 0, row)))
    return results[0], results[1]


def _cut(outputs: Outputs, rows: slice) -> Outputs:
    """Return the outputs of some queries."""
    return {name: x[:, rows] if name == "out" else x[..., rows] for name, x in outputs.items()}
