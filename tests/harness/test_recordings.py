"""Recordings: what is written is read, a digest locates the head that differs, committed ones are drawn again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fa3_reference.problem import AttentionProblem
from fa3verify import recordings
from fa3verify.cases import Case
from fa3verify.inputs.recipe import Recipe
from fa3verify.recordings import Recorded, Recording, digest_of_operands, digests_of

COMMITTED = sorted((Path(__file__).parents[2] / "reports/h100/recordings").glob("*.xz"))
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


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_recordings_draw_the_same_operands_and_hold_their_whole_outputs(path):
    recording = recordings.read(path)
    assert {"version", "gpu", "driver"} <= set(recording.facts)
    with np.load(path.with_suffix(".npz")) as kept:
        numbers = sorted(int(name[3:]) for name in kept.files if name.startswith("out"))
        assert len(numbers) > 50
        for i in numbers[:: len(numbers) // 8]:
            launch = recording.launches[i]
            assert digest_of_operands(launch.case.operands()) == launch.operands
            assert digests_of(launch.case.problem, kept[f"out{i}"], kept[f"lse{i}"]) == launch.digests
