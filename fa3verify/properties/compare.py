"""Comparisons of results, bit for bit or within a bound; each returns a violation, or None if the results agree.

The checks of laws are made of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cached_property

import numpy as np

from fa3_reference.problem import AttentionProblem
from fa3verify.judging.metrics import other_bits
from fa3verify.judging.verdict import Seen, ratio_text, value_of
from fa3verify.kernels.policy import rows_like
from fa3verify.operations import Outputs
from fa3verify.operations.operation import error_over_bound
from fa3verify.properties.law import Setup, Trial, Untaken, Violation

Found = Iterable[Violation | None]  # the results of a law's comparisons; the first violation counts


class CallResult:
    """A call with what the kernel returned; the bound is computed when it is first read."""

    def __init__(self, setup: Setup, outputs: Outputs) -> None:
        self.setup = setup
        self.outputs = outputs

    @cached_property
    def bound(self) -> Outputs:
        return self.setup.bound()


def called(setup: Setup) -> CallResult:
    """Run a call; if no caller can have its configuration, in the one that the kernel chooses for the problem.

    Untaken if the kernel has none for the problem.
    """
    if (words := setup.kernel.unreachable(setup.problem, setup.config)) is not None:
        try:
            setup = setup._replace(config=setup.kernel.configured(setup.problem))
        except ValueError:
            raise Untaken(words) from None
    return CallResult(setup, setup.run())


def unsigned_zeros(outputs: Outputs) -> Outputs:
    """Return outputs whose zeros have no sign."""
    return {name: np.where(x == 0, np.zeros_like(x), x) for name, x in outputs.items()}


def first(found: Found) -> Violation | None:
    """Return the first violation, None without one; later comparisons are not made."""
    return next(filter(None, found), None)


def same_bits(what: str, got: Outputs, expected: Outputs, masks: Outputs | None = None) -> Violation | None:
    """Compare the outputs that both results have, bit for bit; every NaN equals every NaN.

    Parameters
    ----------
    what : str
        Words for the message: the two things that are compared.
    masks : mapping of str to bool array, optional
        Which values of an output to compare, such as :func:`rows_of` returns; all by default.
    """
    shared = [name for name in got if name in expected]
    return first(same_values(f"{what}: {x}", x, got[x], expected[x], masks[x] if masks else None) for x in shared)


def rows_of(problem: AttentionProblem, rows: np.ndarray, outputs: Outputs) -> Outputs:
    """Return for each output a mask of the values in some rows, which are given by a mask in the layout of lse."""
    return {name: rows_like(x, problem, rows) for name, x in outputs.items()}


def same_values(
    what: str, output: str, got: np.ndarray, expected: np.ndarray, mask: np.ndarray | None = None
) -> Violation | None:
    """Compare arrays of one float dtype bit for bit where ``mask`` holds; every NaN equals every NaN."""
    if got.dtype != expected.dtype:
        return Violation(f"{what} has dtype {got.dtype}, expected {expected.dtype}")
    differs = other_bits(got, expected)
    if mask is not None:
        differs &= mask
    if not differs.any():
        return None
    index = tuple(int(i) for i in np.argwhere(differs)[0])
    value, due = float(got[index]), float(expected[index])
    values = f"got {value!r}, expected {due!r} bit for bit"
    message = f"{what}{list(index)}: {values}; {int(differs.sum())} of {differs.size} values differ"
    return Violation(message, Seen(output, value_of(value), value_of(due)))


def within(what: str, got: Outputs, expected: Outputs, bound: Outputs) -> Violation | None:
    """Compare the outputs that both results have within their bounds; an infinite bound allows anything."""
    return first(
        close(f"{what}: {name}", name, x.astype(np.float64), expected[name].astype(np.float64), bound[name])
        for name, x in got.items()
        if name in expected
    )


def agree(
    trial: Trial,
    what: str,
    *,
    got: CallResult,
    expected: CallResult,
    of: Callable[[Outputs], Outputs] = dict,
) -> Violation | None:
    """Compare two calls by a law of kind "agreement".

    They are compared bit for bit if the kernel claims the law and both calls have the same configuration, else within
    the sum of both bounds. ``of`` cuts the outputs of the second call, and their bounds, to what the first one
    computes; by default nothing is cut.
    """
    if got.setup.kernel.claims(trial.law) and got.setup.config == expected.setup.config:
        return same_bits(what, got.outputs, of(expected.outputs))
    return within(what, got.outputs, of(expected.outputs), summed(got.bound, of(expected.bound)))


def agreeing(what: str, make: Callable[[Setup, Trial], tuple[Setup, Setup]]) -> Callable[[Setup, Trial], Found]:
    """Return the check of a law of kind "agreement" that compares two whole calls; ``make`` returns both of them."""

    def check(setup: Setup, trial: Trial) -> Found:
        one, other = make(setup, trial)
        yield agree(trial, what, got=called(one), expected=called(other))

    return check


def alike(what: str, one: Setup, other: Setup, rows: np.ndarray) -> Violation | None:
    """Compare some rows of two calls, given by a mask in the layout of lse, bit for bit but for the sign of a zero.

    The scales of a kernel that quantises depend on keys that a row does not see: its calls may differ by the sum of
    both bounds.
    """
    got, expected = one.run(), other.run()
    masks = rows_of(one.problem, rows, got)
    if not one.kernel.quantises.said:  # a weight of 0 times V has the sign of V
        return same_bits(what, unsigned_zeros(got), unsigned_zeros(expected), masks)
    bound = summed(one.bound(), other.bound())
    return within(what, got, expected, {name: np.where(masks[name], bound[name], math.inf) for name in masks})


def slack(setup: Setup) -> Outputs:
    """Return by output how far two runs of one call may differ; empty for a kernel that claims equal bits of them."""
    if setup.kernel.claims("repeated_run_is_identical"):
        return {}
    bound = setup.bound()
    return summed(bound, bound)


def summed(*bounds: Outputs) -> Outputs:
    """Return the sum of bounds, for the outputs that all have: the bound of a sum or difference of their results."""
    shared = [name for name in bounds[0] if all(name in bound for bound in bounds)]
    return {name: sum((bound[name] for bound in bounds), np.zeros(())) for name in shared}


def close(
    what: str,
    output: str,
    got: np.ndarray,
    expected: np.ndarray,
    bound: np.ndarray,
    ratio_of: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray] = error_over_bound,
) -> Violation | None:
    """Compare float64 arrays within a bound; -inf equals -inf, any other infinity or NaN needs an infinite bound.

    ``ratio_of`` computes error over bound; above 1 is a violation, which names the worst element.
    """
    ratio = ratio_of(got, expected, bound)
    if ratio.size == 0 or ratio.max() <= 1:
        return None
    index = tuple(int(i) for i in np.unravel_index(int(ratio.argmax()), ratio.shape))
    value, due = float(got[index]), float(expected[index])
    values = f"got {value!r}, expected {due!r}"
    seen = Seen(output, value_of(value), value_of(due), float(ratio[index]))
    if seen.got == seen.expected == "nan":  # both results are the kernel's, and both are wrong
        values = "NaN in both results that are compared"
        seen = Seen(output, ratio=math.inf)
    message = f"{what}{list(index)}: {values}, bound {float(bound[index]):.3e}, ratio {ratio_text(float(ratio[index]))}"
    if math.isnan(value) or math.isnan(due):
        message += "; NaN is due only in a row that sees NaN or an infinity, and this one sees none"
    return Violation(message, seen)


def near_truth(setup: Setup, trial: Trial) -> Found:
    """Compare the unchanged call with the exact outputs of its operation: the check that every operation has."""
    yield against_truth(setup, "against float64")


def against_truth(setup: Setup, what: str) -> Violation | None:
    """Compare what a kernel returns with the exact outputs of its operation, each within its bound.

    Truth and bound are computed before the run, so that the kernel cannot influence them, unless they depend on its
    outputs.
    """
    before = None if setup.operation.judges_choices else (setup.truth(), setup.bound())
    got = setup.run()
    truth, bound = before or (setup.truth(got), setup.bound(got))
    return first(
        close(f"{what}: {x.name}", x.name, got[x.name].astype(np.float64), truth[x.name], bound[x.name], x.ratio)
        for x in setup.operation.outputs
        if x.name in got
    )
