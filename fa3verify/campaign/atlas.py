"""The atlas: what a campaign found of each kernel, as it is stored for publication and put side by side.

``verify`` writes ``OUT/atlas.json``, and the verb ``atlas`` one of many campaigns; entries need nothing else but the
replay files that they name, by paths relative to the atlas's own folder. The records below are the schema, and their
fields its keys: a change of meaning, or a field more or less, is a new number. All figures are those of
:func:`fa3verify.judging.metrics.measures_of`, pooled over a family.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fa3_reference.problem import Dtype
from fa3verify import records
from fa3verify.campaign.run import CaseRow, Finding, KernelRun, Run
from fa3verify.cases.coverage import Coverage
from fa3verify.files import Json, json_text, read_text, write_text
from fa3verify.judging.family import FamilyRow
from fa3verify.judging.verdict import Seen, What
from fa3verify.kernels.record import Identity
from fa3verify.operations import FORWARD

SCHEMA = "fa3verify.atlas/3"
FILE = "atlas.json"


@dataclass(frozen=True, slots=True)
class Effort:
    """Says how much was searched: a largest known error is a lower bound of the true one.

    ``problems`` are judged cases and trials of properties, ``outputs`` the values they were compared on, ``seeds``
    those that inputs were drawn from; trials follow from the campaign's own.
    """

    problems: int
    outputs: int
    seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FamilyFigures:
    """Figures of one family of inputs; ``largest`` is the case of the largest error / bound, in one line.

    ``replay`` judges all its cases again, that one first, and gives the same figures. In an atlas that the verb
    ``atlas`` wrote it holds the largest case of every family of the kernel: its replay names the family.
    """

    family: str
    problems: int
    seeds: tuple[int, ...]
    figures: dict[str, float | None]
    largest: str
    replay: str


@dataclass(frozen=True, slots=True)
class Property:
    """Holds what became of one property; ``replay`` is the smallest trial that broke it."""

    name: str
    kind: str
    status: str
    problems: int
    outputs: int
    message: str | None
    replay: str | None


@dataclass(frozen=True, slots=True)
class Loss:
    """Holds what a forward loses over long rows of keys, with V of mean 1: relative RMSE against the operands it saw,
    and ``bias``, the gain less 1; or why there is no figure.
    """

    seqlen_k: int
    rows: int
    rel_rmse: float | None
    bias: float | None
    missing: str | None


@dataclass(frozen=True, slots=True)
class EntryFinding:
    """One finding, as in ``summary.json``; findings of one cause are neighbours."""

    what: What
    message: str
    case: str | None
    cause: str
    replay: str | None
    seen: Seen | None = None
    raised: str | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One kernel.

    Parameters
    ----------
    kernel, description, operation, dtype : str
        No dtype for a kernel that could not be loaded.
    identity : Identity
        Version and hash of what was judged, and the GPU it ran on; "CPU" for a twin.
    states_order : bool
        Whether it states its order of operations; if not, it was judged by that of any order.
    orders : tuple of dict
        The orders that its bounds assumed: fields of :class:`fa3_reference.bounds.KernelModel`, of gradients of
        :class:`fa3_reference.bounds.model.BackwardModel`, as this version has them. Several where its configurations
        differ, none for a quantiser.
    effort : Effort
    verdict : {"pass", "fail", "inconclusive", "not run"}
    reason : str, optional
        Why there is no verdict: what kept the kernel from running, or from being tried enough.
    coverage : Coverage, optional
        None, in files an empty object, for a kernel that was not run.
    policy : tuple of str
        What it declares other than the default policy and sizes: these things were judged so, or not judged.
    families, properties, findings
    loss : tuple of Loss
        Empty where none was measured.
    """

    kernel: str
    description: str
    operation: str
    dtype: Dtype | None
    identity: Identity
    states_order: bool
    orders: tuple[Json, ...]
    effort: Effort
    verdict: Literal["pass", "fail", "inconclusive", "not run"]
    reason: str | None
    coverage: Coverage | None
    policy: tuple[str, ...]
    families: tuple[FamilyFigures, ...]
    properties: tuple[Property, ...]
    findings: tuple[EntryFinding, ...]
    loss: tuple[Loss, ...]

    @property
    def listed(self) -> list[Finding]:
        """Return its findings as those of a run."""
        return [
            Finding(self.kernel, x.what, x.message, x.case, x.cause, x.replay, seen=x.seen, raised=x.raised)
            for x in self.findings
        ]


@dataclass(frozen=True, slots=True)
class Atlas:
    """The entries of one campaign or several of a day, and where they come from: the version and commit of fa3verify,
    profile and seed, when the first began (UTC), platform and packages.
    """

    version: str
    git: str | None
    profile: str
    seed: int
    started: str
    platform: str
    packages: dict[str, str]
    entries: tuple[Entry, ...]

    def text(self) -> str:
        """Canonical JSON."""
        body = records.plain(self)
        for entry in body["entries"]:
            entry["coverage"] = entry["coverage"] or {}
        return json_text({"schema": SCHEMA, **body})

    @classmethod
    def parse(cls, text: str, name: str) -> Atlas:
        """Read what :meth:`text` gives; ValueError, with ``name`` and the place, for a damaged or foreign file."""
        try:
            body = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{name} is not an atlas: {error}") from None
        if not isinstance(body, dict) or body.get("schema") != SCHEMA:
            found = body.get("schema") if isinstance(body, dict) else type(body).__name__
            raise ValueError(f"{name} is not an atlas: expected schema {SCHEMA!r}, got {found!r}")
        entries = body.get("entries")
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict) and entry.get("coverage") == {}:
                entry["coverage"] = None
        try:
            return records.read(cls, {key: value for key, value in body.items() if key != "schema"}, "atlas")
        except ValueError as error:
            raise ValueError(f"{name} is a damaged atlas: {error}") from error


def of(run: Run) -> Atlas:
    """Return the atlas of a run whose replay files have been written."""
    facts = run.provenance
    return Atlas(
        run.version,
        facts.git,
        run.profile,
        run.seed,
        run.started,
        facts.platform,
        facts.packages,
        tuple(_entry(kernel, run) for kernel in run.kernels),
    )


def _entry(kernel: KernelRun, run: Run) -> Entry:
    cases = [case for case in run.cases if case.kernel == kernel.name]
    found = [each for each in run.failures if each.kernel == kernel.name]
    laws = kernel.laws
    return Entry(
        kernel=kernel.name,
        description=kernel.description,
        operation=kernel.operation,
        dtype=kernel.dtype,
        identity=kernel.identity,
        states_order=kernel.states_order,
        orders=kernel.orders,
        effort=Effort(kernel.cases, kernel.outputs, _seeds(cases)),
        verdict=kernel.verdict,
        reason=kernel.inconclusive,
        coverage=kernel.coverage,
        policy=kernel.policy,
        families=tuple(_family(row, cases) for row in kernel.families),
        properties=tuple(Property(x.law, x.kind, x.status, x.examples, x.outputs, x.message, x.replay) for x in laws),
        findings=tuple(
            EntryFinding(x.what, x.message, x.case, x.cause or str(x.what), x.replay, x.seen, x.raised) for x in found
        ),
        loss=(),
    )


def not_run(kernel: str, reason: str, **known: Any) -> Entry:
    """Return the entry of a kernel that was not judged, with what is known of it by name."""
    stated = {"description": "", "operation": FORWARD, "dtype": None, "identity": Identity(), "policy": (), "loss": ()}
    return Entry(
        kernel=kernel,
        states_order=False,
        orders=(),
        effort=Effort(0, 0, ()),
        verdict="not run",
        reason=reason,
        coverage=None,
        families=(),
        properties=(),
        findings=(),
        **stated | known,
    )


def _seeds(cases: Iterable[CaseRow]) -> tuple[int, ...]:
    return tuple(sorted({case.case.recipe.seed for case in cases}))


def _family(row: FamilyRow, cases: Iterable[CaseRow]) -> FamilyFigures:
    mine = [case for case in cases if case.family == row.family]
    figures = {key: None if value is None else float(value) for key, value in row.figures.items() if key != "cases"}
    largest = max(mine, key=lambda case: case.measures["ratio_max"])
    problems = int(row.number("cases"))
    return FamilyFigures(row.family, problems, _seeds(mine), figures, largest.describe, str(row.replay))


def write(path: Path, atlas: Atlas) -> None:
    """Write an atlas, whole or not at all."""
    write_text(path, atlas.text())


def read(path: Path) -> Atlas:
    """Read an atlas; ValueError, with the path, for one that cannot be read, or is damaged or foreign."""
    try:
        return Atlas.parse(read_text(path), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
