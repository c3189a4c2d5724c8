"""The campaign of caches as far as it goes without a GPU: its cases, what attention meets, planted faults."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("triton")

from fa3_reference.cache import gathered, serve
from fa3_reports.audit.launched import kind_of
from fa3_reports.audit.probes import probes
from fa3_reports.bits.paged import FAULTS, control_case, key, twin_bits, with_fault
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
    shipped = {(x.problem.dtype, x.problem.head_dim, x.problem.head_dim_v) for x in probes() if kind_of(x) == "paged"}
    assert shipped <= asked.keys()


def test_the_twin_computes_calls_of_every_kind() -> None:
    for dtype in ("fp16", "e4m3"):
        of_dtype = [c for c in cases() if c.problem.dtype == dtype and c.problem.seqlen_q == 4]
        for has_sinks in (True, False):
            case = next(c for c in of_dtype if c.problem.sinks == has_sinks)
            out, lse = twin_bits(case, operands(case))
            assert (out.shape, lse.shape) == (case.problem.out_shape, case.problem.lse_shape)


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
