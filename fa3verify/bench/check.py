"""Samples of the output of a timed kernel, compared with the twin bit for bit, or with the error bound of an order.

The last rows of a sequence, with all its keys, are an attention problem of their own with the same row tile as in the
whole problem. The twin computes it in under a second, where the whole would take minutes. The first and the last rows
are those in which a wrong mask shows; their error bound is computed for peers, whose bits are not known.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fa3_kernels.plan.config import Config
from fa3_kernels.plan.tiles import power_of_two
from fa3_kernels.twin.forward import forward
from fa3_reference.attention import attention
from fa3_reference.bounds import KernelModel
from fa3_reference.bounds.forward import forward_bound
from fa3_reference.formats import BY_DTYPE, ulp
from fa3_reference.problem import AttentionProblem, Descale, Operands, Sequence
from fa3verify.checking.call import AttentionCall
from fa3verify.checking.checked import largest
from fa3verify.checking.gradients import judged_gradients
from fa3verify.known.launches import Given, GivenBackward, LaunchOutput
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


def positions(problem: AttentionProblem, config: Config) -> int:
    """Return how many positions of a sequence a row tile has: its rows, or those of the heads of a group together.

    >>> from fa3_kernels.plan.config import default_config
    >>> problem = AttentionProblem(32, 16, 4, 500, 500, 128)
    >>> config = default_config(problem)  # tiles of 128 rows
    >>> positions(problem, config), positions(problem, replace(config, pack_gqa=True))
    (128, 32)
    """
    return config.tile_m // power_of_two(problem.group) if config.pack_gqa else config.tile_m


def sample(
    problem: AttentionProblem, given: Given, output: LaunchOutput, rows: slice, batch: int, head_kv: int
) -> Sample:
    """Cut some rows of one sequence and kv head out of operands and output, and copy them to the host.

    Keys that no row may see, as they lie to the right of the mask, are cut off. Where fewer keys are cut off than there
    are later rows, the diagonal of the sample lies further to the right, and its window is moved back. Chunks cannot be
    moved: of a problem that has some and is not causal only the last rows may be cut.
    """
    group = problem.group
    left, right = problem.window
    sequence = list(problem.sequences())[batch]
    later = sequence.seqlen_q - rows.stop
    hidden = later if problem.causal else max(0, later - right) if right >= 0 else 0
    moved = later - hidden
    heads = slice(head_kv * group, (head_kv + 1) * group)
    keys = max(0, sequence.seqlen_k - hidden)
    of: Any = problem  # which takes tensors as well as arrays
    q, out = (to_numpy(of.rows_q(x, sequence)[None, rows, heads]) for x in (given.q, output.out))
    k, v = (to_numpy(of.rows_k(x, sequence)[None, :keys, head_kv : head_kv + 1]) for x in (given.k, given.v))
    lse = None if output.lse is None else to_numpy(of.rows_lse(output.lse, sequence)[None, heads, rows])
    sizes = {"batch": 1, "nheads": group, "nheads_kv": 1, "seqlen_q": rows.stop - rows.start, "seqlen_k": keys}
    alone = replace(problem, **sizes, seqlens_q=None, seqlens_k=None, cache=None)
    window = (left if left < 0 else left + moved, right if right < 0 else right - moved)
    of_q, of_k, of_v = (
        None if x is None else Descale(np.full((1, n, 1), float(x[batch, head_kv]), np.float32))
        for n, x in zip((group, 1, 1), (given.q_descale, given.k_descale, given.v_descale))
    )
    operands = Operands(q, k, v, q_descale=of_q, k_descale=of_k, v_descale=of_v)
    return Sample(replace(alone, window=window), operands, out, lse)


def asked(problem: AttentionProblem) -> list[Sequence]:
    """Return the sequences that have queries."""
    return [sequence for sequence in problem.sequences() if sequence.seqlen_q]


def last_tiles(problem: AttentionProblem, given: Given, output: LaunchOutput, tile: int) -> tuple[Sample, ...]:
    """Copy the last row tile, with ``tile`` positions in a whole one, of the first and of the last (sequence, head) of
    an output from the GPU, and of the longest sequence.
    """
    sequences = asked(problem)
    longest = max(sequences, key=lambda x: x.seqlen_k)
    places = {(sequences[0], 0), (longest, 0), (sequences[-1], problem.nheads_kv - 1)}
    return tuple(
        sample(problem, given, output, slice((x.seqlen_q - 1) // tile * tile, x.seqlen_q), x.index, head)
        for x, head in sorted(places, key=lambda place: (place[0].index, place[1]))
    )


def bits_differing(part: Sample, config: Config) -> int:
    """Count outputs, and lse where it is returned, with other bits than the twin's; ValueError if its output has
    another shape or dtype.
    """
    want = forward(part.problem, part.operands, config)
    out = part.out
    if want.out.shape != out.shape or want.out.dtype != out.dtype:
        raise ValueError(f"out must be {want.out.dtype} {want.out.shape}, got {out.dtype} {out.shape}")
    wrong = np.count_nonzero(out.view(np.uint16) != want.out.view(np.uint16))
    lse = want.lse if part.lse is None else part.lse  # a call over a cache is timed without
    return int(wrong + np.count_nonzero(lse.view(np.uint32) != want.lse.view(np.uint32)))


def wrong_bits(problem: AttentionProblem, given: Given, config: Config, output: LaunchOutput) -> str:
    """Return in words how many bits of the last row tiles differ from the twin's; empty if none does.

    ValueError as :func:`bits_differing`.
    """
    wrong = sum(bits_differing(part, config) for part in last_tiles(problem, given, output, positions(problem, config)))
    return f"{wrong} bits differ from the twin" if wrong else ""


def edges(problem: AttentionProblem, given: Given, output: LaunchOutput) -> list[Sample]:
    """Return the first and the last rows of the last sequence and head, in which a wrong mask shows."""
    last = asked(problem)[-1]
    end = max(0, last.seqlen_q - EDGE_ROWS)
    first = 0 if problem.causal or not problem.attention_chunk else end  # alone the first rows would be in other chunks
    return [
        sample(
            problem,
            given,
            output,
            slice(start, start + min(EDGE_ROWS, last.seqlen_q)),
            last.index,
            problem.nheads_kv - 1,
        )
        for start in sorted({first, end})
    ]


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


def outside_gradients(problem: AttentionProblem, given: GivenBackward, found: tuple[Any, ...]) -> str:
    """Return in words by how much rows of dq, dk and dv leave the bound of any order; empty if they do not.

    ValueError for gradients of other shapes.
    """
    starts = {name: getattr(problem, name) for name in ("cu_seqlens_q", "cu_seqlens_k") if problem.is_varlen}
    call = AttentionCall(
        **dict(zip(("dq", "dk", "dv"), found, strict=True)),
        **{name: x for name, x in given._asdict().items() if name != "dlse"},
        layout="" if problem.is_varlen else "bshd",
        softmax_scale=problem.softmax_scale,
        causal=problem.causal,
        window=problem.window,
        softcap=problem.softcap,
        **starts,
    )
    rows, _, _ = judged_gradients(call, seed=0, accumulator="either")
    worst = largest(rows)
    return "" if worst <= 1 else f"computes something else: error / bound {worst:.3g} in the sampled rows of gradients"
