"""The smallest change of a kernel or of a quantiser that each rule of the gate sees, found by bisection.

Run as a program: ``python tests/quality/smallest_change.py`` prints reports/notes/smallest-change-seen.md, on all cores
that it is given; ``quick`` or ``release`` behind it prints that profile's table of FP8 errors alone.
A change is graded by x: what it does to the twin's outputs, or to the operands it is given, grows with x. Rules are
those of ``verify --quick``, with its cases, its pooling and its baseline.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from fa3_reference.formats import FORMATS, encode
from fa3_reference.problem import Operands
from fa3_reference.quantize import condition
from fa3verify import operations
from fa3verify.campaign.profiles import PROFILES, ProfileName, families, family_cases
from fa3verify.cases.case import Case
from fa3verify.judging import gate, hypotheses, metrics
from fa3verify.judging.family import CaseResult, FamilyRow, Figured, pooled
from fa3verify.judging.judgement import Judgement, judge
from fa3verify.kernels.record import Kernel
from fa3verify.known import registry

DTYPES = ("fp16", "bf16", "e4m3")
FAMILIES = ("normal", "peaky", "offset_v")
GROWTHS = (0.03, 0.05, 0.1, 0.2, 0.5, 1.0)  # of an error, as a user would grade them
EXPONENTS = range(-24, 2)  # x is a power of two
FORWARD = operations.find("forward")
_SEED = 12


@dataclass(frozen=True, eq=False)
class Scene:
    """One judged case of the sound twin, and what a changed one is judged with again."""

    kernel: Kernel
    judged: Judgement
    config: Any
    enclosure: Mapping[str, tuple[np.ndarray, np.ndarray]]
    quantisation: dict[str, float] | None

    def run(self, kernel: Kernel | None = None, **changes: Any) -> dict[str, np.ndarray]:
        """Outputs of a twin, by default this one, for the case with other fields of its problem or configuration."""
        case, config = self.judged.case, self.config
        of_problem = {name: x for name, x in changes.items() if name == "softmax_scale"}
        of_config = {name: x for name, x in changes.items() if name == "num_splits"}
        operands = changes.get("operands", self.judged.operands)
        problem = replace(case.problem, **of_problem)
        returned = (kernel or self.kernel).code.run(problem, operands, replace(config, **of_config))
        return FORWARD.named(returned, problem, config)

    def record(self, outputs: dict[str, np.ndarray]) -> CaseResult:
        """Figures of other outputs for the same operands."""
        was = self.judged
        measures = metrics.figures(FORWARD, outputs, was.seen, was.unrounded, was.bound, self.config)
        measures |= metrics.enclosed(outputs, was.seen, self.enclosure)
        return CaseResult("", was.case, measures, self.quantisation)

    def with_operands(self, operands: Operands) -> Scene:
        """Return the case with other operands, which the twin is run on and judged against."""
        problem, case = self.judged.case.problem, self.judged.case
        outputs = self.run(operands=operands)
        seen = FORWARD.truth(problem, operands.dequantized(problem), self.config, outputs)
        assumed = hypotheses.assumed(self.kernel, self.config)
        bound = FORWARD.bound(problem, operands, assumed, outputs)
        judged = Judgement(case, self.judged.inputs, operands, outputs, seen, self.judged.unrounded, bound, {})
        enclosure = FORWARD.enclosure(problem, operands, assumed)
        return replace(self, judged=judged, enclosure=enclosure, quantisation=judged.quantisation)


@cache
def scenes(dtype: str, family: str) -> tuple[Scene, ...]:
    """Judge the cases of one family of ``verify --quick`` with the sound twin."""
    kernel = registry.find(f"twin.{dtype}")
    return tuple(_scene(kernel, case) for case in family_cases(kernel, family, PROFILES["quick"], 0))


def _scene(kernel: Kernel, case: Case) -> Scene:
    judged = judge(kernel, case)
    config = kernel.config_for(case.problem, case.changes)
    enclosure = FORWARD.enclosure(case.problem, judged.operands, hypotheses.assumed(kernel, config))
    return Scene(kernel, judged, config, enclosure, judged.quantisation)


def _chosen(shape: tuple[int, ...], share: float) -> np.ndarray:
    return np.random.default_rng(_SEED).random(shape) < share


def _stepped(x: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Numbers so many places further from zero in their format."""
    bits = np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")
    return (bits + steps.astype(np.int64)).astype(bits.dtype).view(x.dtype)


def lse_error(scene: Scene, x: float) -> CaseResult:
    """The error of lse is 1 + x times what it was."""
    got, truth = scene.judged.outputs["lse"], scene.judged.seen["lse"]
    with np.errstate(invalid="ignore"):
        lse = np.where(np.isfinite(truth), truth + (1 + x) * (got.astype(np.float64) - truth), got)
    return scene.record(scene.judged.outputs | {"lse": lse.astype(np.float32)})


def output_error(scene: Scene, x: float) -> CaseResult:
    """The error of the outputs is 1 + x times what it was, rounded to the output's format once more."""
    got, truth = scene.judged.outputs["out"], scene.judged.seen["out"]
    grown = truth + (1 + x) * (got.astype(np.float64) - truth)
    out = np.where(np.isfinite(grown), encode(grown, FORMATS[scene.config.out_dtype], "ieee"), got)
    return scene.record(scene.judged.outputs | {"out": out})


def kernel_error(scene: Scene, x: float) -> CaseResult:
    """The error of the outputs before their last rounding is 1 + x times what it was."""
    got, truth = scene.judged.outputs["out"], scene.judged.seen["out"]
    exact = _unrounded(scene)
    grown = truth + (1 + x) * (exact.astype(np.float64) - truth)
    out = np.where(np.isfinite(grown), encode(grown, FORMATS[scene.config.out_dtype], "ieee"), got)
    return scene.record(scene.judged.outputs | {"out": out})


@cache
def _unrounded(scene: Scene) -> np.ndarray:
    return scene.kernel.code.unrounded(scene.judged.case.problem, scene.judged.operands, scene.config).out


def score_scale(scene: Scene, x: float) -> CaseResult:
    """Scores are 1 + x times what they should be."""
    return scene.record(scene.run(softmax_scale=scene.judged.case.problem.softmax_scale * (1 + x)))


def output_gain(scene: Scene, x: float) -> CaseResult:
    """Outputs are multiplied by 1 + x, before their rounding with e4m3 and after it with 16 bits."""
    operands, got = scene.judged.operands, scene.judged.outputs
    if operands.v_descale is not None:
        gained = (operands.v_descale.values * (1 + x)).astype(np.float32)
        return scene.record(scene.run(operands=replace(operands, v_descale=replace(operands.v_descale, values=gained))))
    fmt = FORMATS[scene.config.out_dtype]
    return scene.record(got | {"out": encode(got["out"].astype(np.float64) * (1 + x), fmt, "ieee")})


def one_ulp(scene: Scene, x: float) -> CaseResult:
    """A share x of the outputs is one place further from zero."""
    got = scene.judged.outputs
    chosen = _chosen(got["out"].shape, x) & (got["out"] != 0)
    return scene.record(got | {"out": _stepped(got["out"], chosen)})


def truncated_p(scene: Scene, x: float) -> CaseResult:
    """P is truncated instead of rounded in a share x of the rows."""
    return scene.record(_rows_of(scene, _with_truncated_p(scene), x))


def no_combine(scene: Scene, x: float) -> CaseResult:
    """A share x of the rows is computed without splits where the configuration has three."""
    return scene.record(_rows_of(scene, _without_splits(scene), x))


@cache
def _with_truncated_p(scene: Scene) -> dict[str, np.ndarray]:
    return scene.run(registry.find(f"{scene.kernel.name}+truncated_p"))


@cache
def _without_splits(scene: Scene) -> dict[str, np.ndarray]:
    return scene.run(num_splits=1)


def _rows_of(scene: Scene, other: dict[str, np.ndarray], share: float) -> dict[str, np.ndarray]:
    got = scene.judged.outputs
    out = got["out"]
    rows = _chosen(out.shape[:-1], share)
    by_head = np.swapaxes(rows, 1, 2) if out.ndim == 4 else rows.T
    return {
        "out": np.where(rows[..., None], other["out"], out),
        "lse": np.where(by_head, other["lse"], got["lse"]),
    }


def truncating_quantiser(scene: Scene, x: float) -> CaseResult:
    """A share x of the elements of q, k and v is truncated to the operands' format instead of rounded."""
    problem, scheme, operands = scene.judged.case.problem, scene.judged.case.scheme, scene.judged.operands
    q, k, v = scene.judged.inputs
    exact = (q, k, v) if scheme is None else (*condition(problem, q, k, scheme)[:2], v)
    codes = {}
    for name, value, rounded in zip("qkv", exact, operands.dequantized(problem), strict=True):
        up = (np.abs(rounded) > np.abs(value)) & _chosen(value.shape, x)
        codes[name] = _stepped(getattr(operands, name), -up.astype(np.int64))
    changed = scene.with_operands(replace(operands, **codes))
    return changed.record(changed.judged.outputs)


Change = Callable[[Scene, float], CaseResult]
CHANGES: tuple[Change, ...] = (
    lse_error,
    output_error,
    score_scale,
    output_gain,
    one_ulp,
    truncated_p,
    no_combine,
    truncating_quantiser,
)


@cache
def _baseline(profile: ProfileName = "quick") -> gate.Baseline | None:
    return gate.shipped_baseline(profile, 0)


def failing(change: Change, dtype: str, family: str, x: float) -> frozenset[str]:
    """Return the rules of bound and baseline that fail for a family of the changed twin."""
    return _failing([change(scene, x) for scene in scenes(dtype, family)], dtype, family, "quick")


def _failing(records: list[CaseResult], dtype: str, family: str, profile: ProfileName) -> frozenset[str]:
    kernel = Figured(f"twin.{dtype}", (FamilyRow(family, pooled(records, FORWARD)),))
    rows = gate.bound_rows(kernel) + gate.baseline_rows(kernel, _baseline(profile))
    return frozenset(row.rule for row in rows if row.status == "fail")


def smallest(change: Change, dtype: str, family: str) -> dict[str, float]:
    """Return the smallest power of two at which each rule fails; a rule is absent that does not fail at the largest.

    Rules are taken to fail at every larger x as well.
    """
    most = 1 if change is lse_error else 0  # a share is at most 1

    @cache
    def at(exponent: int) -> frozenset[str]:
        return failing(change, dtype, family, 2.0**exponent)

    found = {}
    for rule in sorted(at(most)):
        low, high = EXPONENTS[0] - 1, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if rule in at(middle) else (middle, high)
        found[rule] = 2.0**high
    return found


def _figure(x: float | None) -> str:
    return "" if x is None else f"{x:.2g}"


def table(change: Change, dtypes: tuple[str, ...] = DTYPES, names: tuple[str, ...] = FAMILIES) -> Iterator[str]:
    """Yield the lines of one change's table in Markdown."""
    found = {(dtype, family): smallest(change, dtype, family) for dtype in dtypes for family in names}
    rules = sorted({rule for seen in found.values() for rule in seen})
    yield f"| kernel | family | {' | '.join(f'`{rule}`' for rule in rules)} |"
    yield f"|---|---|{'---|' * len(rules)}"
    for (dtype, family), seen in found.items():
        yield f"| twin.{dtype} | {family} | {' | '.join(_figure(seen.get(rule)) for rule in rules)} |"


Records = dict[str, CaseResult]


def grown(dtype: str, family: str, profile: ProfileName, index: int) -> Records:
    """Figures of one case of a family for each growth of the kernel's error, by the growth as text."""
    kernel = registry.find(f"twin.{dtype}")
    scene = _scene(kernel, family_cases(kernel, family, PROFILES[profile], 0)[index])
    found = {f"{x:.0%}": kernel_error(scene, x) for x in GROWTHS}
    _unrounded.cache_clear()
    return found


def growths_seen(of_cases: list[Records], dtype: str, family: str, profile: ProfileName) -> dict[str, frozenset[str]]:
    """Rules of the baseline that see each growth in all cases of a family."""
    measures = {rule.measure for rule in gate.POLICY}
    return {x: _failing([records[x] for records in of_cases], dtype, family, profile) & measures for x in of_cases[0]}


def in_every_family(dtype: str, profile: ProfileName, pool: Executor) -> Iterator[str]:
    """Yield the lines of a table of one kernel: the smallest growth that a rule of the baseline sees in each family."""
    kernel = registry.find(f"twin.{dtype}")
    waiting = {
        family: [
            pool.submit(grown, dtype, family, profile, index)
            for index in range(len(family_cases(kernel, family, PROFILES[profile], 0)))
        ]
        for family in families(kernel, PROFILES[profile])
    }
    yield f"| family | smallest growth, {profile} | rules |"
    yield "|---|---|---|"
    for family, cases in waiting.items():
        seen = growths_seen([case.result() for case in cases], dtype, family, profile).items()
        x, rules = next(((x, rules) for x, rules in seen if rules), ("none", frozenset()))
        told = ", ".join(f"`{rule}`" for rule in sorted(rules))
        yield f"| {family} | {x} | {told} |"


def counts(change: Change, dtype: str) -> str:
    """In how many families each rule of the baseline fails at x = 1."""
    names = families(registry.find(f"twin.{dtype}"), PROFILES["quick"])
    seen = []
    for family in names:
        seen.append(failing(change, dtype, family, 1.0))
        scenes.cache_clear()
    rules = sorted({rule for one in seen for rule in one})
    told = ", ".join(f"`{rule}` {sum(rule in one for one in seen)}" for rule in rules)
    return f"| {change.__name__} | twin.{dtype} | {sum(map(bool, seen))} of {len(names)} | {told} |"


HEAD = """# Smallest change that is seen

Printed by `python tests/quality/smallest_change.py`. The CPU twins are changed by a graded amount x and judged as
`verify --quick` judges them, with its cases, margins and baseline. A figure is the smallest power of two at which that
rule fails, of 2^-24 (6e-08) to 1 (for `lse_error` 2); an empty cell is a rule that sees nothing at the largest x.
"outside the stated order" is there only for kernels that state an order, and assumes the tensor core as measured; the
other rules hold for any kernel.
"""


EVERY_FAMILY = """The smallest growth of the output's error, of 3, 5, 10, 20, 50 and 100 %, that a rule of the baseline
sees in twin.e4m3. These rules hold for a kernel of one's own as well, once it has a baseline."""


def _workers() -> ProcessPoolExecutor:
    """Fresh processes, one for each core that this one may use."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=multiprocessing.get_context("spawn"))


def _print_growths(profile: ProfileName) -> None:
    with _workers() as pool:
        for line in in_every_family("e4m3", profile, pool):
            print(line, flush=True)
    print()


def main() -> None:
    profiles: tuple[ProfileName, ...] = ("quick", "release")
    for profile in profiles:
        if profile in sys.argv[1:]:
            return _print_growths(profile)
    print(HEAD)
    for change in CHANGES:
        print(f"## {change.__name__}\n\n{change.__doc__}\n")
        print("\n".join(table(change)), flush=True)
        print()
    print(f"## FP8 error in every family\n\n{EVERY_FAMILY}\n")
    for profile in profiles:
        _print_growths(profile)
    print("## Whole changes over all families\n\nIn how many families of the quick profile each rule fails at x = 1.\n")
    print("| change | kernel | families | rules |\n|---|---|---|---|")
    for change in (lse_error, truncating_quantiser):
        for dtype in DTYPES:
            print(counts(change, dtype), flush=True)


if __name__ == "__main__":
    sys.exit(main())
