"""The file of a learned order: what is written is read, what is damaged is refused, and it is a family."""

from __future__ import annotations

import json

import pytest

from fa3_kernels.plan.config import default_config
from fa3_kernels.plan.families import traits_of
from fa3_kernels.plan.families.learned import SCHEMA, LearnedOrder, read
from fa3_kernels.plan.order import Order
from fa3_reference.problem import AttentionProblem

LEARNED = LearnedOrder(
    "mine",
    "bf16",
    {64: (128, 64), 128: (96, 0)},
    0,
    Order(keys="left_to_right", lse_empty=float("inf")),
    frozenset({"causal"}),
    {"lse_without_keys": (float("-inf"), float("inf"))},
    (),
    57,
    1_000_000,
)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "order.json"
    path.write_text(json.dumps(LEARNED.to_json()))
    return path


def test_what_is_written_is_read(file):
    assert read(file) == LEARNED


def test_it_is_a_family_by_the_path_of_its_file(file):
    traits = traits_of(str(file))
    assert traits.order == LEARNED.order
    for causal, tile in ((False, 128), (True, 64)):
        assert (
            default_config(AttentionProblem(1, 1, 1, 9, 9, 64, dtype="bf16", causal=causal), family=str(file)).tile_n
            == tile
        )


@pytest.mark.parametrize("problem", [{"head_dim": 96}, {"softcap": 3.0}, {"nheads_kv": 1}, {"window": (4, 0)}])
def test_what_was_not_launched_is_refused(file, problem):
    fields = {"batch": 1, "nheads": 2, "nheads_kv": 2, "seqlen_q": 9, "seqlen_k": 9, "head_dim": 64, "dtype": "bf16"}
    assert "not learned" in traits_of(str(file)).refuses(AttentionProblem(**fields | problem))


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "another/1"},
        {"dtype": "fp8"},
        {"order": {"keys": "left_to_right", "unheard": 1}},
        {"order": {"probabilities": "fp32"}},
        {"tiles": {"64": [128]}},
        {"tiles": "none"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_damaged_or_foreign_file_is_refused_with_its_name(tmp_path, change):
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(LEARNED.to_json() | change))
    with pytest.raises(ValueError, match=r"damaged\.json is no learned order"):
        read(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no learned order can be read"):
        read(tmp_path / "none.json")


def test_the_schema_has_a_version():
    assert LEARNED.to_json()["schema"] == SCHEMA
