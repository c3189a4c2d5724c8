"""Record a measured timeline: an instrumented kernel's stamps, in a file for :mod:`fa3_reports.stamps`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby, takewhile
from pathlib import Path

import numpy as np
import torch

from fa3_kernels.audit.evidence import evidence_facts
from fa3_kernels.plan.choose import config_of
from fa3_kernels.plan.request import Choices
from fa3_kernels.plan.stamps import COLUMNS
from fa3_reference.problem import AttentionProblem
from fa3_reports.stamps import FIELDS, STEPS, Stamp, read_stamps
from fa3verify.bench import graphs, kernels
from fa3verify.files import write_text
from fa3verify.known.launches import Keywords
from fa3verify.timed import timing

BLOCKS = 24  # key blocks that are kept, as many as a simulated timeline shows
PACE = timing.Pace(rounds=5, pause_s=0.1)


def record(problem: AttentionProblem, options: Keywords, path: Path) -> tuple[float, float]:
    """Write the timeline of CTA 0 of our kernel, up to its :data:`BLOCKS`-th key block.

    Parameters
    ----------
    problem : AttentionProblem
    options : dict
        Launch options, see :func:`fa3verify.bench.tuning.options_of`.
    path : Path
        The file. It is also written if the stamps slow the kernel down too much; then its reader refuses it.

    Returns
    -------
    slowdown, sm_mhz : float
        SM cycles with stamps over those without, and the clock of the bursts with stamps.

    Raises
    ------
    ValueError
        For options that the kernel does not take, and for a schedule whose consumers stamp nothing.
    RuntimeError
        When the bits of the instrumented kernel are not those of the kernel, or the SMs' counters gave no clock.
    """
    inputs = kernels.draw(problem, kernels.MAX_COPIES, 0)
    config = config_of(problem, **options)
    ctas = torch.cuda.get_device_properties(0).multi_processor_count
    shape = (ctas, config.consumers + 1, STEPS, COLUMNS)
    stamps = torch.zeros(shape, dtype=torch.int32, device=inputs[0].q.device)

    launch = kernels.our_launch(problem, inputs, Choices(**options))

    def stamped(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return launch(i, stamps=stamps)

    _check_bits(launch(0), stamped(0))
    slowdown, sm_mhz = _slowdown(launch, stamped)
    stamps.zero_()
    stamped(0)
    kept = list(first_blocks(stamps.cpu().numpy()))
    if not any(stamp.event == "turn" for stamp in kept):
        raise ValueError(f"a {problem.dtype} schedule with {dict(options)} has consumers that stamp nothing")
    facts = _facts(problem, options, (config.tile_m, config.tile_n), slowdown, sm_mhz)
    write_text(path, csv_text(facts, kept))
    return slowdown, sm_mhz


def _check_bits(plain: tuple[torch.Tensor, ...], stamped: tuple[torch.Tensor, ...]) -> None:
    """Raise RuntimeError unless both kernels give the same bits, NaN included."""
    for name, bits, a, b in zip(("out", "lse"), (torch.int16, torch.int32), plain, stamped):
        if not torch.equal(a.view(bits), b.view(bits)):
            raise RuntimeError(f"the instrumented kernel must give the bits of the kernel, but its {name} differs")


def _slowdown(plain: Callable[[int], object], stamped: Callable[[int], object]) -> tuple[float, float]:
    """Time both kernels in turn; return slowdown and SM clock in MHz, rounded as the file has them."""
    runs = {"plain": graphs.GraphTimed(plain), "stamped": graphs.GraphTimed(stamped)}
    bursts = timing.measure(runs, PACE)
    cycles = {name: timing.median(map(timing.cycles, each)) for name, each in bursts.items()}
    clock = timing.median(burst.sm_mhz for burst in bursts["stamped"])
    if not math.isfinite(clock):
        raise RuntimeError("the SMs' counters gave no clock")
    return round(cycles["stamped"] / cycles["plain"], 4), round(clock, 1)


def first_blocks(stamps: np.ndarray, blocks: int = BLOCKS) -> Iterator[Stamp]:
    """Yield the stamps of CTA 0 by actor and in time, until the actor comes to key block ``blocks``.

    Later stamps are dropped even if they belong to an earlier block (V is transposed a step behind the loads), as there
    would be a gap in front of them.
    """
    for _, mine in groupby(read_stamps(stamps), key=lambda stamp: stamp.actor):
        yield from takewhile(lambda stamp: stamp.step < blocks, sorted(mine, key=lambda stamp: stamp.cycle))


def csv_text(facts: Mapping[str, object], stamps: list[Stamp]) -> str:
    """Return the text of a file that :func:`fa3_reports.stamps.read` reads.

    >>> print(csv_text({"kernel": "gluon"}, [Stamp("producer", 0, "k_free", 7)]), end="")
    # kernel=gluon
    actor,step,event,cycle
    producer,0,k_free,7
    """
    rows = [",".join(map(str, stamp)) for stamp in stamps]
    head = [f"# {key}={value}" for key, value in facts.items()]
    return "\n".join([*head, ",".join(FIELDS), *rows, ""])


def _facts(
    problem: AttentionProblem, options: Keywords, tile: tuple[int, int], slowdown: float, sm_mhz: float
) -> dict[str, object]:
    """Return the values of :data:`fa3_reports.stamps.KEYS`, and what else ran, where and when."""
    return {
        "kernel": "gluon",
        "dtype": problem.dtype,
        "head_dim": problem.head_dim,
        "tile": f"{tile[0]}x{tile[1]}",
        "seqlen": problem.seqlen_k,
        "causal": str(problem.causal).lower(),
        "sm_mhz": sm_mhz,
        "slowdown": slowdown,
        "batch": problem.batch,
        "nheads": problem.nheads,
        **{name: value for name, value in options.items() if name != "tile"},
        "cta": 0,
        "gpu": timing.query("name"),
        "driver": timing.query("driver_version"),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **evidence_facts("timeline"),
    }
