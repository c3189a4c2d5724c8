"""What the compiler made of every shipped and instrumented kernel, read without a GPU, and what
changed since accepted.

Every launch of :func:`fa3_reports.audit.probes.audited` is compiled for sm_90a with the ptxas of the Triton wheel. Its
figures, and what every probe gives the GPU, are compared with the golden file, ``audit.json`` of the kernels; rules
that must hold whatever was accepted come first.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from fa3_kernels.audit.sass import parse
from fa3_reports.audit.allowed import ALLOWED_ARRIVES, ALLOWED_SPILL_BYTES, ALLOWED_UNDEFINED
from fa3_reports.audit.golden import Figures, is_compiled
from fa3_reports.audit.registers import undefined_uniform_registers

# Group of figures: SASS opcodes counted, by prefix.
OPCODES = {
    "tensor": ("HGMMA", "QGMMA"),
    "tma": ("UTMALDG", "UTMASTG"),
    "special": ("MUFU.EX2", "MUFU.LG2", "MUFU.RCP"),
    "fp32": ("FFMA", "FMUL", "FADD", "FMNMX"),
    "moves": ("LDSM", "STSM", "PRMT", "SHFL", "LDL", "STL"),
    "barriers": ("BAR.SYNC", "BAR.ARV", "SYNCS", "USETMAXREG"),
}

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


class Unavailable(Exception):
    """The kernels cannot be compiled here; the message says what is missing."""


def ptx_sha256(ptx: str) -> str:
    """Return the hash of a kernel's PTX without its name, and without what depends on where the sources lie.

    >>> ptx_sha256("add.f32 a;\\n\\t.loc 1 2 3\\n") == ptx_sha256("add.f32 a; // here\\n")
    True
    >>> ptx_sha256(".entry f( .param f_param_0 )") == ptx_sha256(".entry other( .param other_param_0 )")
    True
    """
    body = ptx.split(".section\t.debug", 1)[0]
    if entry := re.search(r"\.entry\s+(\w+)", body):
        body = re.sub(rf"\b{entry[1]}(?=_param_\d|\b)", "kernel", body)
    lines = (line.split("//", 1)[0].strip() for line in body.splitlines())
    kept = [x for x in lines if x and not x.startswith((".loc", ".file", "$L__tmp", "$L__func"))]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()


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


def figures_of(code: Any, options: Mapping[str, int]) -> Figures:
    """Collect the figures of one compiled kernel.

    Parameters
    ----------
    code : fa3_reports.audit.compile.Compiled
    options : mapping
        Launch options.
    """
    split = sorted({int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", code.ptx)}, reverse=True)
    opcodes = [instruction.opcode for instruction in parse(code.sass)[0]]
    groups = {name: counts(opcodes, prefixes) for name, prefixes in OPCODES.items()}
    fused = len(re.findall(r"\bfma\.rn\.f32\b", code.ptx))
    # Without .rn ptxas may contract them unless told not to; divisions and unrolled loops make FFMA of their own.
    free = len(re.findall(r"\b(?:mul|add|sub)(?:\.ftz)?\.f32\b", code.ptx))
    return {
        "registers": {"entry": code.registers, "setmaxnreg": split},
        "memory": {"spill_bytes": code.spill_bytes, "smem_bytes": code.smem_bytes},
        **groups,
        "contraction": {
            "fmad": bool(options.get("enable_fp_fusion", True)),
            "ptx_fma": fused,
            "sass_ffma": groups["fp32"]["FFMA"],
            "ptx_contractible": free,
        },
        "serialisation": list(code.serialisation),
        "undefined_registers": undefined_uniform_registers(code.sass),
        "loops": [" ".join(f"{name} {n}" for name, n in loop.items() if n) for loop in tensor_loops(code.sass)],
        "ptx_sha256": ptx_sha256(code.ptx),
    }


def compile_launch(name: str) -> dict[str, Figures]:
    """Return the figures of the kernels of a probe, by ``launch/kernel`` (``#2`` the second), compiled if audited."""
    from fa3_reports.audit.calls import calls_of
    from fa3_reports.audit.compile import compile_call
    from fa3_reports.audit.launched import labelled, launch_figures
    from fa3_reports.audit.probes import audited, probes

    launch = next(x for x in probes() if x.name == name)
    is_audited = name in {x.name for x in audited()}
    found = {}
    for label, call in labelled(name, calls_of(launch)).items():
        found[label] = {"launch": launch_figures(launch, call)}
        if is_audited:
            code = compile_call(call)
            found[label] = figures_of(code, call.options) | found[label]
    return found


def compile_all(
    names: Iterable[str] = (), *, workers: int = 0, tell: Callable[[str], None] = lambda name: None
) -> dict[str, Figures]:
    """Compile audited launches, and record all probes, in parallel processes.

    Parameters
    ----------
    names : iterable of str
        All of them by default.
    workers : int
        Processes; 0 is one per core.
    tell : callable
        Gets the name of every launch as it is finished.

    Raises
    ------
    Unavailable
        Without torch or a supported Triton.
    ValueError
        For an unknown name.
    """
    from fa3_kernels.gluon import unsupported
    from fa3_reports.audit.probes import probes

    if reason := unsupported():
        raise Unavailable(reason)
    known = [x.name for x in probes()]
    chosen = list(dict.fromkeys(names)) or known
    if unknown := [name for name in chosen if name not in known]:
        raise ValueError(f"unknown launch {unknown[0]!r}; known are {', '.join(known)}")
    figures: dict[str, Figures] = {}
    with ProcessPoolExecutor(workers or os.cpu_count(), mp_context=get_context("spawn")) as pool:
        for name, found in zip(chosen, pool.map(compile_launch, chosen)):
            figures |= found
            tell(name)
    return figures


def broken_rules(figures: Mapping[str, Figures]) -> list[str]:
    """Return what must never be, accepted or not: spills that are not listed, serialised wgmma, contracted fp32."""
    broken = []
    for name, f in figures.items():
        if not is_compiled(f):
            continue
        allowed = ALLOWED_SPILL_BYTES.get(name, 0)
        contraction = f["contraction"]
        is_arrive = name in ALLOWED_ARRIVES
        serialised = [x for x in f["serialisation"] if not (is_arrive and "C7519" in x)]
        rules = (
            (
                f["memory"]["spill_bytes"] <= allowed,
                f"spills {f['memory']['spill_bytes']} bytes, allowed are {allowed}",
            ),
            (not serialised, f"ptxas serialised wgmma: {'; '.join(serialised)}"),
            (
                not f["undefined_registers"] or name in ALLOWED_UNDEFINED,
                f"registers are read that some path does not set: {'; '.join(f['undefined_registers'])}",
            ),
            (
                not contraction["fmad"] or contraction["ptx_contractible"] == 0,
                f"{contraction['ptx_contractible']} fp32 operations may be contracted",
            ),
        )
        broken += [f"{name}: {rule}" for ok, rule in rules if not ok]
    return broken


def _flat(figures: Figures) -> Figures:
    """One level: ``group.name``."""
    flat = {}
    for group, value in figures.items():
        if isinstance(value, Mapping):
            flat |= {f"{group}.{name}": inner for name, inner in value.items()}
        else:
            flat[group] = value
    return flat


def compare(golden: Mapping[str, Figures], figures: Mapping[str, Figures], *, partial: bool = False) -> list[str]:
    """Return one line per figure that moved, per kernel that is new and, unless ``partial``, per kernel that is gone.

    >>> compare({"a": {"memory": {"smem_bytes": 8}}}, {"a": {"memory": {"smem_bytes": 9}}})
    ['a: memory.smem_bytes 8 -> 9']
    """
    lines = []
    for name, now in figures.items():
        if name not in golden:
            lines.append(f"{name}: not in the golden file")
            continue
        before = _flat(golden[name])
        after = _flat(now)
        moved = [key for key in before | after if before.get(key) != after.get(key)]
        lines += [f"{name}: {key} {_text(before.get(key))} -> {_text(after.get(key))}" for key in moved]
    if not partial:
        lines += [f"{name}: in the golden file, no longer compiled" for name in golden if name not in figures]
    return lines


def _text(value: Any) -> str:
    text = str(value)
    return text[:12] if re.fullmatch(r"[0-9a-f]{64}", text) else text
