"""Laws about terms of scores: biases, masks, paddings, slopes and documents.

A term that adds nothing is none, a constant moves lse alone, two terms that say the same agree, documents are sequences
apart, a key that a term hides never matters, and a row whose keys are all hidden is a row without a key. The gradient
of a bias is the sum of the gradients of all scores that it is added to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from fa3_reference.problem import Array, Sequence
from fa3_reference.score_term import AXES, KINDS, VALUES, ScoreTerm
from fa3_reference.terms import added
from fa3verify.cases.case import Case
from fa3verify.inputs.terms import draw_term, format_of
from fa3verify.kernels.policy import empty_rows
from fa3verify.kernels.record import Kernel
from fa3verify.operations.backward import BIASES
from fa3verify.properties.compare import (
    Found,
    against_truth,
    agree,
    agreeing,
    alike,
    called,
    summed,
    within,
)
from fa3verify.properties.law import Drawn, Setup, Trial, Violation, set_up
from fa3verify.properties.structure import rows_without_keys, want_finite_values
from fa3verify.properties.transforms import part, part_of_result
from fa3verify.properties.trials import Parameters, Wanted, drawn, law, needs

_BIASES = frozenset(BIASES)
_MASKS = frozenset({"attn_mask", "key_padding", "documents"})
_CONSTANTS = (2, -3, 16, -40)  # nats
# The kinds that can say what a kind says; slopes need the bits of float32.
_SAME: dict[str, tuple[str, ...]] = {
    "attn_mask": ("bias", "bias_fp32"),
    "key_padding": ("attn_mask", "bias", "bias_fp32"),
    "documents": ("attn_mask", "bias", "bias_fp32"),
    "alibi": ("bias_fp32",),
}


def _with(setup: Setup, kind: str, values: str = "plain", seed: int = 0) -> tuple[Setup, Array]:
    """Return the call with a term whose values are drawn, and its operand; with functions every call has its own."""
    if kind == "mods":
        return setup, np.zeros(setup.problem.term_shape, np.float32)
    shared = "b" * (kind == "alibi" and setup.kernel.sizes.slopes_by_head)
    problem = replace(setup.problem, term=ScoreTerm(kind=kind, shared=shared, values=values))  # type: ignore[arg-type]
    q, k, *_ = setup.operands.dequantized(setup.problem)
    term = draw_term(problem, q, k, seed).astype(format_of(problem))
    return setup._replace(problem=problem).fed(term=term), term


def _others(kernel: Kernel, kind: str) -> list[str]:
    """Return the other kinds that a kernel takes and that can say what one kind says; none for one it does not take."""
    return [
        other
        for other in _SAME[kind]
        if {kind, other} <= kernel.features
        and (other not in _BIASES or kind == "alibi" or not kernel.sizes.finite_biases)  # masks need -inf
    ]


def _of(kinds: frozenset[str], **more: st.SearchStrategy[int]) -> Parameters:
    """Return a function that draws a kind of term among some, a seed, and more."""

    def draw_parameters(draw: st.DrawFn, kernel: Kernel, case: Case) -> Drawn:
        own = {"kind": st.sampled_from(sorted(kernel.features & kinds)), "seed": st.integers(0, 99)}
        return {name: draw(strategy) for name, strategy in (own | more).items()}

    return draw_parameters


def _takes(kinds: frozenset[str]) -> Callable[[Kernel], bool]:
    return lambda kernel: bool(kernel.features & kinds)


def _constant(setup: Setup, trial: Trial) -> Found:
    neutral, zeros = _with(setup, trial.choice("kind", KINDS), "neutral")
    constant = trial.integer("constant", -100, 100)
    moved = called(neutral.fed(term=np.full_like(zeros, constant)))
    plain = called(setup)
    expected = dict(plain.outputs)
    if "lse" in expected:
        expected["lse"] = expected["lse"] + np.float64(constant)
    yield within(f"a bias of {constant} nats everywhere", moved.outputs, expected, summed(moved.bound, plain.bound))


def _same(setup: Setup, trial: Trial) -> Found:
    seed = trial.integer("seed", 0, 99)
    for kind in _SAME:
        if others := _others(setup.kernel, kind):
            yield _agree(setup, trial, kind, others[seed % len(others)])


def _agree(setup: Setup, trial: Trial, kind: str, other: str) -> Violation | None:
    """Compare a call with a drawn term of one kind with a call that says the same by another kind."""
    seed = trial.integer("seed", 0, 99)
    first, drawn_term = _with(setup, kind, VALUES[kind][seed % 2], seed)
    if kind == "alibi":  # slopes whose products with a distance are exact in float32
        drawn_term = np.exp2(np.round(np.log2(drawn_term))).astype(np.float32)
        first = first.fed(term=drawn_term)
    second, _ = _with(setup, other, "neutral")
    problem = first.problem
    term = np.stack(
        [
            np.stack([added(problem, drawn_term, seq, head) for head in range(problem.nheads)])
            for seq in problem.sequences()
        ]
    )
    said = np.isfinite(term) if other == "attn_mask" else term
    second = second.fed(term=said.astype(format_of(second.problem)))
    return agree(trial, f"{kind} against the same as {other}", got=called(first), expected=called(second))


def _apart(setup: Setup, trial: Trial) -> Found:
    seq: Sequence = next(setup.problem.sequences())
    cuts = [trial.integer("share", 0, 8) * n // 8 for n in (seq.seqlen_q, seq.seqlen_k)]
    ids = [np.where(np.arange(n) < cut, 8, 3) for n, cut in zip((seq.seqlen_q, seq.seqlen_k), cuts, strict=True)]
    documents, _ = _with(setup, "documents")
    both = called(documents.fed(term=np.tile(np.concatenate(ids), (setup.problem.batch, 1)).astype(np.int32)))
    first = slice(0, cuts[0]), slice(0, cuts[1])
    second = slice(cuts[0], seq.seqlen_q), slice(cuts[1], seq.seqlen_k)
    for rows, keys in (each for each in (first, second) if each[0].stop > each[0].start):
        alone = called(part(setup, seq, rows=rows, keys=keys))
        got, bound = (part_of_result(setup, x, seq, rows=rows) for x in (both.outputs, both.bound))
        what = f"rows {rows.start} to {rows.stop} of a document against a call of their own"
        yield within(what, got, alone.outputs, summed(alone.bound, bound))


def _emptied(setup: Setup, trial: Trial) -> Found:
    hidden, _ = _with(setup, trial.choice("kind", tuple(sorted(_HIDES))), "none visible", trial.integer("seed", 0, 99))
    yield from rows_without_keys(hidden, trial)


def _outweighed(setup: Setup, trial: Trial) -> Found:
    """Change V of a key where all scores are low, and compare the rows from which a term hides that key."""
    want_finite_values(setup)
    q, k = (np.zeros_like(x) for x in (setup.operands.q, setup.operands.k))
    q[..., 0] = 1
    k[..., 0] = _LOW_PRODUCT
    seed = trial.integer("seed", 0, 99)
    masked, term = _with(setup.fed(q=q, k=k), trial.choice("kind", tuple(sorted(_HIDES))), "one visible", seed)
    problem = masked.problem
    v = masked.operands.v.copy()
    blind = np.zeros(problem.lse_shape, bool)
    for seq in problem.sequences():
        problem.rows_k(v, seq)[seed % seq.seqlen_k] = -5
        terms = [added(problem, term, seq, head)[:, seed % seq.seqlen_k] for head in range(problem.nheads)]
        problem.rows_lse(blind, seq)[:] = np.isneginf(terms)
    what = f"rows from which a term hides key {seed} modulo their number, after its V changed"
    yield alike(what, masked.fed(v=v), masked, blind & ~empty_rows(problem, term))


def _gradients(setup: Setup, trial: Trial) -> Found:
    """Compare gradients with a bias with the truth, and its own with the sums of those of single pairs."""
    kind = trial.choice("kind", BIASES)
    seed = trial.integer("seed", 0, 99)
    term = ScoreTerm(kind, _SHARED[seed % len(_SHARED)], VALUES[kind][seed % len(VALUES[kind])])  # type: ignore[arg-type]
    biased = set_up(setup.kernel, replace(trial.case, problem=replace(setup.problem, term=term)))
    yield against_truth(biased, "with a bias")
    problem = replace(biased.problem, term=replace(term, shared=""))
    full = np.broadcast_to(biased.operands.term, problem.term_shape).copy()  # type: ignore[arg-type]
    whole = biased._replace(problem=problem).fed(term=full)
    if (name := f"d{kind}") in (apart := whole.run()):
        parts = apart[name].astype(np.float64)
        allowed = whole.bound()[name]
        over = tuple(map(AXES.index, term.shared))
        hidden = np.where(np.isneginf(full), parts, 0)
        yield within("pairs that it hides", {name: hidden}, {name: 0 * hidden}, {name: 0 * hidden})
        with np.errstate(invalid="ignore"):
            expected, bound = ({name: x.sum(over, keepdims=True)} for x in (parts, allowed))
            rows, of_rows = ({name: x.sum(3)} for x in (parts, allowed))
        yield within("a bias that is shared against the sum", biased.run(), expected, summed(bound, biased.bound()))
        if biased.config.forward == "own":
            yield within("the sum over the keys of a row", rows, {name: np.zeros(rows[name].shape)}, of_rows)


_SHARED = ("", "b", "h", "q", "k", "bh", "hq", "bhq", "bhk", "bhqk")  # 10, beside 7 values: every pair has a seed
_LOW_PRODUCT = -6e4  # of q and k: lower than what kernels put in the place of a hidden score, and finite in 16 bits
_SMALL = Wanted(layout="batched", longest_q=40, empty=False)
_HIDES = _BIASES | _MASKS | {"mods"}
TERM_LAWS = (
    law(
        "a_term_that_adds_nothing_is_none",
        "biases and slopes of 0, masks that hide nothing and documents that are all one agree with a call without "
        "them, bit for bit where claimed, else within the sum of both bounds",
        "agreement",
        agreeing(
            "a term that adds nothing against none",
            lambda setup, trial: (_with(setup, trial.choice("kind", KINDS), "neutral")[0], setup),
        ),
        wanted=_SMALL,
        parameters=_of(frozenset(KINDS)),
        applies=_takes(frozenset(KINDS)),
    ),
    law(
        "a_constant_bias_moves_lse_alone",
        "a bias that is one number everywhere keeps out and adds that number to lse, within the sum of both bounds",
        "bounded",
        _constant,
        wanted=_SMALL,
        parameters=_of(_BIASES, constant=st.sampled_from(_CONSTANTS)),
        applies=_takes(_BIASES),
    ),
    law(
        "terms_that_say_the_same_agree",
        "a mask, a padding or documents agree with a mask, or a bias of 0 and -inf, that hides the same keys, and "
        "slopes with the bias that they make, bit for bit where claimed, else within the sum of both bounds",
        "agreement",
        _same,
        wanted=_SMALL,
        parameters=drawn(seed=st.integers(0, 99)),
        applies=lambda kernel: any(_others(kernel, kind) for kind in _SAME),
    ),
    law(
        "documents_are_sequences_apart",
        "rows of a document agree with a call of its queries and keys alone, within the sum of both bounds; dense",
        "bounded",
        _apart,
        wanted=replace(_SMALL, masks="none"),
        parameters=drawn(share=st.integers(0, 8)),
        applies=needs("documents"),
    ),
    law(
        "keys_that_a_term_hides_never_matter",
        "where all scores are low, replacing V of a key that a bias of -inf, a mask, a padding or documents hide "
        "changes no bit of the row but the sign of a zero; of kernels that quantise it moves the row by no more than "
        "the sum of both bounds",
        "exact",
        _outweighed,
        wanted=_SMALL,
        parameters=_of(_HIDES),
        applies=_takes(_HIDES),
    ),
    law(
        "rows_that_a_term_empties_are_zero",
        "rows whose keys a bias, a mask, a padding or documents hide have out exactly 0 and lse -inf, or what the "
        "kernel declares; where that is the mean, NaN as well if a bias of -inf hides them",
        "exact",
        _emptied,
        wanted=_SMALL,
        parameters=_of(_HIDES, num_splits=st.just(1)),
        applies=_takes(_HIDES),
    ),
    law(
        "gradients_with_a_bias",
        "with a bias dQ, dK, dV and its gradient, if that is returned, lie within the bound; the gradient is the sum "
        "of those of all pairs that share an element, 0 for pairs that it hides, and of a forward of the kernel's own "
        "it sums to 0 over the keys of a row, within the bounds",
        "bounded",
        _gradients,
        wanted=replace(_SMALL, max_edits=0),
        parameters=_of(_BIASES),
        applies=_takes(_BIASES),
        of=("backward",),
    ),
)
