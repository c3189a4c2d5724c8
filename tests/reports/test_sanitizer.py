"""Reports of compute-sanitizer are counted by kind and place, and explained by the instructions or not at all."""

import json
from pathlib import Path

import pytest

from fa3_reports.audit.shipped import shipped
from fa3_reports.cli import sanitize
from fa3_reports.device.keys import changed_launches
from fa3_reports.sanitizer import COLUMNS, DONE, TOOLS, Report, explanation, is_complete, parse
from fa3_reports.stored import read_csv

EVIDENCE = Path(__file__).parents[2] / "reports" / "h200" / "sanitizer" / "sanitizer.csv"
HAZARD = "Potential RAW hazard detected"
DIVERGENT = "Barrier error detected. Divergent thread(s) in block."
PRINTED = """========= COMPUTE-SANITIZER
========= Error: Potential RAW hazard detected at __shared__ 0x38520 in block (22,0,0) :
=========     Write Thread (31,0,0) at forward+0x20 in forward.py:301
=========     Read Thread (128,0,0) at forward+0x60 in forward.py:301
=========     Current Value : 0
=========
========= Error: Potential RAW hazard detected at __shared__ 0x38521 in block (23,0,0) :
=========     Write Thread (31,0,0) at forward+0x20 in forward.py:301
=========     Read Thread (129,0,0) at forward+0x60 in forward.py:301
=========     Current Value : 0
=========
========= Invalid __global__ read of size 4 bytes
=========     at forward+0x80 in forward.py:12
=========     by thread (32,0,0) in block (8,0,0)
=========
========= Barrier error detected. Divergent thread(s) in block.
=========     at forward+0x40 in pipeline.py:53
=========     by thread (32,0,0) in block (8,0,0)
=========
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""
SASS = """
        /*0000*/                   STS [R1], R2 ;
        /*0010*/                   BAR.SYNC.DEFER_BLOCKING 0x0, 0x80 ;
        /*0020*/                   STS.64 [R1], R2 ;
        /*0030*/                   BAR.ARV 0xf, 0x100 ;
        /*0040*/                   BAR.SYNC.DEFER_BLOCKING 0xe, 0x100 ;
.L_x_1:
        /*0050*/                   BAR.SYNC.DEFER_BLOCKING 0xf, 0x100 ;
        /*0060*/                   LDS.U8 R7, [R7] ;
        /*0070*/              @!P0 BRA `(.L_x_1) ;
        /*0080*/                   LDS R8, [R7] ;
        /*0090*/                   BAR.SYNC.DEFER_BLOCKING 0xe, 0x100 ;
"""


def raced(write: int, read: int) -> Report:
    return Report(HAZARD, "forward", (write, read))


def test_the_command_offers_every_tool():
    assert sanitize.TOOLS == TOOLS


def test_reports_of_one_kind_at_one_place_are_one():
    assert parse(PRINTED) == {
        raced(0x20, 0x60): 2,
        Report("Invalid __global__ read", "forward", (0x80,)): 1,
        Report(DIVERGENT, "forward", (0x40,)): 1,
    }


def test_a_read_behind_the_barrier_that_the_writer_reached_is_explained():
    assert explanation(raced(0x20, 0x60), SASS) == "both warps meet at barrier 0xf, 0x100"


@pytest.mark.parametrize(
    ("report", "sass"),
    [
        (raced(0x20, 0x80), SASS),  # a branch between barrier and read
        (raced(0x60, 0x20), SASS),
        (raced(0x20, 0x60), SASS.replace("BAR.ARV 0xf", "BAR.ARV 0xd")),
        (raced(0x20, 0x60), SASS.replace("BAR.ARV 0xf, 0x100", "BAR.ARV 0xf, 0x180")),
        (raced(0x20, 0x60), SASS.replace("/*0050*/                   BAR.SYNC.DEFER_BLOCKING", "/*0050*/ BAR.ARV")),
        (raced(0x28, 0x60), SASS),
        (Report("Potential WAR hazard detected", "forward", (0x20, 0x60)), SASS),
        (Report(DIVERGENT, "forward", (0x10,)), SASS),  # nobody meets it elsewhere
        (Report("Invalid __global__ read", "forward", (0x60,)), SASS),
        (Report("Invalid __global__ read"), SASS),
    ],
)
def test_nothing_else_is_explained(report, sass):
    assert explanation(report, sass) == ""


def test_a_counted_barrier_that_others_meet_elsewhere_is_explained():
    assert explanation(Report(DIVERGENT, "forward", (0x40,)), SASS) == "both warps meet at barrier 0xe, 0x100"


def test_a_run_that_died_or_dropped_reports_is_not_complete():
    assert is_complete(f"{PRINTED}\n{DONE}\n")
    assert not is_complete(PRINTED)
    assert not is_complete(f"{DONE}\n========= Error buffer overflow has been detected.\n")


def test_every_shipped_launch_but_some_of_the_newest_was_examined_by_every_tool_and_every_report_is_explained():
    found = read_csv(EVIDENCE)
    assert tuple(found[0]) == COLUMNS
    changed = changed_launches(json.loads(EVIDENCE.with_name("sanitizer_provenance.json").read_text()))
    assert all("_d160_" in name or "e4m3_d96_" in name for name in changed)
    examined = {x["launch"] for x in found}
    left = {x.name for x in shipped()} - examined
    of_the_backward = {"backward_d256_causal_in_turn", "backward_d256_varlen_in_turn"}
    newest = {name for name in left if "_d160_" in name or name.startswith("e4m3_d96_")}
    assert left >= newest == {x.name for x in shipped() if "_d160_" in x.name or x.name.startswith("e4m3_d96_")}
    assert len(left - of_the_backward - newest) == 36
    assert all("_pages" in name for name in left - of_the_backward - newest), "what time ran out for"
    assert {(x["launch"], x["tool"]) for x in found} == {(name, tool) for name in examined for tool in TOOLS}
    assert [x for x in found if x["report"] and not x["explained"]] == []
    cut = {(x["tool"], x["launch"]) for x in found if x["complete"] != "True"}
    backwards = {name for _, name in cut}
    assert all(name.startswith("backward_") for name in backwards)
    longest = {
        "backward_d256_dense",
        "backward_d256_in_turn",
        *(x.name for x in shipped() if x.name.startswith("backward_d192_")),
    }
    longest.intersection_update(examined)
    assert {(tool, name) for tool, name in cut if tool != "synccheck"} == {("racecheck", name) for name in longest}, (
        "synccheck ends a backward at the barrier that it misjudges; racecheck of the longest was ended"
    )
