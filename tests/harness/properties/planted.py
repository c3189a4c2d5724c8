"""Mistakes that laws about other calls are for, planted around a sound twin: each shows in some calls alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fa3_reference.problem import AttentionProblem, Dtype, Operands
from fa3verify.kernels.record import Kernel
from fa3verify.kernels.twins import twin
from fa3verify.operations.forward import Result

Wrap = Callable[[Kernel, AttentionProblem, Operands, object], Result]


def planted(mistake: Wrap, dtype: Dtype = "fp16", **changes) -> Kernel:
    """Return a twin whose calls go through a mistake."""
    sound = twin(dtype)
    return replace(sound.altered(run=lambda *call: mistake(sound, *call)), name=mistake.__name__, **changes)


def window_ignored_by_one_query(sound, problem, operands, config) -> Result:
    """Take a window for none where there is a single query, as a decode kernel without windows would."""
    if problem.seqlen_q == 1 and not problem.is_varlen:
        problem = replace(problem, window=(-1, -1))
    return sound.code.run(problem, operands, config)


def window_counted_from_the_top(sound, problem, operands, config) -> Result:
    """Align windows to the top left, which is the bottom right only where there are as many queries as keys."""
    left, right = problem.window
    off = problem.seqlen_k - problem.seqlen_q
    if problem.window != (-1, -1) and not problem.is_varlen and off > 0:
        problem = replace(
            problem, window=(left + off if left >= 0 else left, max(right - off, 0) if right > 0 else right)
        )
    return sound.code.run(problem, operands, config)


def prefill_aligned_to_the_top_left(sound, problem, operands, config) -> Result:
    """Align the causal mask to the top left where there are several queries, and rightly where there is one."""
    if problem.causal and problem.seqlen_q > 1 and not problem.is_varlen and problem.seqlen_k > problem.seqlen_q:
        shown = slice(0, problem.seqlen_q)
        operands = replace(operands, k=operands.k[:, shown].copy(), v=operands.v[:, shown].copy())
        problem = replace(problem, seqlen_k=problem.seqlen_q)
    return sound.code.run(problem, operands, config)


def third_sequence_reads_the_second(sound, problem, operands, config) -> Result:
    """Wrap the index of a sequence to one bit: right for two sequences."""
    if problem.batch > 2 and not problem.is_varlen:
        index = np.minimum(np.arange(problem.batch), 1)
        operands = replace(operands, k=operands.k[index], v=operands.v[index])
    return sound.code.run(problem, operands, config)


def third_head_reads_the_second(sound, problem, operands, config) -> Result:
    """Clamp the kv head to one bit: right for two kv heads."""
    index = np.minimum(np.arange(problem.nheads_kv), 1)
    return sound.code.run(problem, replace(operands, k=operands.k[..., index, :], v=operands.v[..., index, :]), config)


def last_of_a_group_scores_by_the_first(sound, problem, operands, config) -> Result:
    """Take the query of a group's first head for its last one."""
    heads = np.arange(problem.nheads)
    index = np.where(heads % problem.group == problem.group - 1, heads - problem.group + 1, heads)
    return sound.code.run(problem, replace(operands, q=operands.q[..., index, :]), config)


def lse_of_masked_calls_in_base_2(sound, problem, operands, config) -> Result:
    """Return lse in base 2 where a mask is on, so that dense calls merge as they should."""
    out, lse = sound.code.run(problem, operands, config)
    return Result(out, (lse / np.log(2)).astype(np.float32) if problem.causal else lse)


def key_alone_in_a_tile_dropped(sound, problem, operands, config) -> Result:
    """Lose a key that is alone in the last tile of 128."""
    if problem.seqlen_k % 128 == 1 and problem.seqlen_k > 1 and not problem.is_varlen:
        shown = slice(0, problem.seqlen_k - 1)
        operands = replace(operands, k=operands.k[:, shown].copy(), v=operands.v[:, shown].copy())
        problem = replace(problem, seqlen_k=problem.seqlen_k - 1)
    return sound.code.run(problem, operands, config)


def parity_of_keys_in_the_output(sound, problem, operands, config) -> Result:
    """Move outputs by less than a unit in their last place with an odd number of keys."""
    out, lse = sound.code.run(problem, operands, config)
    return Result((out.astype(np.float64) * (1 + 3.5e-4 * (problem.seqlen_k % 2))).astype(out.dtype), lse)


def output_on_a_fixed_grid(sound, problem, operands, config) -> Result:
    """Round outputs to multiples of 1/16, whatever their size."""
    out, lse = sound.code.run(problem, operands, config)
    return Result((np.rint(out.astype(np.float64) * 16) / 16).astype(out.dtype), lse)


def small_k_descales_taken_for_one(sound, problem, operands, config) -> Result:
    """Take descales of K below 1 for 1."""
    if operands.k_descale is not None:
        known = replace(operands.k_descale, values=np.maximum(operands.k_descale.values, np.float32(1)))
        operands = replace(operands, k_descale=known)
    return sound.code.run(problem, operands, config)
