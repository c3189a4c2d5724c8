"""Orders are found from outputs alone, mistakes are named, and nothing learned acquits a kernel."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from fa3_kernels.plan.order import Order
from fa3_reference.problem import AttentionProblem
from fa3verify.cases.case import Case
from fa3verify.cli.main import main
from fa3verify.commands.learn import Learning
from fa3verify.inputs.recipe import Recipe
from fa3verify.judging.judgement import judge, passes
from fa3verify.kernels.sizes import Sizes
from fa3verify.known import registry
from fa3verify.learn import Learned, inputs, learn
from fa3verify.learn.elimination import Step
from fa3verify.learn.launcher import Form, Launcher
from fa3verify.learn.learner import _lone_key
from fa3verify.learn.probes import Probes, _triples
from fa3verify.learn.space import Structure
from fa3verify.operations.forward import Result
from fa3verify.search.grounds import grounds_of
from tests.quality.learned_orders import OUTSIDE, DrawnTwin, drawn, grade

TWIN = "twin.cudnn.fp16"
CUDNN = replace(registry.find(TWIN).config_for(AttentionProblem(1, 1, 1, 64, 64, 64)).traits.order, diagonal="top_left")
LEARNED = Learned(
    "x", "fp16", 64, Structure(tile_n=128, keys="left_to_right"), (CUDNN,), (Step("normal", 2, 1),), 40, 9.0, 1_000_000
)


@pytest.mark.nightly
def test_the_order_of_a_twin_is_among_those_that_are_left_and_no_fresh_output_differs():
    learned = learn(registry.find(TWIN), 64, outputs=20_000)
    assert replace(CUDNN, combine="in_turn") in {replace(x, combine="in_turn") for x in learned.orders}
    assert learned.is_whole
    assert learned.outputs >= 20_000
    assert not learned.findings


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [3, 7009])
def test_a_drawn_order_is_recovered(seed):
    kernel, twin, head_dim = drawn(seed)
    assert grade(learn(kernel, head_dim, outputs=20_000), twin) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("twin.fp16+lse_base_2", "lse is returned in base 2"),
        pytest.param(
            "twin.flash3.bf16+missed_rescale",
            "O is not rescaled in the second visited block",
            marks=pytest.mark.nightly,
        ),
        ("twin.cudnn.fp16+missing_column", "column 0 of every tile is left out"),
    ],
)
def test_a_known_mistake_is_named(name, words):
    found = learn(registry.find(name), 64, outputs=10_000)
    assert not found.is_whole
    assert any(words in told for told in found.findings), found.findings


@pytest.mark.nightly
def test_another_order_for_many_queries_leaves_no_proposal():
    """Compiled FlexAttention is another kernel below 128 queries than from there on."""
    few, many = registry.find("twin.fp16"), registry.find("twin.flash3.dew.fp16")

    def run(problem, operands, config):
        twin = few if problem.seqlen_q < 128 else many
        return twin.code.run(problem, operands, twin.code.configure(problem))

    learned = learn(replace(few.altered(run=run), name="mine"), 64, outputs=200_000)
    assert learned.orders
    assert not learned.is_whole
    assert "of 192 queries over" in " ".join(learned.findings)
    assert Learning("mine", (learned,), ()).proposal is None


@pytest.mark.parametrize("which", [1, 8], ids=str)
def test_of_a_kernel_outside_the_space_none_survives_and_what_is_certain_is_so(which):
    made, facts = OUTSIDE[which]
    found = learn(made(), 64, outputs=10_000)
    assert not found.is_whole
    assert {name: getattr(found.structure, name) for name in facts} == facts
    assert "no hypothesis survives" in " ".join(found.words())


@pytest.mark.parametrize("tile", [32, 64, 192])
@pytest.mark.parametrize("keys", ["left_to_right", "right_to_left"])
def test_tiles_and_their_direction_are_read_off(tile, keys):
    probes = Probes(Launcher(DrawnTwin(tile, Order(keys=keys)).kernel("tiled", "bf16"), 64))
    known = Structure()
    for probe in (probes.folding, probes.chains, probes.weights, probes.rescaling, probes.tiles, probes.widths):
        known = probe(known)
    assert (known.tile_n, known.keys) == (tile, keys)
    assert (known.score_step, known.value_step, known.probabilities) == (16, 16, "bf16")
    assert known.value_bits in (0, 24)


def test_a_quantizer_is_refused():
    with pytest.raises(ValueError, match="only forward kernels"):
        learn(registry.find("twin.quantize"))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "order.json"
    assert Learning(TWIN, (LEARNED,), ()).write(path)
    return path


CASE = Case("mine", AttentionProblem(1, 2, 2, 70, 200, 64), Recipe("normal"))


def test_one_bit_that_no_bound_sees_is_seen_by_a_learned_order(file):
    sound = registry.find(TWIN)

    def off_by_one_bit(problem, operands, config):
        result = sound.code.run(problem, operands, config)
        result.out.view(np.uint16)[0, 0, 0, 0] ^= 1
        return result

    twin = registry.find(f"{TWIN}[order={file}]").twin
    for kernel, differing in ((sound, 0), (sound.altered(run=off_by_one_bit), 1)):
        held = replace(kernel, name="mine", order=None, accumulator="either", twin=twin)
        measures = judge(held, CASE).measures
        assert measures["bits_differing"] == differing
        assert measures["ratio_max"] <= 1
        assert passes(held, measures) == (differing == 0)


def test_a_wrong_kernel_with_the_order_of_its_own_bits_still_fails(file):
    """The order was learned from a right kernel; a twin that agreed with a wrong one would change nothing either."""
    sound = registry.find(TWIN)

    def doubled(problem, operands, config) -> Result:
        result = sound.code.run(problem, operands, config)
        return Result((result.out * 2).astype(np.float16), result.lse)

    kernel = replace(sound.altered(run=doubled), name="mine", order=None, accumulator="either", twin=None)
    assert not passes(kernel, judge(kernel, CASE).measures)
    twin = registry.find(f"{TWIN}[order={file}]").twin
    assert not passes(kernel, judge(replace(kernel, twin=twin), CASE).measures)


def test_where_a_learned_order_says_nothing_the_bound_judges_alone(file):
    sound = registry.find(TWIN)
    held = replace(sound, twin=registry.find(f"{TWIN}[order={file}]").twin)
    case = replace(CASE, problem=replace(CASE.problem, head_dim=128, head_dim_v=128))
    assert "bits_differing" not in judge(held, case).measures


def test_the_twin_of_a_learned_order_is_hunted_where_it_was_learned(file):
    """No split was learned, and a search may not ask for one."""
    known = registry.find(f"twin.fp16[family={file}]")
    assert "num_splits" in registry.find("twin.fp16").changeable
    assert "num_splits" not in known.changeable
    assert "splits" not in {ground.name for ground in grounds_of(known)}


def test_the_verb_writes_a_proposal_and_ends_with_5_where_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr("fa3verify.commands.learn.learn_all", lambda *given, **options: Learning("x", (LEARNED,), ()))
    out = tmp_path / "o.json"
    told = CliRunner().invoke(main, ["learn", "x", "--out", str(out), "--json", str(tmp_path / "all.json")])
    assert told.exit_code == 0, told.output
    assert json.loads(out.read_text())["dtype"] == "fp16"
    assert "a proposal, which acquits no kernel" in " ".join(told.output.split())
    none = replace(LEARNED, orders=(), why="nothing fits")
    monkeypatch.setattr("fa3verify.commands.learn.learn_all", lambda *given, **options: Learning("x", (none,), ()))
    told = CliRunner().invoke(main, ["learn", "x", "--out", str(tmp_path / "none.json")])
    assert told.exit_code == 5
    assert not (tmp_path / "none.json").exists()


@pytest.mark.parametrize(
    ("kernel", "code", "words"),
    [("twin.nothing", 2, "unknown kernel"), ("flash4.fp16", 3, "unavailable")],
)
def test_a_kernel_that_is_unknown_or_cannot_run_is_no_finding(tmp_path, monkeypatch, kernel, code, words):
    monkeypatch.delenv("FA3VERIFY_PEERS", raising=False)
    told = CliRunner().invoke(main, ["learn", kernel, "--head-dim", "64", "--out", str(tmp_path / "order.json")])
    assert told.exit_code == code
    assert words in told.output


def test_an_order_is_of_one_kernel(file):
    told = CliRunner().invoke(main, ["verify", "twin.fp16", "twin.bf16", "--order", str(file)])
    assert told.exit_code == 2
    assert "--order FILE is of one kernel" in told.output


@pytest.mark.parametrize("keys", ["left_to_right", "right_to_left"])
def test_a_lone_key_is_the_one_that_is_visited_first_and_the_only_one_that_is_seen(keys):
    """Tiles behind it are then hidden as a whole, which a first tile cannot be without a maximum of minus infinity."""
    kernel = replace(registry.find("twin.fp16"), sizes=Sizes(seqlen_multiple=64))
    subject = inputs.Subject(kernel, Form("fp16", 64), Structure(tile_n=32, keys=keys), False, False)
    game = SimpleNamespace(subject=subject, rng=np.random.default_rng(0))
    first = 0 if keys == "left_to_right" else 63
    for question in (_lone_key(game), inputs.one_key(game.rng, subject)):
        assert question.k.shape[1] == 64
        seen = np.isfinite(question.k[0, :, :, 0]) & (question.q[0, 0, :, 0] == 1)
        assert np.flatnonzero(seen.all(axis=1)).tolist() == np.flatnonzero(seen.any(axis=1)).tolist() == [first]


def test_a_level_is_between_its_ends_and_on_neither():
    """A score that is on an end cannot be told from one that is beyond it."""
    form = Form("bf16", 64)
    score = 3.0 * form.factor
    assert form.level(score - 0.01, score + 0.01) == (1.0, 3.0)
    for low, high in ((score, score + 1e-6), (score - 1e-6, score)):
        with pytest.raises(ValueError, match="bf16 has no score between"):
            form.level(low, high)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(("threshold", "read"), [(0.0, 0.0), (4.0, 4.0), (8.0, 8.0), (12.0, 0.0)])
def test_how_far_a_maximum_may_grow_is_read_off_where_a_larger_one_is_refuted(dtype, threshold, read):
    probes = Probes(Launcher(DrawnTwin(64, Order(rescale_threshold_log2=threshold)).kernel("patient", dtype), 64))
    known = Structure()
    for probe in (probes.folding, probes.chains, probes.weights, probes.rescaling):
        known = probe(known)
    assert known.threshold_log2 == read


@pytest.mark.parametrize(("keys", "after"), [("left_to_right", 2), ("right_to_left", 0)])
@pytest.mark.parametrize("tile", [32, 64, 128])
def test_triples_of_keys_lie_over_a_tile_and_the_one_that_is_visited_after_it(tile, keys, after):
    """In some the heavy key is in the second tile, and in at least five alone in the first."""
    tiles = _triples(Structure(tile_n=tile, keys=keys)) // tile
    assert set(tiles.ravel().tolist()) == {1, after}
    assert (tiles == (1, after, after)).all(axis=1).sum() >= 5
    assert (tiles == (after, 1, 1)).all(axis=1).sum() >= 2


@pytest.mark.parametrize("multiple", ["seqlen_q_multiple", "seqlen_k_multiple"])
def test_questions_have_the_lengths_of_queries_and_keys_that_a_kernel_declares(multiple):
    twin = registry.find("twin.fp16")
    declared = replace(twin, sizes=Sizes(**{multiple: 128}))
    asked = []

    def run(problem, operands, config):
        asked.append(problem)
        return twin.code.run(problem, operands, config)

    launcher = Launcher(declared.altered(run=run), 64)
    assert launcher.out_dtype == "fp16"
    Probes(launcher).folding(Structure())
    assert asked
    assert {declared.misfit(problem) for problem in asked} == {None}
