"""What the simulated backward counts of our kernel is in the code that the compiler makes of it."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from fa3_kernels.audit.sass import Instruction, parse
from fa3_reference.problem import AttentionProblem
from fa3_reports.audit.calls import ShippedLaunch, calls_of
from fa3_reports.audit.compile import compile_call
from fa3_simulator.backward_consumer import OTHERS, OTHERS_SPLIT

pytestmark = pytest.mark.optional

# Vector work, products, and the barriers and waits that stand in the program by themselves.
CLASSES = ("FFMA", "FADD", "FMUL", "MUFU", "F2FP", "STSM", "STS", "HGMMA", "BAR", "MEMBAR", "SYNCS")


def row_blocks(sass: str) -> list[list[Instruction]]:
    """The innermost loops with products: a row block of either consumer warpgroup."""
    code, labels = parse(sass)
    loops = set()
    for end, instruction in enumerate(code):
        for label in re.findall(r"\.L_x_\d+", instruction.operands if instruction.opcode.startswith("BRA") else ""):
            if labels.get(label, end + 1) <= end:
                loops.add((labels[label], end))
    found = [code[a : b + 1] for a, b in sorted(loops) if not any(a <= c and d < b for c, d in loops - {(a, b)})]
    return [loop for loop in found if sum(x.opcode.startswith("HGMMA") for x in loop) > 20]


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_other_instructions_of_a_row_block_are_those_of_the_compiled_loops(head_dim: int) -> None:
    problem = AttentionProblem(1, 4, 4, 1024, 1024, head_dim)
    (call,) = (x for x in calls_of(ShippedLaunch("row block", problem, {}, "backward")) if x.kernel == "backward")
    loops = row_blocks(compile_call(call).sass)
    assert len(loops) == 2
    others = [
        sum(not x.opcode.startswith(CLASSES) and x.opcode != "WARPGROUP.DEPBAR.LE" for x in loop) for loop in loops
    ]
    counted = sum(n for n, _ in (OTHERS | OTHERS_SPLIT)[head_dim])
    assert counted == pytest.approx(sum(others) / 2, rel=0.02)
