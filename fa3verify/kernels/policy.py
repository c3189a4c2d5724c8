"""Declarations of what kernels do by design where no arithmetic says what is right.

These are rows without a key, NaN and infinities in the operands, and the alignment of the causal mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args, get_type_hints

import numpy as np

from fa3_reference.problem import AttentionProblem
from fa3_reference.terms import added, rows_without_keys


@dataclass(frozen=True, slots=True)
class Policy:
    """The contract of a kernel where no arithmetic says what is right; what it calls undefined is not judged.

    A field that is None was not declared: FlashAttention-3's contract is then expected, which is the first value of
    each list, and a kernel that keeps another contract of :data:`CONTRACTS` is asked whether it means to.

    Parameters
    ----------
    empty_out : {"zero", "mean", "nan", "undefined"}, optional
        Output of rows that see no key; "mean" is that of V over all keys of the sequence, or NaN where an added bias of
        -inf is what hides them, as where masks fill scores with a finite number.
    empty_lse : {"-inf", "+inf", "finite", "nan", "undefined"}, optional
        Lse of rows that see no key.
    special_values : {"table", "visible", "out", "undefined"}, optional
        Whether NaN and infinities in the operands do what :data:`fa3verify.properties.policy.POLICY` says: to all
        outputs; to all outputs, but rows that do not see such a value may be NaN as well, as where masks are added to
        scores; or to ``out`` alone. With "undefined" they may do anything to their own sequence, and nothing to others.
    causal : {"bottom_right", "top_left"}, optional
        How the causal mask is aligned: at the last query and the last key, or at the first ones.

    Raises
    ------
    ValueError
        For a value that is not in its list.
    """

    empty_out: Literal["zero", "mean", "nan", "undefined"] | None = None
    empty_lse: Literal["-inf", "+inf", "finite", "nan", "undefined"] | None = None
    special_values: Literal["table", "visible", "out", "undefined"] | None = None
    causal: Literal["bottom_right", "top_left"] | None = None

    def __post_init__(self) -> None:
        for name, values in VALUES.items():
            if (value := getattr(self, name)) not in (None, *values):
                raise ValueError(f"{name} must be one of {', '.join(values)}, got {value!r}")

    @property
    def said(self) -> dict[str, str]:
        """Return what was declared, by field."""
        return {name: value for name in VALUES if (value := getattr(self, name)) is not None}

    @property
    def declaration(self) -> str:
        """Return what declares it in Python.

        >>> Policy(causal="top_left", empty_out="mean").declaration
        'policy=fa3verify.Policy(empty_out="mean", causal="top_left")'
        """
        said = ", ".join(f'{name}="{value}"' for name, value in self.said.items())
        return f"policy=fa3verify.Policy({said})"

    @property
    def whole(self) -> Policy:
        """Return the policy that is expected: FlashAttention-3's contract where nothing was declared."""
        return Policy(**{name: values[0] for name, values in VALUES.items()} | self.said)  # type: ignore[arg-type]

    def declaring(self, said: Mapping[str, str]) -> Policy:
        """Return the policy with more fields declared.

        Parameters
        ----------
        said : mapping of str to str
            Values by the name of their field.

        Returns
        -------
        Policy
            Of the same kernel, with the values of both.

        Raises
        ------
        ValueError
            For a value that is not in its list.
        """
        return replace(self, **said)  # type: ignore[arg-type]

    @property
    def free(self) -> frozenset[str]:
        """Return the names of outputs whose rows without a key are not held against the formula's 0 and -inf."""
        named = {"out": self.empty_out not in (None, "zero"), "lse": self.empty_lse not in (None, "-inf")}
        return frozenset(name for name, is_free in named.items() if is_free)

    @property
    def exceptions(self) -> tuple[str, ...]:
        """Return what it declares other than FlashAttention-3's contract, in words, for reports."""
        named = ((name, getattr(self, name), values[0]) for name, values in VALUES.items())
        return tuple(f"{name} {value}" for name, value, default in named if value not in (None, default))

    def aligned(self, problem: AttentionProblem) -> AttentionProblem:
        """Return a problem with the causal mask aligned as the kernel aligns it.

        Parameters
        ----------
        problem : AttentionProblem
            One without a causal mask comes back as it is.

        Returns
        -------
        AttentionProblem
            What the kernel computes of the same call.
        """
        top_left = self.causal == "top_left" and problem.causal
        return problem if top_left == problem.top_left else replace(problem, top_left=top_left)

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


VALUES: dict[str, tuple[str, ...]] = {  # of every field, FlashAttention-3's first
    field.name: get_args(get_args(hint)[0]) for field, hint in zip(fields(Policy), get_type_hints(Policy).values())
}
DEFAULT = Policy()


@dataclass(frozen=True, slots=True)
class Contract:
    """A value of a field of :class:`Policy`, or of :class:`fa3verify.kernels.sizes.Sizes`, that public kernels have."""

    field: str
    value: str
    meaning: str
    public: str


CONTRACTS = (  # of two that explain as much the first is asked about: "mean" allows some NaN, "nan" no mean
    Contract(
        "empty_out",
        "nan",
        "a row that sees no key returns NaN",
        "NaN: softmax over scores of -inf alone, as torch's MATH before 2.5; 0: FlashAttention-2 and 3, FlexAttention",
    ),
    Contract(
        "empty_out",
        "mean",
        "a row that sees no key returns the mean of V over all keys",
        "the mean: torch's MATH with a float mask of finite minima, Transformers' eager attention; 0: FlashAttention-2 "
        "and 3, FlexAttention",
    ),
    Contract(
        "empty_lse",
        "+inf",
        "the lse of a row that sees no key is +inf",
        "+inf: FlashAttention-2; -inf: FlashAttention-3, FlexAttention",
    ),
    Contract(
        "empty_lse",
        "finite",
        "the lse of a row that sees no key is finite",
        "finite: kernels that mask by a large negative number; -inf: FlashAttention-3, FlexAttention",
    ),
    Contract(
        "empty_lse",
        "nan",
        "the lse of a row that sees no key is NaN",
        "NaN: logsumexp of -inf less a maximum of -inf; -inf: FlashAttention-3, FlexAttention",
    ),
    Contract(
        "special_values",
        "visible",
        "NaN or an infinity in a key that a row does not see makes the row NaN",
        "NaN reaches it: masks that are added to scores, as in Triton's tutorial; it does not: FlashAttention-2 and 3",
    ),
    Contract(
        "special_values",
        "undefined",
        "NaN and infinities in the operands do to their own sequence what nothing promises",
        "they may vanish: torch's scaled_dot_product_attention on a CPU, and where NaN is set to 0 for rows without a "
        "key; they follow a table: FlashAttention-2 and 3",
    ),
    Contract(
        "combinations",
        "window with causal",
        "a window hides the keys behind the diagonal without a causal mask too",
        "it does: kernels for language models, such as those of flash-linear-attention; it does not: FlashAttention-2 "
        "and 3, which take windows to both sides",
    ),
    Contract(
        "causal",
        "top_left",
        "the causal mask is aligned at the first query and the first key",
        "top-left: torch's scaled_dot_product_attention, cuDNN, FlashAttention-2 before 2.1; bottom-right: "
        "FlashAttention-2 since 2.1 and 3",
    ),
)


def empty_rows(problem: AttentionProblem, term: np.ndarray | None = None) -> np.ndarray:
    """Return which rows see no key, bool in the layout of lse; ``term`` is the operand of a problem's term."""
    empty = np.zeros(problem.lse_shape, bool)
    for seq in problem.sequences():
        # Without a term all heads see the same keys.
        terms = [None] if term is None else (added(problem, term, seq, head) for head in range(problem.nheads))
        problem.rows_lse(empty, seq)[:] = [rows_without_keys(problem, seq, each) for each in terms]
    return empty


def out_rows(problem: AttentionProblem, rows: np.ndarray) -> np.ndarray:
    """Reorder a row mask from the layout of lse to (batch, seqlen_q, nheads, 1), or its packed form."""
    return (rows.T if problem.is_varlen else rows.transpose(0, 2, 1))[..., None]


def rows_like(x: np.ndarray, problem: AttentionProblem, rows: np.ndarray) -> np.ndarray:
    """Return a row mask from the layout of lse in the layout of an output, which is that of lse or that of out."""
    return rows if x.ndim == rows.ndim else out_rows(problem, rows)


def freed(
    policy: Policy,
    problem: AttentionProblem,
    arrays: Mapping[str, np.ndarray],
    value: float,
    term: np.ndarray | None = None,
) -> Mapping[str, np.ndarray]:
    """Return outputs by name, with ``value`` in the rows without a key of those that :attr:`Policy.free` names."""
    if not policy.free & arrays.keys():
        return arrays
    empty = empty_rows(problem, term)
    return {
        name: np.where(rows_like(x, problem, empty), value, x) if name in policy.free else x
        for name, x in arrays.items()
    }
