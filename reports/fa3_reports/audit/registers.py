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

_MOVES = ("UMOV", "MOV", "R2UR")


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


def _named(name: str, first: int, stop: int) -> set[str]:
    return {f"{name}{n}" for n in range(first, stop)}


def _sets_and_reads(instruction: Instruction) -> tuple[set[str], set[str]]:
    """Return the registers that an instruction sets, and those that it reads.

    A guarded instruction counts as setting its result. The vector registers that a wgmma reads count as 128 from each
    that it names.
    """
    _, opcode, operands = instruction
    result, _, rest = operands.partition(",")
    width = 4 if ".128" in opcode else 2 if ".64" in opcode or "WIDE" in opcode else 1
    sets: set[str] = set()
    if (target := re.fullmatch(r"(U?R)(\d+)", result.strip())) and not opcode.startswith(_NO_RESULT):
        sets = _named(target[1], int(target[2]), int(target[2]) + width)
    else:
        rest = operands
    reads: set[str] = set()
    for name, n, ending in re.findall(r"\b(U?R)(\d+)(\.64)?", rest):
        is_pair = ending or opcode.startswith("UTMA")  # addresses: both halves are read
        of_vectors = 128 if "GMMA" in opcode else width
        many = 2 if is_pair else of_vectors if name == "R" else 1
        reads |= _named(name, int(n), int(n) + many)
    reads |= {f"UR{int(n) + 1}" for n in re.findall(r"[^g]desc\[UR(\d+)\]", rest)}
    for n in map(int, re.findall(r"gdesc\[UR(\d+)\]", rest)):  # four registers: descriptors of A and of B
        a_in_registers = re.match(r"\s*R\d+,\s*R\d+", operands) is not None
        reads -= {f"UR{n}"}
        reads |= _named("UR", n + 2 * a_in_registers, n + 4)
    return sets, reads


def undefined_uniform_registers(sass: str) -> list[str]:
    """Return the instructions that may read a uniform register that is not set on some path from the entry.

    Each is returned as text, with the registers. A forward data-flow analysis finds, for every instruction, the
    registers that some path to it leaves undefined; instructions that no path reaches are left out. A plain move reads
    nothing and makes its result as undefined: ptxas moves both halves of an address of which it sets one later.

    >>> branch = "/*0000*/ @P0 BRA `(.L_x_1) ;\\n/*0010*/ UMOV UR4, URZ ;\\n.L_x_1:\\n/*0020*/ MOV R5, UR4 ;\\n"
    >>> undefined_uniform_registers(branch + "/*0030*/ IADD3 R6, R5, 0x1, RZ ;")
    ['IADD3 R6, R5, 0x1, RZ: R5']
    >>> undefined_uniform_registers(branch + "/*0030*/ MOV R5, RZ ;\\n/*0040*/ IADD3 R6, R5, 0x1, RZ ;")
    []
    """
    code, labels = parse(sass)
    flow = [_sets_and_reads(instruction) for instruction in code]
    undefined: dict[int, set[str]] = {0: _named("UR", 0, 63)} if code else {}
    work = list(undefined)
    while work:
        i = work.pop()
        sets, reads = flow[i]
        is_undefined = code[i].opcode in _MOVES and reads & undefined[i]
        after = undefined[i] | sets if is_undefined else undefined[i] - sets
        for j in _successors(code, labels, i):
            if j < len(code) and not (j in undefined and after <= undefined[j]):
                undefined[j] = undefined.get(j, set()) | after
                work.append(j)
    found = ((x, reads & undefined.get(i, set())) for i, (x, (_, reads)) in enumerate(zip(code, flow, strict=True)))
    return [
        f"{x.opcode} {x.operands.strip()}: {', '.join(sorted(missing))}"
        for x, missing in found
        if missing and x.opcode not in _MOVES
    ]
