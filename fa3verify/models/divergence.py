"""How far log-probabilities lie apart, and what a run of several kernels found: figures and words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fa3_reference.problem import Dtype
from fa3verify.models.rounding import Place

_MOST_PLACES = 6  # that are named


class Sampled(NamedTuple):
    """Log-probabilities of the tokens of texts, float64 (tokens,), and the likeliest token at each, int64 (tokens,).

    ``experts`` is what routers picked there, int64 (tokens, picks); a model without routers has no picks.
    """

    logprobs: np.ndarray
    likeliest: np.ndarray
    experts: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """How far log-probabilities d = a - b lie apart, in nats, and what samplers and trainers make of it.

    Parameters
    ----------
    tokens : int
    rms, largest : float
        Root of the mean of d^2, and the largest magnitude.
    beyond_1, beyond_10 : float
        Shares of tokens whose ratio of probabilities is off by more than 1.01 and 1.1.
    sample_size : float
        Effective sample size of importance weights e^d, a share of the tokens.
    divergence : float
        Mean of e^d - 1 - d, an estimate of the Kullback-Leibler divergence.
    ratio : float
        Mean of e^|d|.
    flips : int
        Tokens at which another token is the likeliest.
    rerouted : int
        Tokens for which a router picks other experts.
    """

    tokens: int
    rms: float
    largest: float
    beyond_1: float
    beyond_10: float
    sample_size: float
    divergence: float
    ratio: float
    flips: int
    rerouted: int

    @classmethod
    def between(cls, a: Sampled, b: Sampled) -> Divergence:
        """Return how far a lies from b."""
        d = a.logprobs - b.logprobs
        size = np.abs(d)
        weights = np.exp(d)
        return cls(
            tokens=len(d),
            rms=float(np.sqrt(np.mean(d**2))),
            largest=float(size.max()),
            beyond_1=float(np.mean(size > math.log(1.01))),
            beyond_10=float(np.mean(size > math.log(1.1))),
            sample_size=float(weights.sum() ** 2 / (weights**2).sum() / len(d)),
            divergence=float(np.mean(np.expm1(d) - d)),
            ratio=float(np.mean(np.exp(size))),
            flips=int((a.likeliest != b.likeliest).sum()),
            rerouted=int((a.experts != b.experts).any(1).sum()),
        )

    def __str__(self) -> str:
        return (
            f"largest {self.largest:.3g}; ratios beyond 1.01 {self.beyond_1:.1%}, beyond 1.1 {self.beyond_10:.1%}; "
            f"effective sample size {self.sample_size:.4f}; mean e^|d| {self.ratio:.4f}; "
            f"KL {self.divergence:.1e}; likeliest token differs {self.flips} times"
            + f"; a router picks other experts for {self.rerouted}"
            * bool(self.rerouted)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLogprobs:
    """What one kernel did to the log-probabilities of all texts, and what its roundings were predicted to do.

    Parameters
    ----------
    name : str
        Of the kernel, or of a function of Transformers.
    found : Divergence
        From the exact model.
    variances : mapping
        The predicted variance of a token's log-probability by place, in nats^2.
    calls : int
        Calls that were judged.
    wrong : tuple of str
        Those that leave the bound of their rounding errors: layer, head, token.
    first : str
        Where its attention first differs from that of the first kernel; empty if nowhere, and of the first kernel.
    apart : Divergence, optional
        From the first kernel.
    differences, deviations : tuples of arrays
        For each text, float64 (tokens,), in nats: how far its log-probabilities are from the exact model, and by which
        standard deviation rounding moves them; no deviations where they were not asked for.
    """

    name: str
    found: Divergence
    variances: Mapping[Place, float]
    calls: int
    wrong: tuple[str, ...]
    first: str = ""
    apart: Divergence | None = None
    differences: tuple[np.ndarray, ...] = ()
    deviations: tuple[np.ndarray, ...] = ()

    @property
    def predicted(self) -> float:
        """RMS that rounding is predicted to have, in nats."""
        return math.sqrt(sum(self.variances.values()))

    def shares(self, of: str) -> Counter[object]:
        """Return shares of the predicted variance by "layer" or "where"; they add up to 1."""
        shares: Counter[object] = Counter()
        for place, variance in self.variances.items():
            shares[getattr(place, of)] += variance / self.predicted**2  # type: ignore[assignment] # it adds any number
        return shares

    def _named(self, of: str) -> str:
        return ", ".join(f"{key} {share:.0%}" for key, share in self.shares(of).most_common(_MOST_PLACES))

    def _of_tokens(self) -> str:
        z = [np.abs(d / sigma) for d, sigma in zip(self.differences, self.deviations, strict=True)]
        text = int(np.argmax([each.max() for each in z]))
        sigma = np.concatenate(self.deviations)
        return (
            f"{np.mean(np.concatenate(z) <= 2):.0%} of tokens within 2 sigma, largest {z[text].max():.1f} "
            f"(text {text + 1}, token {z[text].argmax() + 1}); sigma {np.sqrt(np.mean(sigma**2)):.3g} nats RMS"
        )

    def __str__(self) -> str:
        judged = f"; {len(self.wrong)} of {self.calls} calls beyond their bound" if self.calls else ""
        ratio = f" ({self.found.rms / self.predicted:.2f} of it)" if self.predicted else ""
        lines = (
            f"{self.name}: {self.found.rms:.3g} nats RMS, predicted {self.predicted:.3g}{ratio}{judged}",
            f"    {self.found}",
            f"    predicted by place: {self._named('where')}" if self.predicted else "",
            f"    predicted by layer: {self._named('layer')}" if self.predicted else "",
            f"    beside the first: {self.apart.rms:.3g} nats RMS{self.first and ', '}{self.first}"
            if self.apart
            else "",
            "    what other experts do is no rounding, and not in the prediction" if self.found.rerouted else "",
            f"    {self._of_tokens()}" if self.deviations else "",
            *(f"    wrong: {each}" for each in self.wrong[:_MOST_PLACES]),
        )
        return "\n".join(filter(None, lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsRun:
    """Log-probabilities of texts under several kernels. Its truth value is "no call is beyond its bound".

    Parameters
    ----------
    model : str
        Its name.
    rest : {"fp32", "bf16", "fp16"}
        Format of everything but attention.
    texts : int
    kernels : tuple of KernelLogprobs
    """

    model: str
    rest: Dtype
    texts: int
    kernels: tuple[KernelLogprobs, ...]

    def __bool__(self) -> bool:
        return not any(kernel.wrong for kernel in self.kernels)

    def __str__(self) -> str:
        tokens = f"{self.kernels[0].found.tokens:,} tokens of {'a text' if self.texts == 1 else f'{self.texts} texts'}"
        return "\n".join(
            [
                f"{self.model}, {tokens}, the rest in {self.rest}; beside binary32 with exact attention",
                *map(str, self.kernels),
            ]
        )


def joined(samples: Sequence[Sampled]) -> Sampled:
    """Return the samples of several texts as one."""
    return Sampled(*map(np.concatenate, zip(*samples, strict=True)))
