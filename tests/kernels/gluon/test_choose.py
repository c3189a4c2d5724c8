"""Which configuration a launch uses: packing and splits follow from the shape, and what no kernel does is refused."""

from __future__ import annotations

import pytest

from fa3_kernels.gluon.choose import config_of, shape_of
from fa3_kernels.gluon.variant import variant_of
from fa3_reference.problem import AttentionProblem

DECODE = AttentionProblem(8, 32, 8, 1, 8192, 128)


def test_decode_packs_its_heads_and_splits_its_keys():
    config = config_of(DECODE, num_splits=0)
    assert config.pack_gqa  # 64 tiles of 4 rows instead of 256 of one
    assert config.num_splits > 1  # 64 tiles on 132 multiprocessors


def test_a_full_grid_neither_packs_nor_splits():
    problem = AttentionProblem(4, 16, 4, 4096, 4096, 128, causal=True)
    config = config_of(problem, num_splits=0)
    assert (config.pack_gqa, config.num_splits) == (False, 1)


@pytest.mark.parametrize(
    ("semantics", "limits"),
    [
        ({}, (False, False)),
        ({"causal": True}, (False, True)),
        ({"window": (100, 0)}, (True, True)),
        ({"window": (5000, 5000)}, (False, False)),  # hides nothing
    ],
)
def test_a_limit_that_hides_nothing_is_not_compiled_in(semantics, limits):
    problem = AttentionProblem(1, 2, 2, 300, 500, 128, **semantics)
    variant = variant_of(config_of(problem), problem, shape_of(problem))
    assert (variant.is_left_limited, variant.is_right_limited) == limits


def test_causal_with_one_query_sees_every_key():
    problem = AttentionProblem(1, 2, 2, 1, 500, 128, causal=True)
    assert not variant_of(config_of(problem), problem, shape_of(problem)).is_right_limited


def test_varlen_packs_only_powers_of_two():
    problem = AttentionProblem.varlen((3, 4), (50, 60), nheads=6, nheads_kv=2, head_dim=64)
    assert not config_of(problem).pack_gqa
    with pytest.raises(ValueError, match="with varlen powers of two, got 6 heads on 2"):
        config_of(problem, pack_gqa=True)


@pytest.mark.parametrize(
    ("problem", "choices", "rule"),
    [
        (AttentionProblem(1, 65, 1, 8, 8, 64), {"pack_gqa": True}, "groups of at most 64 heads"),
        (AttentionProblem(1, 1, 1, 8, 8, 60), {}, "head_dim must be a multiple of 8"),
        (DECODE, {"num_splits": -1}, "num_splits must be 0"),
    ],
)
def test_what_no_kernel_does_is_refused(problem, choices, rule):
    with pytest.raises(ValueError, match=rule):
        config_of(problem, **choices)
