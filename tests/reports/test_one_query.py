"""cuDNN's kernel for one query: the recorded bits, and none of its rules can be another."""

from __future__ import annotations

from functools import reduce
from pathlib import Path

import pytest

from fa3_reference.problem import AttentionProblem
from fa3_reports import one_query as twin, recordings

FOLDER = Path(__file__).parents[2] / "reports/h100/recordings"
LAUNCHES = [x for file in ("cudnn", "cudnn.corners") for x in recordings.read(FOLDER / f"{file}.xz").launches]
ONE_QUERY = [x for x in LAUNCHES if x.case.problem.seqlen_q == 1 and not x.error]
FEW = [x for x in ONE_QUERY if x.case.problem.nheads == 2 or x.case.problem.dtype == "bf16"]


def differing(launch: recordings.Recorded) -> tuple[int, int]:
    """Digests of O and of LSE that differ."""
    found = recordings.check("cudnn", launch)
    assert not found.refused
    return len(found.out_differing), len(found.lse_differing)


@pytest.mark.parametrize("keys", sorted({x.case.problem.seqlen_k for x in FEW}))
def test_one_query_gives_the_recorded_bits(keys):
    launches = [x for x in FEW if x.case.problem.seqlen_k == keys]
    assert len(launches) >= 4
    assert [differing(x) for x in launches] == [(0, 0)] * len(launches)


sums_of_all_warps = twin._block_sums


def sums_of_warp_0(p, warps):
    return sums_of_all_warps(p, warps)[[0] * warps]


# Each: how many keys of a launch tell the rule, and what stands in its place.
CHANGES = {
    "small blocks for more keys": (300, ("SHORT", 300)),
    "small blocks for fewer keys": (256, ("SHORT", 128)),
    "a split for 512 keys": (512, ("splits", lambda keys: 2)),
    "no splits": (901, ("splits", lambda keys: 1)),
    "as many splits as blocks": (901, ("splits", lambda keys: 8)),
    "fewer splits": (4096, ("splits", lambda keys: 16)),
    "warps in turn for O": (1025, ("_over_warps", lambda out: reduce(twin._sum, out))),
    "warp 0's sums for all channels": (4096, ("_block_sums", lambda p, warps: sums_of_warp_0(p, warps))),
    "one warp": (300, ("_kernel", lambda keys: twin._KeyCut(128, 1))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_rule_gives_other_bits(monkeypatch, name):
    keys, change = CHANGES[name]
    monkeypatch.setattr(twin, *change)
    launches = [x for x in ONE_QUERY if x.case.problem.seqlen_k == keys and x.case.problem.nheads > 2]
    assert any(any(differing(x)) for x in launches)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"seqlen_q": 2}, "one query"),
        ({"seqlen_k": 0}, "without keys"),
        ({"softcap": 3.0}, "softcap"),
        ({"head_dim_v": 32}, "head_dim_v"),
        ({"dtype": "e4m3"}, "fp16 or bf16"),
    ],
)
def test_what_was_not_recorded_is_refused(change, rule):
    given = {"batch": 1, "nheads": 1, "nheads_kv": 1, "seqlen_q": 1, "seqlen_k": 9, "head_dim": 64, "dtype": "fp16"}
    assert not twin.refusal(AttentionProblem(**given))
    assert rule in twin.refusal(AttentionProblem(**(given | change)))
