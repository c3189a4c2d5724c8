"""Read the disassembly of a kernel: loops with tensor work, and uniform registers that are read before they are set.

The audit of the reports asks for both. The second one is a bug of the compiler: ptxas 12.8 can merge equal address
computations of two loops although the first loop, which sets the register, may be skipped; wgmma then reads from a
wrong address. Such a register is not assigned on every path from the entry, which a forward data-flow analysis over the
instructions finds. No GPU and no Triton is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(@!?U?P\w+)?\s*([A-Z][\w.]*)\s*(.*?);")
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
# The opcodes that are counted in a loop, by how they begin.
_LOOP = (
    "HGMMA",
    "QGMMA",
    "MUFU.EX2",
    "FFMA",
    "FMUL",
    "FADD",
    "FMNMX",
    "BAR",
    "LDSM",
    "STSM",
    "PRMT",
    "R2UR",
    "LDL",
    "STL",
)


class Instruction(NamedTuple):
    """One line of a disassembly; ``guard`` is its predicate or empty."""

    guard: str
    opcode: str
    operands: str


def parse(sass: str) -> tuple[list[Instruction], dict[str, int]]:
    """Return the instructions of a kernel and the index of every label."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _INSTRUCTION.match(line):
            code.append(Instruction(found[1] or "", found[2], found[3]))
    return code, labels


def counts(opcodes: Iterable[str], prefixes: Iterable[str]) -> dict[str, int]:
    """Return how many opcodes begin with each prefix."""
    known = list(opcodes)
    return {prefix: sum(opcode.startswith(prefix) for opcode in known) for prefix in prefixes}


def tensor_loops(sass: str) -> list[dict[str, int]]:
    """Count the instructions of every innermost loop that has tensor and special-function work, in the code's order.

    A loop is the code between a label and a branch back to it. Each result has the instructions of one iteration in
    all, and by opcode. The first loops are the steps over key blocks.
    """
    code, labels = parse(sass)
    opcodes = [instruction.opcode for instruction in code]
    spans = {
        (labels[name], i + 1)
        for i, (_, opcode, operands) in enumerate(code)
        if opcode.startswith("BRA")
        for name in re.findall(r"\.L_x_\d+", operands)
        if labels.get(name, i + 1) <= i
    }
    work = (("HGMMA", "QGMMA"), "MUFU.EX2")
    heavy = sorted(s for s in spans if all(any(x.startswith(w) for x in opcodes[slice(*s)]) for w in work))
    inner = [s for s in heavy if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in heavy)]
    return [{"instructions": b - a, **counts(opcodes[a:b], _LOOP)} for a, b in inner]


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
