"""What a study is: a measurement of independent units, and how their records become one dataset.

A unit is a set of JSON arguments to the study's measurement, a top-level function that returns a list of records (dicts
of JSON values), so that any executor can run it, a journal can store it and a lost one costs a NaN, never the study.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from fa3_reference.attention import attention
from fa3_reference.problem import AttentionProblem, Operands
from fa3_reference.quantize import QuantScheme, prepare
from fa3_reference.scales import Granularity
from fa3verify.campaign.profiles import ProfileName
from fa3verify.cases.case import Case
from fa3verify.files import Json
from fa3verify.inputs.recipe import Recipe
from fa3verify.judging.judgement import Judgement, judge
from fa3verify.known import registry
from fa3verify.report.tables import PageTable

Records = list[Json]
HEAD_DIM = 64  # of the studies that do not say another


class Extent(NamedTuple):
    """How much a study does under a profile: query rows, numbers of keys, and how often inputs are drawn."""

    rows: int
    lengths: tuple[int, ...]
    draws: int


@dataclass(frozen=True, slots=True)
class Study:
    """A question that a release answers with data, and what a reader sees of the answer.

    Parameters
    ----------
    name : str
        Group of the dataset file, and anchor of the page.
    measure : callable
        ``measure(**unit) -> list of records``; equal units mean equal records.
    units : callable
        ``units(profile, seed) -> list of units``; all seeds used derive from ``seed`` by addition.
    dataset : callable
        ``dataset(records) -> xr.Dataset``; units may come in any order, and some may be missing.
    draw : callable
        Draws the dataset, within :func:`fa3verify.report.svg.styled`.
    title, reading : str
        Heading and caption of the figure; ``reading`` tells what to see, never what to hope.
    table : callable, optional
        What stands beside the figure.
    """

    name: str
    measure: Callable[..., Records] = field(repr=False)
    units: Callable[[ProfileName, int], list[Json]] = field(repr=False)
    dataset: Callable[[Records], xr.Dataset] = field(repr=False)
    draw: Callable[[xr.Dataset], Figure] = field(kw_only=True, repr=False)
    title: str = field(kw_only=True)
    reading: str = field(kw_only=True)
    table: Callable[[xr.Dataset], PageTable] | None = field(default=None, kw_only=True, repr=False)

    def assemble(self, results: Iterable[Records]) -> xr.Dataset:
        """Return the dataset of what every unit delivered.

        Raises
        ------
        ValueError
            If there is no record.
        """
        records = [record for part in results for record in part]
        if not records:
            raise ValueError("a study needs at least one unit's result, got none")
        return self.dataset(records)


def meaning(long_name: str, units: str = "1") -> dict[str, str]:
    """Return the attributes of a variable: what it is, and its unit (UDUNITS)."""
    return {"units": units, "long_name": long_name}


def pivot(
    records: Records, dims: Sequence[str], variables: Mapping[str, str], *, title: str = "", comment: str = ""
) -> xr.Dataset:
    """Spread records over a grid.

    Parameters
    ----------
    records : list of dict
        Each holds every name of ``dims`` and any of ``variables`` (numbers).
    dims : sequence of str
        Coordinates: numbers ascend, texts keep the order of ``variables``-independent first appearance.
    variables : mapping
        Data variables to take, with their meaning; their unit is 1.
    title, comment : str
        Attributes of the dataset.

    Returns
    -------
    xr.Dataset
        float64; NaN where no record is. Of two records at one place the later wins.
    """
    axes = {dim: _axis([record[dim] for record in records]) for dim in dims}
    places = {dim: {value: i for i, value in enumerate(axis)} for dim, axis in axes.items()}
    grids = {name: np.full([len(axis) for axis in axes.values()], np.nan) for name in variables}
    for record in records:
        where = tuple(places[dim][record[dim]] for dim in dims)
        for name in variables:
            if name in record:
                grids[name][where] = record[name]
    coords = {dim: texts(axis) if isinstance(axis[0], str) else np.array(axis) for dim, axis in axes.items()}
    data = {name: (tuple(dims), grids[name], meaning(long_name)) for name, long_name in variables.items()}
    return xr.Dataset(data, coords, {"title": title, "comment": comment})


def _axis(values: list) -> list:
    unique = list(dict.fromkeys(values))
    return unique if isinstance(unique[0], str) else sorted(unique)


def texts(values: Iterable[str]) -> np.ndarray:
    """Return texts as the array that a dataset keeps them in."""
    return np.array(list(values), object)


def seen(
    problem: AttentionProblem, arrays: tuple[np.ndarray, np.ndarray, np.ndarray], scheme: QuantScheme
) -> tuple[Operands, np.ndarray]:
    """Return the operands that a kernel sees, those of e4m3 quantised by a scheme, and the exact output of these."""
    operands = prepare(problem, *arrays, scheme if problem.dtype == "e4m3" else None).operands
    return operands, attention(problem, *operands.dequantized(problem)).out


def judged(kernel: str, recipe: Recipe, rows: int, seqlen_k: int, granularity: Granularity) -> tuple[Case, Judgement]:
    """Return a case of one head, e4m3 with scales of a granularity, and what becomes of it."""
    asked = registry.find(kernel)
    problem = AttentionProblem(1, 1, 1, rows, seqlen_k, HEAD_DIM, dtype=asked.dtype)
    case = Case(kernel, problem, recipe, QuantScheme(granularity) if asked.dtype == "e4m3" else None)
    return case, judge(asked, case, unrounded=False)


def rms(x: np.ndarray) -> float:
    """Root mean square, 0 for nothing."""
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0
