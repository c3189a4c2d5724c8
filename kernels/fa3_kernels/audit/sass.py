"""Read the disassembly of a kernel: instructions, and loops with tensor work. Neither GPU nor Triton is needed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(@!?U?P\w+)?\s*([A-Z][\w.]*)\s*(.*?);")
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
