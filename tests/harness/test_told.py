"""What is written on pages and on the terminal, compared as a whole: every number with its digits, every line."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from fa3_reports import schedules
from fa3_reports.cli.hazards import hazards as verb
from fa3_simulator.footprint import Hazard
from fa3_simulator.held_out import HeldOut
from fa3_simulator.run import Estimate
from fa3_simulator.unbounded import Proof
from fa3verify import hazards
from fa3verify.campaign.findings import Finding
from fa3verify.campaign.replay_files import ReplayFile
from fa3verify.cli import console, tune
from fa3verify.commands.replay import Replayed
from fa3verify.commands.tune import MachineRanking, ScheduleRow
from fa3verify.commands.verify import ShardRun
from fa3verify.judging.verdict import What
from fa3verify.known import registry
from fa3verify.report import tables

NUMBERS = {  # three digits, and a power where plain digits would be longer
    0.0: "0",
    0.00999: "9.99e-3",
    0.01: "0.0100",
    0.0999: "0.0999",
    0.5: "0.500",
    1.0: "1.00",
    9.994: "9.99",
    9.996: "10.0",
    99.96: "100",
    999.4: "999",
    999.6: "1.00e3",
    -2.5: "-2.50",
    -1e-9: "-1.00e-9",
    math.inf: "∞",
    -math.inf: "−∞",
    math.nan: "–",
    None: "–",
    "x": "–",
    "1.5": "1.50",
}


@pytest.mark.parametrize(
    ("write", "wanted"),
    [
        (tables.number, NUMBERS),
        (tables.ratio, {0.9499: "0.950", 0.95: "0.950", 0.9996: "0.9996", 1.0499: "1.05", 68.2: "68.2", None: "–"}),
        (tables.below_one, {0.9994: "0.999", 0.9995: "< 1.00", 0.99999: "< 1.00", 1: "1.00", 1.0001: "1.0001"}),
        (tables.signed, {0.5: "+0.500", -0.5: "−0.500", 0: "0", None: "–", -math.inf: "−∞"}),
        (
            tables.percent,
            {
                0: "0 %",
                1: "100 %",
                0.9995: "> 99.9 %",
                0.9994: "99.9 %",
                0.001: "0.1 %",
                0.00099: "0.0990 %",
                2: "200.0 %",
            },
        ),
        (tables.count, {999: "999", 1000: "1\u202f000", 1e6: "1\u202f000\u202f000", math.inf: "–", None: "–"}),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_number_is_written_with_the_digits_that_tell(write, wanted):
    assert {x: write(x) for x in wanted} == wanted


def finding(number: int, what: str, message: str, **more: Any) -> Finding:
    return Finding("mine.fp16", What.from_json(what), message, case="a [case]", replay=f"worst/{number}.json", **more)


def test_a_shard_tells_its_findings_and_no_verdict(capsys):
    raised = {"frame": "mine.py:3 in f", "text": "..."}
    found = (finding(0, "family normal", "RuntimeError: no", traceback=raised),)
    shard = ShardRun("shard 2 of 3", "shard-2.json", 17, found)
    console.print_shard(shard, Path("out"))
    assert capsys.readouterr().out.splitlines() == [
        "FAIL, no result: mine.fp16 family normal: RuntimeError: no",
        "     raised at: mine.py:3 in f",
        "     case: a [case]",
        "SHARD 2 OF 3 1 findings in 17 tasks; the verdict is that of fa3verify merge",
        "shard out/shard-2.json",
    ]
    console.print_shard(replace(shard, failures=()), Path("out"))
    assert capsys.readouterr().out.splitlines()[0] == (
        "SHARD 2 OF 3 no finding in 17 tasks; the verdict is that of fa3verify merge"
    )


def test_a_replay_tells_every_figure_with_two_digits_and_a_ratio_on_its_side_of_one(capsys):
    measures = {"ratio_max": 0.9997, "ratio_lse_max": 1.0004, "ratio_median": 0.94, "ulp_max": 0.00012, "rms": 1234.0}
    bound = ReplayFile("mine.fp16", What.from_json("L1 error / bound"), {})
    console.print_replay(bound, Replayed(holds=False, message="the [message]", measures=measures))
    assert capsys.readouterr().out.splitlines() == [
        "mine.fp16: bound, error / bound",
        "the [message]",
        "  ratio_max            < 1",
        "  ratio_lse_max        1.0004",
        "  ratio_median         0.94",
        "  ulp_max              0.00012",
        "  rms                  1.2e3",
        "still broken",
    ]
    law = ReplayFile("mine.fp16", What.from_json("law kv_head_order"), {})
    console.print_replay(law, Replayed(holds=True, message="ok", measures=None))
    assert capsys.readouterr().out.splitlines() == ["mine.fp16: property kv_head_order", "ok", "holds"]


def test_kernels_are_told_with_what_keeps_the_others_away(capsys):
    sound = registry.find("twin.fp16")
    away = [replace(sound, name=name, unavailable="no device") for name in ("x", "y")]
    console.print_kernels([sound, *away], with_faults=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"twin.fp16  {sound.description}", "not here, no device: x, y"]
    assert lines[2].startswith("add +FAULT to a twin of forward to plant a fault: ")


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_shape_of_schedules_has_one_line_and_each_hazard_another(monkeypatch, is_complete):
    texts = [Hazard("race", "slot s: B is not ordered after A"), Hazard("barrier", "named barrier n")]
    shapes = [
        hazards.Checked(("a", "b", "c", "d", "e"), "program", Proof(texts, 3, 9, False)),
        hazards.Checked(("f",), "program", Proof([], 12, 7, is_complete)),
    ]
    monkeypatch.setattr(schedules, "check", lambda kernels, machine: iter(shapes))
    result = CliRunner().invoke(verb, [])
    claim = "stand for all" if is_complete else "tried, then the search ended"
    assert result.stdout.splitlines() == [
        "2 findings: a, b, c and 2 more (3 lists of tiles, of up to 9 blocks tried, then the search ended)",
        "  race: slot s: B is not ordered after A",
        "  barrier: named barrier n",
        f"no hazard: f (12 lists of tiles, of up to 7 blocks {claim})",
    ]
    assert result.exit_code == 1
    del shapes[0]
    assert CliRunner().invoke(verb, []).exit_code == (0 if is_complete else 5)


def schedule(place: int, held_out: HeldOut | None = None, **more: Any) -> ScheduleRow:
    base = {"place": place, "tile": "128x96", "splits": 1, "packed": False, "stages": 2, "p": "reg", "cycles": 30000}
    base |= {"schedule": "pingpong", "milliseconds": 0.01754, "tflops": 551.6, "gap": 0.0421, "binds": "tensor"}
    base |= {
        "busy": 0.914,
        "hbm_gb_per_s": 812.3,
        "gluon": True,
        "flash3_choice": False,
        "alike": [],
        "estimated_counts": False,
        "under_load": {},
        "interval": Estimate(30000, 0, 0, 0, 0, 0, (), 1710.4, held_out=held_out).interval_figures(),
    }
    return ScheduleRow(**base | more)


MACHINE: Any = SimpleNamespace(name="h200", assumed=list)
RANKED = MachineRanking(
    problem="b1",
    machine=MACHINE,
    clock_mhz=1710.4,
    kernel="gluon",
    schedules=17,
    lower_bound_cycles=28000,
    lower_bound_binds="mufu",
    shows_peer=True,
    regret_gluon=0.0314,
    regret_flash3=None,
    ranked=[
        schedule(1, alike=["64x64", "64x96", "64x128", "64x160", "64x192", "64x224"]),
        schedule(2, tile="64x64", measured=31000.4, gap=1.256, gluon=False, flash3_choice=True, binds="hbm"),
        schedule(2, HeldOut("such", 20, 0.9, 1.1), binds="l2"),
        schedule(4, p="smem", binds="reduce", measured="no GPU", alike=["80x64"]),
    ],
    hazards=[],
    launches="",
)


TOLD_RANKING = """\
b1: gluon on h200 at 1710 MHz
lower bound 28000 cycles (exp2); 17 schedules fit, the best of every tile:
 #   tile stages    P cycles     ms       90%  gap        binds   schedule
 1 128x96      2  reg  30000 0.0175           4.2%   tensor 91% G pingpong
   as long with 64x64, 64x96, 64x128, 64x160 and 2 more
2=  64x64      2  reg  30000 0.0175           126% HBM 812 GB/s F pingpong, measured 31000 (-3.2%)
2= 128x96      2  reg  30000 0.0175 -9%..+11% 4.2%       L2 91% G pingpong
 4 128x96      2 smem  30000 0.0175           4.2%       dQ 91% G pingpong, ! not measured: no GPU
   as long with 80x64
against the first: best launch of Gluon +3.1%, FlashAttention-3's own is not among them
Take 128x96 pingpong: 0.0% ahead of 64x64 pingpong, bound by tensor, busy 91% of
  the time.
b1: gluon on h200 at 1710 MHz
lower bound 28000 cycles (L2); 17 schedules fit, the best of every tile:
#   tile parts  heads stages   P cycles     ms  gap        binds   schedule
1 128x96     3 packed      2 reg  30000 0.0175 4.2%   tensor 91% G pingpong
  as long with 64x64, 64x96, 64x128, 64x160 and 2 more
2  64x64     3 packed      2 reg  30000 0.0175 126% HBM 812 GB/s F pingpong, measured 31000 (-3.2%)
against the first: best launch of Gluon +3.1%, FlashAttention-3's own +50.0%
Take 128x96 pingpong, 3 parts, packed: 0.0% ahead of 64x64 pingpong, 3 parts,
  packed, bound by tensor, busy 91% of the time.
b1: gluon on h200 at 1710 MHz
lower bound 28000 cycles (exp2); 17 schedules fit, the best our kernels can be launched with:
#   tile parts  heads stages   P cycles     ms  gap      binds   schedule
1 128x96     3 packed      2 reg  30000 0.0175 4.2% tensor 91% G pingpong
  as long with 64x64, 64x96, 64x128, 64x160 and 2 more
simulated against measured: Kendall tau 0.87, regret top-1 1.2%, top-3 0.0%
Take 128x96 pingpong, 3 parts, packed: bound by tensor, busy 91% of the time.
""".splitlines()


def test_a_ranking_of_schedules_is_told_whole(capsys):
    tune.print_ranking(RANKED)
    split = [row._replace(splits=3, packed=True) for row in RANKED.ranked[:2]]
    tune.print_ranking(RANKED._replace(ranked=split, lower_bound_binds="l2", regret_flash3=0.5))
    tune.print_ranking(RANKED._replace(ranked=split[:1], agreement=(0.874, (0.0123, 0.0))))
    assert capsys.readouterr().out.splitlines() == TOLD_RANKING
    assert tune.csv_of([RANKED._replace(ranked=RANKED.ranked[:1])]).splitlines()[1:] == [
        "b1,h200,1710.4,gluon,1,128x96,1,False,2,reg,pingpong,30000,0.01754,,,,,,,551.6,0.0421,tensor,0.914,812.3,True,False"
    ]
