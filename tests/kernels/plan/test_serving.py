"""Tiles of the builds that serve, by hand from their sources and from the lengths at which recorded outputs part."""

from __future__ import annotations

import pytest

from fa3_kernels.plan.config import default_config
from fa3_kernels.plan.families import traits_of
from fa3_reference.cache import Cache
from fa3_reference.problem import AttentionProblem


def tile(build, dtype, rows, *, head_dim=128, causal=True, **more):
    """A build is a family, or one over pages."""
    family, _, pages = build.partition(" ")
    sizes = {"nheads": 32, "nheads_kv": 8, "head_dim": head_dim, "dtype": dtype, "causal": causal}
    problem = AttentionProblem.varlen((rows,), (2000,), cache=Cache(16) if pages else None, **sizes, **more)
    return tuple(traits_of(family).shipped(problem)[:2])  # type: ignore[index]


@pytest.mark.parametrize(
    ("build", "dtype", "few", "many", "dense"),
    [
        ("vllm", "bf16", (64, 128), (128, 128), (128, 160)),  # prefill parts from fa3-fwd's 176 at 161 keys
        ("vllm over pages", "bf16", (64, 128), (128, 128), (128, 128)),
        ("vllm", "e4m3", (64, 96), (128, 192), (128, 192)),  # decode parts from prefill at 97 keys
        ("vllm over pages", "e4m3", (64, 96), (128, 192), (128, 192)),
        ("sglang", "bf16", (128, 128), (128, 128), (128, 176)),
        ("sglang over pages", "bf16", (128, 128), (128, 128), (128, 128)),
        ("sglang", "e4m3", (64, 96), (128, 224), (128, 224)),
        ("sglang over pages", "e4m3", (64, 96), (128, 160), (128, 160)),
    ],
)
def test_tiles_follow_the_longest_queries_and_pages(build, dtype, few, many, dense):
    """Four heads a kv head: 16 queries fill the 64 rows of a warpgroup, 17 do not."""
    assert [tile(build, dtype, n) for n in (2, 16, 17, 2000)] == [few, few, many, many]
    assert tile(build, dtype, 2000, causal=False) == dense


@pytest.mark.parametrize(("build", "keys"), [("vllm", 176), ("vllm over pages", 128), ("sglang", 176), ("flash3", 176)])
def test_one_query_is_dense_but_over_pages(build, keys):
    """Recorded outputs of 129 keys: over pages one query has the bits of a causal prefill, without it has not."""
    assert tile(build, "bf16", 1)[1] == keys


@pytest.mark.parametrize(
    ("head_dim", "changes", "keys"),
    [
        (64, {}, 128),
        (64, {"causal": False}, 160),
        (64, {"window": (99, 0), "causal": False}, 160),
        (96, {}, 128),
        (192, {}, 96),
        (192, {"head_dim_v": 128}, 96),
        (256, {}, 80),
        (256, {"window": (99, 0), "causal": False}, 64),
    ],
)
def test_other_head_dims_of_vllm_are_those_of_its_source(head_dim, changes, keys):
    assert tile("vllm over pages", "bf16", 300, head_dim=head_dim, **changes)[1] == keys


def test_a_padded_head_dim_never_takes_one_warpgroup():
    assert tile("vllm", "e4m3", 1, head_dim=112) == (128, 192)


def test_promoted_sums_of_vllm_take_a_whole_tile():
    configs = [default_config(AttentionProblem(1, 32, 8, n, 99, 128, dtype="e4m3"), family="vllm") for n in (1, 99)]
    assert [config.promotion_interval for config in configs] == [96, 192]


@pytest.mark.parametrize("head_dim", [64, 112, 256])
def test_no_tile_of_sglang_is_made_up_where_none_was_recorded(head_dim):
    problem = AttentionProblem(1, 32, 8, 1, 300, head_dim, dtype="bf16")
    with pytest.raises(ValueError, match=f"sglang has no known tile for bf16 at head_dim {head_dim}"):
        default_config(problem, family="sglang")
