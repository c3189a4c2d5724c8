"""Mutations of what all individuals of a colony share: softmax_scale, softcap and descales.

Some of them move a power of two from one factor to another, which leaves the exact result as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fa3_reference.bounds.device import FP32_MAX
from fa3verify.search.colony import Rng, positive, power_of_two_in_log2_units, rounded
from fa3verify.search.forward.colony import ForwardColony
from fa3verify.search.forward.guide import Guide


def _scaled(x: float, factor: float) -> float:
    return float(np.clip(x * factor, 2.0**-149, FP32_MAX))


def _far(rng: Rng) -> float:
    """Return a factor of any size that binary32 has; every second one leads to an end of its range."""
    if rng.random() < 0.5:
        return float(np.exp2(rng.uniform(-150, 150)))
    return float(np.exp2(rng.choice([-1, 1]) * rng.uniform(118, 150)))


def _scale(colony: ForwardColony, step: float, rng: Rng) -> None:
    """Change the factor of the scores, nearly the same or as a power of two in log2 units."""
    environment = colony.environment
    scale = _scaled(environment.softmax_scale, np.exp2(step * rng.standard_normal()))
    if rng.random() < 0.3:
        scale = float(power_of_two_in_log2_units(rng))
    colony.environment = replace(environment, softmax_scale=scale)


def _screened(colony: ForwardColony, step: float, rng: Rng) -> None:
    """Take the best of many factors of softmax_scale, of the softcap or of both: that with the largest error of lse.

    The guide estimates the errors. A factor of both leaves the argument of tanh as it is and changes the roundings of
    its unit.
    """
    environment = colony.environment
    choices = []
    for factor in np.exp2(np.exp2(rng.uniform(-20, 0, 16)) * rng.standard_normal(16)):
        of_scale, of_softcap = ((factor, 1.0), (1.0, factor), (factor, factor))[rng.integers(3)]
        scale = _scaled(environment.softmax_scale, of_scale)
        softcap = environment.softcap
        choices.append(replace(environment, softmax_scale=scale, softcap=softcap and _scaled(softcap, of_softcap)))
    errors = [np.nan_to_num(Guide.of(replace(colony, environment=e)).lse_errors, posinf=0.0).max() for e in choices]
    colony.environment = choices[int(np.argmax(errors))]


def _softcap(colony: ForwardColony, step: float, rng: Rng) -> None:
    factor = np.exp2(rng.uniform(-6, 6) if rng.random() < 0.3 else step * rng.standard_normal())
    colony.environment = replace(colony.environment, softcap=_scaled(colony.environment.softcap, factor))


def _descale(colony: ForwardColony, step: float, rng: Rng, far: bool = False) -> None:
    """Change one descale, or all, of K or V."""
    name = rng.choice(["k_descale", "v_descale"])
    values = getattr(colony.environment, name).astype(np.float64)
    where = np.ones(values.size, bool) if rng.random() < 0.3 else np.arange(values.size) == rng.integers(values.size)
    factor = _far(rng) if far else np.exp2(rng.integers(-8, 9) if rng.random() < 0.3 else step * rng.standard_normal())
    colony.environment = replace(colony.environment, **{name: positive(np.where(where, values * factor, values))})


def _far_scale(colony: ForwardColony, step: float, rng: Rng) -> None:
    scale = _scaled(colony.environment.softmax_scale, _far(rng))
    colony.environment = replace(colony.environment, softmax_scale=scale)


def _far_softcap(colony: ForwardColony, step: float, rng: Rng) -> None:
    colony.environment = replace(colony.environment, softcap=_scaled(1.0, _far(rng)))


def _far_descale(colony: ForwardColony, step: float, rng: Rng) -> None:
    _descale(colony, step, rng, far=True)


def _apart(colony: ForwardColony, step: float, rng: Rng) -> None:
    """Move descales of neighbouring blocks as far from each other as binary32 has room for."""
    name = rng.choice(["k_descale", "v_descale"])
    values = getattr(colony.environment, name).astype(np.float64)
    sign = np.where((np.arange(values.size) + rng.integers(2)) % 2, 1, -1)
    factor = np.exp2(sign * rng.uniform(20, 75))
    colony.environment = replace(colony.environment, **{name: positive(values * factor)})


def _far_values(colony: ForwardColony, step: float, rng: Rng) -> None:
    """Make all of V larger or smaller, as far as its format goes."""
    colony.v = rounded(colony.v * _far(rng), colony.island.dtype)


def _exchange(colony: ForwardColony, step: float, rng: Rng) -> None:
    """Move powers of two between factors: the exact result stays as it is."""
    environment = colony.environment
    dtype = colony.island.dtype
    factor = _far(rng) if rng.random() < 0.7 else float(np.exp2(rng.integers(-20, 21)))
    kind = rng.integers(4)
    if dtype != "e4m3" and kind < 2:  # raw scores that reach the end of binary32
        factor = float(np.exp2(np.round(rng.uniform(120, 131) - np.log2(np.abs(colony.raw_scores).max() + 2.0**-100))))
    if dtype != "e4m3" or kind == 0:
        colony.environment = replace(environment, softmax_scale=_scaled(environment.softmax_scale, 1 / factor))
        if dtype == "e4m3":
            colony.q_descale = positive(colony.q_descale * np.float64(factor))
        else:
            share = np.exp2(np.round(np.log2(factor) * rng.random()))
            colony.q, colony.k = rounded(colony.q * share, dtype), rounded(colony.k * (factor / share), dtype)
    elif kind == 1:
        colony.q_descale = positive(colony.q_descale * np.float64(factor))
        colony.environment = replace(environment, k_descale=positive(environment.k_descale / np.float64(factor)))
    elif kind == 2:
        k_descale = positive(environment.k_descale * np.float64(factor))
        scale = _scaled(environment.softmax_scale, 1 / factor)
        colony.environment = replace(environment, k_descale=k_descale, softmax_scale=scale)
    else:
        small = np.exp2(rng.integers(-8, 9))
        colony.v = rounded(colony.v * small, dtype)
        colony.environment = replace(environment, v_descale=positive(environment.v_descale / np.float64(small)))


Mutation = Callable[[ForwardColony, float, Rng], None]


def mutate(colony: ForwardColony, step: float, wild: bool, rng: Rng) -> None:
    """Change one shared factor, now and then two; ``wild`` by as much as binary32 has room for.

    A mutation that stands twice in a list is drawn twice as often; those that the island has no use for are left out.
    """
    island = colony.island
    tame: list[Mutation] = [_scale, _screened, *[_softcap] * island.softcap, *[_descale] * (island.dtype == "e4m3")]
    tame += [_screened] * 2 * (island.softcap and not island.is_chained)
    far: list[Mutation] = [_far_scale, _far_values, _exchange, _exchange, *[_far_softcap] * island.softcap]
    far += [_far_descale, *[_apart] * 2 * (island.descales > 1)] * (island.dtype == "e4m3")
    for _ in range(1 + int(wild and rng.random() < 0.3)):
        choices = far if wild and rng.random() < 0.75 else tame
        choices[rng.integers(len(choices))](colony, step, rng)
