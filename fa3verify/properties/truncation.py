"""Laws about rows computed in other calls: alone, in chunks of a prefill, or without the keys that they do not see.

A serving stack computes the same row in calls of different shapes. If the row's key tiles are the same in both calls,
its bits must be equal; in our kernels they are whenever the part starts at a whole tile. For kernels that do not claim
equal bits, the calls may differ by the sum of their bounds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from hypothesis import strategies as st

from fa3_reference.problem import AttentionProblem, Sequence
from fa3verify.cases.case import Case
from fa3verify.kernels.record import Kernel
from fa3verify.operations import Outputs
from fa3verify.properties.compare import CallResult, Found, agree, called, same_bits
from fa3verify.properties.law import Drawn, Setup, Trial, Untaken, Violation
from fa3verify.properties.transforms import filled, key_unit, masked_part, part, part_of_result, visible
from fa3verify.properties.trials import Wanted, law, needs

CHUNKS = 3  # of a prefill, at most
Made = Callable[[Setup], Setup]  # turns the call of a part into another one with the same values


def _row(draw: st.DrawFn, kernel: Kernel, case: Case) -> Drawn:
    return {"row": draw(st.integers(0, max(0, case.problem.seqlen_q - 1)))}


def _causal(setup: Setup, trial: Trial) -> Found:
    """Compare a row of a causal call with a dense call of that row and the keys it sees."""
    whole = setup.run()
    for seq in filled(setup.problem):
        row = trial.integer("row", 0, 2**20) % seq.seqlen_q
        stop = int(visible(setup.problem, seq)[1][row])
        rows = slice(row, row + 1)
        cut = part(setup, seq, rows=rows, keys=slice(0, stop))
        alone = cut._replace(problem=replace(cut.problem, causal=False)).run()
        what = f"row {row} of sequence {seq.index} alone with keys [0, {stop}) against the causal call"
        yield same_bits(what, alone, part_of_result(setup, whole, seq, rows=rows))


def _windowed(setup: Setup, trial: Trial) -> Found:
    """Compare a row of a windowed call with a call of that row without the keys outside its window."""
    whole = called(setup)
    for seq in filled(setup.problem):
        row = trial.integer("row", 0, 2**20) % seq.seqlen_q
        first, stop = (int(x[row]) for x in visible(setup.problem, seq))
        if stop <= first:
            continue
        unit = key_unit(setup)
        if setup.kernel.claims(trial.law):  # tiles of the part are those of the whole
            unit = math.lcm(unit, setup.config.tile_n)
        yield _part_agrees(trial, whole, seq, slice(row, row + 1), slice(first - first % unit, stop))


def _as_it_is(setup: Setup) -> Setup:
    return setup


def _part_agrees(
    trial: Trial, whole: CallResult, seq: Sequence, rows: slice, keys: slice, made: Made = _as_it_is
) -> Violation | None:
    """Compare a call of some rows and keys with the same rows of the whole call."""
    alone = called(made(masked_part(whole.setup, seq, rows=rows, keys=keys)))
    names = f"rows [{rows.start}, {rows.stop}) of sequence {seq.index} with keys [{keys.start}, {keys.stop}) alone"

    def of_part(outputs: Outputs) -> Outputs:
        cut = part_of_result(whole.setup, outputs, seq, rows=rows)
        return {name: x[0] for name, x in cut.items()} if alone.setup.problem.is_varlen else cut

    return agree(trial, f"{names} against the whole call", got=alone, expected=whole, of=of_part)


def chunks(draw: st.DrawFn, kernel: Kernel, case: Case) -> Drawn:
    """Draw the rows at which the chunks of a prefill start, but for the first chunk."""
    starts = st.lists(st.integers(1, max(1, case.problem.seqlen_q - 1)), max_size=CHUNKS - 1, unique=True)
    return {"starts": sorted(draw(starts))}


def chunked(setup: Setup, trial: Trial, made: Made = _as_it_is) -> Found:
    """Compare chunks of each prefill, and its last query alone, with the whole; ``made`` says how a chunk is called.

    Chunks that the kernel does not take are left out; Untaken where it takes none.
    """
    starts = trial.parameters.get("starts")
    if not isinstance(starts, list) or not all(isinstance(n, int) and n > 0 for n in starts):
        raise ValueError(f"{trial.law}: starts must be a list of positive integers, got {starts!r}")
    whole = called(setup)
    taken = 0
    untaken = None
    for seq, rows, keys in _pieces(setup.problem, starts):
        try:
            violation = _part_agrees(trial, whole, seq, rows, keys, made)
        except Untaken as error:
            untaken = error
        else:
            taken += 1
            yield violation
    if untaken and not taken:
        raise untaken


def _pieces(problem: AttentionProblem, starts: Iterable[int]) -> Iterator[tuple[Sequence, slice, slice]]:
    """Yield the rows of every chunk, and of the last query alone, each with the keys that it sees."""
    for seq in filled(problem):
        edges = sorted({0, *(n for n in starts if n < seq.seqlen_q), seq.seqlen_q})
        parts = [slice(a, b) for a, b in itertools.pairwise(edges)]
        decode = slice(seq.seqlen_q - 1, seq.seqlen_q)
        for rows in [*parts, decode] if seq.seqlen_q > 1 else parts:
            keys = slice(0, int(visible(problem, seq)[1][rows.stop - 1]))
            if keys.stop:  # a policy, not this law, says what a call without keys returns
                yield seq, rows, keys


TRUNCATION_LAWS = (
    law(
        "causal_row_equals_truncated_problem",
        "row i of a causal call equals a dense call of row i alone with the keys it sees, bit for bit (operands "
        "given, not re-quantised)",
        "invariant",
        _causal,
        wanted=Wanted(masks="causal"),
        parameters=_row,
        applies=needs("causal"),
    ),
    law(
        "windowed_row_equals_truncated_problem",
        "row i of a windowed call equals a call of row i alone without the key tiles before its window and the keys "
        "behind it, bit for bit; of kernels that do not claim it, without any key outside, within the sum of both "
        "bounds",
        "agreement",
        _windowed,
        wanted=Wanted(masks="window"),
        parameters=_row,
        applies=needs("window"),
    ),
    law(
        "prefill_equals_its_chunks_and_decode",
        "rows of a causal call equal calls of fewer of its queries with the keys up to their last one, of its last "
        "query alone too, bit for bit where claimed, else within the sum of both bounds",
        "agreement",
        chunked,
        wanted=Wanted(masks="causal"),
        parameters=chunks,
        applies=needs("causal"),
    ),
)
