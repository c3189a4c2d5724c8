"""The dataset of a run: one netCDF file with every judged case, law and gate rule, as an xarray DataTree.

:mod:`fa3verify.report.build` writes it and makes every page of a report from it. Groups are ``/cases``, ``/laws``,
``/gate`` and ``/provenance``; files of earlier versions also have ``/studies``, which is not read. The root attribute
``summary_json`` holds the summary without :data:`CIRCUMSTANCES`, which are in ``circumstances_json``. Attributes follow
CF.

``content_sha256`` covers the data: equal data have an equal hash, whenever, wherever and in however many shards they
were made. ``provenance_sha256`` covers the rest, so that all damage is noticed. Equal content gives equal bytes for one
version of the libraries.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from fa3_reference.rules import require
from fa3verify.campaign import run
from fa3verify.campaign.run import Run
from fa3verify.files import Json, plain, replacing
from fa3verify.judging.metrics import all_measures

SCHEMA = "fa3verify.run/2"
CIRCUMSTANCES = ("command", "started", "wall_s", "cpu_s", "provenance")  # keys of a summary: when, where and how
ENGINE = "h5netcdf"
_GATE_NUMBERS = {
    "observed": "what the run gave",
    "limit": "what the policy allows",
    "baseline": "what the stored baseline has",
    "margin": "distance to the limit, as the policy defines it; negative fails",
}


def to_tree(found: Run) -> xr.DataTree:
    """Build the tree of a run; :func:`from_tree` returns the run from the summary in it."""
    body = plain(found.to_json())
    laws = [{"kernel": kernel["name"], **law} for kernel in body["kernels"] for law in kernel["laws"]]
    groups = {
        "/": xr.Dataset(attrs=_root_attributes(found, body)),
        "/cases": _cases(found),
        "/laws": _table(
            "law_run",
            laws,
            ("kernel", "law", "statement", "kind", "status", "message", "replay"),
            {"examples": "examples tried", "outputs": "output values checked"},
        ),
        "/gate": _table("rule_run", body["gate"], ("layer", "rule", "kernel", "family", "status"), _GATE_NUMBERS),
        "/provenance": xr.Dataset(attrs={key: _text(item) for key, item in body["provenance"].items()}),
    }
    tree = xr.DataTree.from_dict(groups)
    tree.attrs |= _checksums(tree)
    return tree


def _root_attributes(found: Run, body: Json) -> dict[str, str]:
    """Return all attributes of the root except the checksums, which are of the finished tree.

    ``body`` is the run as JSON values.
    """
    circumstances = {key: value for key, value in body.items() if key in CIRCUMSTANCES}
    data = {key: value for key, value in body.items() if key not in CIRCUMSTANCES}
    return {
        "Conventions": "CF-1.11",
        "fa3verify_schema": SCHEMA,
        "title": "fa3verify: numerical verification of FlashAttention-3 kernels",
        "source": f"fa3verify {found.version}, profile {found.profile}, seed {found.seed}",
        "history": f"{found.started} {found.command}",
        "references": "FlashAttention-3, arXiv:2407.08608",
        "summary_json": json.dumps(data, sort_keys=True, ensure_ascii=False),
        "circumstances_json": json.dumps(circumstances, sort_keys=True, ensure_ascii=False),
    }


def _cases(found: Run) -> xr.Dataset:
    """Return a variable for each figure over all judged cases; a figure that a case lacks is NaN."""
    cases = found.cases
    data: dict[str, Any] = {
        "kernel": _texts("case", [case.kernel for case in cases], "name of the kernel"),
        "family": _texts("case", [case.family for case in cases], "kind of input"),
        "case_json": _texts("case", [case.case.key() for case in cases], "replayable case"),
    }
    for name, (unit, meaning) in all_measures(kernel.operation for kernel in found.kernels).items():
        attributes = {"units": "1" if unit in ("ulp", "nat") else unit, "long_name": meaning}
        if unit in ("ulp", "nat"):
            attributes["comment"] = f"counted in {unit}"
        data[name] = ("case", np.array([case.measures.get(name) for case in cases], float), attributes)
    return xr.Dataset(data)


def _table(dim: str, rows: Sequence[Json], texts: Sequence[str], numbers: Mapping[str, str]) -> xr.Dataset:
    data = {name: _texts(dim, [_text(row.get(name)) for row in rows], name.replace("_", " ")) for name in texts}
    return xr.Dataset(
        data
        | {
            name: (dim, np.array([row.get(name) for row in rows], float), {"units": "1", "long_name": meaning})
            for name, meaning in numbers.items()
        }
    )


def _texts(dim: str, values: list[str], meaning: str) -> tuple:
    return dim, np.array(values, object) if values else np.array([], "U1"), {"long_name": meaning}


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, sort_keys=True)


_OF_PROVENANCE = ("history", "circumstances_json")  # attributes of the root


def _checksums(tree: xr.DataTree) -> dict[str, str]:
    """Return both checksums of a tree, by the names of the attributes that hold them."""
    facts = [{key: tree.attrs.get(key) for key in _OF_PROVENANCE}, plain(tree["provenance"].attrs)]
    provenance = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return {"content_sha256": checksum(tree), "provenance_sha256": provenance}


def checksum(tree: xr.DataTree) -> str:
    """Return the SHA-256 over the data: all names, dimensions, values and attributes of the tree.

    The group ``/provenance``, the attributes that say when and how the run was made, and the checksums are left out.
    """
    omitted = {*_OF_PROVENANCE, "content_sha256", "provenance_sha256"}
    digest = hashlib.sha256()
    for node in sorted(tree.subtree, key=lambda node: node.path):
        if node.path == "/provenance":
            continue
        attributes = {key: plain(value) for key, value in node.attrs.items() if key not in omitted}
        digest.update(json.dumps([node.path, attributes], sort_keys=True).encode())
        for name in sorted(map(str, node.variables)):
            variable = node.variables[name]
            head = [name, list(variable.dims), {key: plain(value) for key, value in variable.attrs.items()}]
            digest.update(json.dumps(head, sort_keys=True).encode() + _content(np.asarray(variable.values)))
    return digest.hexdigest()


def _content(values: np.ndarray) -> bytes:
    """Return the bytes of an array that are hashed: numbers as little-endian float64, all else as JSON texts."""
    if values.dtype.kind in "biuf":
        return np.ascontiguousarray(values, "<f8").tobytes()
    return json.dumps([str(value) for value in values.ravel()]).encode()


def save(tree: xr.DataTree, path: Path) -> None:
    """Write a tree, read it back, and only then put it in place.

    Raises
    ------
    OSError
        From the file system, or if the file does not read back; ``path`` then has its former content.
    """
    with replacing(Path(path)) as temporary:
        tree.to_netcdf(temporary, engine=ENGINE)
        try:
            load(temporary)
        except ValueError as error:
            raise OSError(f"{path} could not be written: {error}") from error


def load(path: Path) -> xr.DataTree:
    """Read a tree that :func:`save` wrote, into memory.

    Raises
    ------
    ValueError
        If the file is missing, no netCDF file, another program's, of another schema, or damaged; the path is named.
    """
    try:
        tree = xr.open_datatree(path, engine=ENGINE)
    except Exception as error:  # h5py and xarray raise many types on foreign bytes
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} is not a readable netCDF file: {reason}") from None
    try:
        tree.load()
        schema = tree.attrs.get("fa3verify_schema")
        require(schema == SCHEMA, f"{path} is not a run of this program: expected schema {SCHEMA!r}, got {schema!r}")
        require(
            not any(tree.attrs.get(key) != value for key, value in _checksums(tree).items()),
            f"{path} is damaged: its content does not match its checksums",
        )
    except (OSError, KeyError, RuntimeError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}") from None
    finally:
        tree.close()
    return tree


def from_tree(tree: xr.DataTree) -> Run:
    """Return the run of a tree; ValueError if its summary is not one of this program."""
    return run.parse(summary_of(tree), "summary")


def summary_of(tree: xr.DataTree) -> Json:
    """Return the JSON of the run of a tree, as it was written."""
    return json.loads(tree.attrs["summary_json"]) | json.loads(tree.attrs["circumstances_json"])
