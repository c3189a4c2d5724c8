"""Independent draws reach more of the space than Hypothesis's own, and as much as is published."""

from __future__ import annotations

from pathlib import Path

from tests.quality.distinct_draws import hypothesis_draws, seeds_and_switches

NOTE = Path(__file__).parents[2] / "reports" / "notes" / "draws.md"


def test_sixty_independent_trials_hold_the_published_seeds_switches_and_windows():
    with hypothesis_draws():
        before = seeds_and_switches(60)
    drawn = seeds_and_switches(60)
    assert all(own >= other for own, other in zip(drawn, before, strict=True))
    assert drawn[0] > 2 * before[0]
    assert f"| 60 | independent | {' | '.join(map(str, drawn))} |" in NOTE.read_text()
