"""Every shipped kernel under compute-sanitizer, and which of its reports the machine code explains.

memcheck looks for accesses outside of memory, synccheck for barriers that not all threads reach, racecheck for accesses
of shared memory that no barrier orders. Warps of different roles meet at barriers from different places of the code,
which neither of the last two relates to each other. A report is explained where the instructions show that meeting, and
nothing else explains one: that both warps are in the same round there is the claim of the simulator's hazard checker.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from fa3_reference.problem import BackwardOperands
from fa3_reports.audit.calls import ShippedLaunch, calls_of
from fa3_reports.audit.shipped import shipped
from fa3verify.campaign.pool import processes
from fa3verify.text import one_line

Tool = Literal["memcheck", "synccheck", "racecheck"]
TOOLS: tuple[Tool, ...] = get_args(Tool)
COLUMNS = ("launch", "tool", "report", "kernel", "code", "count", "explained", "complete")
MOST = 50_000  # reports that a tool prints of one launch
_MACHINE = {"gpu": "name", "driver": "driver_version"}
DONE = "the launch has ended"  # printed by its process
MEETING = "both warps meet at barrier"  # the one explanation, with the id of the barrier
_BARRIER = re.compile(r"BAR\.(SYNC\.DEFER_BLOCKING|ARV) (0x[0-9a-f]+(?:, 0x[0-9a-f]+)?) ;")
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]+)\*/\s+(.*?;)")
_DROPPED = re.compile(r"errors were skipped|[Bb]uffer overflow|records have been dropped")
_REPORT = re.compile(r"=+ (Error: |Warning: )?(?P<kind>\S.*\S)$")
_PLACE = re.compile(r"(?P<kernel>\w+)\+0x(?P<offset>[0-9a-f]+)")


class Report(NamedTuple):
    """Reports of one kind at one place: ``code`` are the offsets of the instructions in the kernel, in bytes."""

    kind: str
    kernel: str = ""
    code: tuple[int, ...] = ()


def parse(text: str) -> Counter[Report]:
    """Count the reports in what a tool printed.

    Addresses, blocks and threads are left out, so that reports of one kind at one place are counted together.
    """
    found: Counter[Report] = Counter()
    lines = iter(text.splitlines())
    for line in lines:
        head = _REPORT.match(line)
        if not head or not _is_report(head["kind"]):
            continue
        places = []
        for more in lines:
            if not (more.startswith("=========     ") and more.strip("= ")):
                break
            places += _PLACE.findall(more)
        kind = one_line(re.sub(r" at __\w+__ 0x[0-9a-f]+.*| of size.*", "", head["kind"]))
        kernel = places[0][0] if places else ""
        found[Report(kind, kernel, tuple(int(offset, 16) for _, offset in places))] += 1
    return found


def _is_report(kind: str) -> bool:
    no_report = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "Target application")
    return not kind.startswith(no_report) and not _DROPPED.search(kind)


def is_complete(text: str) -> bool:
    """Whether a launch came to its end under a tool that dropped no report."""
    return DONE in text and not _DROPPED.search(text)


def explanation(report: Report, sass: str) -> str:
    """Return what explains a report, by the kernel's disassembly; empty where nothing does.

    A read behind a write: barrier ``id`` lies behind the write and before the read, with the same number of threads,
    without a branch or label between. A barrier that synccheck believes not all threads reach: it counts its threads,
    and other warps meet it at another instruction with the same id and number.
    """
    lines = sass.splitlines()
    at = {int(m[1], 16): i for i, line in enumerate(lines) if (m := _INSTRUCTION.match(line))}
    if not report.code or any(offset not in at for offset in report.code):
        return ""
    if report.kind == "Potential RAW hazard detected" and len(report.code) == 2:
        write, read = (at[offset] for offset in report.code)
        behind = _barriers(lines[write + 1 :])
        before = _barriers(reversed(lines[:read]))
        shared = [name for name, is_sync in before.items() if is_sync and name in behind]
        return f"{MEETING} {shared[0]}" if shared and "STS" in lines[write] and "LDS" in lines[read] else ""
    if report.kind == "Barrier error detected. Divergent thread(s) in block.":
        (own,) = (_BARRIER.search(lines[at[offset]]) for offset in report.code)
        alike = [m[2] for m in map(_BARRIER.search, lines) if own and m and m[2] == own[2]]
        return f"{MEETING} {alike[0]}" if len(alike) > 1 and "," in alike[0] else ""
    return ""


def _barriers(lines: Iterable[str]) -> dict[str, bool]:
    """Barriers before any branch or label, by id and number of threads: whether a warp waits there."""
    found: dict[str, bool] = {}
    for line in lines:
        if barrier := _BARRIER.search(line):
            found[barrier[2]] = found.get(barrier[2], False) or barrier[1] != "ARV"
        elif ".L_" in line or re.search(r"\b(BRA|BRX|EXIT|RET|CALL)\b", line):
            break
    return found


def explanations(name: str, reports: Sequence[Report]) -> list[str]:
    """Return what explains each report of a launch, by the code that its kernels compile to here; or empty texts."""
    if not reports:
        return []
    from fa3_reports.audit.compile import compile_call

    wanted = {report.kernel for report in reports}
    code = {call.kernel: compile_call(call).sass for call in calls_of(_named(name)) if call.kernel in wanted}
    return [explanation(report, code.get(report.kernel, "")) for report in reports]


def _named(name: str) -> ShippedLaunch:
    found = {launch.name: launch for launch in shipped()}
    if name not in found:
        raise ValueError(f"unknown launch {name!r}; known are {', '.join(found)}")
    return found[name]


def start(launch: ShippedLaunch) -> None:
    """Start a launch on this GPU, on normal values, and wait for it."""
    import numpy as np
    import torch

    from fa3_reports.bits import forward_cases, paged, paged_cases
    from fa3verify.known import launches
    from fa3verify.known.device import run_forward, run_quantiser

    problem = launch.problem
    choices = dict(launch.choices)
    blocks = choices.pop("descale_blocks", None)
    scopes: Any = tuple(map(str, blocks)) if blocks else ("none",) * 3
    drawn = forward_cases.operands(forward_cases.Case(launch.name, problem, scopes=scopes))
    if launch.function == "quantize_qkv":
        run_quantiser({"q": drawn.q, "k": drawn.k, "v": drawn.v}, choices)
    elif launch.function == "backward":
        rng = np.random.default_rng(0)
        out, dout = (rng.standard_normal(problem.out_shape).astype(drawn.q.dtype) for _ in range(2))
        lse = np.full(problem.lse_shape, np.log(problem.seqlen_k), np.float32)
        name = "gluon.deterministic" if choices.get("is_deterministic") else "gluon"
        given = BackwardOperands(drawn.q, drawn.k, drawn.v, dout=dout, out=out, lse=lse)
        launches.run(name, problem, given, {})
    elif problem.cache is not None:
        case = forward_cases.Case(launch.name, problem, choices={"num_splits": 1, "pack_gqa": False} | choices)
        paged.device_bits(case, paged_cases.operands(case))
    else:
        run_forward(problem, drawn, choices)
    torch.cuda.synchronize()
    print(DONE, flush=True)


class Settings(NamedTuple):
    """What :func:`run` does; a process starts one launch and has ``seconds``."""

    launches: tuple[str, ...]
    tools: tuple[Tool, ...] = TOOLS
    workers: int = 8
    seconds: float = 120.0


class Examined(NamedTuple):
    """Rows of :data:`COLUMNS`: one per kind of report, or one without any for a launch that is clean.

    ``cut``: by tool and launch what a process printed last that came to no end or dropped reports.
    """

    rows: list[list[str]]
    cut: dict[str, str]

    @property
    def unexplained(self) -> list[list[str]]:
        return [row for row in self.rows if row[COLUMNS.index("report")] and not row[COLUMNS.index("explained")]]


def run(settings: Settings, sanitizer: Path, tell: Callable[[str], None]) -> Examined:
    """Run launches under tools, several processes at a time; kernels of other packages are not examined."""
    jobs: list[tuple[Tool, str]] = [(tool, name) for tool in settings.tools for name in settings.launches]
    names = [name for _, name in jobs]
    commands = [_command(sanitizer, tool, name) for tool, name in jobs]
    texts = []
    with processes(settings.workers) as pool:
        for job, text in zip(jobs, pool.map(partial(_printed, seconds=settings.seconds), commands, names), strict=True):
            texts.append(text)
            tell(" ".join(job))
        counts = [parse(text) for text in texts]
        words = list(pool.map(explanations, names, [sorted(found) for found in counts]))
    rows = []
    for (tool, name), text, found, why in zip(jobs, texts, counts, words, strict=True):
        end = str(is_complete(text))
        rows += [
            [name, tool, r.kind, r.kernel, " ".join(map(hex, r.code)), str(found[r]), w, end]
            for r, w in zip(sorted(found), why, strict=True)
        ] or [[name, tool, "", "", "", "0", "", end]]
    cut = {" ".join(job): one_line(text[-300:]) for job, text in zip(jobs, texts, strict=True) if not is_complete(text)}
    return Examined(rows, cut)


def _command(sanitizer: Path, tool: Tool, name: str) -> list[str]:
    command = [str(sanitizer), "--tool", tool, "--print-limit", str(MOST), "--show-backtrace", "no"]
    if _named(name).function == "append":  # attention runs behind it, whose kernels have launches of their own
        command += ["--kernel-name", "kernel_substring=append"]
    else:
        command += ["--kernel-name-exclude", "kernel_substring=at"]  # torch's own, in namespace at
    return command + (["--racecheck-report", "hazard"] if tool == "racecheck" else [])


def _printed(command: list[str], name: str, seconds: float) -> str:
    """What starting a launch printed, under a tool or without one."""
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # so that every tensor has its own bounds
    call = [*command, sys.executable, "-m", "fa3_reports.sanitizer", name]
    try:
        done = subprocess.run(call, capture_output=True, text=True, timeout=seconds, env=environment, check=False)
    except subprocess.TimeoutExpired as error:
        return f"{(error.stdout or b'').decode(errors='replace')}\nno end within {seconds:g} s"
    return done.stdout + done.stderr


def provenance(sanitizer: Path) -> str:
    """JSON of what examined which kernels."""
    from fa3_kernels.audit.evidence import evidence_facts
    from fa3verify.timed.timing import query

    version = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=True).stdout.split("\n")
    facts = {
        **{name: query(field) for name, field in _MACHINE.items()},
        **evidence_facts("forward+packed+paged+quantize+backward"),
        "sanitizer": next(line for line in version if line.startswith("Version")),
        "date_utc": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
    }
    return json.dumps(facts, indent=1) + "\n"


if __name__ == "__main__":
    start(_named(sys.argv[1]))
