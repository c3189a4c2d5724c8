"""The sizes with which a launch of a known problem is planned."""

from __future__ import annotations

from dataclasses import replace

from fa3_reference.problem import AttentionProblem
from fa3_reports.audit.calls import sizes_of


def test_sizes_of_known_lengths():
    problem = AttentionProblem.varlen((3, 5), (4, 0), nheads=2, nheads_kv=1, head_dim=64)
    assert sizes_of(problem) == (8, 4, (5, 4))
    assert sizes_of(replace(problem, seqlens_q=None, seqlens_k=None)) == (5, 4, (0, 0))
