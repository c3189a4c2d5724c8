"""Bugs that released backward kernels have shipped with, planted around the twin, by their row in the museum.

A row is a function of problem, operands and the sound twin's run that returns what the mistaken kernel would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fa3_kernels.faults.table import BackwardFault, faulty
from fa3_kernels.plan.order import BackwardOrder
from fa3_kernels.twin.backward import Gradients, backward
from fa3_reference.problem import AttentionProblem, BackwardOperands
from fa3verify.kernels.record import Kernel
from fa3verify.known import registry

TILE = 64  # rows or keys that a stale or missing tile has
Run = Callable[..., Gradients]
Mistake = Callable[[AttentionProblem, BackwardOperands, Run], Gradients]


@dataclass(frozen=True)
class Row:
    """One row: what is planted, and the family of inputs or the property of quick that finds it."""

    source: str
    mistake: Callable[[], Mistake]  # a fresh one, as some keep a state
    family: str = ""
    law: str = ""
    twin: str = "twin.flash3.dew.backward.fp16"


def kernel_of(row: Row) -> Kernel:
    """The row's twin, by default that of FlashAttention-3's backward in fp16, with the row's mistake around it."""
    sound = registry.find(row.twin)
    mistake = row.mistake()

    def run(problem: AttentionProblem, operands: BackwardOperands, config: Any) -> Gradients:
        def twin(
            p: AttentionProblem = problem,
            o: BackwardOperands = operands,
            fault: BackwardFault | None = None,
            order: BackwardOrder | None = None,
        ) -> Gradients:
            return (faulty(fault) if fault else backward)(p, o, config, order=order)

        return mistake(problem, operands, twin)

    return sound.altered(run=run)


def _stateless(mistake: Mistake) -> Callable[[], Mistake]:
    return lambda: mistake


def _fault(fault: BackwardFault, where: Callable[[AttentionProblem], bool] = lambda p: True) -> Callable[[], Mistake]:
    return lambda: lambda problem, operands, run: run(fault=fault if where(problem) else None)


def _fp8_lse(problem: AttentionProblem, operands: BackwardOperands, run: Run) -> Gradients:
    return run(o=replace(operands, lse=operands.lse + np.float32(8 * np.log(2))))


def _stale_k(problem: AttentionProblem, operands: BackwardOperands, run: Run) -> Gradients:
    """The second tile of K still holds the first."""
    k = operands.k.copy()
    rows = min(TILE, len(k) - TILE) if problem.is_varlen else min(TILE, max(0, k.shape[1] - TILE))
    if rows > 0 and not problem.is_varlen:
        k[:, TILE : TILE + rows] = k[:, :rows]
    return run(o=replace(operands, k=k))


def _early_dots(problem: AttentionProblem, operands: BackwardOperands, run: Run) -> Gradients:
    """D of the first rows is still zero."""
    out = operands.out.copy()
    out[..., :TILE, :, :] = 0
    return run(o=replace(operands, out=out))


def _unordered() -> Mistake:
    """Every second call adds the parts of dQ in the other order."""
    calls = []

    def mistake(problem: AttentionProblem, operands: BackwardOperands, run: Run) -> Gradients:
        calls.append(1)
        return run(order=BackwardOrder(keys="descending" if len(calls) % 2 else "ascending"))

    return mistake


def _stale_semaphore() -> Mistake:
    """A counter that no call resets: every second call takes a part of dQ for added."""
    calls = []

    def mistake(problem: AttentionProblem, operands: BackwardOperands, run: Run) -> Gradients:
        calls.append(1)
        return run(fault=BackwardFault("dropped_dq_part") if len(calls) % 2 == 0 else None)

    return mistake


def _always_causal(problem: AttentionProblem, operands: BackwardOperands, run: Run) -> Gradients:
    return run(p=replace(problem, causal=True)) if problem.window == (-1, -1) else run()


def _dense_statistics(problem: AttentionProblem, operands: BackwardOperands, run: Run) -> Gradients:
    """The lse of packed sequences is read as if each had the longest one's rows."""
    lse = operands.lse.copy()
    if problem.is_varlen:
        for seq in problem.sequences():
            place = np.minimum(seq.index * problem.seqlen_q + np.arange(seq.seqlen_q), lse.shape[-1] - 1)
            problem.rows_lse(lse, seq)[:] = operands.lse[:, place]
    return run(o=replace(operands, lse=lse))


def _short_offsets(problem: AttentionProblem, operands: BackwardOperands, run: Run) -> Gradients:
    """Offsets of 14 bits: what lies beyond is written at the front instead."""
    found = run()
    dq = np.zeros_like(found.dq)
    offsets = np.arange(dq.size) % 2**14
    dq.flat[offsets] = found.dq.ravel()
    return found._replace(dq=dq)


def _strides_of_dout(problem: AttentionProblem, operands: BackwardOperands, run: Run) -> Gradients:
    """O is read with rows and heads exchanged."""
    swapped = np.ascontiguousarray(operands.out.swapaxes(-3, -2)).reshape(operands.out.shape)
    return run(o=replace(operands, out=swapped))


def _transposed_twice(problem: AttentionProblem, operands: BackwardOperands, run: Run) -> Gradients:
    """K and V with rows and heads exchanged, which shows wherever their numbers differ."""
    arrays = {name: getattr(operands, name) for name in "kv"}
    swapped = {name: np.ascontiguousarray(x.swapaxes(-3, -2)).reshape(x.shape) for name, x in arrays.items()}
    return run(o=replace(operands, **swapped))


def _first_block(problem: AttentionProblem, operands: BackwardOperands, run: Run) -> Gradients:
    """Every row block reads the lse of the first one."""
    rows = np.arange(operands.lse.shape[-1]) % TILE
    return run(o=replace(operands, lse=operands.lse[..., rows]))


def _large_scores(problem: AttentionProblem, operands: BackwardOperands, run: Run) -> Gradients:
    """Gradients five times too large where some lse exceeds 12, which that of normal inputs does not."""
    found = run()
    size = np.abs(operands.lse[np.isfinite(operands.lse)]).max(initial=0)
    return Gradients(*(x * x.dtype.type(5) for x in found)) if size > 12 else found


def _times_dlse(factor: float | None) -> Mistake:
    """The gradient of lse counts so many times; None leaves it out."""

    def mistake(problem: AttentionProblem, operands: BackwardOperands, run: Run) -> Gradients:
        dlse = None if factor is None or operands.dlse is None else operands.dlse * np.float32(factor)
        return run(o=replace(operands, dlse=dlse))

    return mistake


def _slope_of_dq_alone(problem: AttentionProblem, operands: BackwardOperands, run: Run) -> Gradients:
    """The derivative of the softcap enters dQ and not dK."""
    return run()._replace(dk=run(fault=BackwardFault("no_softcap_slope")).dk)


REPEATED = "repeated_run_is_identical"
OF_LSE = "gradient_of_the_lse"
OURS = "twin.backward.fp16"
MUSEUM: Mapping[str, Row] = {
    "31": Row("flash-attention 1711", _stateless(_fp8_lse), "normal"),
    "45": Row("flash-attention 1c41d2b0", _stateless(_stale_k), "normal"),
    "46": Row("FA1 Triton 9b0bc978", _fault(BackwardFault("dropped_dq_part")), "normal"),
    "47": Row("flash-attention 2756", _stateless(_early_dots), "normal"),
    "56": Row("flash-attention 2033", _fault(BackwardFault("doubled_dq_part")), "normal"),
    "57, 58, 64": Row("flash-attention 2244, 1596", _unordered, law="negated_dout_negates_gradients"),
    "59, 61": Row("flash-attention 1678, 2063", _stale_semaphore, law=REPEATED),
    "60": Row(
        "flash-attention 2510", _fault(BackwardFault("dropped_dq_part"), lambda p: p.window != (-1, -1)), "normal"
    ),
    "68": Row("flash-attention 443", _fault(BackwardFault("empty_row_lse")), law="rows_without_a_key_have_zero_dq"),
    "69": Row(
        "flash-attention a4f148b6",
        _fault(BackwardFault("dropped_last_rows"), lambda p: p.seqlen_q % 128 != 0),
        "normal",
    ),
    "73": Row("triton 4541", _stateless(_always_causal), "normal"),
    "74": Row("TransformerEngine 3249", _stateless(_dense_statistics), law="gradients_within_bound"),
    "77": Row("flash-attention 1033", _fault(BackwardFault("no_softcap_slope")), "normal", twin=OURS),
    "softcap, argument": Row(
        "flash-attention 72e27c63", _fault(BackwardFault("slope_of_uncapped")), "normal", twin=OURS
    ),
    "softcap, dK": Row("ours, never shipped", _stateless(_slope_of_dq_alone), "normal", twin=OURS),
    "84": Row("levanter 449", _fault(BackwardFault("last_head_only")), "normal"),
    "85": Row("flash-attention 1500, of 14 bits", _stateless(_short_offsets), "normal"),
    "86": Row("flash-attention 9ee0ff1d", _stateless(_strides_of_dout), "normal"),
    "lse": Row("FlashAttention-3, whose lse has none", _stateless(_times_dlse(None)), law=OF_LSE, twin=OURS),
    "lse, sign": Row("ours, never shipped", _stateless(_times_dlse(-1)), law=OF_LSE, twin=OURS),
    "88": Row("diffusers 14338", _stateless(_transposed_twice), "normal"),
    "89": Row("flash-attention b3f1b6a5", _stateless(_first_block), "normal"),
    "90": Row("TransformerEngine 3216", _stateless(_large_scores), "activations:SmolLM2-135M-Instruct"),
}
