"""Samples of the output of a timed kernel, compared with the twin bit for bit.

The last rows of a sequence, with all its keys, are an attention problem of their own with the same row tile as in the
whole problem. The twin computes it in under a second, where the whole would take minutes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fa3_kernels.plan.config import Config
from fa3_kernels.plan.tiles import power_of_two
from fa3_kernels.twin.forward import forward
from fa3_reference.attention import attention
from fa3_reference.problem import AttentionProblem, Descale, Operands
from fa3verify.known.launches import Given, LaunchOutput
from fa3verify.tensors.convert import to_numpy

MAX_ROWS = 128  # that are compared where the row tile is not known


class Sample(NamedTuple):
    """Some rows of one sequence and one group of heads, with the keys that the last of them may see, and the outputs.

    ``lse`` is None if the kernel returned none.
    """

    problem: AttentionProblem
    operands: Operands
    out: np.ndarray
    lse: np.ndarray | None

    @property
    def truth(self) -> np.ndarray:
        """Return float64 attention of the dequantised operands."""
        return attention(self.problem, *self.operands.dequantized(self.problem)).out


def last_rows(problem: AttentionProblem, config: Config | None) -> int:
    """Return how many rows the last row tile of a sequence has; without a configuration :data:`MAX_ROWS` at most.

    >>> from fa3_kernels.plan.config import default_config
    >>> problem = AttentionProblem(32, 16, 16, 500, 500, 128)
    >>> last_rows(problem, default_config(problem))  # tiles of 128 rows: 384 and 116
    116
    """
    if config is None:
        return min(problem.seqlen_q, MAX_ROWS)
    positions = config.tile_m // power_of_two(problem.group) if config.pack_gqa else config.tile_m
    return (problem.seqlen_q - 1) % positions + 1


def sample(
    problem: AttentionProblem, given: Given, output: LaunchOutput, rows: slice, batch: int, head_kv: int
) -> Sample:
    """Cut some rows of one sequence and kv head out of operands and output, and copy them to the host."""
    group = problem.group
    heads = slice(head_kv * group, (head_kv + 1) * group)
    keys = max(0, problem.seqlen_k - (problem.seqlen_q - rows.stop if problem.causal else 0))
    q, out = (to_numpy(x[batch : batch + 1, rows, heads]) for x in (given.q, output.out))
    k, v = (to_numpy(x[batch : batch + 1, :keys, head_kv : head_kv + 1]) for x in (given.k, given.v))
    lse = None if output.lse is None else to_numpy(output.lse[batch : batch + 1, heads, rows])
    sizes = {"nheads": group, "nheads_kv": 1, "seqlen_q": rows.stop - rows.start, "seqlen_k": keys}
    descales = [
        None if x is None else Descale(np.full((1, n, 1), float(x[batch, head_kv]), np.float32))
        for n, x in zip((group, 1, 1), (given.q_descale, given.k_descale, given.v_descale))
    ]
    return Sample(replace(problem, batch=1, **sizes), Operands(q, k, v, *descales), out, lse)


def last_tiles(
    problem: AttentionProblem, given: Given, output: LaunchOutput, config: Config | None
) -> tuple[Sample, ...]:
    """Copy the last row tile of the first and of the last (sequence, head) of an output from the GPU."""
    rows = slice(problem.seqlen_q - last_rows(problem, config), problem.seqlen_q)
    places = sorted({(0, 0), (problem.batch - 1, problem.nheads_kv - 1)})
    return tuple(sample(problem, given, output, rows, *place) for place in places)


def bits_differing(part: Sample, config: Config) -> int:
    """Count outputs and lse with other bits than the twin's; ValueError if its output has another shape or dtype."""
    want = forward(part.problem, part.operands, config)
    out = part.out
    lse = part.lse
    assert lse is not None, "our kernels return one"
    if want.out.shape != out.shape or want.out.dtype != out.dtype:
        raise ValueError(f"out must be {want.out.dtype} {want.out.shape}, got {out.dtype} {out.shape}")
    wrong = np.count_nonzero(out.view(np.uint16) != want.out.view(np.uint16))
    return int(wrong + np.count_nonzero(lse.view(np.uint32) != want.lse.view(np.uint32)))
