"""Mutants are examined as kernels are: what finds them is told, and what changes nothing is not called wrong."""

from __future__ import annotations

import pytest

from fa3_reports.mutation import edits
from fa3_reports.mutation.equivalence import EQUIVALENT
from fa3_reports.mutation.examine import SEARCH, SEED, examine, examine_mutant, found_by
from fa3verify.campaign.profiles import ACTIVATIONS, PROFILES, families, family_cases
from fa3verify.known.registry import find

NORMAL = [("twin.fp16", "normal")]

# mutant -> parts of the verdict that the first family of quick fails: a wrong lse, a mask, a rescale, a crash
FOUND = {
    "softmax.-: LN2 = np.float32(0.6931471805599453) -> LN2 = np.float32(0.6985623929080699)": ("L1",),
    "forward._masked: return s if hidden is None else np.where(hidden, softmax.NEG_INF, s) -> "
    "return s if hidden is None else np.where(hidden, s, softmax.NEG_INF)": ("L1",),
    "softmax._alpha: return arithmetic.ex2(state.row_max - base) -> return arithmetic.ex2(state.row_max + base)": (
        "L1",
    ),
    "softmax.update: p = arithmetic.exp2_scaled(s, c, minus) -> p = arithmetic.exp2_scaled(c, s, minus)": ("crash",),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("identity", FOUND)
def test_a_mutant_is_found_by_the_parts_that_see_it(identity):
    found = examine_mutant(identity, NORMAL, "quick")
    assert found.found_by == FOUND[identity], found
    assert (found.kernel, found.task) == NORMAL[0]


@pytest.mark.parametrize("identity", list(EQUIVALENT)[:1])
def test_a_mutant_that_changes_nothing_is_not_found(identity):
    found = examine_mutant(identity, NORMAL, "quick")
    assert (found.found_by, found.bits, found.tasks) == ((), "", 1)


def test_bits_see_what_others_do_not_and_are_told_apart():
    identity = (
        "softmax.finalize: inverse = mufu.rcp(row_sum) if order.inverse == 'reciprocal' else np.float32(1) / row_sum "
        "-> inverse = np.float32(1) / row_sum"
    )
    found = examine_mutant(identity, NORMAL, "quick")
    assert (found.found_by, found.bits) == ((), "normal")
    assert examine_mutant(identity, NORMAL, "quick", bits=False).bits == ""


def test_the_search_compares_bits_of_drawn_trials():
    identity = (
        "softmax.finalize: inverse = mufu.rcp(row_sum) if order.inverse == 'reciprocal' else np.float32(1) / row_sum "
        "-> inverse = np.float32(1) / row_sum"
    )
    assert examine_mutant(identity, [("twin.fp16", SEARCH)], "quick").bits == SEARCH


@pytest.mark.parametrize("kernel", ["twin.fp16", "twin.e4m3", "twin.quantize", "twin.backward.fp16"])
def test_release_begins_with_the_cases_of_quick(kernel):
    """As its trials do, so that it finds whatever the bound or a property finds in quick's synthetic inputs."""
    asked = find(kernel)
    for family in families(asked, PROFILES["quick"]):
        if not family.startswith(ACTIVATIONS):
            quick, release = (family_cases(asked, family, PROFILES[name], SEED) for name in ("quick", "release"))
            assert release[0] == quick[0]
            assert all(case in release for case in quick), family


def test_every_argument_of_equivalence_names_a_mutant():
    for identity in EQUIVALENT:
        edits.find(identity)


def test_an_examination_that_its_time_ends_says_nothing():
    assert examine_mutant(next(iter(EQUIVALENT)), NORMAL, "quick", until=0.0) is None


def test_a_kernel_that_cannot_be_made_is_no_finding():
    def make(kernel: str):
        raise ValueError("no such thing")

    with pytest.raises(RuntimeError, match="no such thing"):
        examine(make, NORMAL, "quick", 0)


def test_a_task_that_the_sound_twin_fails_finds_nothing():
    """Each edit that fa3-fwd's twin runs counted as found by the property that this twin itself breaks."""
    kernel, task = "twin.flash3.dew.fp16", "error_within_bound"
    assert found_by(find(kernel), task, "quick", 0) == ("laws",)
    unseen = "forward._Attention.scale: if self.takes_tanh: -> if False:"  # it has no softcap
    found = examine_mutant(unseen, [(kernel, task)], "quick")
    assert found is not None
    assert found.found_by == ()
