"""Declarations of what kernels do by design where no arithmetic says what is right.

These are rows without a key, NaN and infinities in the operands, and the alignment of the causal mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np

from fa3_reference.problem import AttentionProblem


@dataclass(frozen=True, slots=True)
class Policy:
    """Holds what a kernel declares for such cases; outputs that are "undefined" are not judged.

    Parameters
    ----------
    empty_out : {"zero", "undefined"}
        Output of rows that see no key.
    empty_lse : {"-inf", "+inf", "undefined"}
        Lse of rows that see no key.
    special_values : {"table", "out", "undefined"}
        Whether NaN and infinities in the operands do what :data:`fa3verify.properties.policy.POLICY` says: to all
        outputs, or to ``out`` alone.
    causal : {"bottom_right", "top_left"}
        How the causal mask is aligned. A problem of the other diagonal is judged with as many queries as keys, where
        both are one; those that a campaign draws are aligned bottom-right.
    """

    empty_out: Literal["zero", "undefined"] = "zero"
    empty_lse: Literal["-inf", "+inf", "undefined"] = "-inf"
    special_values: Literal["table", "out", "undefined"] = "table"
    causal: Literal["bottom_right", "top_left"] = "bottom_right"

    @property
    def free(self) -> frozenset[str]:
        """Return the names of outputs whose rows without a key are not held against the formula's 0 and -inf."""
        named = {"out": self.empty_out != "zero", "lse": self.empty_lse != "-inf"}
        return frozenset(name for name, is_free in named.items() if is_free)

    @property
    def exceptions(self) -> tuple[str, ...]:
        """Return in words what it declares other than the default, so that a report can say what was not judged."""
        named = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        return tuple(f"{name} {value}" for name, value, default in named if value != default)

    def misfit(self, problem: AttentionProblem) -> str | None:
        """Return why a problem cannot be judged.

        Parameters
        ----------
        problem : AttentionProblem
            What would be computed.

        Returns
        -------
        str or None
            The rule in words; None if the problem can be judged.
        """
        if problem.causal and problem.top_left != (self.causal == "top_left"):
            own = "bottom-right, of a problem aligned top-left," if problem.top_left else "top-left"
            for n, m in ((seq.seqlen_q, seq.seqlen_k) for seq in problem.sequences()):
                if n != m:
                    return f"a causal mask aligned {own} needs as many queries as keys, got {n} and {m}"
        return None


DEFAULT = Policy()


def empty_rows(problem: AttentionProblem) -> np.ndarray:
    """Return which rows see no key, bool in the layout of lse."""
    empty = np.zeros(problem.lse_shape, bool)
    for seq in problem.sequences():
        first, stop = problem.visible_keys(np.arange(seq.seqlen_q), seq.seqlen_q, seq.seqlen_k)
        problem.rows_lse(empty, seq)[:] = stop <= first
    return empty


def out_rows(problem: AttentionProblem, rows: np.ndarray) -> np.ndarray:
    """Reorder a row mask from the layout of lse to (batch, seqlen_q, nheads, 1), or its packed form."""
    return (rows.T if problem.is_varlen else rows.transpose(0, 2, 1))[..., None]


def rows_like(x: np.ndarray, problem: AttentionProblem, rows: np.ndarray) -> np.ndarray:
    """Return a row mask from the layout of lse in the layout of an output, which is that of lse or that of out."""
    return rows if x.ndim == rows.ndim else out_rows(problem, rows)


def freed(
    policy: Policy, problem: AttentionProblem, arrays: Mapping[str, np.ndarray], value: float
) -> Mapping[str, np.ndarray]:
    """Return outputs by name, with ``value`` in the rows without a key of those that :attr:`Policy.free` names."""
    if not policy.free & arrays.keys():
        return arrays
    empty = empty_rows(problem)
    return {
        name: np.where(rows_like(x, problem, empty), value, x) if name in policy.free else x
        for name, x in arrays.items()
    }
