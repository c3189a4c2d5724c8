"""Recipes: a named distribution, its parameters, a seed and a few edits, which together draw Q, K and V.

Cases store a recipe instead of arrays: it is readable, it is JSON, it shrinks, and it draws the same float64 values on
every platform.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fa3_reference.problem import AttentionProblem
from fa3_reference.rules import require
from fa3verify.inputs.distributions import DISTRIBUTIONS, Distribution
from fa3verify.inputs.draws import Arrays, Value
from fa3verify.inputs.edits import Edit, EditKind, exact_keys, natural
from fa3verify.inputs.streams import HeadGroup, Tensor

__all__ = [
    "DISTRIBUTIONS",
    "FAMILIES",
    "MAX_EDITS",
    "UNCOMMON",
    "Arrays",
    "Distribution",
    "Edit",
    "EditKind",
    "Family",
    "Recipe",
    "Tensor",
    "Value",
]

MAX_EDITS = 8


@dataclass(frozen=True, slots=True)
class Recipe:
    """Holds what to draw: a distribution, its parameters, a seed and at most 8 edits.

    Parameters
    ----------
    distribution : str
        A name in :data:`DISTRIBUTIONS`.
    params : mapping or tuple of (name, value)
        Values that differ from the defaults; stored complete, in declared order, so that a stored recipe
        does not change when a default does.
    seed : int
        0 <= seed < 2^64.
    edits : tuple of Edit
        Applied in order after drawing; an edit of Q may read the edited K.

    Raises
    ------
    ValueError
        For an unknown distribution or parameter, a value of the wrong type or outside its range.

    Examples
    --------
    >>> recipe = Recipe("peaky", {"gain": 8}, seed=3)
    >>> recipe.describe()
    'peaky(gain=8.0), seed 3'
    >>> Recipe.from_json(recipe.to_json()) == recipe
    True
    """

    distribution: str
    params: Mapping[str, Value] | tuple[tuple[str, Value], ...] = ()
    seed: int = 0
    edits: tuple[Edit, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.distribution, str) or self.distribution not in DISTRIBUTIONS:
            names = ", ".join(DISTRIBUTIONS)
            raise ValueError(f"distribution must be one of {names}, got {self.distribution!r}")
        settings = DISTRIBUTIONS[self.distribution].settings(dict(self.params))
        object.__setattr__(self, "params", tuple(settings.items()))
        require(natural("recipe", "seed", self.seed) < 2**64, f"recipe: seed must be below 2^64, got {self.seed}")
        object.__setattr__(self, "edits", tuple(self.edits))
        require(
            len(self.edits) <= MAX_EDITS and all(isinstance(edit, Edit) for edit in self.edits),
            f"recipe: edits must be at most {MAX_EDITS} Edit records, got {len(self.edits)}",
        )

    @property
    def settings(self) -> dict[str, Value]:
        """Return every parameter of the distribution with its value."""
        return dict(self.params)

    def draw(self, problem: AttentionProblem) -> Arrays:
        """Draw q, k and v.

        Parameters
        ----------
        problem : AttentionProblem
            What the arrays are for.

        Returns
        -------
        q, k, v : float64 arrays in the problem's shapes
            Not rounded to ``problem.dtype``. The same bits on every platform and in every run; finite, also
            after rounding to ``problem.dtype`` (e4m3: after scaling), unless an edit says otherwise.
            Only ``huge``, ``huge_keys``, ``tiny`` and ``subnormals`` depend on ``problem.dtype``.

        Raises
        ------
        ValueError
            If an edit lies outside the problem, or stored activations do not fit its shape.
        """
        distribution = DISTRIBUTIONS[self.distribution]
        if distribution.check is not None:
            distribution.check(problem, **self.settings)
        q, k, v = (np.zeros(shape) for shape in (problem.q_shape, problem.k_shape, problem.v_shape))
        for seq in problem.sequences():
            for kv_head in range(problem.nheads_kv):
                group = HeadGroup(self.seed, problem, seq, kv_head)
                group_q, group_k, group_v = distribution.draw(group, **self.settings)
                heads = slice(kv_head * problem.group, (kv_head + 1) * problem.group)
                problem.rows_q(q, seq)[:, heads] = group_q.transpose(1, 0, 2)
                problem.rows_k(k, seq)[:, kv_head] = group_k[0]
                problem.rows_k(v, seq)[:, kv_head] = group_v[0]
        for edit in self.edits:
            edit.apply(problem, (q, k, v))
        return q, k, v

    def describe(self) -> str:
        """Return one readable line.

        Returns
        -------
        str
            Distribution, parameters, seed and edits.
        """
        params = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        edits = "".join(f"; {edit.describe()}" for edit in self.edits)
        return f"{self.distribution}({params}), seed {self.seed}{edits}"

    def to_json(self) -> dict[str, object]:
        """Return a record that JSON can hold exactly.

        Returns
        -------
        dict of str to object
            Every field by its name; :meth:`from_json` restores an equal recipe.
        """
        edits = [edit.to_json() for edit in self.edits]
        return {"distribution": self.distribution, "params": self.settings, "seed": self.seed, "edits": edits}

    @classmethod
    def from_json(cls, record: object) -> Recipe:
        """Read what :meth:`to_json` wrote.

        Parameters
        ----------
        record : object
            Decoded JSON.

        Returns
        -------
        Recipe
            An equal recipe.

        Raises
        ------
        ValueError
            For a wrong key, type or value, in one line.
        """
        if not isinstance(record, dict):
            raise ValueError(f"recipe must be an object, got {json.dumps(record, default=repr)}")
        exact_keys("recipe", record, ("distribution", "params", "seed", "edits"))
        require(
            isinstance(record["params"], dict) and isinstance(record["edits"], list),
            "recipe: params must be an object and edits a list",
        )
        edits = tuple(Edit.from_json(edit) for edit in record["edits"])
        return cls(record["distribution"], record["params"], record["seed"], edits)


@dataclass(frozen=True, slots=True)
class Family:
    """A named kind of input that campaigns cover: a recipe without a seed."""

    name: str
    distribution: str
    params: tuple[tuple[str, Value], ...] = ()

    def recipe(self, *, seed: int = 0, edits: tuple[Edit, ...] = ()) -> Recipe:
        """Return the family's recipe for one seed."""
        return Recipe(self.distribution, self.params, seed, edits)


_UNCOMMON = ("huge_keys", "level", "shelf", "vanishing")  # distributions of uncommon families alone
FAMILIES: tuple[Family, ...] = (
    *(Family(name, name) for name in DISTRIBUTIONS if name not in ("activations", "captured", *_UNCOMMON)),
    Family("outlier_channels_1000", "outlier_channels", (("channels", 1), ("ratio", 1000.0))),
    Family("block_scaled_smooth", "block_scaled", (("tile", 128), ("power_of_two", 0))),
    Family("ramp_128", "ramp", (("tile", 128),)),
    Family("very_peaky", "peaky", (("gain", 16.0),)),
    Family("faint", "normal", (("std", 1e-24),)),
    Family("all_ties", "ties", (("distinct", 1),)),
    Family("saturated_sink", "sink", (("strength", 50.0),)),
    Family("activations", "activations"),
)
# Families that only covering arrays draw, so that no baseline has them.
UNCOMMON: tuple[Family, ...] = (
    Family("huge_keys", "huge_keys"),
    Family("lse_below_88", "level", (("nats", -120.0),)),
    Family("lse_above_88", "level", (("nats", 120.0),)),
    Family("sentinels", "level", (("nats", -5e4),)),
    Family("deep_sentinels", "level", (("nats", -2.1e6),)),
    Family("vanishing_v", "vanishing", (("nats", 100.0),)),
    Family("vanishing_later_v", "vanishing", (("nats", -100.0),)),
    Family("lost_weights", "shelf", (("depth_log2", 24.0),)),
    Family("subnormal_weights", "shelf", (("depth_log2", 17.0),)),
)
