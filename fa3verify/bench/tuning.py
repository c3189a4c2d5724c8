"""Compile and time schedules of our kernels, for the verb tune, which ranks them by simulation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from fa3_kernels.audit.calls import forward_calls
from fa3_kernels.audit.compile import compile_call
from fa3_kernels.audit.sass import tensor_loops
from fa3_kernels.audit.shipped import ShippedLaunch
from fa3_kernels.plan.config import Config
from fa3_kernels.plan.request import Choices
from fa3_reference.problem import AttentionProblem
from fa3verify.bench import kernels
from fa3verify.known.launches import Keywords
from fa3verify.timed import timing

_REGISTER = re.compile(r"\bR(\d+)\b")


class Built(NamedTuple):
    """One compiled schedule; ``note`` says what is wrong, empty for a sound one.

    ``registers`` are those that the code names in one thread of a consumer, to which setmaxnreg gives the most.
    """

    registers: int = 0
    spill_bytes: int = 0
    note: str = ""


def options_of(config: Config, problem: AttentionProblem) -> Keywords:
    """Return the fields of :class:`fa3_kernels.plan.request.Choices` with which a launch has a configuration.

    >>> options_of(Config(tile_n=64, pingpong=False, pack_gqa=True), AttentionProblem(1, 8, 2, 1, 4096, 128))
    {'tile': (128, 64), 'pingpong': False, 'intra_wg_overlap': True, 'pack_gqa': True}
    """
    c = config
    options = {"tile": (c.tile_m, c.tile_n), "pingpong": c.pingpong, "intra_wg_overlap": c.intra_wg_overlap}
    options |= {"promotion_interval": c.promotion_interval} if c.is_fp8 else {}
    options |= {"num_splits": c.num_splits} if c.num_splits > 1 else {}
    return options | ({"pack_gqa": c.pack_gqa} if problem.group > 1 else {})


def compile_schedule(problem: AttentionProblem, config: Config) -> Built:
    """Compile our kernel for sm_90a as a launch with this schedule would; an error becomes the note."""
    try:
        options = options_of(config, problem)
        (call,) = forward_calls(ShippedLaunch("tune", problem, options))
        code = compile_call(call)
    except ValueError as error:
        return Built(note=f"refused: {error}")
    except Exception as error:  # the compiler may raise anything
        return Built(note=f"does not compile: {type(error).__name__}: {' '.join(str(error).split())[:120]}")
    spills = sum(loop[name] for loop in tensor_loops(code.sass) for name in ("LDL", "STL"))
    notes = [f"{spills} spill instructions in the loops"] if spills else []
    notes += ["ptxas serialised wgmma"] if code.serialisation else []
    registers = 1 + max(int(n) for n in _REGISTER.findall(code.sass))
    return Built(registers, code.spill_bytes, ", ".join(notes))


def measure_cycles(problem: AttentionProblem, options: Sequence[Keywords]) -> list[float | str]:
    """Time our kernel with each set of launch options: interleaved cool bursts, in SM cycles by the counted clock.

    Parameters
    ----------
    problem : AttentionProblem
    options : sequence of dict
        ShippedLaunch options, see :func:`options_of`.

    Returns
    -------
    list of float or str
        Median cycles of a launch, or why there are none: it is refused or fails, or its bits differ from the twin's.
    """
    tried = {str(i): partial(kernels.ours, Choices(**chosen)) for i, chosen in enumerate(options)}
    return [
        timing.median(map(timing.cycles, x.bursts)) if x.bursts else f"{x.status}: {x.reason}"
        for x in kernels.measured(problem, tried).values()
    ]
