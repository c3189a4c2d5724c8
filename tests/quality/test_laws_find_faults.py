"""The laws find every planted fault, without comparing with the unmutated twin, and shrink what they find."""

from __future__ import annotations

from enum import StrEnum

import pytest

from fa3_kernels.faults.table import BackwardFault, Fault, QuantizerFault, description
from fa3verify.known.registry import find
from fa3verify.properties import LawOutcome, find_law, run_law
from tests.quality.found_by import FAULTS, FOUND_BY, Found, of

pytestmark = pytest.mark.usefixtures("shared_references")
# Trials that a law has; gradients, whose trials take longer, are found by fewer.
MAX_EXAMPLES = {Fault: 100, QuantizerFault: 100, BackwardFault: 20}
# Faults that random laws meet too rarely to be held to it, with the input family of every campaign that shows them.
LEFT_TO_FAMILIES: dict[Fault, str] = {Fault.UNCLAMPED_SCALE: "faint"}

# fault -> law, and the keys of the smallest problem that shows it
SMALLEST_KEYS = (
    (Fault.MISSING_COLUMN, "constant_values_come_back", 1),  # column 0 exists from the first key on
    (Fault.SWAPPED_V_ROWS, "error_within_bound", 3),  # row 2 changes places with the cleared row 3
    (Fault.STALE_V, "error_within_bound", 129),  # needs a second block of 128 keys
)


def _search(kernel: str, fault: StrEnum, law: str, shrink_seconds: float = 0.0) -> LawOutcome:
    examples = MAX_EXAMPLES[type(fault)]
    faulty = find(f"{kernel}+{fault}")
    return run_law(find_law(law), faulty, max_examples=examples, seed=0, shrink_seconds=shrink_seconds)


def test_every_fault_has_one_row_and_laws_or_a_reason():
    assert [found.fault for found in FOUND_BY] == [fault for kind in FAULTS for fault in kind]
    without = {found.fault: found.quick.task for found in of(Fault, QuantizerFault) if not found.laws}
    assert without == LEFT_TO_FAMILIES


# fp16 accumulators overflow on purpose
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("found", [row for row in of(Fault, QuantizerFault) if row.laws], ids=str)
def test_some_expected_law_finds_the_fault(found):
    find_by_laws(found)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("found", [row for row in of(BackwardFault) if row.laws], ids=str)
def test_some_expected_law_finds_the_backwards_fault(found):
    find_by_laws(found)


def find_by_laws(found: Found) -> None:
    """Fail unless a law that is named in a row is violated."""
    assert found.laws
    tried = []
    for law in found.laws.names:
        outcome = _search(found.laws.kernel, found.fault, law)
        tried.append(f"{law}: {outcome.status} after {outcome.examples}")
        if outcome.violation is not None and outcome.violation.failure is None:
            return
    pytest.fail(f"{found.fault} ({description(found.fault)}) survives in {found.laws.kernel}: {'; '.join(tried)}")


@pytest.mark.parametrize(("fault", "law", "keys"), SMALLEST_KEYS, ids=lambda value: str(value))
def test_fault_shrinks_to_its_smallest_problem(fault, law, keys):
    outcome = _search("twin.fp16", fault, law, shrink_seconds=600)
    problem = outcome.trial.case.problem
    assert (problem.seqlen_q, problem.seqlen_k) == (1, keys), outcome.trial.describe()
    assert (problem.batch, problem.nheads) == (1, 1), outcome.trial.describe()
