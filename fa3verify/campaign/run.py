"""A run: what a campaign found, of which ``summary.json`` is the JSON (its keys: ``docs/summary.md``).

:func:`parse` reads what :meth:`Run.to_json` gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fa3_reference.problem import Dtype
from fa3verify import records
from fa3verify.cases.coverage import Coverage
from fa3verify.cases.tried import SizesTried
from fa3verify.files import Json
from fa3verify.judging.bits_lost import BitsLost
from fa3verify.judging.family import CaseFigures, Figured
from fa3verify.judging.gate import GateRow
from fa3verify.judging.sketch import Sketch
from fa3verify.judging.verdict import Seen, What, ratio_text
from fa3verify.kernels.record import Identity
from fa3verify.records import NOT_WRITTEN, OLDER, OMITTED

SCHEMA = "fa3verify.summary/1"
Verdict = Literal["pass", "fail", "inconclusive"]


@dataclass(frozen=True, slots=True)
class MovedFigure:
    """The stored figure from which one of a family moved, and its limit."""

    family: str
    profile: str
    seed: int
    measure: str
    limit: float
    baseline: float | None


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that failed.

    Parameters
    ----------
    kernel : str
        "-" where it is of none.
    what : What
        What found it, in files one text: ``L1 error / bound``, ``law NAME``, ``family NAME``, ``loading``.
    message : str
        One line.
    case : str, optional
        The case on one line.
    cause : str, optional
        Findings of one cause are neighbours; files of version 0.1.0 name none.
    replay : str, optional
        Path of its replay file.
    baseline : MovedFigure, optional
    traceback : dict, optional
        Of what the kernel raised, as :func:`fa3verify.text.of_traceback` gives it.
    content : dict, optional
        Content of its replay file before that is written: a case, or for a law a trial, in JSON.
    clause : str, optional
        The clause that the kernel does not meet, as ``docs/conformance.md`` names it.
    seen : Seen, optional
        What was wrong with an output, where one element of one output is.
    raised : str, optional
        Of a kernel that gave no result, the type of the exception; empty where it raised none. None where it gave one.
    """

    kernel: str
    what: What
    message: str
    case: str | None = field(default=None, metadata=OLDER)
    cause: str | None = field(default=None, metadata=OLDER)
    replay: str | None = None
    baseline: MovedFigure | None = field(default=None, metadata=OLDER)
    traceback: dict[str, str] | None = field(default=None, metadata=OLDER)
    content: Json | None = field(default=None, metadata=NOT_WRITTEN)
    clause: str | None = field(default=None, metadata=OLDER)
    seen: Seen | None = field(default=None, metadata=OLDER)
    raised: str | None = field(default=None, metadata=OLDER)


@dataclass(frozen=True, slots=True)
class LawRow:
    """Tells what became of one property; ``replay`` is the smallest trial that broke it, ``content`` the file's."""

    law: str
    statement: str
    kind: str
    status: str
    examples: int
    outputs: int
    message: str | None
    replay: str | None = None
    content: Json | None = field(default=None, metadata=NOT_WRITTEN)


@dataclass(frozen=True, slots=True)
class RefutedBy:
    """Holds what speaks most against a hypothesis: where it was found, error / bound, the case, its replay file."""

    what: What
    ratio: float
    case: str
    replay: str | None = None
    content: Json | None = field(default=None, metadata=NOT_WRITTEN)

    @property
    def words(self) -> str:
        """Say where it was found, and how large it is."""
        return f"{self.what.told}, {ratio_text(self.ratio)}"


@dataclass(frozen=True, slots=True)
class HypothesisRow:
    """A hypothesis about a kernel, its largest error / bound, and what refutes it, None where it holds."""

    name: str
    worst_ratio: float
    refuted_by: RefutedBy | None


@dataclass(frozen=True, slots=True)
class Assumed:
    """Holds what the bound of a kernel without an order assumed: its sums, in words, and one of several hypotheses.

    Parameters
    ----------
    chosen : str
        The hypothesis whose figures are told: the first that holds, and where none does the one with the least largest
        error.
    hypotheses : tuple of HypothesisRow
        Infinite is the error / bound of an output that is not finite.
    is_at_once : bool
        Whether one case or one property refutes all of them.
    refuted : dict
        What refutes hypotheses, by their names, in the order in which it was found.
    """

    sums: str | None
    accumulator: str | None
    chosen: str
    hypotheses: tuple[HypothesisRow, ...]
    is_at_once: bool = field(default=False, metadata=NOT_WRITTEN)
    refuted: dict[str, RefutedBy] = field(default_factory=dict, metadata=NOT_WRITTEN)

    @property
    def words(self) -> str:
        """Say which hypotheses hold, and what refutes the others."""
        kept = [row.name for row in self.hypotheses if not row.refuted_by]
        words = f"bound of any order, {self.sums}; surviving: {', '.join(kept) or 'no hypothesis'}"
        refuted = [f"{row.name} ({by.words})" for row in self.hypotheses if (by := row.refuted_by)]
        return f"{words}; refuted: {', '.join(refuted)}" if refuted else words


@dataclass(frozen=True, slots=True)
class WorstCase:
    """The case of a kernel's largest error / bound: its family, one line, and the file that replays it."""

    family: str
    case: str
    replay: str | None = None
    content: Json | None = field(default=None, metadata=NOT_WRITTEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRun(Figured):
    """Holds what a campaign found of one kernel; ratios are error / bound.

    Parameters
    ----------
    name : str
        As the command names it.
    families : tuple of FamilyRow
        Per input family the pooled figures of :func:`fa3verify.judging.metrics.measures_of`.
    operation : {"forward", "quantize", "backward"}
        What it computes.
    description : str
        One line about it.
    verdict : {"pass", "fail", "inconclusive"}
        Of this kernel alone.
    laws : tuple of LawRow
        What became of every property.
    cases, outputs : int
        Judged cases and law examples, and the output values compared in them.
    worst_ratio, worst_ratio_lse : float, optional
        Largest error / bound of any output over the families, and that of lse; None where there is none.
    worst : WorstCase, optional
        The case of ``worst_ratio``.
    search_effort : int
        Cases behind ``worst_ratio``: a largest known error is a lower bound of the true one.
    dtype : {"fp16", "bf16", "e4m3"}, optional
        Format of its operands, of a quantiser that of its codes; None if it could not be loaded.
    identity : Identity
        Version, file, hash and device.
    states_order : bool
        Whether it states its order of operations; if not, the bound is that of any order.
    assumed : Assumed, optional
        What that bound assumed.
    orders : tuple of dict
        The :class:`fa3_reference.bounds.KernelModel` of every bound, each once, as JSON values.
    policy : tuple of str
        What it declares other than the default policy and sizes, in words.
    tried : SizesTried, optional
        Sizes of the calls that returned and were compared.
    coverage : Coverage, optional
        Classes of problems that it claims, and which of them were tried.
    inconclusive : str, optional
        Why too little was tried for a verdict.
    worst_ratios : dict of str to float, optional
        Largest error / bound of every output beside the main ones, by its name.
    bits_lost : BitsLost, optional
        The number that ranks; None for a quantiser, and where a family was not judged whole.
    sketch : Sketch, optional
        Where the errors of a forward lie, in units of the bound.
    """

    description: str
    verdict: Verdict
    laws: tuple[LawRow, ...]
    cases: int
    outputs: int
    worst_ratio: float | None
    worst_ratio_lse: float | None
    worst: WorstCase | None
    search_effort: int
    dtype: Dtype | None = field(default=None, metadata=OLDER)
    identity: Identity = field(default_factory=Identity, metadata=OLDER)
    states_order: bool = field(default=False, metadata=OLDER)
    assumed: Assumed | None = field(default=None, metadata=OMITTED)
    orders: tuple[dict[str, object], ...] = field(default=(), metadata=OLDER)
    policy: tuple[str, ...] = field(default=(), metadata=OLDER)
    tried: SizesTried | None = field(default=None, metadata=OLDER)
    coverage: Coverage | None = field(default=None, metadata=OLDER)
    inconclusive: str | None = field(default=None, metadata=OLDER)
    worst_ratios: dict[str, float | None] | None = field(default=None, metadata=OLDER)
    bits_lost: BitsLost | None = field(default=None, metadata=OLDER)
    sketch: Sketch | None = field(default=None, metadata=OLDER)

    @property
    def side_ratios(self) -> dict[str, float | None]:
        """Largest error / bound of every output beside the main ones."""
        return {"lse": self.worst_ratio_lse} if self.worst_ratios is None else self.worst_ratios

    @property
    def assumption(self) -> str:
        """Return what its bound assumed, in words; empty for a kernel that states its order."""
        return self.assumed.words if self.assumed else ""

    @property
    def hypothesis(self) -> str:
        """Return the hypothesis under which its figures are; empty for a kernel that states its order."""
        return self.assumed.chosen if self.assumed else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRow(CaseFigures):
    """A judged case of a kernel; of one that states no order with the largest error / bound under each hypothesis."""

    kernel: str
    describe: str = field(default="", metadata=OLDER)
    hypotheses: dict[str, float] = field(default_factory=dict, metadata=OMITTED)

    @property
    def figures(self) -> dict[str, float]:
        """Its measures, and how far quantising its inputs went towards its own bound."""
        quantisation = self.quantisation or {"bound_ratio": 0.0}
        return self.measures | {"quantisation_bound_ratio": quantisation["bound_ratio"]}


@dataclass(frozen=True, slots=True)
class BaselineName:
    """The baseline that a run was compared with."""

    name: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Provenance:
    """Versions and platform of a run, and the hash of the twin's sources."""

    version: str
    python: str
    platform: str
    cpu_count: int | None
    git: str | None
    twin_hash: str
    seed: int
    packages: dict[str, str]


@dataclass(frozen=True, slots=True)
class Run:
    """Holds what a campaign found: the verdict and everything behind it.

    Parameters
    ----------
    profile : {"quick", "release", "soak"}
        How much was tried.
    seed : int
        Seed of every draw.
    verdict : {"pass", "fail", "inconclusive"}
        "fail" if any part fails or a task was lost, "inconclusive" if nothing failed and too little was tried.
    exit_code : int
        Of the command: 0, 1 or 5; 128 + N where signal N interrupted it.
    layers : dict of str to str
        Status of bits (L0), bound (L1), baseline (L2) and properties (laws).
    kernels : tuple of KernelRun
        One record per kernel.
    gate : tuple of GateRow
        Every comparison of a figure with its limit.
    baseline : BaselineName, optional
        The baseline compared with.
    failures : tuple of Finding
        What failed; findings of one cause are neighbours.
    cases : tuple of CaseRow
        Every judged case.
    provenance : Provenance
        Versions, platform and the hash of the twin's sources.
    version, command, started : str
        Version of fa3verify, the command line, and when it began in UTC (ISO 8601).
    wall_s : float
        Seconds until the report was begun; of a merged campaign those of its longest shard.
    cpu_s : dict of str to dict of str to float
        CPU seconds by kernel (- for none) and by what they were spent on; what was resumed counts 0.
    schema : str
        ``fa3verify.summary/1``.
    """

    profile: str
    seed: int
    verdict: Verdict
    exit_code: int
    layers: dict[str, str]
    kernels: tuple[KernelRun, ...]
    gate: tuple[GateRow, ...]
    baseline: BaselineName | None
    failures: tuple[Finding, ...]
    cases: tuple[CaseRow, ...]
    provenance: Provenance
    version: str
    command: str = ""
    started: str = ""
    wall_s: float = 0.0
    cpu_s: dict[str, dict[str, float]] = field(default_factory=dict, metadata=OLDER)
    schema: str = SCHEMA

    @property
    def bits_lost(self) -> dict[str, float]:
        """Return the number that ranks of every kernel that has one, by name."""
        return {kernel.name: kernel.bits_lost.mean for kernel in self.kernels if kernel.bits_lost}

    def to_json(self) -> dict[str, object]:
        """Return the JSON values of ``summary.json``.

        Returns
        -------
        dict of str to object
            Every key of ``docs/summary.md``; numbers that are not finite stay numbers.
        """
        return records.plain(self)


def parse(body: Mapping[str, Any], name: str) -> Run:
    """Read what :meth:`Run.to_json` gives; ValueError, with ``name`` and the place, for what is damaged or foreign."""
    if body.get("schema") != SCHEMA:
        raise ValueError(f"{name} must have schema {SCHEMA!r}, got {body.get('schema')!r}")
    return records.read(Run, body, name)
