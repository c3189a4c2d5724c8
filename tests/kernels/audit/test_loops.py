"""Loops of compiled code, on small texts as nvdisasm and as cuobjdump print them. Needs no Triton."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from fa3_kernels.audit.sass import CLASSES, class_of, run_tool, work_loops

PRODUCT = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24"
ARRIVE = "SYNCS.ARRIVE.TRANS64 RZ, [UR4], RZ"
WAIT = "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R3"
LOAD = "UTMALDG.3D [UR8], [UR4]"


def text(lines: list[str]) -> str:
    """Number the instructions of a kernel; ``name:`` is a label, and ``=name`` a branch's address of one."""
    addresses: dict[str, int] = {}
    code: list[str] = []
    for line in lines:
        if line.endswith(":"):
            addresses[line[:-1]] = 16 * len(code)
        else:
            code.append(line)
    for name, address in addresses.items():
        code = [line.replace(f"={name}", f"{address:#x}") for line in code]
    return "\n".join(f"        /*{16 * i:04x}*/                   {line} ;   /* 0x0 */" for i, line in enumerate(code))


def labelled(lines: list[str]) -> str:
    """The same as nvdisasm writes it, with labels."""
    names = {line[:-1]: f".L_x_{i}" for i, line in enumerate(lines) if line.endswith(":")}
    found, number = [], 0
    for line in lines:
        if line.endswith(":"):
            found.append(f"{names[line[:-1]]}:")
            continue
        for name, label in names.items():
            line = line.replace(f"={name}", f"`({label})")
        found.append(f"        /*{16 * number:04x}*/                   {line} ;")
        number += 1
    return "\n".join(found)


WRITERS = pytest.mark.parametrize("write", [text, labelled])


@WRITERS
def test_of_nested_loops_the_innermost_that_multiplies_is_counted(write) -> None:
    lines = ["UMOV UR4, URZ", "tile:", "FADD R1, R1, R2", "block:", PRODUCT, "FFMA R5, R5, R6, R7", "MUFU.EX2 R3, R4"]
    lines += ["inner:", "FMNMX R1, R1, R2, !PT", "@P2 BRA =inner", "@P0 BRA =block", "@P1 BRA =tile", "EXIT"]
    (trip,) = work_loops(write(lines)).values()
    assert trip == {"64x128x16": 1, "fma": 1, "mufu": 1, "alu": 1, "other": 2, "instructions": 6}


@WRITERS
def test_an_unrolled_loop_has_all_its_products_in_a_trip(write) -> None:
    lines = ["block:", *[PRODUCT, "FFMA R5, R5, R6, R7"] * 3, "@P0 BRA =block", "EXIT"]
    (trip,) = work_loops(write(lines)).values()
    assert (trip["64x128x16"], trip["fma"], trip["instructions"]) == (3, 3, 7)


@WRITERS
def test_loops_of_two_roles_are_apart_and_have_the_registers_of_theirs(write) -> None:
    """Wherever the code lies: the consumer's begins in front of the producer's here, and goes on behind it."""
    lines = ["@P0 BRA =load", "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0", "BRA =consume"]
    lines += ["load:", "USETMAXREG.DEALLOC.CTAPOOL 0x18", "tile:", WAIT, LOAD, ARRIVE, "@P1 BRA =tile", "EXIT"]
    lines += ["consume:", WAIT, PRODUCT, ARRIVE, "BRA P1, =consume", "EXIT"]
    loops = [*work_loops(write(lines)).values()]
    consumer, producer = sorted(loops, key=lambda trip: trip["tma load"])
    assert (producer["registers"], producer["tma load"], producer["64x128x16"]) == (24, 1, 0)
    assert (consumer["registers"], consumer["tma load"], consumer["64x128x16"]) == (240, 0, 1)


@WRITERS
def test_a_branch_is_conditional_by_its_guard_or_by_an_operand(write) -> None:
    for skip in ("@P2 BRA =back", "BRA P2, =back", "BRA.U UP0, =back"):
        lines = ["MOV R1, R2", "block:", PRODUCT, skip, "FMUL R1, R1, R2", "back:", "@P0 BRA =block", "EXIT"]
        (trip,) = work_loops(write(lines)).values()
        assert trip["fma"] == 1, skip
    lines = ["MOV R1, R2", "block:", PRODUCT, "BRA =back", "out:", "FMUL R1, R1, R2", "EXIT", "back:", "@P0 BRA =block"]
    (trip,) = work_loops(write([*lines, "BRA =out"])).values()
    assert trip["fma"] == 0


@WRITERS
def test_a_part_behind_the_kernel_belongs_to_the_loop_and_retries_of_a_wait_do_not(write) -> None:
    """As ptxas lays it out: the slow way of a wait stands at the end, tries again, and jumps back."""
    lines = [
        "block:",
        WAIT,
        "@!P1 BRA =slow",
        "go:",
        PRODUCT,
        "@P2 BRA =rare",
        "back:",
        ARRIVE,
        "@P0 BRA =block",
        "EXIT",
    ]
    lines += ["rare:", "FMUL R1, R1, R2", "BRA =back", "slow:", WAIT, "@!P1 BRA =slow", "BRA =go"]
    (trip,) = work_loops(write(lines)).values()
    assert trip == {"64x128x16": 1, "fma": 1, "wait": 1, "arrive": 1, "other": 5, "instructions": 9}


def test_partitions_behind_an_indirect_branch_are_found() -> None:
    """As of warps that Triton specialises: nothing else leads to their code."""
    lines = ["BRX R2 -0x190", "NOP", "EXIT", "first:", PRODUCT, "FFMA R5, R5, R6, R7", "@P0 BRA =first", "EXIT"]
    lines += ["second:", WAIT, LOAD, ARRIVE, "@P0 BRA =second", "EXIT"]
    loops = work_loops(text(lines))
    assert [(trip["fma"], trip["tma load"]) for trip in loops.values()] == [(1, 0), (0, 1)]
    assert [*loops] == ["0x30", "0x70"]


def test_bytes_of_shared_memory_are_those_of_a_warp() -> None:
    widths = {"LDSM.16.M88.4": 512, "LDSM.16.MT88.2": 256, "STSM.16.M88.4": 512, "LDS": 128, "LDS.64": 256}
    widths |= {"STS.128": 512, "LDS.U.128": 512}
    for opcode, size in widths.items():
        (trip,) = work_loops(text(["block:", PRODUCT, f"{opcode} R1, [R2]", "@P0 BRA =block"])).values()
        assert trip["smem_bytes"] == size, opcode


OPCODES = [begin for begins in CLASSES.values() for begin in begins] + ["MOV", "R2UR", "IMAD", "HMMA.16816.F32"]


@given(st.lists(st.sampled_from(OPCODES), max_size=30), st.lists(st.sampled_from(OPCODES), max_size=5))
def test_the_classes_of_a_loop_add_up_to_the_instructions_between_label_and_branch(body, around) -> None:
    lines = [*around, "block:", "HMMA.16816.F32 R4", *body, "@P0 BRA =block", *around, "EXIT"]
    (trip,) = work_loops(text(lines)).values()
    assert trip["instructions"] == len(body) + 2
    memory = ("cp.async", "shared", "global", "spill")  # in "other" as well
    classes = sum(n for name, n in trip.items() if name not in ("instructions", "smem_bytes", *memory))
    assert classes == trip["instructions"]
    assert trip["16816"] == 1 + body.count("HMMA.16816.F32")


def test_products_are_told_apart_by_shape_and_loads_by_kind() -> None:
    told = {"QGMMA.64x256x32.F32.E4M3.E4M3": "64x256x32", "HMMA.16816.F32.BF16": "16816", "IMMA.16832.S8.S8": "16832"}
    told |= {"LDGSTS.E.BYPASS.LTC128B.128": "cp.async", "LDG.E.128": "global", "LDSM.16.M88.4": "shared"}
    told |= {"LDGDEPBAR": "arrive", "F2FP.BF16.F32.PACK_AB": "convert", "UIADD3": "other", "BAR.SYNC": "bar"}
    assert {opcode: class_of(opcode) for opcode in told} == told


def test_a_tool_that_is_nowhere_is_named_in_one_line() -> None:
    with pytest.raises(FileNotFoundError, match=r"^nvnothing is missing, which CUDA has and Triton ships"):
        run_tool("nvnothing")
