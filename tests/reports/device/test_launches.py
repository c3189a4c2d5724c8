"""Rows of a table are stale where a launch whose features they have has changed, and no others are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fa3_reports.audit.probes import probes
from fa3_reports.bench_rows import read_rows
from fa3_reports.device import keys
from fa3_reports.device.launches import concerns
from fa3_reports.device.source import Source
from fa3verify.report.tables import count

BITS = Path(__file__).parents[3] / "reports" / "h100" / "bits"
SCHEDULES = BITS.parents[1] / "h200" / "simulator" / "schedules_2k_8k_fp16" / "bench.jsonl"
BENCH = BITS.parents[1] / "h200" / "speed" / "paper_grid" / "bench.jsonl"
DECODE = BENCH.parents[1] / "decode" / "bench.jsonl"
GRADIENTS = BITS.parents[1] / "h200" / "bits"


def rows(path: Path) -> list[dict[str, str]]:
    return read_rows(path)


def of(path: Path, *changed: str) -> list[dict[str, str]]:
    return [row for row in rows(path) if concerns(row, frozenset(changed))]


def test_a_causal_launch_is_of_causal_rows_of_16_bits_at_its_head_dim_alone():
    found = of(BITS / "gluon_forward_bits.csv", "fp16_d128_causal")
    assert {row["dtype"] for row in found} == {"fp16", "bf16"}
    assert all(96 < max(int(row["head_dim"]), int(row["head_dim_v"])) <= 128 for row in found)
    assert all(row["causal"] == "True" or int(row["right"]) >= 0 for row in found)
    causal = [
        row for row in rows(BITS / "gluon_forward_bits.csv") if row["causal"] == "True" and row["dtype"] == "fp16"
    ]
    assert sum(row["dtype"] == "fp16" and row["causal"] == "True" for row in found) == sum(
        96 < max(int(row["head_dim"]), int(row["head_dim_v"])) <= 128 for row in causal
    )


@pytest.mark.parametrize(
    ("probe", "column", "values"),
    [
        ("fp16_d64_splits", "num_splits", {"1"}),
        ("fp16_d64_softcap", "softcap", {"0.0"}),
        ("fp16_d64_packed", "pack_gqa", {"False"}),
        ("fp16_d64_varlen", "varlen", {"False"}),
        ("e4m3_d64_dense_chained", "promotion_interval", {"64", "128"}),
        ("e4m3_d64_dense_blocks", "v_scope", {"none", "tensor", "head"}),
        ("bf16_d64_dense", "dtype", {"fp16", "e4m3"}),
        ("fp16_d64_dense_128_rows", "causal", {"True"}),
    ],
)
def test_a_feature_of_a_launch_is_of_no_row_without_it(probe, column, values):
    found = of(BITS / "gluon_forward_bits.csv", probe)
    assert found
    assert not {row[column] for row in found} & values


def test_a_dense_launch_is_of_all_rows_of_its_formats_and_head_dim():
    every = [
        x
        for x in rows(BITS / "gluon_forward_bits.csv")
        if x["dtype"] == "e4m3" and max(int(x["head_dim"]), int(x["head_dim_v"])) > 192
    ]
    assert of(BITS / "gluon_forward_bits.csv", "e4m3_d256_dense") == every


def test_a_dense_launch_in_tiles_of_128_rows_is_of_no_row_that_names_another_tile():
    found = [row for row in of(SCHEDULES, "fp16_d64_dense_128_rows") if row["kernel"].startswith("gluon")]
    assert found
    assert {(row["tile_m"], row["causal"], row["head_dim"]) for row in found} == {("128", "False", "64")}
    every = of(SCHEDULES, "fp16_d64_dense")
    assert {row["tile_m"] for row in every} == {"128", "192"}
    assert [row for row in every if row in found] == found


def test_of_the_bench_only_rows_of_one_query_are_of_launches_that_split_keys():
    assert not of(BENCH, "fp16_d128_splits")
    found = of(DECODE, "fp16_d128_splits")
    assert {row["kernel"] for row in found} == {"gluon"}
    assert not concerns(found[0] | {"kernel": "gluon.one_split"}, frozenset({"fp16_d128_splits"}))


def test_every_row_of_the_bits_is_of_some_launch_and_launches_of_other_functions_of_none():
    forward = frozenset(x.name for x in probes() if x.function == "forward" and not x.stamps)
    others = frozenset(x.name for x in probes() if x.function != "forward")
    for row in rows(BITS / "gluon_forward_bits.csv"):
        assert concerns(row, forward)
        assert not concerns(row, others)


def test_rows_of_other_kernels_are_of_no_launch_of_ours_and_a_launch_that_is_gone_is_of_all_of_ours():
    found = of(BENCH, "a launch that is gone")
    assert {row["kernel"].partition(".")[0] for row in found} == {"gluon"}
    assert len(found) == sum(row["kernel"].startswith("gluon") for row in rows(BENCH)) < len(rows(BENCH))


@pytest.fixture
def folder(tmp_path) -> Path:
    there = tmp_path / "h100" / "bits"
    shutil.copytree(BITS, there)
    for file in GRADIENTS.glob("gluon_backward_bits*"):
        shutil.copy(file, there)
    return there


def test_a_table_says_how_many_of_its_rows_are_stale_and_is_current_where_none_is(folder, monkeypatch):
    path, other = "bits/gluon_forward_bits.csv", "bits/gluon_backward_bits.csv"
    source = Source(folder.parent)
    for changed, says in (
        (frozenset(), ""),
        (frozenset({"fp16_d128_causal"}), f"512 of {count(5352)} rows: {keys.CHANGED}"),
        (frozenset({"quantize_d64_plain"}), ""),
    ):
        monkeypatch.setattr(keys, "changed_since", lambda *args, changed=changed: changed)
        assert says in keys.why_stale(source, path)
        assert bool(keys.why_stale(source, path)) == bool(says)
    monkeypatch.setattr(keys, "changed_since", lambda *args: frozenset({"backward_d64_dense"}))
    assert "160 of 752 rows: " in keys.why_stale(source, other)


def test_a_table_that_names_launches_that_nobody_kept_is_stale(folder):
    provenance = folder / "gluon_forward_bits_provenance.json"
    facts = json.loads(provenance.read_text()) | {"launches_sha256": "0" * 64}
    del facts["launches"]
    provenance.write_text(json.dumps(facts))
    assert keys.why_stale(Source(folder.parent), "bits/gluon_forward_bits.csv") == keys.CHANGED
