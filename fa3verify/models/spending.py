"""Which layers of a model keep the dearer kernel, so that its log-probabilities stay within a budget of nats.

Variances of layers add up, so that what each costs is known before anything is tried: the dearest are kept until the
prediction fits. What was chosen is then measured on texts that were not used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fa3verify.models.attention import ExactAttention, KernelAttention
from fa3verify.models.logprobs import Divergence, LanguageModel, format_of, joined, predict


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBudget:
    """Layers that keep a kernel, so that another one in the rest stays within a budget; true if it was kept.

    Parameters
    ----------
    cheap, kept : str
        The kernel of most layers, and that of ``layers``.
    layers : tuple of int
        Dearest first.
    layers_of : int
        Layers that the model has.
    budget, predicted : float
        RMS in nats.
    found : Divergence
        Measured on the texts behind the first, which chose the layers; on that one if it is alone.
    """

    cheap: str
    kept: str
    layers: tuple[int, ...]
    layers_of: int
    budget: float
    predicted: float
    found: Divergence

    def __bool__(self) -> bool:
        return self.found.rms <= self.budget

    def __str__(self) -> str:
        which = ", ".join(map(str, sorted(self.layers))) or "none"
        return (
            f"within {self.budget:g} nats: {self.cheap}, with {self.kept} in {len(self.layers)} of {self.layers_of} "
            f"layers ({which}); predicted {self.predicted:.3g}, measured {self.found.rms:.3g} nats RMS "
            f"on {self.found.tokens:,} tokens\n    {self.found}"
        )


def spend(
    both: LanguageModel,
    texts: Sequence[torch.Tensor],
    kernels: tuple[KernelAttention, KernelAttention],
    budget: float,
    seed: int = 0,
) -> LayerBudget:
    """Choose the layers that keep the second of two kernels, so that the first in all others stays within a budget.

    Parameters
    ----------
    both : LanguageModel
    texts : sequence of int64 tensors (tokens,)
        The first chooses; the others measure.
    kernels : two KernelAttention
        The cheaper and the more accurate one.
    budget : float
        RMS in nats, of all that rounds.

    Raises
    ------
    ValueError
        If the more accurate kernel in all layers is predicted to exceed the budget.
    """
    cheap, kept = kernels
    by_format = predict(both, texts[0], kernels, seed)
    of_cheap, of_kept = (by_format[format_of(kernel)] for kernel in kernels)
    gains = dict.fromkeys(range(both.layers), 0.0)
    for place in {place for place in (*of_cheap, *of_kept) if place.layer in gains}:
        gains[place.layer] += of_cheap[place] - of_kept[place]
    dearest = sorted(gains, key=lambda layer: -gains[layer])
    squares = [sum(of_cheap.values()) - sum(gains[layer] for layer in dearest[:n]) for n in range(len(dearest) + 1)]
    within = [n for n, square in enumerate(squares) if square <= budget**2]
    if not within:
        raise ValueError(
            f"{kept.kernel.name} in every layer is predicted to have {math.sqrt(squares[-1]):.3g} nats RMS, "
            f"more than {budget:g}"
        )
    layers = tuple(dearest[: within[0]])
    mixed = KernelAttention(cheap.kernel, cheap.scheme, dict.fromkeys(layers, kept))
    measured = texts[1:] or texts
    return LayerBudget(
        cheap=cheap.kernel.name,
        kept=kept.kernel.name,
        layers=layers,
        layers_of=both.layers,
        budget=budget,
        predicted=math.sqrt(squares[within[0]]),
        found=Divergence.between(
            joined([both.sample(text, mixed) for text in measured]),
            joined([both.sample(text, ExactAttention(), exactly=True) for text in measured]),
        ),
    )
