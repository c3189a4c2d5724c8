"""Decoding beside prefill: from which token on they differ, by the plans of both calls, and in a run.

Everything but attention is computed once for all tokens in both, so that what differs is attention's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fa3_reference.problem import AttentionProblem
from fa3verify.compare.proof.plans import Batch, planner
from fa3verify.known.registry import find
from fa3verify.models.attention import DecodingAttention, KernelAttention
from fa3verify.models.logprobs import Divergence, LanguageModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """How decoding and prefill of one kernel lie apart on a text. True if plans said from which token on they differ.

    Parameters
    ----------
    name : str
    tokens : int
    planned, seen : int or None
        Keys of the first row whose bits differ, by the plans and in the run; None if none does.
    apart : Divergence
        Of decoding from prefill.
    """

    name: str
    tokens: int
    planned: int | None
    seen: int | None
    apart: Divergence

    def __bool__(self) -> bool:
        return self.planned == self.seen

    def __str__(self) -> str:
        seen, planned = (
            f"are equal in all {self.tokens:,} rows" if keys is None else f"differ from {keys} keys on"
            for keys in (self.seen, self.planned)
        )
        said = "as the plans say" if self else f"but {planned} by the plans"
        return (
            f"{self.name}: decoding and prefill {seen}, {said}; {self.apart.rms:.3g} nats RMS apart\n    {self.apart}"
        )


def planned_difference(name: str, problem: AttentionProblem, tokens: int) -> int | None:
    """Return the keys of the first row of a prefill whose bits differ from those of a call of its own; None if none.

    Of the problem its heads, mask and cache count. ValueError for a kernel whose plan nobody knows.
    """
    sizes = {field: getattr(problem, field) for field in ("nheads", "nheads_kv", "head_dim", "causal", "window")}
    plan = planner(name, sizes | ({"cache": problem.cache} if problem.cache else {}), "batch")
    at_once = plan.bits(Batch(((tokens, tokens),)))
    return next((n for n in range(1, tokens + 1) if plan.bits(Batch(((1, n),)))[0] != at_once[n - 1]), None)


def decode(both: LanguageModel, text: torch.Tensor, name: str, *, page_size: int = 0) -> Decoded:
    """Run a text as a prefill and token by token, with one kernel; operands of e4m3 have descales of 1.

    Parameters
    ----------
    both : LanguageModel
    text : int64 tensor (tokens,)
    name : str
        Of a kernel whose plan is known.
    page_size : int
        Keys of a page of the cache; 0 without.

    Raises
    ------
    ValueError
        For a kernel whose plan nobody knows, or that refuses the model's attention.
    """
    prefill = KernelAttention(find(name), page_size=page_size, keeps=True)
    decoding = DecodingAttention(find(name), page_size=page_size, keeps=True)
    at_once = both.sample(text, prefill)
    one_by_one = both.sample(text, decoding)
    calls = (np.stack([call.out for call in each.calls]) for each in (prefill, decoding))
    differs = np.not_equal(*(outs.reshape(both.layers, len(text), -1) for outs in calls)).any((0, 2))
    return Decoded(
        name=name,
        tokens=len(text),
        planned=planned_difference(name, prefill.calls[0].problem, len(text)),
        seen=int(differs.argmax()) + 1 if differs.any() else None,
        apart=Divergence.between(one_by_one, at_once),
    )
