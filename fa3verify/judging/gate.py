"""The gate: compare the pooled figures of each family with their limits, a :class:`GateRow` for each comparison.

Bits (L0 in files): a GPU kernel equals its twin. Bound (L1): error / bound <= 1 everywhere, and the error of quantising
the inputs stays within its own bound. Baseline (L2): no figure of a family is worse than the stored one by more than
the margin of :data:`POLICY`. What was not compared never passes. Stored baselines are read and made here as well
(:class:`Baseline`). :mod:`fa3verify.campaign.summary` applies the rules and makes findings of rows that fail.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from fa3verify import operations
from fa3verify.cases.coverage import COVER
from fa3verify.files import parsed
from fa3verify.judging.family import FamilyRow, Figured
from fa3verify.judging.verdict import Part, Seen
from fa3verify.kernels.names import KernelName
from fa3verify.operations import Operation
from fa3verify.records import NOT_WRITTEN

SCHEMA = "fa3verify.baseline/1"
SHIPPED = Path(__file__).parents[1] / "data" / "baselines"
# Names of rules that other modules ask for.
OTHER_BITS = "bits that differ from the twin"
NON_FINITE = "non-finite outputs"
OUTSIDE = "outside the stated order, assuming the tensor-core model"
QUANTISATION = "quantisation error / its own bound"


@dataclass(frozen=True, slots=True)
class BaselineRule:
    """How much worse one figure may get: ``limit = baseline * (1 + relative) + absolute``.

    A figure that is ``counted`` is a share of the outputs. Its limit is also at most 1.05 times the baseline plus four
    standard deviations of the count, which is tighter where few of many outputs are counted.
    """

    measure: str
    relative: float
    absolute: float
    why: str
    counted: bool = False

    def limit(self, baseline: float, outputs: int) -> float:
        """The largest figure that passes; ``outputs`` is the number of judged outputs, 0 where it is unknown."""
        limit = baseline * (1 + self.relative) + self.absolute
        if not self.counted or not outputs:
            return limit
        # 1 / outputs: even a baseline of 0 leaves room for a few outputs.
        deviation = math.sqrt((baseline * (1 - baseline) + 1 / outputs) / outputs)
        return min(limit, 1.05 * baseline + 4 * deviation)


# The inputs are fixed by their seeds, so an unchanged kernel moves none of these: the margins are for a kernel that was
# changed on purpose in ways that should not matter.
POLICY: tuple[BaselineRule, ...] = (
    BaselineRule("rel_rmse_seen", 0.02, 1e-9, "rounding noise of one family moves by less than 2 % under reordering"),
    BaselineRule(
        "rel_rmse_unrounded",
        0.02,
        1e-9,
        "mostly the rounding of inputs; reordering moves it by less than 1 %",
    ),
    BaselineRule("abs_bias", 0.10, 2e-6, "a signed bias is a truncation or a lost term, however small"),
    *(
        BaselineRule(side.figure(kind), *margin)
        for operation in operations.OPERATIONS.values()
        for side in operation.sides
        for kind, margin in side.margins.items()
    ),
    BaselineRule(
        "not_bit_equal", 0.02, 0.01, "share of outputs that are not the correctly rounded truth", counted=True
    ),
    BaselineRule("nonfinite", 0.0, 0.0, "NaN or Inf where the truth is finite"),
)
# Figures that a stored baseline must have, as the first version of the schema had them.
_OF_EVERY_BASELINE = ("rel_rmse_seen", "abs_bias", "ratio_max", "not_bit_equal", "nonfinite")


@dataclass(frozen=True, slots=True)
class GateRow:
    """One comparison of a figure with its limit.

    ``status`` is "pass", "fail" or "not compared"; ``observed`` or ``limit`` is None where it was not compared, and
    ``baseline`` for bits and bound. ``margin`` is 1 - observed / limit unless it is given; None where either is unknown
    or the limit is 0. Two fields are for findings and in no file: ``telling``, the measure whose largest value in the
    family picks the case to replay, and ``seen``, what is wrong with the output.
    """

    layer: str
    rule: str
    kernel: str
    family: str
    observed: float | None
    limit: float | None
    baseline: float | None
    status: str
    telling: str = field(default="ratio_max", metadata=NOT_WRITTEN)
    margin: float | None = None
    seen: Seen | None = field(default=None, metadata=NOT_WRITTEN)

    def __post_init__(self) -> None:
        if self.margin is None and self.observed is not None and self.limit:
            object.__setattr__(self, "margin", 1 - self.observed / self.limit)


def gated_figures(operation: Operation, figures: Mapping[str, float | None]) -> dict[str, float]:
    """Return the figures of one family that a baseline stores; the rules of :data:`POLICY` compare most of them.

    They are such that larger is worse: ``abs_bias``, and ``not_bit_equal`` for 1 - ``bit_equal``.
    """
    side_errors = {name for side in operation.sides for name in (side.figure("max"), side.figure("rms"))}
    known = {name: x for name, x in figures.items() if x is not None}
    return {
        "rel_rmse_seen": known["rel_rmse_seen"],
        "rel_rmse_unrounded": known["rel_rmse_unrounded"],
        "abs_bias": abs(known["bias"]),
        "ratio_max": known["ratio_max"],
        **{name: known[name] for name in sorted(side_errors & known.keys())},
        "not_bit_equal": 1.0 - known["bit_equal"],
        "nonfinite": known["nonfinite"],
    }


def _stored_families(kernel: Figured) -> list[FamilyRow]:
    """Return the families that baselines hold: all but the covering array, whose cases are no fixed set."""
    return [family for family in kernel.families if family.family != COVER]


def failed_parts(rows: Iterable[GateRow]) -> set[str]:
    """Return the parts of the verdict (L0, L1, L2) in which some row fails."""
    return {row.layer for row in rows if row.status == "fail"}


def bit_rows(kernel: Figured) -> list[GateRow]:
    """Compare the bits of every family with the twin's; no row for a kernel without a twin."""
    return [
        GateRow(Part.BITS, OTHER_BITS, kernel.name, row.family, n, 0.0, None, "fail" if n else "pass", "bits_differing")
        for row in kernel.families
        if (n := row.figures.get("bits_differing")) is not None
    ]


def _status(observed: float | None, limit: float | None) -> str:
    """Return the status of a comparison: None is not compared, and a figure that is not finite never passes."""
    if observed is None or limit is None:
        return "not compared"
    return "pass" if observed <= limit and math.isfinite(observed) else "fail"


def bound_rows(kernel: Figured) -> list[GateRow]:
    """Compare every family's errors with their bounds: a row for each rule of the operation."""
    sides = operations.find(kernel.operation).sides
    rules = [
        ("error / bound", "ratio_max", "out", 1.0),
        *((f"{side.words} error / bound", side.figure("ratio"), side.name, 1.0) for side in sides),
        (NON_FINITE, "nonfinite", "out", 0.0),
    ]
    figures = [row.figures for row in kernel.families]
    if all("outside" in known for known in figures):
        rules.append((OUTSIDE, "outside", "out", 0.0))
    if any(known.get("quantisation_bound_ratio") is not None for known in figures):
        rules.append((QUANTISATION, "quantisation_bound_ratio", "out", 1.0))
    return [
        GateRow(
            layer=Part.BOUND,
            rule=rule,
            kernel=kernel.name,
            family=family.family,
            observed=observed,
            limit=limit,
            baseline=None,
            status=_status(observed, limit),
            telling=key,
            # A count is no ratio: an output that is not finite has an infinite error, one outside its order none known.
            seen=Seen(output, ratio={"nonfinite": math.inf, "outside": None}.get(key, observed)),
        )
        for family in kernel.families
        for rule, key, output, limit in rules
        for observed in [family.figures.get(key)]
    ]


def baseline_rows(kernel: Figured, baseline: Baseline | None) -> list[GateRow]:
    """Compare every family's figures with the stored ones; a family that the baseline lacks has a row of its own.

    Without a baseline there is one row, "not compared".
    """
    name = kernel.name
    if baseline is None:
        return [GateRow(Part.BASELINE, "drift", name, "all: no baseline", None, None, None, "not compared")]
    rows = []
    for family in _stored_families(kernel):
        stored = baseline.figures(name, family.family)
        if stored is None:
            rows.append(GateRow(Part.BASELINE, "drift", name, family.family, None, None, None, "not compared"))
            continue
        figures = gated_figures(operations.find(kernel.operation), family.figures)
        for rule in POLICY:
            if (observed := figures.get(rule.measure)) is None:
                continue
            reference = stored.get(rule.measure)
            telling = rule.measure if rule.measure in family.figures else "ratio_max"
            outputs = int(family.figures.get("outputs") or 0)
            limit = None if reference is None else rule.limit(reference, outputs)
            rows.append(
                GateRow(
                    layer=Part.BASELINE,
                    rule=rule.measure,
                    kernel=name,
                    family=family.family,
                    observed=observed,
                    limit=limit,
                    baseline=reference,
                    status=_status(observed, limit),
                    telling=telling,
                    seen=Seen("out", ratio=observed) if math.isinf(observed) else None,
                )
            )
    return rows


@dataclass(frozen=True, slots=True)
class Baseline:
    """Stored figures, ``kernels[name][family][measure]``, to compare with runs of the same profile and seed."""

    profile: str
    seed: int
    kernels: dict[str, dict[str, dict[str, float]]]
    sha256: str = ""
    name: str = ""

    def figures(self, kernel: str, family: str) -> dict[str, float] | None:
        """Return the figures of one family, None where none is stored.

        A twin with a planted fault has those of the twin without it.
        """
        stored = self.kernels.get(kernel) or self.kernels.get(str(KernelName.parse(kernel).sound), {})
        return stored.get(family)

    def with_kernels_of(self, other: Baseline | None) -> Baseline:
        """Return this baseline with the kernels of another one that it lacks."""
        return replace(self, kernels={**other.kernels, **self.kernels}) if other else self

    def text(self) -> str:
        """Canonical text, one figure per line so that a diff can be reviewed."""
        body = {"schema": SCHEMA, "profile": self.profile, "seed": self.seed, "kernels": self.kernels}
        return json.dumps(body, indent=1, sort_keys=True) + "\n"

    @classmethod
    def of(cls, profile: str, seed: int, kernels: Iterable[Figured]) -> Baseline:
        """Collect a baseline from a campaign's kernels, with six digits of each figure.

        An infinite figure is left out, such as the relative error where rounding the inputs leaves nothing but zeros;
        figures that every baseline has are kept.
        """
        stored = {
            k.name: {
                f.family: {
                    name: float(f"{value:.6g}")
                    for name, value in gated_figures(operations.find(k.operation), f.figures).items()
                    if math.isfinite(value) or name in _OF_EVERY_BASELINE
                }
                for f in _stored_families(k)
            }
            for k in kernels
        }
        return cls(profile, seed, stored)

    @classmethod
    def parse(cls, text: str, name: str) -> Baseline:
        """Read a baseline; ValueError names what is wrong with a damaged or foreign file."""
        body = parsed(text, SCHEMA, f"{name} is not a baseline")
        try:
            kernels = {
                kernel: {
                    family: {m: float(figures[m]) for m in {*_OF_EVERY_BASELINE, *figures}}
                    for family, figures in families.items()
                }
                for kernel, families in body["kernels"].items()
            }
            return cls(
                str(body["profile"]), int(body["seed"]), kernels, hashlib.sha256(text.encode()).hexdigest(), name
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{name} is a damaged baseline: {type(error).__name__}: {error}") from None


def read_baseline(path: Path) -> Baseline:
    """Read a baseline file; ValueError if it cannot be read, is damaged, or is no baseline."""
    try:
        return Baseline.parse(path.read_text(encoding="utf-8"), path.name)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"baseline {path} cannot be read: {error}") from None


def shipped_baseline(profile: str, seed: int) -> Baseline | None:
    """Return the baseline that ships for a profile and seed, None if there is none."""
    path = SHIPPED / f"{profile}.json"
    baseline = read_baseline(path) if path.exists() else None
    return baseline if baseline and baseline.seed == seed else None


def layer_status(rows: Iterable[GateRow], layer: str) -> str:
    """Return the status of a whole layer: "fail" if a row fails, else "pass" if one passes, else "not compared"."""
    statuses = {row.status for row in rows if row.layer == layer}
    return next((status for status in ("fail", "pass") if status in statuses), "not compared")
