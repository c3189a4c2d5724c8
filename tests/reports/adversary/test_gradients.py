"""The adversary of gradients: it runs the twin's arithmetic, and breaks a bound that is too small."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from fa3_kernels.plan.backward import BackwardConfig
from fa3_kernels.twin.backward import backward
from fa3_reference.bounds.backward import BackwardBound, backward_bound
from fa3_reports.__main__ import main
from fa3_reports.adversary.gradients.colony import GENES, ISLANDS, GradientColony, GradientIsland, individual
from fa3_reports.adversary.gradients.execution import GRADIENTS, execute
from fa3_reports.adversary.gradients.mutations import MUTATIONS, Child
from fa3_reports.adversary.gradients.search import GradientSearch, judge, over_bound
from fa3_reports.adversary.search import island_of
from fa3_reports.gradient_range import backward_range


def label(island: GradientIsland) -> str:
    return f"{island.dtype} {island.name}"


def bred(island: GradientIsland, seed: int) -> GradientColony:
    """Normal inputs of which each has met some mutations."""
    rng = np.random.default_rng(seed)
    colony = GradientColony.normal(island, rng)
    with np.errstate(all="ignore"):
        for index in range(island.problems):
            for mutation in rng.choice(len(MUTATIONS), 3):
                MUTATIONS[mutation](Child(colony, index, 0.5, rng), rng)
    return colony


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("island", [i for i in ISLANDS if not (i.weights or i.softcap)], ids=label)
def test_the_ends_are_those_of_the_twin_once_they_are_rounded(island: GradientIsland) -> None:
    for colony in (GradientColony.normal(island, np.random.default_rng(1)), bred(island, 2)):
        twin = backward_range(
            colony.problem, colony.operands, BackwardConfig(island.dtype, 64, 16, island.tile_n, "flash3.dew")
        )
        found = execute(colony)
        for name in GRADIENTS:
            for end, expected in zip(found[name], (getattr(twin.low, name), getattr(twin.high, name))):
                rounded = end.astype(expected.dtype)
                equal = (rounded == expected) | (np.isnan(rounded) & np.isnan(expected))
                assert equal.all(), name


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("island", [i for i in ISLANDS if i.softcap and not i.weights], ids=label)
def test_the_twin_with_a_softcap_lies_between_the_ends(island: GradientIsland) -> None:
    """It adds parts in one of the orders that the ends are of, and equals both where there is one part."""
    config = BackwardConfig(island.dtype, 64, 16, island.tile_n, "gluon")
    for colony in (GradientColony.normal(island, np.random.default_rng(1)), bred(island, 2)):
        twin, found = backward(colony.problem, colony.operands, config, order=island.order), execute(colony)
        for name in GRADIENTS:
            expected = getattr(twin, name)
            low, high = (end.astype(expected.dtype) for end in found[name])
            assert (((low <= expected) & (expected <= high)) | np.isnan(low)).all(), name
            if island.heads == 1 and name != "dq":
                assert np.array_equal(low, expected, equal_nan=True)


@pytest.mark.parametrize("island", ISLANDS[::3], ids=label)
def test_an_individual_comes_back_from_json_with_its_ratios(island: GradientIsland) -> None:
    colony = bred(island, 3)
    together = judge(colony)
    for index in (0, island.problems - 1):
        back, _ = individual(json.loads(json.dumps(colony.to_json((index, 0)))))
        assert all(np.array_equal(getattr(back, name)[0], getattr(colony, name)[index]) for name in GENES)
        alone = judge(back)
        for name in GRADIENTS:
            assert alone[name].max() == pytest.approx(together[name][index].max(), rel=1e-6)


def halved(problem, operands, model) -> BackwardBound:
    return BackwardBound(*(x / 2 for x in backward_bound(problem, operands, model)))


@pytest.mark.parametrize("island", [island for island in ISLANDS if not island.weights][::2], ids=label)
def test_half_the_bound_is_broken_and_the_whole_is_not(island: GradientIsland) -> None:
    climb = GradientSearch(island, 0, over_bound(halved))
    found = climb.found
    while set(found.violations) != set(GRADIENTS) and found.problems < 20 * island.problems:
        climb.generation()
    assert set(found.violations) == set(GRADIENTS)
    assert all(over_bound().again(*individual(find.content))[name] <= 1 for name, find in found.violations.items())


def of_ex2(problem, operands, model) -> BackwardBound:
    return backward_bound(problem, operands, replace(model, tanh_error=0.0))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_tanh_approx_breaks_the_bound_of_a_tanh_by_ex2(dtype: str) -> None:
    island = island_of(dtype, "softcap by tanh, unrounded weights", "backward")
    found = GradientSearch(island, 0, over_bound(of_ex2)).until(32)
    assert set(found.violations) == set(GRADIENTS)


@pytest.mark.usefixtures("in_this_process")
def test_the_verb_searches_gradients_and_judges_its_file_again(tmp_path) -> None:
    out = tmp_path / "found.json"
    search_it = ["adversary", "--operation", "backward", "--dtype", "fp16", "--problems", "3", "--jobs", "1"]
    result = CliRunner().invoke(main, [*search_it, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "columns: dq, dk and dv before their last rounding" in result.output
    body = json.loads(out.read_text())
    assert body["operation"] == "backward"
    assert set(body["dtypes"]["fp16"]["islands"]) == {island.name for island in ISLANDS}
    again = CliRunner().invoke(main, ["adversary", "--replay", str(out)])
    assert again.exit_code == 0
    assert again.output.count("stored") == 3 * len(body["dtypes"]["fp16"]["islands"])
    refused = CliRunner().invoke(main, ["adversary", "--operation", "backward", "--dtype", "e4m3"])
    assert refused.exit_code == 2
    assert "dtype of backward must be among fp16, bf16, got e4m3" in refused.output
