"""The golden file of the audit: the figures of every shipped kernel as accepted, its PTX's hash among them. Needs no compiler."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "audit.json"
Figures = dict[str, Any]


def read_golden(path: Path = GOLDEN) -> dict[str, Figures]:
    """Read the accepted figures; ValueError if the file is none of ours."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        if body["schema"] != "fa3verify.audit/1":
            raise ValueError(f"schema must be fa3verify.audit/1, got {body['schema']!r}")
        return body["kernels"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name} is not a golden file of the audit: {error}") from None


def golden_text(figures: Mapping[str, Figures]) -> str:
    """Return the golden file: one group of figures per line, so that a diff shows which moved.

    >>> print(golden_text({"a": {"memory": {"smem_bytes": 8}}}), end="")
    {"schema": "fa3verify.audit/1", "kernels": {
    "a": {
      "memory": {"smem_bytes": 8}
    }
    }}
    """
    bodies = []
    for name, groups in figures.items():
        lines = ",\n".join(f"  {json.dumps(group)}: {json.dumps(value)}" for group, value in groups.items())
        bodies.append(f"{json.dumps(name)}: {{\n{lines}\n}}")
    return '{"schema": "fa3verify.audit/1", "kernels": {\n' + ",\n".join(bodies) + "\n}}\n"
