"""Time schedules of our kernels, for the verb tune, which ranks them by simulation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fa3_kernels.plan.config import Config
from fa3_kernels.plan.request import Choices
from fa3_reference.problem import AttentionProblem
from fa3verify.bench import kernels
from fa3verify.known.launches import Keywords
from fa3verify.operations import FORWARD
from fa3verify.timed import timing


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


def measure_cycles(problem: AttentionProblem, options: Sequence[Keywords]) -> list[float | str]:
    """Time our kernel with each set of launch options: interleaved cool bursts, in SM cycles by the counted clock.

    Parameters
    ----------
    problem : AttentionProblem
    options : sequence of dict
        Options of launches, see :func:`options_of`.

    Returns
    -------
    list of float or str
        Median cycles of a launch, or why there are none: it is refused or fails, or its bits differ from the twin's.
    """
    tried = {str(i): partial(kernels.ours, Choices(**chosen)) for i, chosen in enumerate(options)}
    return [
        timing.median(map(timing.cycles, x.bursts)) if x.bursts else f"{x.status}: {x.reason}"
        for x in kernels.measured((problem, FORWARD), tried).values()
    ]
