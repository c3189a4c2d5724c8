"""How much of the space drawn trials and the covering array reach, beside Hypothesis's draws, which vary earlier ones.

Run as a program: ``python tests/quality/distinct_draws.py`` prints the tables of reports/notes/draws.md. Trials are
drawn and not judged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

from fa3verify.campaign.cover import cover
from fa3verify.campaign.profiles import PROFILES, families, family_cases
from fa3verify.cases import coverage, space
from fa3verify.judging.verdict import BOUND_LAWS
from fa3verify.kernels.record import Kernel
from fa3verify.known.registry import find
from fa3verify.properties import LAWS, Trial, find_law, run_law, runner

KERNELS = ("twin.fp16", "twin.bf16", "twin.e4m3", "twin.quantize")


@contextlib.contextmanager
def hypothesis_draws() -> Iterator[None]:
    """Trials as Hypothesis's own backend draws them."""
    with mock.patch.object(runner, "independent", return_value=contextlib.nullcontext("hypothesis")):
        yield


def trials_of(law: str, kernel: Kernel, count: int, seed: int = 0) -> list[Trial]:
    """Draw the trials of a law that the kernel takes; nothing is judged."""
    trials: list[Trial] = []
    drawn = replace(find_law(law), check=lambda c, trial: trials.append(trial))
    run_law(drawn, kernel, max_examples=count, seed=seed)
    return trials


def seeds_and_switches(count: int) -> tuple[int, int, int]:
    """Distinct input seeds of the error bound, switches and windows of the schedule's property, in so many trials."""
    kernel = find("twin.e4m3")
    inputs = trials_of("error_within_bound", kernel, count)
    switched = trials_of("schedule_switches_change_no_bit", kernel, count)
    seeds = {trial.case.recipe.seed for trial in inputs}
    return len(seeds), len({str(t.parameters) for t in switched}), len({t.case.problem.window for t in switched})


def pairs_of(name: str, *, covers: bool) -> tuple[int, int]:
    """Pairs of classes that meet in what quick judges of a kernel, of those that can."""
    kernel, size = find(name), PROFILES["quick"]
    cases = [case for family in families(kernel, size) for case in family_cases(kernel, family, size, 0)]
    for law in LAWS:
        if law.applies(kernel) and law.is_claimed(kernel):
            count = size.bound_examples if law.name in BOUND_LAWS else size.law_examples
            cases += [trial.case for trial in trials_of(law.name, kernel, count)]
    array = cover(kernel, 2, 0)
    cases += [case for _, case in array if case and covers]
    met = coverage.pairs(space.point(kernel, case) for case in cases)
    wanted = coverage.pairs(point for point, case in array if case)
    return len(met & wanted), len(wanted)


def main() -> None:
    print("| trials | draws | seeds | switches | windows |\n|---|---|---|---|---|")
    for count in (60, 600):
        with hypothesis_draws():
            before = seeds_and_switches(count)
        for draws, found in (("Hypothesis", before), ("independent", seeds_and_switches(count))):
            print(f"| {count} | {draws} | {' | '.join(map(str, found))} |", flush=True)
    print("\n| kernel | pairs that can meet | Hypothesis's draws | independent draws | and the covering array |")
    print("|---|---|---|---|---|")
    for name in KERNELS:
        with hypothesis_draws():
            before, wanted = pairs_of(name, covers=False)
        drawn, covered = pairs_of(name, covers=False)[0], pairs_of(name, covers=True)[0]
        shares = (f"{met} ({met / wanted:.0%})" for met in (before, drawn, covered))
        print(f"| {name} | {wanted} | {' | '.join(shares)} |", flush=True)


if __name__ == "__main__":
    main()
