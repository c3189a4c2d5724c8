"""A row of a colony while it mutates: its Q and keys, and how it is given the scores that a mutation wants.

The mutations themselves stand in :mod:`fa3verify.search.forward.scores` and :mod:`fa3verify.search.forward.chains`.
"""

from __future__ import annotations

import numpy as np

from fa3_reference.bounds.steps import LOG2_E
from fa3verify.search.colony import rounded
from fa3verify.search.forward.guide import Led


class Row(Led):
    """Holds one row of a colony while it mutates, with what its parent's guide knows."""

    __slots__ = ()

    @property
    def top(self) -> float:
        return float(self.guide.top[self.row])

    @property
    def scores(self) -> np.ndarray:
        """Return the scores in log2 units, (keys,); those of keys that are not seen are far below the maximum."""
        scores = self.guide.scores[self.row]
        return np.where(np.isneginf(scores), self.top - 30, scores)

    @property
    def q(self) -> np.ndarray:
        """Return the channels of Q, (width,), a view of the colony."""
        return self.colony.q[self.index]

    @property
    def k(self) -> np.ndarray:
        """Return the channels of its keys, (keys, width), a view of the colony."""
        return self.colony.k[self.index]

    @property
    def keys(self) -> int:
        return self.colony.island.keys

    @property
    def offset(self) -> int:
        return self.colony.island.config.p_offset_log2

    def write(self, keys: np.ndarray, log2_scores: np.ndarray) -> None:
        """Change K of some keys so that they have these scores, as nearly as ``width`` channels of K can."""
        self.k[keys] = self.digits(keys, log2_scores)

    def digits(self, keys: np.ndarray, log2_scores: np.ndarray) -> np.ndarray:
        """Return K of some keys, (..., keys, width), that gives them the scores (..., keys), in log2 units.

        The channels are set one after the other, that of the largest Q first; each takes what is left of the score.
        """
        x = log2_scores
        softcap = self.colony.environment.softcap * LOG2_E
        if softcap:
            # Undo the softcap; clipped, as no raw score gives the softcap itself.
            x = softcap * np.arctanh(np.clip(x / softcap, -1 + 2.0**-50, 1 - 2.0**-50))
        left = x / self.colony.factors[self.index, keys]
        result = np.zeros((*x.shape, self.q.size))
        for channel in np.argsort(-np.abs(self.q)):
            q = self.q[channel]
            if q != 0:
                result[..., channel] = rounded(left / q, self.dtype)
                left = left - q * result[..., channel]
        return result
