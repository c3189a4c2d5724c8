"""What is wrong with an atlas that somebody sends, beyond keys and types, which reading it refuses.

Checked is that counts add up, that each verdict agrees with its findings, that no error is below 0, and that replay
files are there. That the figures are true, only a replay shows (:mod:`fa3verify.commands.replay`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from fa3verify import operations
from fa3verify.campaign.atlas import findings, read
from fa3verify.campaign.findings import Finding
from fa3verify.campaign.run import KernelRun, Run, verdict_of
from fa3verify.cases.coverage import REQUIRED, Coverage
from fa3verify.files import stored
from fa3verify.judging.family import FamilyRow
from fa3verify.judging.metrics import all_measures
from fa3verify.properties import LawOutcome
from fa3verify.records import DamagedError

# One check that was made: whether it holds, the path of the value in the file, what is expected, and what is there.
Rule = tuple[bool, str, str, object]
# Figures that every family has, whatever its operation.
NEEDED = ("outputs", "nonfinite", "unbounded", "rms", "max_error", "ratio_max", "rel_rmse_seen", "ulp_max")
# Pairs of figures of which the first is never larger than the second: a part of a count, a mean or median of a maximum.
NO_MORE = (("nonfinite", "outputs"), ("unbounded", "outputs"), ("rmse_seen", "max_error"), ("ulp_p50", "ulp_max"))


def mistakes(path: Path) -> list[str]:
    """Return what is wrong with an atlas, one line each: the place, what is expected, and what is there.

    The list is empty for an atlas without a mistake. Where keys or types are wrong only those are listed.

    Raises
    ------
    ValueError
        For a file that cannot be read, or is no atlas of this schema.
    """
    try:
        made = read(path)
    except ValueError as error:
        if not isinstance(error.__cause__, DamagedError):
            raise
        # A line of cattrs is "what is wrong @ place".
        lines = [line.rpartition(" @ atlas") for line in error.__cause__.lines]
        return [f"{place.lstrip('.') or 'the file'}: {what}" for what, _, place in lines]
    return [f"{place}: expected {wanted}, got {got!r}" for holds, place, wanted, got in _of(made, path) if not holds]


def _of(found: Run, path: Path) -> list[Rule]:
    """Return every check of an atlas that was read from a path, with those of its kernels."""
    names = [kernel.name for kernel in found.kernels]
    twice = [name for name, count in Counter(names).items() if count > 1]
    verdict = verdict_of(found.kernels, found.failures)
    return [
        (bool(re.match(r"\d+\.\d+\.\d+", found.version)), "version", "that of fa3verify, as 0.2.0", found.version),
        (
            bool(re.match(r"\d{4}(-\d\d){2}T\d\d(:\d\d){2}", found.started)),
            "started",
            "a moment as 2026-01-02T03:04:05+00:00",
            found.started,
        ),
        (bool(found.kernels), "kernels", "at least one", 0),
        (not twice, "kernels", "every kernel once", twice),
        (found.verdict == verdict, "verdict", f"{verdict!r}, as its kernels have it", found.verdict),
        (not found.cases, "cases", "none in an atlas", len(found.cases)),
        (not found.gate, "gate", "none in an atlas", len(found.gate)),
        *(_below(found.failures, "failures", path.parent)),
        *(
            (each.kernel in names, f"failures[{number}].kernel", "one of the kernels", each.kernel)
            for number, each in enumerate(found.failures)
        ),
        *(
            (not (each.seen.ratio or 0) < 0, f"failures[{number}].seen.ratio", "0 or more", each.seen.ratio)
            for number, each in enumerate(found.failures)
            if each.seen
        ),
        *(
            (holds, f"kernels[{number}].{place}", wanted, got)
            for number, kernel in enumerate(found.kernels)
            for holds, place, wanted, got in (
                *_of_kernel(kernel),
                _of_verdict(kernel, findings(found, kernel.name)),
                *_below(kernel.families, "families", path.parent),
                *_below(kernel.laws, "laws", path.parent),
            )
        ),
    ]


def _below(rows: Sequence[Finding | FamilyRow | LawOutcome], name: str, folder: Path) -> list[Rule]:
    """Check that every replay file is below the folder of the atlas: whoever gets the atlas must be able to run it."""
    return [
        (
            _is_below(each.replay, folder),
            f"{name}[{number}].replay",
            "a file below the folder of the atlas",
            each.replay,
        )
        for number, each in enumerate(rows)
        if each.replay is not None
    ]


def _is_below(replay: str, folder: Path) -> bool:
    """Tell whether a path, relative to a folder, is that of a file below it, compressed or not."""
    place = PurePosixPath(replay)
    return not place.is_absolute() and ".." not in place.parts and stored(folder / place).is_file()


def _of_kernel(kernel: KernelRun) -> list[Rule]:
    """Return the checks of one kernel but that of its verdict; places are within the kernel."""
    known = kernel.operation in operations.OPERATIONS
    measures = {
        *all_measures([kernel.operation] if known else operations.OPERATIONS),
        "quantisation_ratio",
        "quantisation_bound_ratio",
    }
    covered = kernel.coverage or Coverage({}, (), None, 0.0, REQUIRED, None)
    shares = [share.tried / share.claimed for share in covered.kinds.values() if share.claimed > 0]
    parts = (*kernel.families, *kernel.laws)
    names = Counter([*(row.family for row in kernel.families), *(law.law for law in kernel.laws)])
    cases = sum(row.figures.get("cases") or 0 for row in kernel.families) + sum(law.examples for law in kernel.laws)
    outputs = sum(row.figures.get("outputs") or 0 for row in kernel.families) + sum(law.outputs for law in kernel.laws)
    return [
        (bool(kernel.name.strip()), "name", "a name", kernel.name),
        (kernel.dtype is not None or not parts, "dtype", "that of a kernel that was judged", kernel.dtype),
        (known, "operation", f"one of {', '.join(operations.OPERATIONS)}", kernel.operation),
        (kernel.cases == cases, "cases", f"{cases:g}, the sum of its parts", kernel.cases),
        (kernel.outputs == outputs, "outputs", f"{outputs:g}, the sum of its parts", kernel.outputs),
        (len(names) == len(parts), "families", "every family and property once", names.most_common(1)),
        *(
            (0 <= share.tried <= share.claimed, f"coverage.kinds.{kind}.tried", f"0 to {share.claimed}", share.tried)
            for kind, share in covered.kinds.items()
        ),
        (covered.share == min(shares, default=0.0), "coverage.share", "the least share of its kinds", covered.share),
        (covered.required == REQUIRED, "coverage.required", f"{REQUIRED}", covered.required),
        *_of_bits_lost(kernel),
        *_of_sizes_tried(kernel),
        *(
            (holds, f"families[{number}].{place}", wanted, got)
            for number, row in enumerate(kernel.families)
            for holds, place, wanted, got in _of_family(row, measures)
        ),
        *(
            (
                (loss.rel_rmse is None) == bool(loss.missing) and not (loss.rel_rmse or 0) < 0,
                f"loss[{number}].rel_rmse",
                "a figure of 0 or more, or else a reason in missing",
                loss.rel_rmse,
            )
            for number, loss in enumerate(kernel.loss or ())
        ),
    ]


def _of_sizes_tried(kernel: KernelRun) -> list[Rule]:
    """Return the checks of the sizes that were tried, which older rows lack."""
    if (tried := kernel.tried) is None:
        return []
    sizes = {
        name: getattr(tried, name) for name in ("head_dim", "group", "nheads", "sequences", "seqlen_q", "seqlen_k")
    }
    sizes |= {"head_dim_v": [n for pair in tried.head_dim_v for n in pair], "calls": [tried.calls]}
    return [(min(x, default=0) >= 0, f"tried.{name}", "0 or more each", min(x, default=0)) for name, x in sizes.items()]


def _of_bits_lost(kernel: KernelRun) -> list[Rule]:
    """Return the checks of the number that ranks a kernel, which older rows and quantisers lack."""
    if (lost := kernel.bits_lost) is None:
        return []
    figures = {row.family: row.figures.get("bits_lost") for row in kernel.families}
    worst = figures.get(lost.worst_family)
    return [
        (0 < lost.families <= len(figures), "bits_lost.families", f"1 to {len(figures)}", lost.families),
        (lost.worst == worst, "bits_lost.worst", f"{worst}, that of {lost.worst_family}", lost.worst),
        (0 <= lost.mean <= lost.worst, "bits_lost.mean", f"0 to {lost.worst}", lost.mean),
    ]


def _of_verdict(kernel: KernelRun, findings: Sequence[Finding]) -> Rule:
    """Check a verdict: "fail" needs a finding; all others need that nothing is wrong, and "pass" that enough was tried.

    "inconclusive" and "not run" need a reason as well.
    """
    against = [
        *(str(finding.what) for finding in findings),
        *(f"property {law.law} fails" for law in kernel.laws if law.status == "fail"),
        *(f"figures of family {row.family}" for row in kernel.families if _is_wrong(row)),
    ]
    share = kernel.coverage.share if kernel.coverage else 0.0
    was_judged = bool(kernel.families or kernel.laws)
    holds, wanted = {
        "pass": (not against and share >= REQUIRED and was_judged, "no finding, and enough of what it claims tried"),
        "fail": (bool(findings), "at least one finding"),
        "question": (not against and was_judged, "no finding under the contract in its name"),
        "inconclusive": (not against and bool(kernel.inconclusive), "no finding, and a reason"),
        "not run": (not against and not was_judged and bool(kernel.inconclusive), "nothing judged, and a reason"),
    }[kernel.verdict]
    got = against[0] if against else f"no finding, {share:.0%} tried"
    return holds, "verdict", f"{wanted}, where it is {kernel.verdict!r}", got


def _is_wrong(row: FamilyRow) -> bool:
    """Tell whether the figures show an output that is not finite, beyond its bound, outside the stated order, or unlike
    the twin's."""
    ratios = [x for key, x in row.figures.items() if key.startswith("ratio_") and key.endswith("_max")]
    return any(row.figures.get(key) for key in ("nonfinite", "outside", "bits_differing")) or any(
        x is not None and not x <= 1 for x in ratios
    )


def _of_family(row: FamilyRow, known: set[str]) -> list[Rule]:
    """Return the checks of a family's figures; ``known`` are the names of figures that its operation has."""
    figures = {key: x for key, x in row.figures.items() if x is not None}
    cases = figures.pop("cases")
    return [
        (cases >= 1 and cases == int(cases), "cases", "a whole number, at least 1", cases),
        *((key in figures, key, "a number", None) for key in NEEDED),
        *((key in known, key, "a figure of this operation", x) for key, x in figures.items()),
        *((_is_legal(key, x), key, "0 or more, a share at most 1", x) for key, x in figures.items()),
        *(
            # A mean that equals the maximum may be rounded above it.
            (not figures[less] > figures[more] * (1 + 1e-9), less, f"at most {more}", figures[less])
            for less, more in NO_MORE
            if less in figures and more in figures
        ),
    ]


def _is_legal(key: str, x: float) -> bool:
    """Tell whether a figure can have a value: a bias may be negative, and outputs of NaN make a median NaN."""
    if key == "bias" or (key == "ratio_median" and math.isnan(x)):
        return True
    return 0 <= x <= (1 if key in ("bit_equal", "determined") else math.inf)
