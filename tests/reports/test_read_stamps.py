"""Stamps of an instrumented kernel as events: what is read, from which zero, and what is none."""

from __future__ import annotations

import numpy as np
import pytest

from fa3_kernels.plan.stamps import COLUMNS, CONSUMER_EVENTS, PRODUCER_EVENTS
from fa3_reports.stamps import Stamp, read_stamps


def stamped(*entries: tuple[int, int, int, int], ctas: int = 1) -> np.ndarray:
    """Stamps of the last CTA: (actor, step, column, counter), for two consumers, a producer and five steps."""
    stamps = np.zeros((ctas, 3, 5, COLUMNS), np.uint32)
    for actor, step, column, counter in entries:
        stamps[-1, actor, step, column] = counter % 2**32
    return stamps.view(np.int32)


def test_every_column_of_every_actor_has_its_event() -> None:
    """Counters 100, 101, ...; the columns behind the events stay free."""
    entries = [(actor, 0, column, 100 + 4 * actor + column) for actor in range(3) for column in range(4)]
    names = [("consumer 0", CONSUMER_EVENTS), ("consumer 1", CONSUMER_EVENTS), ("producer", PRODUCER_EVENTS)]
    events = [(name, event) for name, some in names for event in some]
    expected = [Stamp(name, 0, event, i) for i, (name, event) in enumerate(events)]
    assert list(read_stamps(stamped(*entries))) == expected


def test_cycles_count_from_the_first_stamp_whoever_has_it() -> None:
    found = list(read_stamps(stamped((0, 0, 0, 700), (0, 1, 0, 900), (2, 0, 0, 650))))
    assert found == [
        Stamp("consumer 0", 0, "turn", 50),
        Stamp("consumer 0", 1, "turn", 250),
        Stamp("producer", 0, "k_free", 0),
    ]


# Just below the largest unsigned counter, and just below the largest signed one, from where int32 goes on at its least.
@pytest.mark.parametrize("edge", [2**32, 2**31])
@pytest.mark.parametrize("first", [0, 2])
def test_a_counter_that_wraps_counts_on(edge: int, first: int) -> None:
    """Whichever actor's stamp lies before the edge: consumer 0's is the one that the array begins with."""
    found = list(read_stamps(stamped((first, 0, 0, edge - 10), (2 - first, 0, 0, edge + 20))))
    assert sorted((stamp.cycle, stamp.actor == "producer") for stamp in found) == [(0, first == 2), (30, first == 0)]


def test_what_was_not_stamped_is_no_event() -> None:
    assert list(read_stamps(stamped((1, 2, 3, 5)))) == [Stamp("consumer 1", 2, "output", 0)]


def test_a_cta_is_read_alone() -> None:
    stamps = stamped((0, 0, 0, 40), ctas=2)
    assert [stamp.cycle for stamp in read_stamps(stamps, cta=1)] == [0]
    with pytest.raises(ValueError, match="CTA 0 has no stamps"):
        list(read_stamps(stamps))


@pytest.mark.parametrize(
    "stamps",
    [np.ones((3, 3, COLUMNS), np.int32), np.ones((1, 3, 3, 4), np.int32), np.ones((1, 3, 3, COLUMNS), np.int64)],
)
def test_an_array_of_another_kind_is_refused(stamps: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"stamps must be int32 \(ctas, actors, steps, 8\), got "):
        list(read_stamps(stamps))
