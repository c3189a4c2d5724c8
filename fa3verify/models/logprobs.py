"""What a kernel does to the log-probabilities of a language model, beside what rounding may do to them.

The measure is the same model with the same weights in binary32, whose attention is exact. Every call of a kernel is
judged for itself (:func:`fa3verify.check`), in the rows that are farthest from what is due.
"""

from __future__ import annotations

import copy
from collections import ChainMap, Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from fa3_reference.bounds.model import KernelModel
from fa3_reference.problem import Dtype
from fa3_reference.quantize import QuantScheme
from fa3verify.checking.call import AttentionCall
from fa3verify.checking.check import check, rows_of, truth_of
from fa3verify.checking.screen import worst_rows
from fa3verify.known.registry import find
from fa3verify.models.attention import Attention, ExactAttention, KernelAttention, KernelCall, attending
from fa3verify.models.calls import facts_of
from fa3verify.models.divergence import Divergence, KernelLogprobs, LogprobsRun, Sampled, joined
from fa3verify.models.rounding import (
    TORCH,
    Looking,
    Rounded,
    SitedAttention,
    Variances,
    deviations,
    logprobs_of,
    predicted,
    recorded,
)
from fa3verify.tensors.convert import to_torch

Tokens = torch.Tensor  # int64 (tokens,)
OF_TRANSFORMERS = ("eager", "sdpa")  # attention that Transformers has, and no kernel of ours to judge
_WORST = 8  # rows of a call that are judged as the farthest, and first positions of which all heads are
_ROWS = 8  # of logits that are taken to float64 at once
_PAIRS = 1 << 17  # of queries and keys that are held at once, so that a core's cache has room for them
_PAIRS_ON_GPU = 1 << 26  # likewise, so that launches are few


class LanguageModel:
    """A model of Transformers whose weights are in the format of ``rest``, and the same weights in binary32."""

    def __init__(self, model: PreTrainedModel, rest: Dtype = "fp32") -> None:
        self.rest: Dtype = rest
        self.name = type(model).__name__
        narrow = copy.deepcopy(model).to(TORCH[rest]).eval().requires_grad_(False)  # type: ignore[arg-type]
        self.narrow = None if rest == "fp32" else narrow
        self.wide = narrow if rest == "fp32" else copy.deepcopy(narrow).float()
        self.layers = int(model.config.get_text_config().num_hidden_layers)

    def sample(self, text: torch.Tensor, attention: Attention | str, *, exactly: bool = False) -> Sampled:
        """Return the log-probabilities of a text; ``exactly`` in binary32."""
        model = self.wide if exactly or self.narrow is None else self.narrow
        picked = [torch.empty(len(text), 0, dtype=torch.int64)]  # by routers, which experts for every token

        def look(out: Any, func: Any, *_: Any) -> Any:
            if func in (torch.topk, torch.Tensor.topk) and out.indices.numel() % len(text) == 0:
                picked.append(out.indices.reshape(len(text), -1).sort(1).values.cpu())
            return out

        with torch.no_grad(), attending(model, attention), Looking(look):
            logits = model(text[None], use_cache=False).logits[0]
        # Stretches share an end, and are few rows of float64, for which a core's cache has room.
        starts = range(0, len(text) - 1, _ROWS)
        parts = [logprobs_of(logits[a : a + _ROWS + 1].double(), text[a : a + _ROWS + 1]) for a in starts]
        found = torch.cat(parts), logits[:-1].argmax(-1), torch.cat(picked, 1)[:-1]
        return Sampled(*(x.numpy(force=True) for x in found))


def judged(call: KernelCall, device: str = "cpu") -> str:
    """Judge the queries of a call that are farthest from what is due, and the first ones, whose few keys leave little
    room: return what is wrong, or nothing.

    The farthest are looked for on ``device``. The bound is that of the kernel's own order of operations where that is
    known, else of any. Operands are taken as the kernel has them, so that their rounding is no error of the call.
    """
    facts = facts_of(call.problem, call.operands)
    made = AttentionCall(**{name: getattr(call.operands, name) for name in "qkv"}, out=call.out, **facts)
    tensors = {name: to_torch(getattr(made, name), device) for name in ("q", "k", "v", "out")}
    found, _ = worst_rows(
        replace(made, **tensors),
        seed=0,
        rows=_WORST,
        heads=made.nheads,
        pairs=1 << 62,
        scores=_PAIRS if device == "cpu" else _PAIRS_ON_GPU,
        dtype=torch.float64 if call.problem.dtype == "fp32" else torch.float32,
    )
    first = range(min(_WORST, call.problem.seqlen_q))
    if not isinstance(call.order, KernelModel):
        checked = check(made.out, made.q, made.k, made.v, rows=sorted({*first, *chain(*found.values())}), **facts)
        return "" if checked else f"layer {call.layer}: error {checked.ratio:.3g} times its bound, at {checked.seen}"
    heads = map(made.heads_of, range(made.nheads_kv))
    own = ((x, chain(*(found.get((0, head), ()) for head in range(x.start, x.stop)))) for x in heads)
    parts = ((place, made.part(*place)) for place in ((0, x, np.array(sorted({*first, *rows}))) for x, rows in own))
    (worst,) = max((rows_of(*each, truth_of(each[1]), call.order) for each in parts), key=lambda x: x[0].largest)
    return (
        f"layer {call.layer}: error {worst.largest:.3g} times its bound, at {worst.place}" if worst.largest > 1 else ""
    )


def first_difference(a: Sequence[KernelCall], b: Sequence[KernelCall]) -> str:
    """Return where the outputs of two kernels first differ: layer, then token, then head; empty if nowhere."""
    for one, other in zip(a, b, strict=True):
        width = min(one.out.shape[-1], other.out.shape[-1])  # of what is padded the rest is zeros
        differs = (one.out[0, ..., :width].astype(np.float32) != other.out[0, ..., :width].astype(np.float32)).any(-1)
        if differs.any():
            token, head = np.argwhere(differs)[0]
            return f"first in layer {one.layer}, head {head}, token {token}; {differs.mean():.0%} of that layer's rows"
    return ""


def attention_of(name: str, scheme: QuantScheme | None = None, *, keeps: bool = False) -> KernelAttention | str:
    """Return the attention of a name: a kernel's, of which e4m3 has a descale a kv head, or what Transformers has.

    ValueError for an unknown kernel.
    """
    return name if name in OF_TRANSFORMERS else KernelAttention(find(name), scheme or QuantScheme("head"), keeps=keeps)


def format_of(attention: KernelAttention | str) -> str:
    """Return what decides where attention rounds: a kernel's format, or the name of what Transformers has."""
    return attention if isinstance(attention, str) else attention.kernel.dtype


def rounded_in(
    model: LanguageModel, text: torch.Tensor, attentions: Sequence[KernelAttention | str]
) -> Iterator[Rounded]:
    """Yield what attention rounds in a model on a text: kernels of all formats at once, those of e4m3 of one scheme.

    In binary32 what Transformers has rounds nothing.
    """
    schemes = {each.kernel.dtype: each.scheme for each in attentions if isinstance(each, KernelAttention)}
    if schemes:
        sited = partial(SitedAttention, schemes=schemes, rest=model.rest)
        yield Rounded(model.wide, recorded(model.narrow, text) if model.narrow else (), sited, schemes)
    for name in (x for x in OF_TRANSFORMERS if model.narrow and x in attentions):
        yield Rounded(model.wide, recorded(model.narrow, text, name), name, [name])


def predict(
    model: LanguageModel, text: torch.Tensor, attentions: Sequence[KernelAttention | str], seed: int, draws: int = 2
) -> dict[str, Variances]:
    """Return what rounding is predicted to do to the tokens of a text, by :func:`format_of` the attention."""
    passes = (predicted(each, text, draws=draws, seed=seed) for each in rounded_in(model, text, attentions))
    return defaultdict(Counter, ChainMap(*passes))


class RunOfText(NamedTuple):
    """A text under one kernel, and exactly, in the model of that name: what is wrong with each call, if anything, where
    attention first differs from the first kernel's, predicted variances, and deviations of tokens, if any.
    """

    model: str
    exact: Sampled
    sampled: Sampled
    judged: Sequence[str]
    first: str
    variances: Variances
    deviations: Sequence[np.ndarray]


def run_text(
    model: LanguageModel,
    text: np.ndarray | torch.Tensor,
    seed: int,
    kernels: Sequence[str],
    scheme: QuantScheme | None = None,
    draws: int = 2,
    *,
    by_token: bool = False,
) -> list[RunOfText]:
    """Run a text, int64 (tokens,), under every kernel; the prediction draws its signs ``draws`` times."""
    tokens = torch.as_tensor(text, device=model.wide.device)
    attentions = {format_of(each): each for each in (attention_of(name, scheme) for name in kernels)}
    variances = predict(model, tokens, [*attentions.values()], seed, draws)
    sigmas = {
        key: [deviations(rounded, tokens, seed=seed) for rounded in rounded_in(model, tokens, [attention])]
        for key, attention in attentions.items()
        if by_token
    }
    exact = model.sample(tokens, ExactAttention(), exactly=True)
    found: list[RunOfText] = []
    first: list[KernelCall] = []  # of the first kernel
    for name in kernels:
        attention = attention_of(name, scheme, keeps=True)
        sampled = model.sample(tokens, attention)
        calls = [] if isinstance(attention, str) else attention.calls
        found.append(
            RunOfText(
                model=model.name,
                exact=exact,
                sampled=sampled,
                judged=[judged(call, str(tokens.device)) for call in calls],
                first=first_difference(first, calls) if first and calls else "",
                variances=variances[format_of(attention)],
                deviations=sigmas.get(format_of(attention), ()),
            )
        )
        first = first if len(found) > 1 else calls
    return found


def gathered(kernels: Sequence[str], rest: Dtype, runs: Sequence[Sequence[RunOfText]]) -> LogprobsRun:
    """Put the runs of several texts together, each of the same kernels."""
    exact = joined([run[0].exact for run in runs])
    samples = [joined(each) for each in zip(*([own.sampled for own in run] for run in runs), strict=True)]
    found = []
    for number, name in enumerate(kernels):
        of_texts = [run[number] for run in runs]
        variances: Variances = Counter()
        for own in of_texts:
            share = len(own.sampled.logprobs) / len(exact.logprobs)
            variances.update({place: x * share for place, x in own.variances.items()})  # type: ignore[arg-type]
        found.append(
            KernelLogprobs(
                name=name,
                found=Divergence.between(samples[number], exact),
                variances=dict(variances),
                calls=sum(len(own.judged) for own in of_texts),
                wrong=tuple(filter(None, chain.from_iterable(own.judged for own in of_texts))),
                first=next(filter(None, (own.first for own in of_texts)), ""),
                apart=Divergence.between(samples[number], samples[0]) if number else None,
                differences=tuple(own.sampled.logprobs - own.exact.logprobs for own in of_texts),
                deviations=tuple(chain.from_iterable(own.deviations for own in of_texts)),
            )
        )
    return LogprobsRun(model=runs[0][0].model, rest=rest, texts=len(runs), kernels=tuple(found))


def logprobs(
    model: PreTrainedModel,
    texts: Sequence[torch.Tensor],
    kernels: Sequence[str],
    rest: Dtype = "fp32",
    *,
    scheme: QuantScheme | None = None,
    seed: int = 0,
) -> LogprobsRun:
    """Run texts under every kernel; the parameters are those of :func:`fa3verify.logprobs`."""
    both = LanguageModel(model, rest)
    run = partial(run_text, both, kernels=kernels, scheme=scheme, draws=2 if len(texts) == 1 else 1)
    return gathered(kernels, rest, [run(text, seed + number) for number, text in enumerate(texts)])
