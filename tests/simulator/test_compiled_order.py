"""Waits and barriers stand, among the exponentials, where ptxas put them: read off the SASS, no GPU needed."""

from __future__ import annotations

import re
from functools import cache

import pytest

from fa3_kernels.plan.config import Config
from fa3_reports.audit.launches import launches as shipped
from fa3_simulator.schedules import LATE_TURN, early_exponentials, late_rescaling

pytest.importorskip("triton", reason="triton compiles the kernels")
pytestmark = pytest.mark.optional  # or CI, whose environment with triton runs these alone, would never run it
EXPONENTIALS = 66
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)(.*)$")


@cache
def first_loop(name: str) -> list[tuple[str, str]]:
    """Opcodes and operands of one step: from the branch's target to the branch, in the first loop of ex2 and wgmma."""
    from fa3_reports.audit.calls import calls_of
    from fa3_reports.audit.compile import compile_call

    (call,) = calls_of(next(x for x in shipped() if x.name == name))
    labels: dict[str, int] = {}
    found: list[tuple[str, str]] = []
    for line in compile_call(call).sass.splitlines():
        if label := re.match(r"^(\.L_\w+):", line):
            labels[label[1]] = len(found)
        elif instruction := INSTRUCTION.match(line):
            found.append((instruction[1], instruction[2]))
            target = re.search(r"`\((\.L_\w+)\)", instruction[2]) if instruction[1].startswith("BRA") else None
            if target and target[1] in labels:
                loop = found[labels[target[1]] :]
                if exponentials(loop) == EXPONENTIALS and any("GMMA" in opcode for opcode, _ in loop):
                    return loop
    raise AssertionError(f"{name} has no loop with {EXPONENTIALS} exponentials")


def exponentials(loop: list[tuple[str, str]]) -> int:
    return sum(opcode == "MUFU.EX2" for opcode, _ in loop)


def in_front_of(loop: list[tuple[str, str]], opcode: str, operands: str) -> float:
    """Share of the exponentials in front of the last such instruction."""
    last = max(i for i, (name, text) in enumerate(loop) if name.startswith(opcode) and operands in text)
    return exponentials(loop[:last]) / EXPONENTIALS


def test_the_wait_for_p_v_stands_among_the_exponentials() -> None:
    share = early_exponentials(Config())
    assert share > 0
    assert in_front_of(first_loop("fp16_d128_dense"), "WARPGROUP.DEPBAR", "gsb0, 0x0") == pytest.approx(share, abs=0.04)


def test_with_queries_in_registers_it_stands_in_front_of_them() -> None:
    assert early_exponentials(Config("e4m3", 64)) == 0
    assert in_front_of(first_loop("e4m3_d64_dense_chained"), "WARPGROUP.DEPBAR", "gsb0, 0x0") == 0


def test_a_branch_keeps_the_wait_in_front_of_them() -> None:
    assert in_front_of(first_loop("fp16_d64_dense"), "WARPGROUP.DEPBAR", "gsb0, 0x0") == 0


def test_without_overlap_the_turn_is_handed_on_among_them() -> None:
    assert in_front_of(first_loop("fp16_d128_no_overlap"), "BAR.ARV", ", 0x100") == pytest.approx(LATE_TURN, abs=0.04)


def test_a_held_turn_is_handed_on_between_the_maxima_and_the_exponentials() -> None:
    assert Config("e4m3", promotion_interval=128).holds_turn
    loop = first_loop("e4m3_d128_dense")
    (passed,) = (i for i, (opcode, text) in enumerate(loop) if opcode == "BAR.ARV" and ", 0x100" in text)
    assert exponentials(loop[:passed]) == 0
    assert not any(opcode.startswith("VIMNMX3") for opcode, _ in loop[passed:])


def multiplications_behind(loop: list[tuple[str, str]]) -> int:
    """Multiplications behind the last exponential."""
    last = max(i for i, (opcode, _) in enumerate(loop) if opcode == "MUFU.EX2")
    return sum(opcode == "FMUL" for opcode, _ in loop[last:])


def test_o_is_rescaled_behind_the_exponentials_where_ptxas_put_it() -> None:
    """Of fp16 at head_dim 128 one copy of the code has half of it there and the other one all."""
    for name, config in (
        ("fp16_d64_dense", Config(head_dim=64)),
        ("e4m3_d64_dense_chained", Config("e4m3", 64)),
        ("e4m3_d128_dense_chained", Config("e4m3")),
    ):
        share = multiplications_behind(first_loop(name)) / (config.head_dim // 2)
        assert share == pytest.approx(late_rescaling(config), abs=0.04), name
    assert multiplications_behind(first_loop("fp16_d128_dense")) / 64 == 0.5
    assert late_rescaling(Config()) == 0.75


def test_promoted_p_v_is_added_in_front_of_the_exponentials() -> None:
    loop = first_loop("e4m3_d128_dense")
    second = [i for i, (opcode, _) in enumerate(loop) if opcode == "MUFU.EX2"][1]
    in_front = [opcode for opcode, _ in loop[:second]]
    assert in_front.count("FFMA") >= 48
    assert multiplications_behind(loop) == 0
