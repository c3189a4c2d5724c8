"""Counts of the instructions of compiled kernels."""

from __future__ import annotations

from typing import Any

from fa3_kernels.audit.sass import parse


def count(code: Any, prefix: str) -> int:
    """Return how many SASS instructions of a compiled kernel have an opcode that starts with ``prefix``."""
    return sum(instruction.opcode.startswith(prefix) for instruction in parse(code.sass)[0])
