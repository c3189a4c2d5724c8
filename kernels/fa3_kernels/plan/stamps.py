"""The timeline of an instrumented kernel: which events it stamps, and how the stamps are read.

:mod:`fa3_kernels.gluon.stamps` writes them inside a kernel; the reports record and draw timelines with
:func:`read_stamps`. Stamps are int32 (ctas, actors, steps, COLUMNS): the lower half of the cycle counter, 0 where
nothing was stamped. Actors are the consumer warpgroups, then the producer. A step is a key block of a CTA, counted over
all its tiles; a consumer's step is P V of that block with the scores and the softmax of the next one, in the main loop
of a tile alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from fa3_reference.rules import require

COLUMNS = 8
STEPS = 512  # steps of a CTA in a recorded timeline; later steps are not stamped
# Turn taken; GEMMs issued and turn passed; S ready; P V done. There is no event where nothing waits, such as behind the
# exponentials: ptxas moves no instruction over a clock read, and the order it chooses there is worth 5 %.
CONSUMER_EVENTS = ("turn", "issued", "scores", "output")
PRODUCER_EVENTS = (
    "k_free",
    "k_issued",
    "v_free",
    "v_issued",
)  # slot free to be written; its load or transposition done
# The events that kernels stamp. A consumer stamps one event a step: with all four fp16 at head_dim 128 was 19 % slower
# on an H200, with the turn and one of the others 12 to 16 %, with the turn and the producer's events 0.1 %.
STAMPED = ("turn", *PRODUCER_EVENTS)


class Stamp(NamedTuple):
    """One event of an actor in a step; ``cycle`` counts from the first stamp of the CTA."""

    actor: str
    step: int
    event: str
    cycle: int


def read_stamps(stamps: np.ndarray, cta: int = 0) -> Iterator[Stamp]:
    """Yield the events of one CTA, by actor and step.

    Parameters
    ----------
    stamps : int32 (ctas, actors, steps, COLUMNS)
    cta : int

    Raises
    ------
    ValueError
        If nothing was stamped, or the array has not the shape and type of stamps.
    """
    require(
        stamps.ndim == 4 and stamps.dtype == np.int32 and stamps.shape[3] == COLUMNS,
        f"stamps must be int32 (ctas, actors, steps, {COLUMNS}), got {stamps.dtype} {stamps.shape}",
    )
    mine = stamps[cta]
    written = mine[mine != 0]
    require(written.size, f"CTA {cta} has no stamps")
    since = mine - written[0]  # wraps as the counter does
    since -= since[mine != 0].min()
    for actor in range(mine.shape[0]):
        is_producer = actor == mine.shape[0] - 1
        events = PRODUCER_EVENTS if is_producer else CONSUMER_EVENTS
        name = "producer" if is_producer else f"consumer {actor}"
        for step in range(mine.shape[1]):
            for column, event in enumerate(events):
                if mine[actor, step, column]:
                    yield Stamp(name, step, event, int(since[actor, step, column]))
