"""Which configuration a launch uses: packing and splits follow from the shape, and what no kernel does is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fa3_kernels.audit.evidence import accepted_rows
from fa3_kernels.plan.choose import SMEM_OVERHEAD_BYTES, config_of, over_cache
from fa3_kernels.plan.tile_order import shape_of
from fa3_kernels.plan.tiles import power_of_two
from fa3_kernels.plan.variant import smem_bytes, variant_of
from fa3_reference.problem import AttentionProblem
from fa3_reports.audit.launches import launches as shipped

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
        ({"window": (0, 250)}, (True, True)),
        ({"window": (5000, 5000)}, (False, False)),  # hides nothing
    ],
)
def test_a_limit_that_hides_nothing_is_not_compiled_in(semantics, limits):
    problem = AttentionProblem(1, 2, 2, 300, 500, 128, **semantics)
    variant = variant_of(config_of(problem), problem, shape_of(problem))
    assert (variant.is_left_limited, variant.is_right_limited) == limits


@pytest.mark.parametrize("window", [(100, -1), (0, -1), (-1, 3), (100, 3)])
def test_a_window_that_hides_keys_on_either_side_takes_the_code_that_ships_for_hidden_keys(window):
    """Chained sums of e4m3 at head_dim 64: dense launches keep Q in registers, the others take integer maxima."""
    dense = AttentionProblem(1, 2, 2, 300, 500, 64, dtype="e4m3")
    found = [
        variant_of(config_of(problem, promotion_interval=0), problem, shape_of(problem))
        for problem in (dense, replace(dense, causal=True), replace(dense, window=window))
    ]
    taken = [(variant.integer_max, variant.holds_queries) for variant in found]
    assert taken == [(False, True), (True, False), (True, False)]


@pytest.mark.parametrize(("num_splits", "is_split"), [(1, False), (2, True), (3, True)])
def test_a_launch_whose_keys_are_cut_writes_parts_and_merges_them(num_splits, is_split):
    problem = AttentionProblem(1, 2, 2, 300, 500, 128)
    config = config_of(problem, num_splits=num_splits)
    assert variant_of(config, problem, shape_of(problem, num_splits=num_splits)).is_split == is_split


def test_causal_with_one_query_sees_every_key():
    problem = AttentionProblem(1, 2, 2, 1, 500, 128, causal=True)
    assert not variant_of(config_of(problem), problem, shape_of(problem)).is_right_limited


@pytest.mark.parametrize("group", [3, 5, 6, 7])
def test_packed_sequences_pack_any_group_and_threads_store_the_heads_that_do_not_fill_it(group):
    problem = AttentionProblem.varlen((3, 4), (50, 60), nheads=2 * group, nheads_kv=2, head_dim=80)
    config = config_of(problem)
    assert config.pack_gqa
    variant = variant_of(config, problem, shape_of(problem, pack_gqa=True))
    assert (variant.pack, variant.stored_channels) == (power_of_two(group), 80)
    of_parts = replace(config, num_splits=2)
    assert not variant_of(of_parts, problem, shape_of(problem, pack_gqa=True, num_splits=2)).stored_channels


def test_prompts_over_long_caches_are_not_cut_where_parts_cost_more_than_waves():
    """Chunks of 4 prompts in 28 heads took 545 us in 4 parts and 477 in one, and in e4m3 615 and 417 (H200)."""
    chunks = AttentionProblem.varlen((730,) * 4, (5900,) * 4, nheads=28, nheads_kv=4, head_dim=128, causal=True)
    assert config_of(chunks, num_splits=0).num_splits == 1
    assert config_of(AttentionProblem(1, 32, 8, 1, 65536, 128), num_splits=0).num_splits > 8


@pytest.mark.parametrize("splits", [0, 1, 7])
def test_groups_beyond_64_heads_are_never_packed_whatever_is_asked(splits):
    problem = AttentionProblem(2, 130, 2, 8, 4096, 64)
    packed, plain = (config_of(problem, pack_gqa=pack, num_splits=splits) for pack in (True, False))
    assert packed == plain
    assert not packed.pack_gqa


@pytest.mark.parametrize(
    ("problem", "choices", "rule"),
    [
        (AttentionProblem(1, 1, 1, 8, 8, 60), {}, "head_dim must be a multiple of 8"),
        (DECODE, {"num_splits": -1}, "num_splits must be 0"),
    ],
)
def test_what_no_kernel_does_is_refused(problem, choices, rule):
    with pytest.raises(ValueError, match=rule):
        config_of(problem, **choices)


def small(dtype: str = "fp16", head_dim: int = 128) -> AttentionProblem:
    return AttentionProblem(1, 2, 2, 1000, 1000, head_dim, dtype=dtype)


@pytest.mark.parametrize(
    ("problem", "tile", "expected"),
    [
        (small(), (128, 64), (2, 24, 240, 0)),
        (small(), (192, 64), (3, 24, 160, 0)),
        (small("bf16", 64), (192, 128), (3, 24, 160, 0)),
        (small("e4m3"), (128, 64), (2, 40, 232, 64)),  # promotion cannot span more keys than a tile
        (small("e4m3", 64), (128, 256), (2, 40, 232, 128)),
        (small("e4m3", 64), (192, 128), (3, 32, 160, 128)),
        (small("e4m3", 256), (128, 128), (2, 24, 240, 128)),
    ],
)
def test_a_tile_brings_its_warpgroups_registers_and_promotion(problem, tile, expected):
    config = config_of(problem, tile=tile)
    assert (config.tile_m, config.tile_n) == tile
    got = (config.consumers, *config.registers, config.promotion_interval)
    assert got == expected


@pytest.mark.parametrize(
    ("problem", "tile", "rule"),
    [
        (small(), (64, 128), "tile_m must be 128 or 192 for fp16 at head_dim 128, got 64"),
        (small("e4m3"), (192, 64), "tile_m must be 128 for e4m3 at head_dim 128, got 192"),
        (small(), (128, 96), "tile_n must be a power of two from 32 to 256, got 96"),
        (small(), (192, 128), "got 160 with head_dim 128 and tile_n 128"),  # 64 of O, 64 of S, 32 of P
        (
            small(),
            (128, 256),
            "must fit 232448 bytes of shared memory, 128 x 256 at head_dim 128 and fp16 needs 360960",
        ),
        (small("e4m3"), (128, 256), "at head_dim 128 and e4m3 needs 263680"),
    ],
)
def test_a_tile_no_sm_holds_is_refused(problem, tile, rule):
    with pytest.raises(ValueError, match=rule):
        config_of(problem, tile=tile)


def test_the_kernel_without_warp_specialisation_has_one_tile():
    assert config_of(small(), warp_specialize=False, tile=(128, 128)).tile_n == 128
    with pytest.raises(ValueError, match="takes tiles of 128 x 128, got"):
        config_of(small(), warp_specialize=False, tile=(128, 64))


def test_shared_memory_is_what_the_compiler_allocated():
    """Launches with splits stage no O and are smaller, and so are those whose threads store it."""
    golden = accepted_rows()
    checked = 0
    for launch in shipped():
        figures = golden.get(f"{launch.name}/forward_{'fp8' if launch.problem.dtype == 'e4m3' else 'fp16'}")
        if figures is None or "num_splits" in launch.choices or launch.name.endswith("of_7"):
            continue
        choices = {n: x for n, x in launch.choices.items() if n != "descale_blocks"}
        config = config_of(launch.problem, **choices)
        config = over_cache(launch.problem, config) if launch.problem.cache else config
        parts = launch.name.split("_")
        is_gathered = "pages1" in parts or (config.dtype == "e4m3" and "pages16" in parts)
        rows = 4 * config.tile_n if is_gathered else 0  # whose places a gathering producer holds
        unused = 1024 if config.dtype == "e4m3" and "descale_blocks" not in launch.choices else 0
        overhead = figures["memory"]["smem_bytes"] - (smem_bytes(config) - unused) - rows
        assert 0 < overhead <= SMEM_OVERHEAD_BYTES, launch.name
        checked += 1
    assert checked > 40


@pytest.mark.parametrize("seqlens", [(300, 500), (500, 300), (1, 4), (4, 1), (1, 1), (2, 2)])
def test_a_limit_is_compiled_in_exactly_where_it_hides_a_key(seqlens):
    """The reference's masks say what is hidden; the widths around the last one that hides a key are tried."""
    rows, keys = seqlens
    for width in {max(0, n + d) for n in (keys, rows) for d in (-3, -2, -1, 0)}:
        for side in (0, 1):
            window = ((width, -1), (-1, width))[side]
            problem = AttentionProblem(1, 1, 1, rows, keys, 64, window=window)
            shape = shape_of(problem)
            first, stop = problem.visible_keys(np.arange(rows), rows, keys)
            hides = bool(np.any(first > 0) or np.any(stop < keys))
            assert ((shape.left, shape.right)[side] >= 0) == hides, window


def test_packed_sequences_are_limited_where_the_longest_is():
    short = AttentionProblem.varlen((5, 9), (7, 20), nheads=1, nheads_kv=1, head_dim=64, window=(18, 7))
    assert (shape_of(short).left, shape_of(short).right) == (18, 7)
    enough = AttentionProblem.varlen((5, 9), (7, 20), nheads=1, nheads_kv=1, head_dim=64, window=(19, 8))
    assert (shape_of(enough).left, shape_of(enough).right) == (-1, -1)
