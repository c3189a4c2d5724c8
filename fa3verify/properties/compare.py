"""Comparisons of results that end in a violation: bit for bit, or within a bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fa3_reference.problem import AttentionProblem
from fa3verify.judging.verdict import ratio_text
from fa3verify.kernels.policy import rows_like
from fa3verify.kernels.record import Candidate
from fa3verify.operations import Outputs
from fa3verify.operations.ratios import error_over_bound
from fa3verify.properties.law import Setup, Trial, Violation


@dataclass(frozen=True, eq=False)
class CallResult:
    """A call, and what the kernel returned; its bound is found once, where somebody asks for it."""

    setup: Setup
    outputs: Outputs

    @cached_property
    def bound(self) -> Outputs:
        return self.setup.bound()


def called(candidate: Candidate, setup: Setup) -> CallResult:
    """Run a call, in the configuration that a caller can have."""
    setup = setup.launched(candidate)
    return CallResult(setup, setup.run(candidate))


def unsigned_zeros(outputs: Outputs) -> Outputs:
    """Return outputs whose zeros have no sign."""
    return {name: np.where(x == 0, np.zeros_like(x), x) for name, x in outputs.items()}


def same_bits(
    what: str,
    got: Outputs,
    expected: Outputs,
    *,
    rows: np.ndarray | None = None,
    problem: AttentionProblem | None = None,
) -> Violation | None:
    """Compare the outputs that both have bit for bit; every NaN equals every NaN.

    Parameters
    ----------
    what : str
        What is compared, for the message.
    rows : bool array in the layout of lse, optional
        Rows to compare; needs ``problem``. All by default.
    """
    for name, a in got.items():
        b = expected.get(name)
        if b is None:
            continue
        mask = None
        if rows is not None and problem is not None:
            mask = np.broadcast_to(rows_like(a, problem, rows), a.shape)
        if violation := same_values(f"{what}: {name}", a, b, mask):
            return violation
    return None


def same_values(what: str, got: np.ndarray, expected: np.ndarray, mask: np.ndarray | None = None) -> Violation | None:
    """Compare arrays of one float dtype bit for bit where ``mask`` holds; every NaN equals every NaN."""
    if got.dtype != expected.dtype:
        return Violation(f"{what} has dtype {got.dtype}, expected {expected.dtype}")
    bits = np.dtype(f"u{got.dtype.itemsize}")
    with np.errstate(invalid="ignore"):
        differs = np.ascontiguousarray(got).view(bits) != np.ascontiguousarray(expected).view(bits)
        differs &= ~(np.isnan(got) & np.isnan(expected))
    if mask is not None:
        differs &= mask
    if not differs.any():
        return None
    index = tuple(int(i) for i in np.argwhere(differs)[0])
    values = f"got {float(got[index])!r}, expected {float(expected[index])!r} bit for bit"
    message = f"{what}{list(index)}: {values}; {int(differs.sum())} of {differs.size} values differ"
    return Violation(message, where=f"{what}{list(index)}")


def within(what: str, got: Outputs, expected: Outputs, bound: Outputs) -> Violation | None:
    """Compare the outputs that both have within their bounds; nothing is asked where a bound is infinite."""
    for name, a in got.items():
        b = expected.get(name)
        if b is None:
            continue
        if violation := close(f"{what}: {name}", a.astype(np.float64), b.astype(np.float64), bound[name]):
            return violation
    return None


def agree(
    candidate: Candidate,
    trial: Trial,
    what: str,
    *,
    got: CallResult,
    expected: CallResult,
    of: Callable[[Outputs], Outputs] = dict,
) -> Violation | None:
    """Compare two calls by a law of kind "agreement".

    Bit for bit where the kernel claims the law and both calls have the same configuration, elsewhere within the sum of
    both bounds. ``of`` cuts the outputs of the second call, and their bounds, to what the first one computes;
    by default nothing is cut.
    """
    if candidate.claims(trial.law) and got.setup.config == expected.setup.config:
        return same_bits(what, got.outputs, of(expected.outputs))
    bound = got.bound
    other = of(expected.bound)
    total = {name: bound[name] + other[name] for name in got.outputs if name in other}
    return within(what, got.outputs, of(expected.outputs), total)


def close(
    what: str,
    got: np.ndarray,
    expected: np.ndarray,
    bound: np.ndarray,
    ratio_of: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray] = error_over_bound,
) -> Violation | None:
    """Compare float64 arrays within a bound; -inf equals -inf, any other infinity or NaN needs an infinite bound."""
    ratio = ratio_of(got, expected, bound)
    if ratio.size == 0 or ratio.max() <= 1:
        return None
    index = tuple(int(i) for i in np.unravel_index(int(ratio.argmax()), ratio.shape))
    message = (
        f"{what}{list(index)}: got {float(got[index])!r}, expected {float(expected[index])!r}, "
        f"bound {float(bound[index]):.3e}, ratio {ratio_text(float(ratio[index]))}"
    )
    if np.isnan(got[index]):
        message += "; NaN is due only in a row that sees NaN or an infinity, and this one sees none"
    return Violation(message, where=f"{what}{list(index)}", ratio=float(ratio[index]))


def against_truth(candidate: Candidate, setup: Setup, what: str) -> Violation | None:
    """Compare what a candidate returns with the exact outputs of its operation, each within its bound."""
    got, truth, bound = setup.judged(candidate)
    for output in setup.operation.outputs:
        name = output.name
        if name not in got:
            continue
        arrays = got[name].astype(np.float64), truth[name], bound[name]
        if violation := close(f"{what}: {name}", *arrays, output.ratio):
            return violation
    return None
