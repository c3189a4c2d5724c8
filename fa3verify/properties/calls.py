"""Laws about calls that follow each other: no call may leave a trace in another, however many there are."""

from __future__ import annotations

import random
import sys
import time
from dataclasses import replace

import numpy as np

from fa3verify.operations import Outputs
from fa3verify.properties.compare import Found, same_bits, summed, within
from fa3verify.properties.law import Setup, Trial, Violation
from fa3verify.properties.trials import Wanted, law

CALLS = 450  # of a trial at most: more than 2,000 in a quick campaign, which show a loss in one launch of 150
_SECONDS = 1.5  # that the calls of a trial may take, but a dozen are always made
_LONG = 90  # keys of every third call
# Seconds of a call, by kernel; measured once, so that a trial that is checked again makes as many calls.
_pace: dict[str, float] = {}


def _calls(setup: Setup, trial: Trial) -> Found:
    setups = _alternating(setup)
    firsts = [each.run() for each in setups]
    count = _count(setups)
    for i in range(count):
        if i == count // 2:
            _reseed((trial.case.recipe.seed + 1) % 2**64)
        which = i % len(setups)
        yield _repeated(trial, setups[which], setups[which].run(), firsts[which], i + len(setups))


def _count(setups: list[Setup]) -> int:
    """Return how many calls a trial makes, by the time of calls that have been compiled before."""
    name = setups[0].kernel.name
    if name not in _pace:
        began = time.monotonic()
        for each in setups:
            each.run()
        _pace[name] = (time.monotonic() - began) / len(setups)
    return min(CALLS, max(12, int(_SECONDS / max(_pace[name], 1e-6))))


def _alternating(setup: Setup) -> list[Setup]:
    """Return the call, one of its shape with other data, and, if the kernel takes it, one with more keys."""
    operands = setup.operands
    other = setup.fed(q=-operands.q, v=operands.v[..., ::-1].copy())
    if setup.problem.is_varlen or setup.kernel.operation != "forward":
        return [setup, other]
    problem = replace(setup.problem, seqlen_k=setup.kernel.sizes.keys(_LONG))
    repeats = -(-problem.seqlen_k // max(1, setup.problem.seqlen_k))
    k, v = (np.concatenate([x] * repeats, 1)[:, : problem.seqlen_k] for x in (operands.k, operands.v))
    if not setup.problem.seqlen_k or not setup.kernel.supports(problem) or operands.k_descale is not None:
        return [setup, other]
    config = setup.kernel.config_for(problem)
    longer = setup._replace(problem=problem, config=config).fed(k=np.ascontiguousarray(k), v=np.ascontiguousarray(v))
    return [setup, other, longer]


def _repeated(trial: Trial, setup: Setup, got: Outputs, expected: Outputs, number: int) -> Violation | None:
    """Compare a call with the first one of its inputs: bit for bit where that is claimed, else within both bounds."""
    what = f"call {number} against the first with its inputs"
    differs = same_bits(what, got, expected)
    if differs is None or setup.kernel.claims(trial.law):
        return differs
    bound = setup.bound()
    return within(what, got, expected, summed(bound, bound))


def _reseed(seed: int) -> None:
    """Change every global generator that a kernel may draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (the state that kernels share is what is changed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


CALL_LAWS = (
    law(
        "calls_leave_no_trace",
        "a call gives what the first call with its inputs gave, after hundreds of calls of other data and lengths and "
        "another global seed; bit for bit where claimed, else within the sum of both bounds",
        "agreement",
        _calls,
        wanted=Wanted(
            layout="batched", softcap=False, single=True, longest_q=8, seqlens_k=(7, 8, 5), max_edits=0, empty=False
        ),
        applies=lambda kernel: kernel.operation == "forward",
    ),
)
