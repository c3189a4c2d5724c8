"""The campaign of caches as far as it goes without a GPU: its cases, what attention meets, planted faults."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("triton")

from fa3_kernels.audit.probes import probes
from fa3_reference.cache import gathered, rotated, serve
from fa3_reports.bits.paged import FAULTS, attended, control_case, key, plain, twin_bits, with_fault
from fa3_reports.bits.paged_cases import SIZES, cases, operands

pytestmark = pytest.mark.optional


def test_cases_meet_every_kind_of_cache_at_every_size() -> None:
    assert len({tuple(map(str, key(case))) for case in cases()}) == len(cases())
    for dtype in ("fp16", "e4m3"):
        for size in SIZES:
            of_size = [
                c for c in cases() if (c.problem.dtype, c.problem.head_dim, c.problem.head_dim_v) == (dtype, *size)
            ]
            caches = [c.problem.cache for c in of_size]
            assert {cache.page_size for cache in caches if cache} == {0, 8, 16, 32, 64, 128, 256}
            assert {c.problem.sinks for c in of_size} == {c.choices["pack_gqa"] for c in of_size} == {True, False}
            assert {c.choices["num_splits"] for c in of_size} == {1, 3, 7}
            assert any(cache.new for cache in caches if cache)
            assert any(cache.leftpad for cache in caches if cache)
            assert dtype == "e4m3" or {cache.interleaved for cache in caches if cache and cache.rotary_dim} == {
                True,
                False,
            }


def test_every_launch_that_ships_is_of_a_kind_that_is_asked() -> None:
    asked = Counter((c.problem.dtype, c.problem.head_dim, c.problem.head_dim_v) for c in cases())
    shipped = {(x.problem.dtype, x.problem.head_dim, x.problem.head_dim_v) for x in probes() if x.evidence == "paged"}
    assert shipped <= asked.keys()


@pytest.mark.parametrize("case", [c for c in cases() if c.problem.is_rotated][:6], ids=lambda c: c.feature)
def test_what_attention_meets_is_the_truths_rotation_rounded_once(case) -> None:
    given = operands(case)
    found = attended(case.problem, given)
    sizes = rotated(case.problem, given.q, given.k, of_sizes=True)
    for got, want, size in zip((found.q, found.k), rotated(case.problem, given.q, given.k), sizes, strict=True):
        got = got.astype(np.float64)
        told = np.isfinite(got) & np.isfinite(want)
        assert told.mean() > 0.5
        off = np.abs(got[told] - want[told])
        assert (off <= 2.0**-11 * np.abs(want[told]) + 2.0**-22 * np.abs(size[told]) + 2.0**-25).all()


def test_the_twin_computes_calls_of_both_widths() -> None:
    for dtype in ("fp16", "e4m3"):
        case = next(c for c in cases() if c.problem.dtype == dtype and not c.problem.sinks and c.problem.seqlen_q == 4)
        out, lse = twin_bits(case, operands(case))
        assert (out.shape, lse.shape) == (plain(case.problem).out_shape, plain(case.problem).lse_shape)


@pytest.mark.parametrize("fault", FAULTS[1:])
def test_a_planted_fault_is_another_call(fault: str) -> None:
    case = control_case("fp16")
    call = serve(case.problem, operands(case))
    wrong = with_fault(call, fault)
    changed = {name for name in call if not np.array_equal(call[name], wrong[name])}
    assert len(changed) == 1
    if changed == {"page_table"}:
        keys = [gathered(replace(case.problem, sinks=False), x)[0] for x in (call, wrong)]
        assert not np.array_equal(*keys)
