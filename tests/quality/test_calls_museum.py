"""Each wrong kernel of calls is really wrong, by a call that it takes and that shows it, and no room is too large."""

from __future__ import annotations

from pathlib import Path

import pytest

import fa3verify
from fa3verify import AttentionProblem, Case, Recipe

pytest.importorskip("torch", reason="needs torch: pip install torch")

from tests.quality.calls.museum import EXHIBITS, ROOMS

pytestmark = pytest.mark.optional

WRONG = [name for name, exhibit in EXHIBITS.items() if exhibit.kind != "right"]
RIGHT = [name for name in EXHIBITS if name not in WRONG]
EVERYWHERE = ("coarse_exponential", "clears_dout", "scales_in_place")  # wrong in every call
THIN = [name for name in WRONG if EXHIBITS[name].kind != "quantiser" and name not in EVERYWHERE]
LEAST = {"serving": 35, "sizes": 20, "strides": 20, "state": 18, "gradients": 20, "quantiser": 7, "numerics": 10}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * EXHIBITS[name].nightly) for name in WRONG]
)
def test_each_wrong_kernel_is_wrong_somewhere(name):
    exhibit = EXHIBITS[name]
    assert exhibit.witness is not None
    assert exhibit.witness(exhibit)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", [*THIN, *RIGHT])
def test_each_kernel_is_right_in_an_ordinary_call(name):
    """What finds a wrong one has to ask for more than another ordinary call."""
    kernel = fa3verify.find_kernel(EXHIBITS[name].reference)
    nheads_kv = 2 if "gqa" in kernel.features else 4
    problem = kernel.fitted(AttentionProblem(2, 4, nheads_kv, 9, 33, 64, dtype=kernel.dtype, causal=True))
    measures = fa3verify.judge(
        kernel, Case(kernel.name, problem, Recipe("normal"), operation=kernel.operation)
    ).measures
    assert max(measures[of] for of in measures.keys() & {"ratio_max", "ratio_lse_max"}) <= 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_kernel_is_loaded_by_its_reference():
    for exhibit in EXHIBITS.values():
        assert fa3verify.find_kernel(exhibit.reference).name == exhibit.reference


def test_the_museum_has_kernels_of_every_class():
    held = [EXHIBITS[name].kind for name in WRONG]
    assert {kind: held.count(kind) >= least for kind, least in LEAST.items()} == dict.fromkeys(LEAST, True)
    assert len(RIGHT) >= 40
    assert all(len(Path(str(room.__file__)).read_text().splitlines()) <= 400 for room in ROOMS)
