"""Recordings: what is written is read, a digest locates the head that differs, committed ones are drawn again."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from fa3_kernels.plan.config import default_config
from fa3_kernels.twin.forward import forward
from fa3_reference.problem import AttentionProblem
from fa3_reports import recordings
from fa3_reports.__main__ import main
from fa3_reports.bits import serving_cases
from fa3_reports.bits.corner_cases import corners
from fa3_reports.bits.gap_cases import gaps
from fa3_reports.bits.recorded_cases import cases
from fa3_reports.recordings import KEPT_OUTPUTS, Recorded, Recording, digest_of_operands, digests_of
from fa3verify.cases.case import Case
from fa3verify.inputs.recipe import Recipe
from fa3verify.known.peers import PEERS
from tests.sampling import sampled

REPORTS = Path(__file__).parents[2] / "reports"
FOUND = {path.name: path for gpu in ("h200", "h100") for path in sorted((REPORTS / gpu / "recordings").glob("*.xz"))}
COMMITTED = [FOUND[name] for name in sorted(FOUND)]  # by the H100 where both GPUs have the cases
SETS = {".corners": corners, ".gaps": gaps}
PACKED = AttentionProblem.varlen((3, 5), (4, 7), nheads=2, nheads_kv=1, head_dim=16)


def test_a_recording_is_read_as_it_was_written(tmp_path):
    launch = Recorded(Case("flash3.fp16", PACKED, Recipe("normal")), "00", recordings.Digests(("a", "b"), ("c",)))
    refused = Recorded(Case("flash3.fp16", PACKED, Recipe("peaky"), changes=(("num_splits", 0),)), "11", error="no")
    written = Recording("flash3", {"version": "1"}, (launch, refused))
    recordings.write(tmp_path / "x.xz", written)
    assert recordings.read(tmp_path / "x.xz") == written


@pytest.mark.parametrize("content", [b"", b"no archive", b"\xfd7zXZ\x00 cut off"])
def test_a_damaged_recording_is_refused_by_name(tmp_path, content):
    (tmp_path / "x.xz").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.xz is not a recording"):
        recordings.read(tmp_path / "x.xz")


def test_one_bit_changes_the_digest_of_its_own_sequence_and_head():
    rng = np.random.default_rng(0)
    out, lse = rng.standard_normal(PACKED.out_shape).astype(np.float16), np.zeros(PACKED.lse_shape, np.float32)
    before = digests_of(PACKED, out, lse)
    out[4, 1, 3] = np.nextafter(out[4, 1, 3], np.float16(9))  # sequence 1, head 1
    lse[0, 1] = -0.0  # sequence 0, head 0
    after = digests_of(PACKED, out, lse)
    assert [i for i, (a, b) in enumerate(zip(before.out, after.out, strict=True)) if a != b] == [3]
    assert [i for i, (a, b) in enumerate(zip(before.lse, after.lse, strict=True)) if a != b] == [0]


# Operands of the corners of flash3 are long, so that drawing a few takes as long as all others do.
@pytest.mark.parametrize(
    "path", sampled(COMMITTED, [x for x in COMMITTED if x.stem != "flash3.corners"]), ids=lambda path: path.stem
)
def test_committed_recordings_draw_the_same_operands_and_hold_their_whole_outputs(path):
    recording = recordings.read(path)
    assert {"version", "gpu", "driver"} <= set(recording.facts)
    small = [x for x in recording.launches if not x.error and x.outputs <= KEPT_OUTPUTS]
    if not small:
        assert not path.with_suffix(".npz").exists()
        return
    with np.load(path.with_suffix(".npz")) as kept:
        numbers = sorted(int(name[3:]) for name in kept.files if name.startswith("out"))
        assert len(numbers) >= min(40, len(small))
        for i in numbers[:: max(1, len(numbers) // 8)]:
            launch = recording.launches[i]
            assert digest_of_operands(launch.case.operands()) == launch.operands
            assert digests_of(launch.case.problem, kept[f"out{i}"], kept[f"lse{i}"]) == launch.digests


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_twins_give_the_recorded_bits_and_a_changed_digest_is_located(path):
    recording = recordings.read(path)
    known = (x for x in recording.launches if not recordings.refusal(recording.library, x))
    compared = [recordings.check(recording.library, x) for x in sorted(known, key=recordings.cost)[:15]]
    assert not any(found.differs for found in compared)
    out = list(compared[0].launch.digests.out)
    out[-1] = "0" * 16
    wrong = replace(compared[0].launch, digests=compared[0].launch.digests._replace(out=tuple(out)))
    problem = wrong.case.problem
    found = recordings.check(recording.library, wrong)
    assert found.out_differing == ((problem.batch - 1, problem.nheads - 1),)
    assert not found.lse_differing


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_the_cases_of_committed_recordings_are_those_that_a_new_one_would_have(path):
    recording = recordings.read(path)
    dtypes = tuple({launch.case.problem.dtype for launch in recording.launches})
    own = next((made for suffix, made in SETS.items() if path.stem.endswith(suffix)), None)
    again = own(recording.library, dtypes) if own else cases(recording.library, dtypes, rounds=8)
    if PEERS[recording.library].serves:
        again = [
            case  # absorbed heads end the process of SGLang's build as it was reduced
            for case in serving_cases.cases(recording.library, dtypes, rounds=4)
            if not (recording.library == "sglang" and case.problem.qv)
        ]
    assert [launch.case.key() for launch in recording.launches] == [case.key() for case in again]


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_no_digest_differs_between_an_h100_and_an_h200(path):
    if not (again := REPORTS / "h200/recordings" / path.name).exists() or again == path:
        pytest.skip("these cases were recorded on one GPU")
    tenth = recordings.read(again)
    found = recordings.against(tenth, recordings.read(path))
    assert "H200" in tenth.facts["gpu"]
    assert (found["launches"], found["left_out"], found["differing"]) == (len(tenth.launches), 0, [])
    assert found["outputs"] > 3e7


@pytest.mark.parametrize("library", ["flash3", "flash2", "cudnn"])
def test_sets_of_cases_share_no_seed(library):
    dtypes = ("fp16", "bf16", "e4m3")
    drawn = [cases(library, dtypes, rounds=8), corners(library, dtypes), gaps(library, dtypes)]
    seeds = [{case.recipe.seed for case in found} for found in drawn]
    assert all(seeds)
    assert sum(map(len, seeds)) == len(set().union(*seeds))


@pytest.mark.nightly
def test_gaps_tell_the_rules_that_flash2_has_by_source_from_their_opposites():
    """The cheapest case of each rule: another order gives other bits."""
    given = [
        Recorded(case, "") for case in gaps("flash2", ("bf16",)) if case.problem.seqlen_k and not case.problem.is_varlen
    ]
    for kind, switch in (("ties", {"compiles_masked_apart": False}), ("normal", {"splits_visible": True})):
        launch = min((x for x in given if x.case.recipe.distribution == kind), key=recordings.cost)
        problem, config = launch.case.problem, default_config(launch.case.problem, family="flash2")
        operands, order = launch.case.operands(), replace(config.traits.order, **switch)
        with warnings.catch_warnings(action="ignore"):
            other = forward(problem, operands, config, order=order)
        assert digests_of(problem, *forward(problem, operands, config)) != digests_of(problem, *other)


def test_a_recording_that_differs_is_a_finding(tmp_path):
    recording = recordings.read(COMMITTED[0])
    known = (x for x in recording.launches if not recordings.refusal(recording.library, x))
    launch = min(known, key=recordings.cost)
    wrong = replace(launch, digests=launch.digests._replace(lse=tuple("0" * 16 for _ in launch.digests.lse)))
    for name, chosen, code in (("right", launch, 0), ("wrong", wrong, 1)):
        path = tmp_path / f"{name}.xz"
        recordings.write(path, replace(recording, launches=(chosen,)))
        result = CliRunner().invoke(main, ["recordings", str(path), "--products", "0", "--workers", "1"])
        assert result.exit_code == code, result.output
        assert ("DIFFERS" in result.output) == (code == 1)


def test_an_update_that_changes_a_bit_is_found_by_comparing_two_recordings(tmp_path):
    recording = recordings.read(COMMITTED[0])
    recordings.write(tmp_path / "old.xz", replace(recording, launches=recording.launches[:9]))
    changed = replace(recording.launches[4], digests=recordings.NONE)
    launches = (*recording.launches[:4], changed, *recording.launches[5:12])
    recordings.write(tmp_path / "new.xz", replace(recording, launches=launches))
    found = recordings.against(*(recordings.read(tmp_path / name) for name in ("new.xz", "old.xz")))
    assert (found["launches"], found["left_out"], found["differing"]) == (9, 3, [changed.case.describe()])
    files = [str(tmp_path / name) for name in ("new.xz", "old.xz")]
    assert CliRunner().invoke(main, ["recordings", files[0], "--against", files[1]]).exit_code == 1
    assert CliRunner().invoke(main, ["recordings", files[1], "--against", files[1]]).exit_code == 0


def test_two_recordings_agree_where_both_refused_whatever_the_words(tmp_path):
    case = Case("flash3.fp16", PACKED, Recipe("normal"))
    said, other = (Recording("x", {}, (Recorded(case, "00", error=words),)) for words in ("line 1", "line 2"))
    ran = Recording("x", {}, (Recorded(case, "00"),))
    assert recordings.against(said, other)["differing"] == []
    assert recordings.against(said, ran)["differing"] == [case.describe()]
    assert (recordings.against(said, other)["outputs"], recordings.against(ran, ran)["outputs"]) == (0, 2 * 8 * 16)


def test_what_can_be_recorded_are_the_peers_that_have_a_twin():
    from fa3_reports.cli.record import LIBRARIES
    from fa3verify.known.peers import PEERS

    assert set(LIBRARIES) == {name for name, peer in PEERS.items() if peer.family}


@pytest.mark.nightly
def test_the_build_of_flash3_dew_never_packs_heads():
    """One recorded launch tells: subnormal values under a narrow window, where a tile that a row visits in vain flushes
    what it has."""
    (path,) = (path for path in COMMITTED if path.name == "flash3.dew.xz")
    (launch,) = (x for x in recordings.read(path).launches if x.case.recipe.seed == 2_000_213)
    assert launch.case.problem.group == 6
    assert not recordings.check("flash3.dew", launch).differs
