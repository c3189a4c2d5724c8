"""Find uniform registers that the code of a kernel reads before they are set, a bug of the compiler.

ptxas 12.8 can merge equal address computations of two loops although the first loop, which sets the register, may be
skipped; wgmma then reads from a wrong address. Such a register is not assigned on every path from the entry, which a
forward data-flow analysis over the instructions finds.
"""

from __future__ import annotations

import re

from fa3_kernels.audit.sass import Instruction, parse

_NO_RESULT = (  # opcodes that set no register: their first operand is read
    "ST",
    "BAR",
    "BRA",
    "EXIT",
    "UTMA",
    "SYNCS",
    "RED.",  # to memory; REDUX has a result
    "BRX",
    "ERR",
    "FENCE",
    "MEMBAR",
    "WARPSYNC",
    "USETMAX",
)


def _successors(code: list[Instruction], labels: dict[str, int], i: int) -> list[int]:
    """Return the indices of the instructions that may follow instruction ``i``."""
    guard, opcode, operands = code[i]
    targets = [labels[name] for name in re.findall(r"\.L_x_\d+", operands) if name in labels]
    if opcode.startswith("BRX"):
        return targets
    if opcode.startswith("BRA"):
        is_conditional = bool(guard) or operands.strip().startswith(("P", "!P", "UP"))
        return targets + ([i + 1] if is_conditional else [])
    return [] if opcode.startswith("EXIT") and not guard else [i + 1]


def _sets_and_reads(instruction: Instruction) -> tuple[set[int], set[int]]:
    """Return the uniform registers that an instruction sets, and those that it reads.

    A guarded instruction counts as setting its result.
    """
    _, opcode, operands = instruction
    result, _, rest = operands.partition(",")
    sets: set[int] = set()
    if (target := re.fullmatch(r"UR(\d+)", result.strip())) and not opcode.startswith(_NO_RESULT):
        width = 4 if ".128" in opcode else 2 if ".64" in opcode or "WIDE" in opcode else 1
        sets = set(range(int(target[1]), int(target[1]) + width))
    else:
        rest = operands
    reads = {int(n) for n in re.findall(r"\bUR(\d+)", rest)}
    for n in map(int, re.findall(r"[^g]desc\[UR(\d+)\]", rest)):
        reads.add(n + 1)
    for n in map(int, re.findall(r"gdesc\[UR(\d+)\]", rest)):  # four registers: descriptors of A and of B
        a_in_registers = re.match(r"\s*R\d+,\s*R\d+", operands) is not None
        reads -= {n}
        reads |= set(range(n + 2 * a_in_registers, n + 4))
    return sets, reads


def undefined_uniform_registers(sass: str) -> list[str]:
    """Return the instructions that may read a uniform register that is not set on some path from the entry.

    Each is returned as text, with the registers. A forward data-flow analysis finds, for every instruction, the
    registers that are set on all paths to it; instructions that no path reaches are left out.

    >>> branch = "/*0000*/ @P0 BRA `(.L_x_1) ;\\n/*0010*/ UMOV UR4, URZ ;\\n"
    >>> undefined_uniform_registers(branch + ".L_x_1:\\n/*0020*/ UMOV UR5, UR4 ;")
    ['UMOV UR5, UR4: UR4']
    >>> undefined_uniform_registers("/*0000*/ REDUX.SUM.S32 UR4, R1 ;\\n/*0010*/ UMOV UR5, UR4 ;")
    []
    """
    code, labels = parse(sass)
    flow = [_sets_and_reads(instruction) for instruction in code]
    assigned: list[frozenset[int] | None] = [None] * len(code)
    work = [0] if code else []
    if code:
        assigned[0] = frozenset()
    while work:
        i = work.pop()
        after = (assigned[i] or frozenset()) | flow[i][0]
        for j in _successors(code, labels, i):
            if j >= len(code):
                continue
            before = assigned[j]
            merged = after if before is None else before & after
            if merged != before:
                assigned[j] = merged
                work.append(j)
    lines = []
    for instruction, (_, reads), before in zip(code, flow, assigned, strict=True):
        if before is not None and (missing := sorted(reads - before)):
            names = ", ".join(f"UR{n}" for n in missing)
            lines.append(f"{instruction.opcode} {instruction.operands.strip()}: {names}")
    return lines
