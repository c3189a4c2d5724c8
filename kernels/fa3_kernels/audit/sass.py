"""Read the disassembly of a kernel: instructions, and loops with tensor work. Neither GPU nor Triton is needed.

Loops are those of the flow of control, not spans between a label and a branch back to it, as compilers put what seldom
runs behind the rest of a kernel.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from importlib.util import find_spec
from operator import and_
from typing import NamedTuple

from fa3_reference.rules import require

_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(@!?U?P\w+)?\s*([A-Z][\w.]*)\s*(.*?);")
_BYTES = 16  # of an instruction
_SHAPE = re.compile(r"[HQIB]G?MMA(?:\.SP)?\.(\w+)")  # HGMMA.64x176x16.F32.BF16, HMMA.16816.F32
# What an instruction is, by how its opcode begins: the pipes of vector work, by their names in the simulator's Work;
# then what the simulator has an operation for; then memory. Any other is "other".
CLASSES = {
    "fma": ("FFMA", "FADD", "FMUL", "HFMA2", "HADD2", "HMUL2"),
    "mufu": ("MUFU",),
    "convert": ("F2F", "F2I", "I2F"),
    "shuffle": ("SHFL",),
    "alu": (
        *("FMNMX", "HMNMX", "FSEL", "FSET", "SEL", "LOP3", "IADD3", "VIADD", "ISETP", "PRMT", "SHF", "LEA", "IABS"),
        *("IMNMX", "VIMNMX"),
    ),
    "arrive": ("SYNCS.ARRIVE", "LDGDEPBAR"),  # at an mbarrier, or the end of a group of cp.async
    "wait": ("SYNCS", "DEPBAR"),
    "bar": ("BAR",),
    "tma load": ("UTMALDG", "UBLKCP"),
    "tma store": ("UTMASTG", "UTMARED"),
    "fence": ("WARPGROUP", "FENCE", "MEMBAR", "UTMACMDFLUSH"),
    "cp.async": ("LDGSTS",),
    "shared": ("LDS", "STS"),
    "global": ("LDG", "STG", "LD.", "ST.", "RED."),
    "spill": ("LDL", "STL"),
}


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


def class_of(opcode: str) -> str:
    """Return what an instruction is: a word of :data:`CLASSES`, "other", or the shape of a product, as 64x176x16."""
    shape = _SHAPE.match(opcode)
    return shape[1] if shape else next((name for name, begins in CLASSES.items() if opcode.startswith(begins)), "other")


def _smem_bytes(code: Iterable[Instruction]) -> int:
    """Return the bytes of shared memory that one warp touches: by matrices of 8 x 8, or by bits of each thread."""
    shared = (re.search(r"\.([248]|64|128)$|$", x.opcode) for x in code if class_of(x.opcode) == "shared")
    return sum({"2": 256, "4": 512, "64": 256, "128": 512}.get(width[1], 128) for width in shared if width)


def _loops(code: Sequence[Instruction], labels: Mapping[str, int]) -> tuple[dict[int, set[int]], list[int]]:
    """Return every natural loop, as all that leads back to its head, by its head; and the dominators of instructions.

    These are what every path to an instruction goes through, as bits.
    """
    before: list[list[int]] = [[] for _ in (*code, "the end")]
    for i, (guard, opcode, operands) in enumerate(code):
        # as nvdisasm and as cuobjdump write it
        target = re.search(r"(\.L_x_\d+)|0x([0-9a-f]+)\s*$", operands) if opcode.startswith(("BRA", "BSSY")) else None
        if target:
            before[labels[target[1]] if target[1] else int(target[2], 16) // _BYTES].append(i)
        ends = opcode.startswith(("BRX", "EXIT", "RET")) or (opcode.startswith("BRA") and "," not in operands)
        if guard or not ends:
            before[i + 1].append(i)
    every = (1 << len(before)) - 1
    over = [1] + [every] * len(code)
    known: list[int] = []
    while known != over:
        known = over.copy()
        for i in range(1, len(over)):
            over[i] = reduce(and_, (over[x] for x in before[i]), every) | 1 << i
        if known == over and every in over:  # an indirect branch leads where nothing else does, first in their order
            before[over.index(every)].append(0)
            over[over.index(every)] = 1
    found: dict[int, set[int]] = {}
    for head, tail in ((i, x) for i, sources in enumerate(before) for x in sources if over[x] >> i & 1):
        body = found.setdefault(head, {head})
        todo = {tail} - body
        while todo:
            body |= todo
            todo = {x for i in todo for x in before[i]} - body
    return found, over


def work_loops(sass: str) -> dict[str, Counter[str]]:
    """Count the innermost loops that multiply, and those that load tiles and signal, by the addresses of their heads.

    Of a trip: the ``instructions``, and how many are in each class of :data:`CLASSES` and of each shape of products,
    where ``other`` has memory too; the ``smem_bytes`` of a warp; and the ``registers`` that the last ``setmaxnreg`` on
    the way there leaves, 0 without one. Retries of a wait are left out. A conditional part counts as if it ran, and a
    loop of other work inside once.
    """
    code, labels = parse(sass)
    loops, over = _loops(code, labels)
    kinds = {}
    for head, body in loops.items():
        counts = Counter(class_of(code[i].opcode) for i in body)
        kinds[head] = (
            "product"
            if any(name[0].isdigit() for name in counts)
            else "load"
            if counts["arrive"] and (counts["tma load"] or counts["cp.async"])
            else "wait"
            if counts["wait"]
            else ""
        )
    found = {}
    for head in sorted(x for x, kind in kinds.items() if kind in ("product", "load")):
        inner = [x for x in loops if loops[x] < loops[head]]
        if all(kinds[x] != kinds[head] for x in inner):
            trip = [code[i] for i in loops[head].difference(*(loops[x] for x in inner if kinds[x] == "wait"))]
            sizes = [x for i, x in enumerate(code[:head]) if over[head] >> i & 1 and x.opcode.startswith("USETMAXREG")]
            counts = Counter(class_of(x.opcode) for x in trip)
            found[f"{head * _BYTES:#x}"] = counts + Counter(
                other=sum(counts[x] for x in ("cp.async", "shared", "global", "spill")),
                smem_bytes=_smem_bytes(trip),
                instructions=len(trip),
                registers=int(sizes[-1].operands.split()[-1], 16) if sizes else 0,
            )
    return found


def run_tool(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a tool of CUDA, such as nvdisasm: the one that Triton ships, or else the one on the PATH.

    FileNotFoundError where there is neither; ValueError where it fails.
    """
    shipped = getattr(find_spec("triton"), "submodule_search_locations", None) or ()
    places = [*(os.path.join(x, "backends", "nvidia", "bin") for x in shipped), os.environ.get("PATH", "")]
    environment = os.environ | {"PATH": os.pathsep.join(places)}
    if not shutil.which(name, path=environment["PATH"]):
        raise FileNotFoundError(f"{name} is missing, which CUDA has and Triton ships: pip install triton")
    done = subprocess.run([name, *map(str, arguments)], capture_output=True, text=True, check=False, env=environment)
    require(done.returncode == 0, f"{name}: {done.stderr.strip()}")
    return done
