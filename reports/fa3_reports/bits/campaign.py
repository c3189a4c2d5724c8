"""Fill tables in processes that share the GPU. Rows are kept as they come: a command goes on where it stopped."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import triton

from fa3_kernels.audit.evidence import launch_keys
from fa3_reports.audit.evidence import changed_since
from fa3_reports.bits import backward, forward, paged, quantise, quantise_accuracy, quantise_speed
from fa3_reports.bits.forward_cases import Case
from fa3_reports.bits.table import CaseTable, Wrong, by_case, read, write
from fa3_reports.device.launches import concerns
from fa3verify.campaign.pool import default_workers, processes
from fa3verify.campaign.tasks import CallTask, run as run_tasks
from fa3verify.files import write_text
from fa3verify.kernels import watch
from fa3verify.timed.timing import query

HANG_SECONDS = 200.0  # of one case
KEPT_FACTS = ("gpu", "driver", "torch", "triton", "launches_sha256", "date_utc")


class Part(NamedTuple):
    """Tables that are evidence of the same kernels, and the file that says which kernels those were."""

    tables: tuple[CaseTable, ...]
    evidence: Callable[[], dict[str, Any]]
    provenance: str


_QUANTISE = (quantise.evidence, "quantize_provenance.json")
PARTS = {
    "forward": Part((forward.BITS, forward.CONTROLS), forward.evidence, "gluon_forward_bits_provenance.json"),
    "paged": Part((paged.BITS, paged.CONTROLS), paged.evidence, "gluon_paged_bits_provenance.json"),
    "backward": Part((backward.BITS,), backward.evidence, "gluon_backward_bits_provenance.json"),
    "quantise": Part((quantise.BITS,), *_QUANTISE),
    "accuracy": Part((quantise_accuracy.ACCURACY,), *_QUANTISE),
    "speed": Part((quantise_speed.SPEED,), *_QUANTISE),
}


def asked_parts(cases: Mapping[str, Sequence[Case]]) -> dict[str, Part]:
    """Return the parts of a campaign over other cases than its own (:mod:`fa3_reports.bits.asked_cases`), with tables
    of their own.
    """
    found = {}
    for name, own in cases.items():
        table, *_ = PARTS[name].tables
        asked = replace(table, file=f"asked_{table.file}", cases=partial(tuple, own))
        found[name] = PARTS[name]._replace(tables=(asked,), provenance=f"asked_{PARTS[name].provenance}")
    return found


@dataclass(frozen=True, slots=True)
class Settings:
    """One call of ``python -m fa3_reports bits``."""

    out: Path
    dtypes: tuple[str, ...]
    workers: int = 0  # 0 is one per core
    budget_s: float = math.inf
    keep: Path | None = None  # folder of an earlier campaign, whose rows of launches that are what they were are kept


class Filled(NamedTuple):
    """What a table holds of the cases that were asked for."""

    table: CaseTable
    rows: list[list[str]]
    left: int  # cases without a row

    @property
    def broken(self) -> list[list[str]]:
        return [row for row in self.rows if self.table.is_broken(row)]

    def totals(self) -> dict[str, int]:
        """Sums of the counts, for tables that have any."""
        counted = [i for i, name in enumerate(self.table.columns) if f"{name}_differing" in self.table.columns]
        counted += [i for i, name in enumerate(self.table.columns) if name.endswith("_differing")]
        return {self.table.columns[i]: sum(int(row[i]) for row in self.rows) for i in sorted(counted)}


def run(
    parts: Sequence[str], settings: Settings, tell: Callable[[str], None], known: Mapping[str, Part] = PARTS
) -> list[Filled]:
    """Fill the tables of some parts, as far as the budget goes.

    Parameters
    ----------
    parts : sequence of str
        Of ``known``.
    settings : Settings
    tell : callable
        Gets one line per finished piece of work.
    known : mapping of str to Part
        What the parts are; those of :func:`asked_parts` for problems that somebody wrote down.

    Raises
    ------
    ValueError
        When the folder holds tables of other kernels than these, or there is nothing to keep.
    Wrong
        When a kernel hangs, raises, or gives results of another kind than its twin.
    """
    deadline = time.monotonic() + settings.budget_s
    found = []
    for name in parts:
        if settings.keep and not (settings.out / known[name].provenance).exists():
            keep(known[name], settings.keep, settings.out)
        check_evidence(known[name], settings.out)
    for name in parts:
        part = known[name]
        for table in part.tables:
            write_provenance(
                part, settings.out, known=known
            )  # before the first row, so that none is ever of unknown kernels
            found.append(fill(table, settings, deadline, tell))
        write_provenance(part, settings.out, known=known)
    return found


def fill(table: CaseTable, settings: Settings, deadline: float, tell: Callable[[str], None]) -> Filled:
    """Make the rows that are missing, in processes that each hold the GPU and run the twin beside it."""
    path = settings.out / table.file
    chosen = table.chosen(settings.dtypes)
    known = read(path, table)
    todo = [case for case in chosen if table.key_of(case) not in known]
    workers = 1 if table.is_alone else settings.workers or default_workers()
    pieces = table.split(todo, workers) if todo else []
    tasks = [CallTask(table.file, _rows, {"make": table.rows, "cases": piece}) for piece in pieces]
    with processes(max(1, min(workers, len(pieces))), HANG_SECONDS) as pool:
        for done, outcome in enumerate(run_tasks(tasks, pool, until=deadline), 1):
            if outcome.lost_worker:
                raise Wrong(f"a kernel hangs or ends its process, at {outcome.at}: {outcome.error}")
            if outcome.error:
                raise Wrong(outcome.error)
            known |= by_case(table, outcome.value)
            write(path, table, known)
            tell(f"{table.file}: {done} of {len(pieces)} pieces of work")
    keys = [table.key_of(case) for case in chosen]
    rows = [row for key in keys for row in known.get(key, [])]
    return Filled(table, rows, sum(key not in known for key in keys))


def _rows(make: Callable[[Any], list[list[Any]]], cases: Sequence[Any]) -> list[list[str]]:
    """Rows of some cases, in a worker."""
    found = []
    for case in cases:
        watch.trying("case", lambda case=case: {"case": str(case)})
        try:
            found += [[str(x) for x in row] for row in make(case)]
        except Exception as error:  # a kernel may raise anything, and what torch raises may not travel
            raise Wrong(f"{case}: {type(error).__name__}: {error}") from None
    return found


def keep(part: Part, source: Path, out: Path) -> None:
    """Begin the tables of a part with the rows of an earlier campaign whose launches are what they were then."""
    facts = json.loads((source / part.provenance).read_text(encoding="utf-8"))
    of = facts["evidence_of"]
    changed = changed_since(of, facts["launches_sha256"], facts.get("launches"))
    if changed >= launch_keys(of).keys():
        raise ValueError(f"no launch of {source / part.provenance} is known to be what it was: nothing can be kept")
    for table in part.tables:
        kept = {}
        for key, rows in read(source / table.file, table).items():
            named = (dict(zip(table.columns, row, strict=True)) for row in rows)
            if "head_dim" in table.columns and not any(concerns(row, changed, of) for row in named):
                kept[key] = rows
        write(out / table.file, table, kept)
    write_provenance(part, out, [*facts.pop("kept", ()), {name: facts[name] for name in KEPT_FACTS}])


def check_evidence(part: Part, out: Path) -> None:
    """Raise ValueError if the folder holds rows of other kernels."""
    path = out / part.provenance
    if not path.exists():
        return
    facts = json.loads(path.read_text(encoding="utf-8"))
    now = json.loads(json.dumps(part.evidence()))
    if any(facts.get(name) != value for name, value in now.items()):
        raise ValueError(f"{path} is of other kernels than these: choose another folder, or remove its tables")


def write_provenance(
    part: Part, out: Path, kept: Sequence[Mapping[str, Any]] = (), known: Mapping[str, Part] = PARTS
) -> None:
    """Say which machine, versions and kernels the tables of a folder are of, and which campaigns rows were kept of."""
    path = out / part.provenance
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8")).get("kept", ())
    alike = {name: other for name, other in known.items() if other.provenance == part.provenance}
    tables = [(out / table.file, table) for other in alike.values() for table in other.tables]
    dtypes = [
        row[table.columns.index("dtype")]
        for path, table in tables
        if "dtype" in table.columns
        for rows in read(path, table).values()
        for row in rows
    ]
    facts = {
        "gpu": query("name"),
        "driver": query("driver_version"),
        "max_sm_mhz": query("clocks.max.sm"),
        "power_limit_w": query("power.limit"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "numpy": np.__version__,
        "dtypes": list(dict.fromkeys(dtypes)),
        "parts": [name for name, other in alike.items() if all((out / t.file).exists() for t in other.tables)],
        **part.evidence(),
        "date_utc": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
        **({"kept": [*kept]} if kept else {}),
    }
    write_text(path, json.dumps(facts, indent=1) + "\n")
