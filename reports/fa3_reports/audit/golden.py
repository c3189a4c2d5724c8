"""The golden file of the audit: figures of every audited kernel and what every probe launches, as accepted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fa3_kernels.audit.evidence import ACCEPTED

Figures = dict[str, Any]


def read_rows(path: Path = ACCEPTED) -> dict[str, Figures]:
    """Read all rows, of launches that are not compiled too; ValueError if the file is none of ours."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        if body["schema"] != "fa3verify.audit/1":
            raise ValueError(f"schema must be fa3verify.audit/1, got {body['schema']!r}")
        return body["kernels"] | body.get("launches", {})
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name} is not a golden file of the audit: {error}") from None


def golden_text(figures: Mapping[str, Figures]) -> str:
    """Return the golden file: one group of figures per line, so that a diff shows which moved; rows without any apart.

    >>> print(golden_text({"a": {"memory": {"smem_bytes": 8}}}), end="")
    {"schema": "fa3verify.audit/1", "kernels": {
    "a": {
      "memory": {"smem_bytes": 8}
    }
    }}
    """
    launches = {name: groups for name, groups in figures.items() if not is_compiled(groups)}
    kernels = {name: groups for name, groups in figures.items() if name not in launches}
    text = '{"schema": "fa3verify.audit/1", "kernels": {\n' + _rows(kernels) + "\n}"
    return text + (', "launches": {\n' + _rows(launches) + "\n}" if launches else "") + "}\n"


def is_compiled(groups: Figures) -> bool:
    """Tell whether a row has figures of the compiled kernel, and not the launch alone."""
    return set(groups) != {"launch"}


def _rows(figures: Mapping[str, Figures]) -> str:
    bodies = []
    for name, groups in figures.items():
        lines = ",\n".join(f"  {json.dumps(group)}: {json.dumps(value)}" for group, value in groups.items())
        bodies.append(f"{json.dumps(name)}: {{\n{lines}\n}}")
    return ",\n".join(bodies)
