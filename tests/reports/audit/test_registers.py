"""The register check finds a value that a skipped loop sets, and accepts one that every path sets."""

from __future__ import annotations

from fa3_reports.audit.registers import undefined_uniform_registers

# The shape of what ptxas 12.8 made of two loops over key blocks: the second reads UR24, set before the first alone.
# An HGMMA with A in registers reads the second pair of its descriptor registers only, the descriptor of B.
SKIPPED_LOOP = """
        /*0010*/                   UMOV UR8, 0x10 ;
        /*0014*/                   UMOV.64 UR26, URZ ;
        /*0018*/                   HGMMA.64x64x16.F32 R88, R124, gdesc[UR24].tnspB, R88 ;
        /*0020*/               @P0 BRA `(.L_x_6) ;
        /*0030*/                   UIADD3 UR24, UP0, UR8, 0x2, URZ ;
        /*0040*/                   UIADD3.X UR25, URZ, URZ, URZ, UP0, !UPT ;
.L_x_9:
        /*0050*/                   HGMMA.64x128x16.F32 R24, gdesc[UR24], R24 ;
        /*0060*/               @P1 BRA `(.L_x_9) ;
.L_x_6:
        /*0070*/                   HGMMA.64x128x16.F32 R24, gdesc[UR24], R24 ;
        /*0080*/                   EXIT ;
"""


def test_a_register_set_before_a_skipped_loop_is_found():
    assert undefined_uniform_registers(SKIPPED_LOOP) == ["HGMMA.64x128x16.F32 R24, gdesc[UR24], R24: UR24, UR25"]


def test_registers_set_on_every_path_are_accepted():
    moved = SKIPPED_LOOP.replace("@P0 BRA `(.L_x_6)", "NOP")
    assert undefined_uniform_registers(moved) == []


def test_both_halves_of_an_address_are_read() -> None:
    """A move hands on what nothing has set, so that it is found where an address of two registers is used."""
    half = "/*0000*/ UMOV UR6, URZ ;\n/*0010*/ UMOV UR7, UR37 ;\n/*0020*/ MOV R9, UR37 ;\n"
    by_tma, by_store = "UTMALDG.4D [UR40], [UR6]", "STG.E desc[UR4][R8.64], R3"
    set_first = "".join(f"/*000{n}*/ UMOV UR{n}, URZ ;\n" for n in (4, 5)) + "/*0006*/ UMOV UR40, URZ ;\n"
    set_first += "/*0007*/ UMOV UR41, URZ ;\n"
    for used, missing in ((by_tma, "UR7"), (by_store, "R9")):
        assert undefined_uniform_registers(f"{half}{set_first}/*0030*/ {used} ;") == [f"{used}: {missing}"]
