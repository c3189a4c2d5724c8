"""Samples of the output of a timed kernel, compared with the twin bit for bit, or with the error bound of an order.

The last rows of a sequence, with all its keys, are an attention problem of their own with the same row tile as in the
whole problem. The twin computes it in under a second, where the whole would take minutes. The first and the last rows
are those in which a wrong mask shows; their error bound is computed for peers, whose bits are not known.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fa3_kernels.plan.config import Config
from fa3_kernels.plan.tiles import power_of_two
from fa3_kernels.twin.forward import forward
from fa3_reference.attention import attention
from fa3_reference.bounds import KernelModel
from fa3_reference.bounds.forward import forward_bound
from fa3_reference.formats import BY_DTYPE, ulp
from fa3_reference.problem import AttentionProblem, Descale, Operands
from fa3verify.known.launches import Given, LaunchOutput
from fa3verify.operations.operation import error_ratio
from fa3verify.tensors.convert import to_numpy

EDGE_ROWS = 8  # rows whose bound is computed: it takes ten times as long as their truth
SCALING = 2.0**-22  # relative error of a scale in binary32, and of a product with it


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


def last_rows(problem: AttentionProblem, config: Config) -> int:
    """Return how many rows the last row tile of a sequence has.

    >>> from fa3_kernels.plan.config import default_config
    >>> problem = AttentionProblem(32, 16, 16, 500, 500, 128)
    >>> last_rows(problem, default_config(problem))  # tiles of 128 rows: 384 and 116
    116
    """
    positions = config.tile_m // power_of_two(problem.group) if config.pack_gqa else config.tile_m
    return (problem.seqlen_q - 1) % positions + 1


def sample(
    problem: AttentionProblem, given: Given, output: LaunchOutput, rows: slice, batch: int, head_kv: int
) -> Sample:
    """Cut some rows of one sequence and kv head out of operands and output, and copy them to the host.

    Keys that no row may see, as they lie to the right of the mask, are cut off. Where fewer keys are cut off than there
    are later rows, the diagonal of the sample lies further to the right, and its window is moved back.
    """
    group = problem.group
    left, right = problem.window
    later = problem.seqlen_q - rows.stop
    hidden = later if problem.causal else max(0, later - right) if right >= 0 else 0
    moved = later - hidden
    heads = slice(head_kv * group, (head_kv + 1) * group)
    keys = max(0, problem.seqlen_k - hidden)
    q, out = (to_numpy(x[batch : batch + 1, rows, heads]) for x in (given.q, output.out))
    k, v = (to_numpy(x[batch : batch + 1, :keys, head_kv : head_kv + 1]) for x in (given.k, given.v))
    lse = None if output.lse is None else to_numpy(output.lse[batch : batch + 1, heads, rows])
    sizes = {"batch": 1, "nheads": group, "nheads_kv": 1, "seqlen_q": rows.stop - rows.start, "seqlen_k": keys}
    window = (left if left < 0 else left + moved, right if right < 0 else right - moved)
    descales = [
        None if x is None else Descale(np.full((1, n, 1), float(x[batch, head_kv]), np.float32))
        for n, x in zip((group, 1, 1), (given.q_descale, given.k_descale, given.v_descale))
    ]
    return Sample(replace(problem, **sizes, window=window), Operands(q, k, v, *descales), out, lse)


def last_tiles(problem: AttentionProblem, given: Given, output: LaunchOutput, count: int) -> tuple[Sample, ...]:
    """Copy the last ``count`` rows of the first and of the last (sequence, head) of an output from the GPU."""
    rows = slice(problem.seqlen_q - count, problem.seqlen_q)
    places = sorted({(0, 0), (problem.batch - 1, problem.nheads_kv - 1)})
    return tuple(sample(problem, given, output, rows, *place) for place in places)


def bits_differing(part: Sample, config: Config) -> int:
    """Count outputs and lse with other bits than the twin's; ValueError if its output has another shape or dtype."""
    want = forward(part.problem, part.operands, config)
    out = part.out
    assert part.lse is not None, "our kernels return one"
    if want.out.shape != out.shape or want.out.dtype != out.dtype:
        raise ValueError(f"out must be {want.out.dtype} {want.out.shape}, got {out.dtype} {out.shape}")
    wrong = np.count_nonzero(out.view(np.uint16) != want.out.view(np.uint16))
    return int(wrong + np.count_nonzero(part.lse.view(np.uint32) != want.lse.view(np.uint32)))


def wrong_bits(problem: AttentionProblem, given: Given, config: Config, output: LaunchOutput) -> str:
    """Return in words how many bits of the last row tiles differ from the twin's; empty if none does.

    ValueError as :func:`bits_differing`.
    """
    wrong = sum(bits_differing(part, config) for part in last_tiles(problem, given, output, last_rows(problem, config)))
    return f"{wrong} bits differ from the twin" if wrong else ""


def edges(problem: AttentionProblem, given: Given, output: LaunchOutput) -> list[Sample]:
    """Return the first and the last rows of the last sequence and head, in which a wrong mask shows."""
    count = min(EDGE_ROWS, problem.seqlen_q)
    rows = (slice(start, start + count) for start in sorted({0, problem.seqlen_q - count}))
    return [sample(problem, given, output, each, problem.batch - 1, problem.nheads_kv - 1) for each in rows]


def ratio_max(part: Sample, model: KernelModel, scale: float) -> float:
    """Return the largest error of a sample over the bound of an order of operations; infinite if an output is NaN.

    The bound is that before the last rounding. The rounding to the output's own format, at the output's scale, is added
    to it; in e4m3 outputs it is most of the error.
    """
    truth = part.truth
    bound = forward_bound(part.problem, part.operands, replace(model, out_dtype="fp32")).out
    reached = (bound + np.abs(truth) * SCALING) / scale  # error bound of the number that is rounded
    rounding = np.where(np.isinf(reached), 0.0, ulp(np.abs(truth) / scale + reached, BY_DTYPE[part.out.dtype]) / 2)
    error = part.out.astype(np.float64) * scale - truth
    return float(np.max(error_ratio(error, (reached + rounding) * scale), initial=0.0))


def outside_bound(problem: AttentionProblem, given: Given, model: KernelModel, output: LaunchOutput) -> str:
    """Return in words by how much the edges of an output leave the bound of an order of operations; empty if not.

    ValueError for an output of another shape.
    """
    ratio = max(ratio_max(part, model, output.scale) for part in edges(problem, given, output))
    return "" if ratio <= 1 else f"computes something else: error / bound {ratio:.3g} in the sampled rows"
