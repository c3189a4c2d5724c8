"""What the tables of a campaign are of: keys of the code that was judged and of the code that judged it.

Each key is :func:`fa3_reports.evidence_keys.judge_key` of a function, or the hash of a file of data that no function
names. What only writes a page is in none of them.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import fa3verify
from fa3_reports.evidence_keys import judge_key
from fa3_reports.merkle import short_hash
from fa3verify.files import json_text, write_text

_FORWARD = ("fa3_kernels.twin.forward:forward", "fa3verify.kernels.twins:TWINS")
# A kernel is told by the name of its family, so that no function names the file in which its order stands.
_FAMILIES = tuple(f"fa3_kernels.plan.families.{family}:FAMILIES" for family in ("ours", "flash3", "flash2", "cudnn"))
_TWINS = (*_FORWARD, "fa3_kernels.twin.backward:backward", "fa3_kernels.twin.quantize:quantize_qkv", *_FAMILIES)
_MUTATION = "fa3_reports.mutation"
ROOTS = {
    "museum": (*_TWINS, f"{_MUTATION}.museum:exhibits", f"{_MUTATION}.museum:show"),
    "uncommon": (*_TWINS, f"{_MUTATION}.uncommon:EXHIBITS", f"{_MUTATION}.museum:judged"),
    "grid": (*_FORWARD, *_FAMILIES, f"{_MUTATION}.grid:cells", f"{_MUTATION}.grid:examine_cell"),
    "automatic": (
        *_TWINS,
        *(f"{_MUTATION}.{name}" for name in ("reach:lines_of", "automatic:chosen", "automatic:_tasks")),
    ),
    "sound": (*_TWINS, f"{_MUTATION}.sound:run"),
}
_DATA = ("baselines/quick.json", "baselines/release.json", "activations/MANIFEST.json")
_VERSIONS = ("fa3verify", "numpy", "hypothesis")


def keys(kind: str) -> dict[str, str]:
    """Return the keys that a campaign of a kind has today, by what each is of; KeyError for an unknown kind."""
    of_code = {place: judge_key(*place.split(":")) for place in ROOTS[kind]}
    return of_code | {f"fa3verify/data/{path}": _of_data(path) for path in _DATA}


@cache
def _of_data(path: str) -> str:
    text = Path(fa3verify.__file__).with_name("data").joinpath(path).read_text(encoding="utf-8")
    return short_hash(json.dumps(json.loads(text), sort_keys=True))


def changed(kind: str, known: Mapping[str, str]) -> list[str]:
    """Return of what the keys of today are others than those that a campaign had."""
    return [name for name, key in keys(kind).items() if known.get(name) != key]


def name_of(kind: str) -> str:
    """Return the name of the file in which the facts of a campaign stand, beside its tables."""
    return f"{kind}_provenance.json"


def write(out: Path, kind: str, known: Mapping[str, str], asked: Mapping[str, Any]) -> None:
    """Write what a campaign was asked for, when and with which versions it ended, and its keys."""
    versions = {package: importlib.metadata.version(package) for package in _VERSIONS}
    facts = {
        "evidence_of": kind,
        "asked": dict(asked),
        "date_utc": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
        "versions": {"python": platform.python_version(), **versions},
        "keys": dict(known),
    }
    write_text(out / name_of(kind), json_text(facts))
