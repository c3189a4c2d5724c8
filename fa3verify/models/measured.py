"""What two vectors of log-probabilities say without their programs: rounding, a known mistake, or neither.

The difference d of two programs stands beside sigma, what rounding does to each token, and f, what a mistake does to it
(:mod:`fa3verify.models.mistakes`). In units of sigma, the amount of a mistake is that of least squares, f d / f f, and
z is f d over the root of f f. To first order one backward pass from d has the products with all mistakes of all layers,
and some passes from random signs have their sizes. The likeliest mistakes are then run in full.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from transformers import PreTrainedModel

from fa3_reference.problem import Dtype
from fa3_reference.rules import require
from fa3verify.models.attention import ExactAttention, LayerCall, attending
from fa3verify.models.logprobs import LanguageModel, attention_of, rounded_in
from fa3verify.models.mistakes import Layer, Mistake, Mistaken, known, rotary
from fa3verify.models.rounding import deviations, differentiable, logprobs_of

EVERY = -1  # instead of a layer
LEAST_Z = 5.0  # of a mistake that is named
_BEYOND = 1.25  # times the predicted RMS, beyond which a difference is no rounding
_DRAWS = 8  # of signs, for each text
_SMALL_Z = 30.0  # of effects of which first order says nearly all

Suspicion = tuple[str, int]  # a mistake by its words, and a layer


class Dump(NamedTuple):
    """Tokens of a text, int64 (tokens,), and the log-probability of each but the first, float64; NaN is not dumped."""

    tokens: torch.Tensor
    logprobs: torch.Tensor


def dumped(tokens: ArrayLike, logprobs: ArrayLike, most: int | None = None) -> Dump:
    """Return the dump of a text's first tokens, from integers (n,) and the log-probabilities of the last of them.

    ValueError for other types and shapes, and for a log-probability that is no number at most 0.
    """
    ids = np.asarray(tokens)
    given = np.asarray(logprobs, np.float64)
    fits = ids.ndim == given.ndim == 1 and ids.dtype.kind in "iu" and 0 < len(given) <= len(ids) > 1
    require(fits, f"n integers and at most n log-probabilities are a text, got {ids.dtype} {ids.shape}, {given.shape}")
    given = given[int(len(given) == len(ids)) :]  # nothing comes before the first token
    wrong = given[~((given <= 0) & np.isfinite(given))]
    require(not len(wrong), f"log-probabilities must be finite and at most 0: {len(wrong)} are not, as {wrong[:1]}")
    padded = np.pad(given, (len(ids) - 1 - len(given), 0), constant_values=np.nan)
    return Dump(torch.as_tensor(ids.astype(np.int64))[:most], torch.as_tensor(padded)[: most and most - 1])


def read(file: Path, most: int | None = None) -> list[Dump]:
    """Return the dumps of a .npz file: ``tokens`` and ``logprobs``, of several texts ``tokens_0``, ``logprobs_0``...

    ValueError for a file that holds none, and for what :func:`dumped` refuses.
    """
    with np.load(file) as arrays:
        ends = sorted(name.removeprefix("tokens") for name in arrays if name.startswith("tokens"))
        require(ends and all(f"logprobs{end}" in arrays for end in ends), f"{file} needs tokens, and logprobs of each")
        return [dumped(arrays[f"tokens{end}"], arrays[f"logprobs{end}"], most) for end in ends]


@dataclass(frozen=True, slots=True)
class Suspect:
    """A mistake by its words, in a layer (-1: every one), its amount, z, and the RMS that is left without it, in sigma.

    The amount is the mistake's own where it has one, else how often it is there; negative is in the first program.
    """

    words: str
    layer: int
    amount: float
    z: float
    left: float

    def __str__(self) -> str:
        where = "every layer" if self.layer == EVERY else f"layer {self.layer}"
        which = "second" if "{" in self.words or self.amount > 0 else "first"
        return f"{self.words.format(self.amount)} in {where} of the {which} program ({abs(self.z):.1f} sigma)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """What the difference of two programs is. Its truth value is "within rounding", its text one sentence.

    Parameters
    ----------
    rest : {"bf16", "fp16"}
        Format whose rounding was predicted.
    tokens : int
        Log-probabilities that were compared.
    seen, predicted : float
        RMS of the difference in nats, and that of two programs that both round.
    relative : float
        RMS of differences over their sigma.
    tested : int
        Mistakes times layers.
    suspects : tuple of Suspect
        The likeliest mistakes, of which the first may be named.
    """

    rest: Dtype
    tokens: int
    seen: float
    predicted: float
    relative: float
    tested: int
    suspects: tuple[Suspect, ...]

    @property
    def named(self) -> Suspect | None:
        """The likeliest mistake, if it is beyond chance, there as a whole, and explains the difference."""
        for first in self.suspects[:1]:
            explains = first.left <= max(_BEYOND, self.relative / 2)
            if abs(first.z) >= LEAST_Z and explains and ("{" in first.words or 0.5 <= abs(first.amount) <= 1.5):
                return first
        return None

    def __bool__(self) -> bool:
        return self.named is None and self.seen <= _BEYOND * self.predicted

    def __str__(self) -> str:
        verdict = f": as {self.named}" if self.named else ", and none of the known mistakes"
        verdict = f"within rounding of {self.rest}" if self else f"not rounding of {self.rest}{verdict}"
        return f"{verdict}; {self.predicted:.3g} nats RMS predicted, {self.seen:.3g} seen on {self.tokens:,} tokens"


def _products(
    model: PreTrainedModel,
    frequencies: torch.Tensor,
    text: torch.Tensor,
    seeds: torch.Tensor,
    mistakes: dict[str, Mistake],
) -> dict[Suspicion, torch.Tensor]:
    """Return, to first order, the products of seeds (n, tokens - 1) with what every mistake does in every layer.

    The last of the seeds are random signs, of which the mean square takes the place of their products. Beside it is
    what a change of such a size has in its layer, as few signs are noisy. The mistakes are noted by their words.
    """
    calls: list[tuple[LayerCall, torch.Tensor]] = []

    def kept(asked: LayerCall, attend: Callable[[LayerCall], torch.Tensor]) -> torch.Tensor:
        calls.append((asked, attend(asked)))
        return calls[-1][1]

    with differentiable(model), attending(model, Mistaken(kept)):
        logprobs = logprobs_of(model(text[None], use_cache=False).logits[0], text)
    outs = [out for _, out in calls]
    gradients = [torch.autograd.grad(logprobs, outs, each.to(logprobs), retain_graph=True) for each in seeds]
    found: defaultdict[Suspicion, torch.Tensor] = defaultdict(lambda: torch.zeros(len(seeds) + 1).double())
    for number, (asked, _) in enumerate(calls):
        gradient = torch.stack([each[number].flatten() for each in gradients])
        layer = Layer.of(asked, frequencies)
        mistakes |= (here := known(layer))
        changes = {words: (x.attend(layer, x.amount) - layer.out).flatten() for words, x in here.items()}
        rows = {words: torch.cat([gradient @ x, (x @ x)[None]]).double().cpu() for words, x in changes.items()}
        gains = torch.stack([row[-1 - _DRAWS : -1].square().mean() / row[-1] for row in rows.values() if row[-1]])
        for words, row in rows.items():
            row[-1] *= gains.log().mean().exp()
            found[words, asked.layer] += row
            found[words, EVERY] += row
    squares = {key: (row[-1] + row[-1 - _DRAWS : -1].square().mean()) / 2 for key, row in found.items()}
    return {key: torch.cat([row[: -1 - _DRAWS], squares[key][None]]) for key, row in found.items()}


def _likely(z: Mapping[Suspicion, float]) -> list[Suspicion]:
    """Return what is worth running in full: the six likeliest, and of large effects the likeliest of each kind."""
    order = sorted((key for key in z if z[key] >= 0.6 * LEAST_Z), key=lambda key: z[key])
    is_large = max(z.values()) >= _SMALL_Z
    kinds = {re.sub(r"\d+", "", key[0]): key for key in order if is_large}
    return [*dict.fromkeys([*order[:-7:-1], *kinds.values()])]


def explained(
    model: LanguageModel, texts: Sequence[torch.Tensor], pairs: Sequence[Sequence[torch.Tensor]], seed: int = 0
) -> list[Explained]:
    """Explain differences of pairs of programs: of each text a float64 tensor (tokens - 1,), NaN where none is known.

    All pairs know the same ones.
    """
    frequencies = rotary(model.wide)
    exact = [model.sample(text, ExactAttention(torch.float32), exactly=True).logprobs for text in texts]
    kernels = [attention_of(f"twin.{model.rest}")]  # any one of the format, of which P and outputs are rounded
    sigma = math.sqrt(2) * torch.cat(  # of the difference of two programs
        [
            torch.as_tensor(deviations(rounded, text, seed=of))
            for text, of in zip(texts, count(seed))
            for rounded in rounded_in(model, text, kernels)
        ]
    )
    is_dumped = torch.cat([~each.isnan() for each in pairs[0]])
    size = int(is_dumped.sum())
    weight = torch.where(is_dumped, 1 / sigma, 0)
    signs = (torch.rand((_DRAWS, len(weight)), generator=torch.Generator().manual_seed(seed)) < 0.5).to(weight) * 2 - 1
    apart = torch.stack([torch.cat(list(pair)).nan_to_num() for pair in pairs]) * weight  # in sigma
    seeds = torch.cat([apart, signs.to(weight)]) * weight
    mistakes: dict[str, Mistake] = {}
    found: Any = Counter()  # of rows by suspicion: it adds tensors as it adds numbers
    for text, own in zip(texts, seeds.split([len(text) - 1 for text in texts], dim=1), strict=True):
        found.update(_products(model.wide, frequencies, text, own, mistakes))

    @cache
    def template(words: str, layer: int, amount: float) -> torch.Tensor:
        """Return what a mistake does to all log-probabilities, in sigma."""

        def attended(asked: LayerCall, attend: Callable[[LayerCall], torch.Tensor]) -> torch.Tensor:
            if layer in (EVERY, asked.layer) and words in known(own := Layer.of(asked, frequencies)):
                return mistakes[words].attend(own, amount)[None].to(asked.qkv[0].dtype)
            return attend(asked)

        wrong = [model.sample(text, Mistaken(attended), exactly=True).logprobs for text in texts]
        return torch.as_tensor(np.concatenate(wrong) - np.concatenate(exact)) * weight

    def fitted(d: torch.Tensor, words: str, layer: int, amount: float) -> Suspect:
        f = template(words, layer, amount)
        square = float(f @ f) + 1e-30
        times = float(f @ d) / square
        left = math.sqrt(float((d - times * f).square().sum()) / size)
        return Suspect(words, layer, times * (amount if "{" in words else 1), times * math.sqrt(square), left)

    answers = []
    for column, d in enumerate(apart):
        z = {key: abs(float(row[column] / row[-1].sqrt())) for key, row in found.items()}
        suspects = [fitted(d, *key, mistakes[key[0]].amount) for key in _likely(z)]
        suspects.sort(key=lambda each: -abs(each.z))
        if suspects and "{" in suspects[0].words:  # again with its amount, in which a mistake need not be linear
            suspects[0] = fitted(d, suspects[0].words, suspects[0].layer, suspects[0].amount)
        answers.append(
            Explained(
                rest=model.rest,
                tokens=size,
                seen=math.sqrt(float(torch.cat(list(pairs[column])).square().nansum()) / size),
                predicted=math.sqrt(float(sigma[is_dumped].square().mean())),
                relative=math.sqrt(float(d @ d) / size),
                tested=len(z),
                suspects=tuple(suspects),
            )
        )
    return answers


def explain(model: LanguageModel, first: Sequence[Dump], second: Sequence[Dump], seed: int = 0) -> Explained:
    """Explain what two programs dumped; ValueError where their tokens differ."""
    is_same = len(first) == len(second) > 0 and all(torch.equal(a.tokens, b.tokens) for a, b in zip(first, second))
    require(is_same, "both programs must have dumped the same tokens of the same texts")
    pair = [b.logprobs - a.logprobs for a, b in zip(first, second, strict=True)]
    return explained(model, [each.tokens for each in first], [pair], seed)[0]
