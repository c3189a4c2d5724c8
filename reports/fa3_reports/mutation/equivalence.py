"""Mutants that compute the same as the original, each with the argument why, from ``equivalent.toml``.

An entry counts only while no comparison of bits contradicts it; one that names no mutant any more fails a test.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

_FILE = Path(__file__).with_name("equivalent.toml")


def _read(path: Path) -> Mapping[str, str]:
    """Arguments by the identity of a mutant; ValueError for a mutant that has two."""
    found: dict[str, str] = {}
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["equivalent"]:
        for mutant in entry["mutants"]:
            if mutant in found:
                raise ValueError(f"{path.name} names a mutant twice: {mutant}")
            found[mutant] = entry["argument"]
    return found


EQUIVALENT: Mapping[str, str] = _read(_FILE)
