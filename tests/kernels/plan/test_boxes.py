"""Boxes of channels: what TMA copies, what is staged and where, and what V of its own width is compiled for."""

from __future__ import annotations

import pytest

from fa3_kernels.plan.backward import BackwardVariant, backward_plan
from fa3_kernels.plan.call import View, slices_of
from fa3_kernels.plan.choose import config_of
from fa3_kernels.plan.config import WARPGROUP_ROWS
from fa3_kernels.plan.plan import Plan, plan_of
from fa3_kernels.plan.request import Choices, Request
from fa3_kernels.plan.variant import buffers
from fa3_reference.problem import AttentionProblem

SIZES = [
    *((d, d) for d in (64, 96, 128, 160, 192, 256)),
    *((128, 64), (160, 96), (192, 128), (192, 160), (256, 160), (256, 192)),
]
each_size = pytest.mark.parametrize(("head_dim", "head_dim_v"), SIZES)
each_dtype = pytest.mark.parametrize("dtype", ["fp16", "e4m3"])


def plan(head_dim: int, head_dim_v: int, dtype: str) -> Plan:
    problem = AttentionProblem(1, 1, 1, 256, 256, head_dim, head_dim_v, dtype=dtype)  # type: ignore[arg-type]
    return plan_of(Request(problem, Choices(), (None, None, None), (0, 0, 0)), 132)


def views(of: Plan) -> dict[str, View]:
    return {x.name: x for x in of.kernels[0].arguments if isinstance(x, View)}


@each_dtype
@each_size
def test_boxes_are_as_wide_together_as_the_tile(head_dim: int, head_dim_v: int, dtype: str) -> None:
    of = plan(head_dim, head_dim_v, dtype)
    found = {name: view.channels for name, view in views(of).items()}
    qk_boxes, v_boxes = of.variant.qk_boxes, of.variant.v_boxes
    assert found["q"] * qk_boxes - of.variant.qk_spare == found["k"] * qk_boxes - of.variant.qk_spare == head_dim
    assert found["v"] * v_boxes - of.variant.v_spare == head_dim_v
    assert of.variant.qk_spare < found["q"]
    assert of.variant.v_spare < found["v"]


@each_dtype
@each_size
def test_a_row_of_a_box_has_64_bytes_at_least(head_dim: int, head_dim_v: int, dtype: str) -> None:
    """Rows of 32 bytes make a step of e4m3 slower than one of more channels (reports/notes/boxes.md)."""
    size = 2 if dtype == "fp16" else 1
    rows = {name: view.channels * size for name, view in views(plan(head_dim, head_dim_v, dtype)).items()}
    assert min(rows[name] for name in "qkv") >= 64


@pytest.mark.parametrize(
    ("channels", "box", "slices"),
    [(64, 64, 1), (96, 32, 1), (96, 64, 1), (128, 128, 2), (160, 32, 1), (160, 64, 1), (160, 64, 3), (192, 64, 3)],
)
def test_slices_are_powers_of_two_that_cover_all_channels_in_order(channels: int, box: int, slices: int) -> None:
    found = slices_of(channels, box, slices)
    assert [first for first, _ in found] == [sum(n for _, n in found[:i]) for i in range(len(found))]
    assert sum(count for _, count in found) == channels
    assert all(count & (count - 1) == 0 and (first % box == 0 or box == channels) for first, count in found)


@each_dtype
@each_size
def test_what_a_warpgroup_stages_of_o_fits_its_buffer(head_dim: int, head_dim_v: int, dtype: str) -> None:
    """16 bits store all channels at once and e4m3 128 at a time, as its buffer holds two boxes."""
    of = plan(head_dim, head_dim_v, dtype)
    at_once = of.variant.staged_boxes * views(of)["out"].channels
    assert at_once == (head_dim_v if dtype == "fp16" else min(head_dim_v + of.variant.v_spare, 128))
    _, size = buffers(of.config)["q" if of.config.output_in_query_slot else "out"]
    assert WARPGROUP_ROWS * at_once * 2 <= size


@each_dtype
@pytest.mark.parametrize("head_dim", [96, 160, 192])
def test_a_row_of_a_box_of_several_is_within_the_swizzle(head_dim: int, dtype: str) -> None:
    """Boxes one behind the other are one larger tile only where a row of a box has at most 128 bytes."""
    size = 2 if dtype == "fp16" else 1
    assert all(
        view.channels * size <= 128 for name, view in views(plan(head_dim, head_dim, dtype)).items() if name != "out"
    )


@each_dtype
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "compiled"),
    [(80, 72, (96, 96)), (192, 128, (192, 128)), (64, 192, (192, 192)), (200, 48, (256, 64)), (136, 136, (160, 160))],
)
def test_v_is_compiled_by_its_own_width_and_never_wider_than_q(
    head_dim: int, head_dim_v: int, compiled: tuple[int, int], dtype: str
) -> None:
    head_dim, head_dim_v = (-(-x // 16) * 16 for x in (head_dim, head_dim_v))
    config = config_of(AttentionProblem(1, 1, 1, 256, 256, head_dim, head_dim_v, dtype=dtype))  # type: ignore[arg-type]
    assert (config.head_dim, config.head_dim_v) == compiled


def test_queries_are_held_where_registers_hold_o_s_and_p_too() -> None:
    held = {size: plan(*size, "fp16").config.holds_queries for size in SIZES}
    assert [size for size, is_held in held.items() if is_held] == [(96, 96), (192, 192), (192, 160)]
    assert not plan(96, 96, "e4m3").config.holds_queries


@pytest.mark.parametrize("head_dim", [64, 96, 128, 160, 192, 256])
def test_both_warpgroups_of_a_backward_stage_boxes_of_dq_of_their_own(head_dim: int) -> None:
    of = backward_plan(AttentionProblem(1, 1, 1, 256, 256, head_dim), 132)
    (variant,) = (x for call in of.kernels for x in call.arguments if isinstance(x, BackwardVariant))
    assert variant.dq_boxes >= 2
    assert variant.dq_boxes % variant.qk_boxes == 0
