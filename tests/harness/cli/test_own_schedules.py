"""What simulate and tune take where nothing is said: the kernel's own tile and channels; and which sizes."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

import fa3verify
from fa3_kernels.plan.choose import config_of, is_launchable
from fa3_reference.problem import AttentionProblem
from fa3_simulator.cta import operations
from fa3_simulator.forward_choice import schedule_for
from fa3_simulator.forward_launch import launched_tiles, moved_bytes
from fa3_simulator.machine import load
from fa3_simulator.tune import candidates, misfit, tune
from fa3verify.cli.main import main

H200 = load("h200")
SIZES = ("head_dim", "tile_m", "tile_n", "pingpong", "pv_from_registers", "promotion_interval")


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    return result.exit_code, result.stdout, result.stderr


def figures(*arguments: object) -> dict:
    return json.loads(run(*arguments, "--json", "-")[1])


def problem(head_dim: int, seqlen: int = 1024, **fields: object) -> AttentionProblem:
    return AttentionProblem(1, 8, 8, seqlen, seqlen, head_dim, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["fp16", "e4m3"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 160, 176, 192, 256])
def test_our_own_schedule_is_that_of_a_launch_and_fits(head_dim: int, dtype: str, causal: bool) -> None:
    asked = problem(head_dim, dtype=dtype, causal=causal)
    chosen, launched = schedule_for(asked), config_of(asked)
    assert [getattr(chosen, name) for name in SIZES] == [getattr(launched, name) for name in SIZES]
    assert misfit(chosen, H200) is None
    assert is_launchable(asked, chosen)


@pytest.mark.parametrize(
    ("kernel", "tile"), [("gluon", "gluon fp16 d256 128x64"), ("flash3", "flash3 fp16 d256 128x80")]
)
def test_simulate_takes_the_tile_of_the_kernel_at_head_dim_256(kernel: str, tile: str) -> None:
    assert run("simulate", "--head-dim", 256, "--seqlen", 1024, "--kernel", kernel)[1].startswith(f"{tile} on H200")
    assert fa3verify.simulate(problem(256), family=kernel).cycles > 0


@pytest.mark.parametrize(("narrow", "wide"), [(80, 96), (120, 128), (144, 160), (176, 192), (200, 256)])
def test_padded_channels_take_the_cycles_of_those_computed_and_none_of_the_work(narrow: int, wide: int) -> None:
    small, large = problem(narrow), problem(wide)
    a, b = fa3verify.simulate(small), fa3verify.simulate(large)
    assert a.cta_cycles == b.cta_cycles
    ratio = narrow / wide
    assert operations(small, schedule_for(small)) == pytest.approx(ratio * operations(large, schedule_for(large)))
    assert moved_bytes(small, schedule_for(small)) == pytest.approx(ratio * moved_bytes(large, schedule_for(large)))


def test_v_of_another_width_has_the_cycles_of_its_own_channels_and_flash3_refuses_it() -> None:
    asked = AttentionProblem(1, 8, 8, 1024, 1024, 192, 128)
    assert fa3verify.simulate(asked).cta_cycles < 0.9 * fa3verify.simulate(problem(192)).cta_cycles
    with pytest.raises(ValueError, match="FlashAttention-3 is simulated with head_dim_v equal to head_dim, got 128"):
        fa3verify.simulate(asked, family="flash3")
    ranked = tune(AttentionProblem(1, 4, 4, 256, 256, 192, 128), H200)
    assert {(r.config.head_dim, r.config.head_dim_v) for r in ranked} == {(192, 128)}


def test_decoding_with_padded_channels_does_not_load_them() -> None:
    narrow, wide = (AttentionProblem(32, 32, 8, 1, 8192, d) for d in (80, 128))
    a, b = (fa3verify.simulate(x, pack_gqa=True) for x in (narrow, wide))
    assert a.cycles < 0.75 * b.cycles


@pytest.mark.parametrize(
    ("head_dim", "channels"), [(80, (96, 96)), (120, (128, 128)), (160, (160, 192)), (200, (256, 256))]
)
def test_candidates_have_the_channels_that_a_launch_of_their_family_computes(head_dim: int, channels: tuple) -> None:
    found = tuple({c.head_dim for c in candidates(problem(head_dim), family=f)} for f in ("gluon", "flash3"))
    assert found == tuple({c} for c in channels)


@pytest.mark.parametrize("kernel", ["gluon", "flash3"])
def test_g_marks_what_a_launch_takes_and_nothing_else(kernel: str) -> None:
    """At head_dim 192 a launch takes neither 128 x 112 nor 192 x 64, three stages, or P through shared memory."""
    found = figures("tune", "--head-dim", 192, "--seqlen", 512, "--nheads", 4, "--kernel", kernel, "--top", 99)
    marked = {(row["tile"], row["stages"], row["p"]) for row in found["ranked"] if row["gluon"]}
    assert marked == {("128x64", 2, "reg"), ("128x32", 2, "reg"), ("192x32", 2, "reg")}
    peers = [(row["tile"], row["schedule"]) for row in found["ranked"] if row["flash3_choice"]]
    assert peers == ([("128x112", "overlap")] if kernel == "flash3" else peers)


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (("--seqlen", 10**8), "at most 1048576 query rows per sequence"),
        (("--seqlen", 10**11), "at most 2^31 rows of output"),
        (("--backward", "--seqlen", 10**8), "at most 1048576 query rows per sequence"),
        (("--nheads", 32, "--seqlen", 2**20), "launches of at most 262144 row tiles of 64"),
        (("--seqlen-q", 1, "--seqlen", 2**31), "at most 2^31 - 1 keys"),
        (("--seqlen-q", 1, "--nheads", 1, "--batch", 10**6), "launches of at most 262144 row tiles of 64"),
        (("--backward", "--seqlen-q", 1, "--seqlen", 2**24), "launches of at most 262144 key tiles of 64"),
    ],
)
@pytest.mark.parametrize("verb", ["simulate", "tune"])
def test_sizes_beyond_a_launch_are_refused_with_the_rule(verb: str, arguments: tuple, rule: str) -> None:
    code, out, err = run(verb, *arguments)
    assert (code, out) == (2, "")
    assert rule in " ".join(err.split())


def test_the_longest_keys_and_queries_that_a_launch_counts_are_simulated() -> None:
    decoding = AttentionProblem(1, 16, 16, 1, 2**31 - 1, 128)
    assert fa3verify.simulate(decoding).cycles > 1e10
    assert fa3verify.simulate(AttentionProblem(1, 1, 1, 2**20, 2**20, 128, causal=True)).cycles > 1e8
    config = schedule_for(decoding)
    kept = launched_tiles(decoding, config, 132).tiles
    assert (kept[:, 1] + kept[:, 2]).max() == 64 * 132  # blocks, of 16.7 million


def test_turns_of_long_heads_are_refused() -> None:
    code, _, err = run("simulate", "--backward", "--nheads", 1, "--seqlen", 65536, "--turns", "ascending")
    assert code == 2
    assert "turns are simulated for at most 262144 steps of a head, got 524288" in " ".join(err.split())
