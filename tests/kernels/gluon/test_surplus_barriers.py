"""Barriers that a kernel marks as surplus are taken out of its PTX, exactly those, or it is not compiled."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("torch", reason="needs torch (extra 'gpu')")
pytest.importorskip("triton.experimental.gluon", reason="needs triton: pip install triton==3.6.0")

from triton import knobs

from fa3_kernels.gluon import surplus_barriers
from fa3_reference.problem import AttentionProblem
from fa3_reports.audit.calls import ShippedLaunch, calls_of
from fa3_reports.audit.compile import compile_call

pytestmark = pytest.mark.optional

MARKER = f"// surplus barriers {surplus_barriers.VERSION}:"
OURS = "bar.sync 14, 256; mov.u32 %r1, 0;\n"
TRITONS = "\tbar.sync \t2, 128;\n"


def marked(number: int, body: str) -> str:
    return f"{TRITONS}mov.u32 %r0, 0; {MARKER} {number}\n{body}mov.u32 %r2, 0; {MARKER} end\n{TRITONS}"


def test_barriers_between_markers_go_and_all_others_stay() -> None:
    assert surplus_barriers.without_surplus(marked(2, TRITONS + OURS + TRITONS) * 2) == (TRITONS + OURS + TRITONS) * 2
    assert surplus_barriers.without_surplus(TRITONS + OURS) == TRITONS + OURS


@pytest.mark.parametrize("number", [0, 1, 3])
def test_another_number_of_barriers_than_marked_is_refused(number: int) -> None:
    with pytest.raises(RuntimeError, match=f"{number} surplus barriers are marked, 2 stand there"):
        surplus_barriers.without_surplus(marked(number, TRITONS + OURS + TRITONS))


def test_a_kernel_that_was_compiled_with_its_markers_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Triton's cache holds a kernel with surplus barriers"):
        surplus_barriers.check(marked(0, ""))


def test_triton_is_left_as_it_was() -> None:
    before = knobs.runtime.add_stages_inspection_hook
    with surplus_barriers.left_out():
        assert knobs.runtime.add_stages_inspection_hook is not before
    assert knobs.runtime.add_stages_inspection_hook is before


KINDS = [
    (64, {}, {}),
    (128, {"causal": True}, {}),
    *(
        pytest.param(head_dim, semantics, choices, marks=pytest.mark.nightly)
        for head_dim in (64, 128)
        for semantics in ({"window": (100, -1)}, {"window": (100, 0)}, {"softcap": 20.0})
        for choices in ({}, {"is_deterministic": True})
    ),
]


@pytest.mark.parametrize(("head_dim", "semantics", "choices"), KINDS)
def test_ds_is_fenced_in_front_of_the_exchange_and_behind_it_come_products(head_dim, semantics, choices) -> None:
    """Whatever is masked: what was stored, the fence, the barrier of both warpgroups, then wgmma."""
    launch = ShippedLaunch("x", AttentionProblem(2, 4, 2, 1000, 1000, head_dim, **semantics), choices, "backward")
    ptx = compile_call(next(x for x in calls_of(launch) if x.kernel == "backward")).ptx
    known = r"stmatrix|fence\.proxy\.async|bar\.(?:sync|arrive)\s+[^;]+|wgmma\.(?:fence|mma_async|commit_group)"
    order = " ".join("".join(x.split()) for x in re.findall(known, ptx))
    stores = 64 * (8192 // head_dim) // (128 * 8)  # of a thread, 8 elements each: 64 keys by 128 or 64 rows
    step = "wgmma.commit_group " + stores * "stmatrix " + "fence.proxy.async bar.sync14,256 wgmma.fence wgmma.mma_async"
    assert order.count(step) == 2, "one per consumer warpgroup"
