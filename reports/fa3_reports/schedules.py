"""The schedules of all kernels that ship and of FlashAttention-3, by name, and a proof of each for hazards.

The proof holds for problems of any length; it stands in :mod:`fa3_simulator.unbounded`. Kernels whose programs differ
in sizes alone share one (:func:`fa3_simulator.unbounded.shape`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from fa3_kernels.plan.config import KERNEL_HEAD_DIMS, Config
from fa3_kernels.plan.families import FAMILIES, OURS
from fa3_reference.problem import AttentionProblem, Dtype
from fa3_reports.audit.calls import plan_for
from fa3_reports.audit.launches import launches
from fa3_simulator import unbounded
from fa3_simulator.backward_choice import shipped_schedule
from fa3_simulator.cta import AnyConfig, kernel_of
from fa3_simulator.footprint import footprint
from fa3_simulator.machine import Machine
from fa3_simulator.schedules import TileBlocks
from fa3verify.hazards import Checked

PEER = "flash3"


def named() -> dict[str, AnyConfig]:
    """Return the schedules by kernel: launches of :func:`fa3_reports.audit.launches.launches`, then those of
    FlashAttention-3, as ``flash3_fp16_d128``.

    >>> "fp16_d128_dense" in named()
    True
    """
    schedules = {
        x.name: shipped_schedule(x.problem, OURS) if x.function == "backward" else plan_for(x).config
        for x in launches()
        if x.function in ("forward", "backward")
    }
    dtypes: tuple[Dtype, ...] = ("fp16", "e4m3")
    for dtype, d, causal in product(dtypes, KERNEL_HEAD_DIMS, (False, True)):
        choice = FAMILIES[PEER].shipped(AttentionProblem(1, 1, 1, 1024, 1024, d, dtype=dtype, causal=causal))
        assert choice is not None
        name = f"{PEER}_{dtype}_d{d}" + "_causal" * causal
        schedules[name] = Config(dtype, d, **choice._asdict(), family=PEER, promotion_interval=0)
    for d in (64, 96, 128, 192, 256):  # the head dims of FlashAttention-3's backward
        problem = AttentionProblem(1, 1, 1, 1024, 1024, d)
        schedules[f"{PEER}_backward_d{d}"] = shipped_schedule(problem, PEER)
    return schedules


def check(kernels: Mapping[str, AnyConfig], machine: Machine) -> Iterator[Checked]:
    """Yield the proof of every shape among the kernels, in their order, with misfits of the machine added."""
    shapes: dict[tuple, list[str]] = {}
    for name, config in kernels.items():
        shape = unbounded.shape(kernel_of(config).program, is_persistent=kernel_of(config).is_persistent)
        shapes.setdefault(shape, []).append(name)
    for names in shapes.values():
        config = kernels[names[0]]
        proof = unbounded.prove(kernel_of(config).program, is_persistent=kernel_of(config).is_persistent)
        programs = [kernel_of(kernels[name]).program([TileBlocks(2)]) for name in names]
        misfits = dict.fromkeys(x for program in programs for x in footprint(program, machine))  # each once, in order
        yield Checked(tuple(names), programs[0].name, proof._replace(findings=[*proof.findings, *misfits]))
