"""The audit's reading of PTX and SASS on small texts, its comparison, and its rules. Needs no Triton."""

from __future__ import annotations

import copy
import json

import pytest

from fa3_reports.audit import figures as audit, golden as accepted
from fa3_reports.audit.allowed import ALLOWED_ARRIVES
from fa3_reports.audit.probes import audited, probes

SASS = """
.L_x_0:
        /*0000*/                   FADD R1, R1, R2 ;
.L_x_1:
        /*0010*/                   HGMMA.64x128x16.F32 R24, gdesc[UR4], R24 ;
        /*0020*/                   MUFU.EX2 R3, R4 ;
        /*0030*/              @!P0 FFMA R5, R5, R6, R7 ;
        /*0040*/               @P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0050*/                   SYNCS.PHASECHK R1 ;
        /*0060*/               @P1 BRA `(.L_x_2) ;
        /*0070*/               @P2 BRA `(.L_x_0) ;
        /*0080*/                   BRA `(.L_x_9) ;
.L_x_9:
"""


def figures() -> dict:
    return {
        "registers": {"entry": 168, "setmaxnreg": [240, 24]},
        "memory": {"spill_bytes": 0, "smem_bytes": 1000},
        "contraction": {"fmad": True, "ptx_fma": 7, "sass_ffma": 7, "ptx_contractible": 0},
        "serialisation": [],
        "undefined_registers": [],
        "ptx_sha256": "a" * 64,
    }


def test_only_innermost_loops_with_tensor_work_are_counted():
    (loop,) = audit.tensor_loops(SASS)
    assert {name: n for name, n in loop.items() if n} == {"instructions": 4, "HGMMA": 1, "MUFU.EX2": 1, "FFMA": 1}


def test_the_hash_of_ptx_ignores_where_the_source_lies_and_nothing_else():
    ptx = '\t.loc 1 5 3\nadd.f32 a; // /home/x\n.file 1 "/home/x"\n$L__tmp4:\n\t.section\t.debug_str {/home/x}'
    assert audit.ptx_sha256(ptx) == audit.ptx_sha256("add.f32 a;\n")
    assert audit.ptx_sha256(ptx) != audit.ptx_sha256("add.f32 b;\n")


@pytest.mark.parametrize(
    ("group", "value", "message"),
    [
        ("memory", {"spill_bytes": 4, "smem_bytes": 1000}, "k: spills 4 bytes, allowed are 0"),
        ("serialisation", ["C7510: serialised"], "k: ptxas serialised wgmma: C7510"),
        ("undefined_registers", ["HGMMA R1, UR4: UR4"], "k: registers are read that some path does not set: HGMMA R1"),
        (
            "contraction",
            {"fmad": True, "ptx_fma": 7, "sass_ffma": 7, "ptx_contractible": 2},
            "k: 2 fp32 operations may be contracted",
        ),
    ],
)
def test_a_broken_rule_is_named(group, value, message):
    assert audit.broken_rules({"k": figures()}) == []
    (line,) = audit.broken_rules({"k": figures() | {group: value}})
    assert line.startswith(message)


def test_an_arrive_of_ptxas_is_accepted_where_it_is_listed_and_no_wait_anywhere():
    (name,) = ALLOWED_ARRIVES
    for message, rules in (("C7519: warpgroup.arrive is injected", 0), ("C7510: serialised", 1)):
        given = figures() | {"serialisation": [message]}
        assert len(audit.broken_rules({name: given})) == rules
        assert len(audit.broken_rules({"k": given})) == 1


def test_every_figure_that_moved_is_one_line():
    now = copy.deepcopy(figures())
    now["registers"]["entry"], now["ptx_sha256"] = 128, "b" * 64
    assert audit.compare({"k": figures()}, {"k": now}) == [
        "k: registers.entry 168 -> 128",
        "k: ptx_sha256 aaaaaaaaaaaa -> bbbbbbbbbbbb",
    ]
    assert audit.compare({}, {"k": now}) == ["k: not in the golden file"]
    assert audit.compare({"k": now}, {}) == ["k: in the golden file, no longer compiled"]
    assert audit.compare({"k": now}, {}, partial=True) == []


def test_a_golden_file_is_read_back(tmp_path):
    path = tmp_path / "golden.json"
    path.write_text(accepted.golden_text({"k": figures()}))
    assert accepted.read_rows(path) == {"k": figures()}
    assert path.read_text().count("\n") == 5 + len(figures()) - 1
    for content in ("", "[]", json.dumps({"schema": "x/1"})):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"golden\.json is not a golden file"):
            accepted.read_rows(path)


def test_launches_have_unique_names_and_cover_every_head_dim():
    names = [x.name for x in probes()]
    assert len(set(names)) == len(names)
    assert {x.problem.head_dim for x in audited() if x.function == "backward"} == {64, 96, 128, 160, 192, 256}
    assert {x.problem.head_dim for x in audited() if x.function != "backward"} == {64, 96, 128, 160, 192, 256}


def test_the_golden_file_covers_every_audited_launch():
    golden = {name.partition("/")[0] for name, row in accepted.read_rows().items() if accepted.is_compiled(row)}
    assert golden == {x.name for x in audited()}


def test_rows_of_launches_alone_are_kept_apart_and_have_no_rules(tmp_path):
    launch = {"launch": {"of": "forward", "grid": [132], "sha256": "b" * 64}}
    rows = {"k": figures() | launch, "l": launch}
    path = tmp_path / "golden.json"
    path.write_text(accepted.golden_text(rows))
    assert accepted.read_rows(path) == rows
    assert audit.broken_rules(rows) == []
    moved = {"l": {"launch": launch["launch"] | {"grid": [131]}}}
    assert audit.compare(rows, moved, partial=True) == ["l: launch.grid [132] -> [131]"]


def test_an_unknown_launch_is_refused_and_a_missing_compiler_named(monkeypatch):
    monkeypatch.setattr("fa3_kernels.gluon.unsupported", lambda: None)
    with pytest.raises(ValueError, match="unknown launch 'x'"):
        audit.compile_all(["x"])
    monkeypatch.setattr("fa3_kernels.gluon.unsupported", lambda: "needs triton 3.6, found 9.9 (extra 'gpu')")
    with pytest.raises(audit.Unavailable, match=r"needs triton 3\.6, found 9\.9"):
        audit.compile_all()
