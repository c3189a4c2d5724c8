"""Recordings: what a released kernel returned on a GPU, kept so that its twin can be held against it anywhere.

A recording names the library, its version and the hash of its binary; each case says how its operands are drawn and
keeps one digest of O and one of LSE for every sequence and head, so that a difference is located. Nothing of it needs
a GPU, torch or the library.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fa3_reference.problem import AttentionProblem, Operands
from fa3_reports.evidence_keys import FORWARD, ONE_QUERY, code_key, launch_key
from fa3verify.campaign.pool import processes
from fa3verify.campaign.tasks import CallTask, execute
from fa3verify.cases.case import Case
from fa3verify.files import read_text, write_text

if TYPE_CHECKING:
    from fa3_kernels.plan.config import Config

SCHEMA = "fa3verify.recording/1"
DIGEST_BYTES = 8
KEPT_OUTPUTS = 24_000  # of a launch, at most, for which its outputs are kept whole


class Digests(NamedTuple):
    """Hexadecimal digests of O and LSE, one per sequence and head, sequence by sequence."""

    out: tuple[str, ...]
    lse: tuple[str, ...]


NONE = Digests((), ())


@dataclass(frozen=True, slots=True)
class Recorded:
    """One launch: its case, a digest of its operands and those of its outputs.

    ``case.changes`` are the options that the library was called with, such as num_splits, where 0 is the library's own
    choice; ``error`` is what it raised instead of returning.
    """

    case: Case
    operands: str
    digests: Digests = NONE
    error: str = ""

    @property
    def outputs(self) -> int:
        """Elements of O."""
        return int(np.prod(self.case.problem.out_shape))


@dataclass(frozen=True, slots=True)
class Recording:
    """Launches of one library on one GPU; ``facts`` are its provenance."""

    library: str
    facts: dict[str, Any] = field(default_factory=dict)
    launches: tuple[Recorded, ...] = ()


def _digest(*arrays: np.ndarray) -> str:
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for x in arrays:
        found.update(x.tobytes())
    return found.hexdigest()


def digest_of_operands(operands: Operands) -> str:
    """Digest of q, k and v and of their descales."""
    descales = (operands.q_descale, operands.k_descale, operands.v_descale)
    return _digest(operands.q, operands.k, operands.v, *(x.values for x in descales if x is not None))


def digests_of(problem: AttentionProblem, out: np.ndarray, lse: np.ndarray) -> Digests:
    """Digest O and LSE of every sequence and head, bit for bit."""
    by_out = []
    by_lse = []
    for seq in problem.sequences():
        rows = problem.rows_q(out, seq)
        sums = problem.rows_lse(lse, seq)
        by_out += [_digest(rows[:, head]) for head in range(problem.nheads)]
        by_lse += [_digest(sums[head]) for head in range(problem.nheads)]
    return Digests(tuple(by_out), tuple(by_lse))


def _to_json(launch: Recorded) -> dict[str, Any]:
    digests = {name: " ".join(values) for name, values in launch.digests._asdict().items()}
    found = {"case": launch.case.to_json(), "operands": launch.operands, **digests}
    return found | ({"error": launch.error} if launch.error else {})


def _of_json(values: dict[str, Any]) -> Recorded:
    digests = Digests(tuple(values["out"].split()), tuple(values["lse"].split()))
    return Recorded(Case.from_json(values["case"]), values["operands"], digests, values.get("error", ""))


def write(path: Path, recording: Recording) -> None:
    """Write a recording, compressed."""
    lines = [json.dumps({"schema": SCHEMA, "library": recording.library, "facts": recording.facts})]
    lines += [json.dumps(_to_json(launch)) for launch in recording.launches]
    write_text(path, "\n".join(lines) + "\n")


def read(path: Path) -> Recording:
    """Read a recording; ValueError for a file that is damaged or foreign."""
    try:
        head, *lines = read_text(path).splitlines()
        facts = json.loads(head)
        if facts.get("schema") != SCHEMA:
            raise ValueError(f"expected schema {SCHEMA!r}, got {facts.get('schema')!r}")
        return Recording(facts["library"], facts["facts"], tuple(_of_json(json.loads(line)) for line in lines))
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"{path.name} is not a recording: {error}") from error


class Checked(NamedTuple):
    """One launch run again: elements of O that were compared, and where digests differ, as (sequence, head)."""

    launch: Recorded
    outputs: int = 0
    out_differing: tuple[tuple[int, int], ...] = ()
    lse_differing: tuple[tuple[int, int], ...] = ()
    refused: str = ""

    @property
    def differs(self) -> bool:
        return bool(self.out_differing or self.lse_differing)


def _config(library: str, launch: Recorded) -> Config:
    from fa3_kernels.plan.config import default_config

    options: dict[str, Any] = {name: value for name, value in launch.case.changes if value is not None}
    return default_config(launch.case.problem, family=library, **options)


def refusal(library: str, launch: Recorded) -> str:
    """Why a launch cannot be compared: the library refused it, or its twin does not reproduce it; empty if it can."""
    if launch.error:
        return f"{library} refused it"
    if is_one_query(library, launch):
        from fa3_reports import one_query

        return one_query.refusal(launch.case.problem)
    try:
        _config(library, launch).traits.check_reproduced(launch.case.problem)
    except ValueError as error:
        return str(error)
    return ""


def is_one_query(library: str, launch: Recorded) -> bool:
    """Whether a launch is one of cuDNN's kernel for one query, which has a twin of its own."""
    return library == "cudnn" and launch.case.problem.seqlen_q == 1


def keys_of(library: str, launch: Recorded) -> tuple[str, str]:
    """Return the keys of a launch as it is compared today: of its twin's code, and of what the plan hands to it.

    Both are empty for a launch that the library's plan does not take today.
    """
    problem = launch.case.problem
    if is_one_query(library, launch):
        return code_key(*ONE_QUERY), launch_key(problem, None)
    try:
        return code_key(*FORWARD), launch_key(problem, _config(library, launch))
    except ValueError:
        return "", ""


def _run_twin(library: str, launch: Recorded, operands: Operands) -> tuple[np.ndarray, np.ndarray]:
    from fa3_kernels.twin.forward import forward
    from fa3_reports.one_query import one_query

    problem = launch.case.problem
    if is_one_query(library, launch):
        return one_query(problem, operands)
    return forward(problem, operands, _config(library, launch))


def check(library: str, launch: Recorded) -> Checked:
    """Run the twin of a library on one launch; ``refused`` is its :func:`refusal`, with which nothing is compared.

    Raises
    ------
    ValueError
        If this machine draws other operands.
    """
    if reason := refusal(library, launch):
        return Checked(launch, refused=reason)
    problem = launch.case.problem
    operands = launch.case.operands()
    if digest_of_operands(operands) != launch.operands:
        raise ValueError(f"other operands are drawn here than were recorded: {launch.case.describe()}")
    found = digests_of(problem, *_run_twin(library, launch, operands))
    out, lse = (_differing(problem.nheads, *pair) for pair in zip(found, launch.digests, strict=True))
    return Checked(launch, launch.outputs, out, lse)


def _differing(nheads: int, ours: tuple[str, ...], theirs: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """Where digests differ, as (sequence, head)."""
    return tuple(divmod(i, nheads) for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)


def cost(launch: Recorded) -> int:
    """Products of the two GEMMs of a launch that its mask leaves: what a twin's time goes with."""
    p = launch.case.problem
    pairs = 0
    for seq in p.sequences():
        first, stop = p.visible_keys(np.arange(seq.seqlen_q), seq.seqlen_q, seq.seqlen_k)
        pairs += int(np.maximum(stop - first, 0).sum())
    return p.nheads * pairs * (p.head_dim + p.head_dim_v)


def compare(recording: Recording, *, products: int | None = None, workers: int = 0) -> dict[str, Any]:
    """Check the launches of at most so many products, in processes.

    Returns
    -------
    dict
        ``launches`` and ``outputs`` that were compared, ``differing`` ones in words, ``left_out`` for their cost, and
        ``refused`` by reason.
    """
    chosen = sorted((x for x in recording.launches if products is None or cost(x) <= products), key=cost, reverse=True)
    found: dict[str, Any] = {"launches": 0, "outputs": 0, "differing": [], "refused": {}}
    found["left_out"] = len(recording.launches) - len(chosen)
    given = [{"library": recording.library, "launch": launch} for launch in chosen]
    with processes(workers) as pool:
        outcomes = execute([CallTask("", check, each) for each in given], pool, stops=lambda x: bool(x.error))
    if errors := [outcome.error for outcome in outcomes if outcome.error]:
        raise ValueError(errors[0])
    for checked in (outcome.value for outcome in outcomes):
        if checked.refused:
            found["refused"][checked.refused] = found["refused"].get(checked.refused, 0) + 1
            continue
        found["launches"] += 1
        found["outputs"] += checked.outputs
        if checked.differs:
            where = f"out {list(checked.out_differing[:3])}, lse {list(checked.lse_differing[:3])}"
            found["differing"].append(f"{checked.launch.case.describe()}: (sequence, head) {where}")
    return found


def against(recording: Recording, other: Recording) -> dict[str, Any]:
    """Compare two recordings of the same cases, digest by digest: what :func:`compare` returns, without a twin.

    Of launches that were refused only that both were: the words hold versions and places in the source.
    """
    known = {launch.case.key(): launch for launch in other.launches}
    found: dict[str, Any] = {"launches": 0, "outputs": 0, "differing": [], "refused": {}, "left_out": 0}
    for launch in recording.launches:
        before = known.get(launch.case.key())
        if before is None or before.operands != launch.operands:
            found["left_out"] += 1
            continue
        found["launches"] += 1
        found["outputs"] += 0 if launch.error else launch.outputs
        if (before.digests, bool(before.error)) != (launch.digests, bool(launch.error)):
            found["differing"].append(launch.case.describe())
    return found
