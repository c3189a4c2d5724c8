"""What the backward kernel computes on the GPU of rows and turns is what the plan and the twin say.

The functions of the device run as plain Python: integers stand for scalars, and the few operations of Gluon that they
use for those of Python.
"""

from __future__ import annotations

from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given

pytest.importorskip("torch", reason="needs torch (extra 'gpu')")
pytest.importorskip("triton", reason="needs triton: pip install triton==3.6.0")

from fa3_kernels.gluon import backward_geometry
from fa3_kernels.gluon.backward import backward
from fa3_kernels.plan.backward import backward_plan
from fa3_kernels.plan.call import Call
from fa3_kernels.plan.choose import without_lengths
from fa3_kernels.plan.key_tiles import visited_rows, walk_of
from fa3_kernels.plan.tiles import mask_of
from fa3_reference.problem import AttentionProblem
from tests.kernels.plan.test_key_tiles import CTAS, FOLDED, MANY_HEADS, PACKED, SPACED_FOLDED, problems

pytestmark = pytest.mark.optional

GL = SimpleNamespace(
    cdiv=lambda a, b: -(-a // b),
    minimum=min,
    maximum=max,
    where=lambda condition, a, b: a if condition else b,
    constexpr=int,
    static_range=range,
)


def on_the_host(name: str) -> Any:
    """A function of the kernel as one of Python."""
    names = vars(backward_geometry) | {"gl": GL, "RowBlocks": rows_of, "_spacing": backward_geometry._spacing.fn}
    if name != "_gang":
        names["_gang"] = on_the_host("_gang")
    return FunctionType(getattr(backward_geometry, name).fn.__code__, names)


def rows_of(first: int, count: int, start: int, right_unmasked: int, left_unmasked: int) -> SimpleNamespace:
    return SimpleNamespace(**locals())


def program_of(call: Call) -> SimpleNamespace:
    """What the partitions of the kernel see of a call's arguments."""
    named: dict[str, Any] = dict(zip(backward.arg_names, call.arguments, strict=True))
    for name in ("q_desc", "k_desc"):
        named[name] = SimpleNamespace(block_type=SimpleNamespace(shape=named[name].block))
    return SimpleNamespace(variant=named["VARIANT"], **named)


def walked(p: SimpleNamespace, rows: SimpleNamespace) -> list[int]:
    """The row blocks of a tile as every partition of the kernel visits them."""
    advanced, cursor, found = on_the_host("advanced"), rows.start, []
    for _ in range(rows.count):
        found.append(rows.first + cursor)
        cursor = advanced(p, rows, cursor)
    assert not found or rows.first + cursor == found[0], "the next head begins where this one began"
    return found


@given(problems(), CTAS)
@example(MANY_HEADS, 8)
@example(PACKED, 132)
@example(FOLDED, 5)
@example(SPACED_FOLDED, 132)
def test_rows_and_turns_are_those_of_the_plan(problem: AttentionProblem, num_ctas: int) -> None:
    plan = backward_plan(without_lengths(problem), num_ctas, is_deterministic=True)
    tile_m, tile_n = plan.config.tile_m, plan.config.tile_n
    p = program_of(plan.calls(problem.q_shape[0])[1])
    row_blocks, parts_before = on_the_host("row_blocks"), on_the_host("parts_before")
    for seq in problem.sequences():
        mask = mask_of(problem, seq.seqlen_q, seq.seqlen_k)
        walk = walk_of(problem, tile_m, tile_n, num_ctas, seq.seqlen_q, seq.seqlen_k)
        blocks = range(-(-seq.seqlen_k // tile_n))
        visited = {n: visited_rows(mask, seq.seqlen_q, n, tile_m, tile_n) for n in blocks}
        lengths = {"seqlen_q": seq.seqlen_q, "seqlen_k": seq.seqlen_k}
        for n in range(len(blocks) + 1):  # one beyond, as schedules of longer sequences have them
            tile = SimpleNamespace(block=n, first_key=n * tile_n, **lengths)
            want = walk.rows(visited[n], n) if n in visited else []
            assert walked(p, row_blocks(p, tile)) == want
            for row_block in want:
                taken = [m for m in walk.parts(len(blocks), row_block) if row_block in visited[m]]
                assert parts_before(p, tile, row_block) == taken.index(n)


# One key of the tile is hidden from one row of the block: the first, and the last.
@given(problems())
@example(AttentionProblem(1, 1, 1, 300, 362, 128, causal=True))
@example(AttentionProblem(1, 1, 1, 300, 300, 128, window=(62, -1)))
def test_masks_are_left_out_only_where_every_pair_is_visible(problem: AttentionProblem) -> None:
    plan = backward_plan(without_lengths(problem), 132)
    tile_m, tile_n = plan.config.tile_m, plan.config.tile_n
    p = program_of(plan.calls(problem.q_shape[0])[1])
    row_blocks = on_the_host("row_blocks")
    for seq in problem.sequences():
        mask = mask_of(problem, seq.seqlen_q, seq.seqlen_k)
        for n in range(-(-seq.seqlen_k // tile_n)):
            tile = SimpleNamespace(block=n, first_key=n * tile_n, seqlen_q=seq.seqlen_q, seqlen_k=seq.seqlen_k)
            rows = row_blocks(p, tile)
            for block in walked(p, rows):
                first_row = block * tile_m
                is_masked = first_row < rows.right_unmasked or first_row + tile_m > rows.left_unmasked
                of_tile = range(first_row, first_row + tile_m), range(n * tile_n, (n + 1) * tile_n)
                is_whole = all(
                    key < seq.seqlen_k
                    and (mask.right < 0 or key <= row + mask.offset + mask.right)
                    and (mask.left < 0 or key >= row + mask.offset - mask.left)
                    for row in (of_tile[0][0], of_tile[0][-1])
                    for key in (of_tile[1][0], of_tile[1][-1])
                )
                assert p.variant.is_masked or is_whole
                assert is_masked or is_whole
