"""Right kernels of kinds that people have pass, and the wrong ones beside them do not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fa3verify.campaign.cover import cover
from fa3verify.campaign.plan import judge_cases
from fa3verify.campaign.profiles import PROFILES, constraint
from fa3verify.cases import coverage, space
from fa3verify.cases.case import Case
from fa3verify.cases.dimensions import OF_CACHES
from fa3verify.kernels.record import Kernel
from fa3verify.kernels.widths import head_dim_refusal
from fa3verify.properties import find_law, run_law
from tests.quality.outside import declared
from tests.quality.outside.declared import KERNELS

pytestmark = pytest.mark.usefixtures("shared_references")  # the wrong kernel is given what the right one was
ASKED = ("mask", "group", "cache", "qv", "queries", *OF_CACHES)  # dimensions of which each class has a case
COSTLY = {"several tiles", "5 or more"}


def findings(kernel: Kernel, laws: tuple[str, ...]) -> Iterator[str]:
    """What a case of each class that it takes, and few trials of some properties, find."""
    classes = {name: of for name, of in space.claimed(kernel).items() if name in ASKED}
    points = [{"mask": mask, name: c} for name in classes for c in classes[name] for mask in classes["mask"]]
    cheap = [point for point in points if COSTLY.isdisjoint(point.values())]
    cases = {repr(case): case for i, point in enumerate(cheap) for case in taken(kernel, point, seed_of(i, point))}
    assert len(cases) >= 3
    for record in judge_cases(kernel, "declared", list(cases.values())):
        if record.error or not record.measures["ratio_max"] <= 1:
            yield f"{record.case.describe()}: {record.error or record.measures['ratio_max']}"
    for law in laws:
        outcome = run_law(find_law(law), kernel, max_examples=4, seed=0, shrink_seconds=0)
        assert outcome.status in ("pass", "fail"), (law, outcome.status)
        if outcome.violation:
            yield f"{law}: {outcome.violation.message}"


def seed_of(index: int, point: space.Point) -> int:
    """The first seed of where keys lie, of which every class is asked first in a campaign; others in turn."""
    return 0 if "cache" in point else index


def taken(kernel: Kernel, point: space.Point, seed: int) -> list[Case]:
    """The case of a class, if the kernel takes one."""
    try:
        case = space.case_of(kernel, point, seed)
    except ValueError:
        return []
    return [case] if kernel.supports(case.problem) else []


@pytest.mark.usefixtures("short_walks")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", KERNELS)
def test_a_right_kernel_passes(name):
    kernel = KERNELS[name]
    assert not list(findings(kernel.kernel, kernel.laws))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", KERNELS)
def test_the_wrong_kernel_beside_it_fails(name):
    kernel = KERNELS[name]
    found = next(findings(kernel.wrong, kernel.laws), "")
    assert found
    assert "TypeError" not in found
    assert "AssertionError" not in found


def test_what_configure_refuses_is_named_and_a_kernel_that_refuses_everything_has_no_verdict():
    quick = PROFILES["quick"]
    assert constraint(KERNELS["always_causal"].kernel, quick) == "it is causal always"
    assert constraint(KERNELS["many_queries"].kernel, quick) == "more queries than one"
    refuses = declared.made(declared.several, "causal", configure=declared.nothing)
    assert cover(refuses, 2, 0) == []
    claims = coverage.claims(refuses, ("error_within_bound",), ("normal",))
    outcome = run_law(find_law("error_within_bound"), refuses, max_examples=2, seed=0)
    assert outcome.status == "not_tried"
    found = coverage.judged(claims, (), constraint(refuses, quick))
    assert found.inconclusive is not None
    assert found.inconclusive.endswith("the kernel refuses: not today")


def test_absorbed_heads_have_a_head_dim_that_no_plain_problem_has():
    wide = KERNELS["absorbed_576"].kernel
    assert head_dim_refusal(wide, 576) is None
    assert space.claimed(wide)["head_dim"] == ("576",)
    for name in ("absorbed_576", "absorbed_192"):
        rows = cover(KERNELS[name].kernel, 2, 0)
        assert any(case.problem.qv for _, case in rows if case), name
