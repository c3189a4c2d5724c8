"""This module says what a study is: a list of independent units of work, and how their records become one dataset.

A unit is a top-level function with JSON arguments that returns a list of records (dicts of JSON values), so that any
executor can run it, a journal can store it and a lost one costs a NaN, never the study.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import xarray as xr

Profile = Literal["quick", "release", "soak"]
PROFILES: tuple[Profile, ...] = ("quick", "release", "soak")
Record = dict[str, Any]
Records = list[Record]


class Extent(NamedTuple):
    """How much a study does under a profile: query rows, numbers of keys, and how often inputs are drawn."""

    rows: int
    lengths: tuple[int, ...]
    draws: int


@dataclass(frozen=True, slots=True)
class Unit:
    """One piece of work: ``run(**kwargs)`` returns records; equal keys mean equal results."""

    study: str
    run: Callable[..., Records]
    kwargs: Mapping[str, Any]

    def __call__(self) -> Records:
        return self.run(**self.kwargs)

    @property
    def key(self) -> str:
        """Identity for journals: study, function and arguments."""
        return f"{self.study}/{self.run.__name__}/{json.dumps(dict(self.kwargs), sort_keys=True)}"


@dataclass(frozen=True, slots=True)
class Study:
    """A question that a report answers with data.

    Parameters
    ----------
    name : str
        Group of the dataset file, ``/studies/<name>``.
    units : callable
        ``units(profile, seed) -> list[Unit]``; all seeds used derive from ``seed`` by addition.
    assemble : callable
        ``assemble(list of unit results) -> xr.Dataset``; results may come in any order, and some may be missing.
    of_kernel : callable
        ``of_kernel(kernel, profile, seed) -> list[Unit]``: what is asked of every FP8 forward that a campaign judges.
    """

    name: str
    units: Callable[[Profile, int], list[Unit]] = field(repr=False)
    assemble: Callable[[Sequence[Records]], xr.Dataset] = field(repr=False)
    of_kernel: Callable[[str, Profile, int], list[Unit]] = field(default=lambda kernel, profile, seed: [], repr=False)


class Variable(NamedTuple):
    """Unit (UDUNITS) and meaning of a data variable."""

    units: str
    long_name: str


def flatten(results: Iterable[Records]) -> Records:
    """Join the records of every unit that delivered any.

    Raises
    ------
    ValueError
        If there is none.
    """
    records = [record for part in results for record in part]
    if not records:
        raise ValueError("a study needs at least one unit's result, got none")
    return records


def pivot(
    records: Records, dims: Sequence[str], variables: Mapping[str, Variable], *, title: str, **attrs: str
) -> xr.Dataset:
    """Spread records over a grid.

    Parameters
    ----------
    records : list of dict
        Each holds every name of ``dims`` and any of ``variables`` (numbers).
    dims : sequence of str
        Coordinates: numbers ascend, texts keep the order of ``variables``-independent first appearance.
    variables : mapping
        Data variables to take.
    title, attrs : str
        Attributes of the dataset.

    Returns
    -------
    xr.Dataset
        float64; NaN where no record is. Of two records at one place the later wins.
    """
    import xarray as xr

    axes = {dim: _axis([record[dim] for record in records]) for dim in dims}
    places = {dim: {value: i for i, value in enumerate(axis)} for dim, axis in axes.items()}
    grids = {name: np.full([len(axis) for axis in axes.values()], np.nan) for name in variables}
    for record in records:
        where = tuple(places[dim][record[dim]] for dim in dims)
        for name in variables:
            if name in record:
                grids[name][where] = record[name]
    coords = {dim: np.array(axis, object if isinstance(axis[0], str) else None) for dim, axis in axes.items()}
    data = {name: (tuple(dims), grids[name], variables[name]._asdict()) for name in variables}
    return xr.Dataset(data, coords, {"title": title, **attrs})


def _axis(values: list) -> list:
    unique = list(dict.fromkeys(values))
    return unique if isinstance(unique[0], str) else sorted(unique)


def run_serially(study: Study, profile: Profile, seed: int) -> xr.Dataset:
    """Run every unit in this process and assemble the dataset."""
    return study.assemble([unit() for unit in study.units(profile, seed)])


def rms(x: np.ndarray) -> float:
    """Root mean square, 0 for nothing."""
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0
