"""The records of what a campaign found: one :class:`Run`, with a :class:`KernelRun` for each kernel.

``summary.json`` is the JSON of a run (its keys: ``docs/summary.md``): :meth:`Run.to_json` gives it and :func:`parse`
reads it. :mod:`fa3verify.campaign.summary` makes these records from the outcomes of tasks, and the report, the terminal
and the atlas read them. A field that older files lack has ``metadata=OLDER`` (:mod:`fa3verify.records`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fa3_reference.problem import Dtype
from fa3verify import records
from fa3verify.campaign.findings import ContractQuestion, Finding
from fa3verify.campaign.results import Assumed
from fa3verify.cases.coverage import Coverage
from fa3verify.cases.tried import SizesTried
from fa3verify.files import Json
from fa3verify.judging.bits_lost import BitsLost
from fa3verify.judging.family import CaseResult, FamilyRow, Figured
from fa3verify.judging.gate import GateRow
from fa3verify.judging.sketch import Sketch
from fa3verify.kernels.record import Identity
from fa3verify.operations import FORWARD
from fa3verify.properties import LawOutcome
from fa3verify.records import FLAT, NOT_WRITTEN, OLDER, OMITTED, PRIVATE
from fa3verify.text import Failure

SCHEMA = "fa3verify.summary/1"
Verdict = Literal["pass", "fail", "question", "inconclusive"]


@dataclass(frozen=True, slots=True)
class WorstCase:
    """The case of a kernel's largest error / bound: its family, the case on one line, and the path of its replay file.

    ``content`` is the case in JSON, from which the replay file is written.
    """

    family: str
    case: str
    replay: str | None = None
    content: Json | None = field(default=None, metadata=NOT_WRITTEN)


@dataclass(frozen=True, slots=True)
class Introduction:
    """A kernel as its campaign knows it before anything is run.

    Fields that are ``PRIVATE`` pass between the processes and shards of a campaign; published files do not have them.

    Parameters
    ----------
    name, description : str
        As the command names it, and one line about it.
    operation : {"forward", "quantize", "backward"}
        What it computes.
    laws, families : tuple of str
        Names of the properties and of the families of inputs that the campaign runs on it.
    claims : tuple of str
        The classes that it claims, as :mod:`fa3verify.cases.coverage` names them.
    not_claimed : tuple of str
        What kernels of its operation may claim and this one does not.
    constraint : str, optional
        Why it refuses a problem of the campaign; None for a kernel that takes all of them.
    failed : Failure, optional
        How it failed while it was loaded or configured, which is a finding; None if it did not.
    dtype : {"fp16", "bf16", "e4m3"}, optional
        Format of its operands, for a quantiser the format of its codes; None where loading it failed.
    states_order : bool
        Whether it states its order of operations. If not, its bound holds for any order.
    accumulator, sums : str, optional
        For a kernel that states no order: in which arithmetic the bound adds its products, and the same in words, with
        who says so.
    policy : tuple of str
        In words, where its declared policy and sizes differ from the default.
    identity : Identity
        Version and hash of what is judged, and the GPU it runs on; "CPU" for a twin.
    covers : bool
        Whether the covering array, in which all pairs of classes meet, is run.
    narrowed : str, optional
        Why there can be no verdict, where the user asked for a part of the campaign; None where all of it is run.
    source : str, optional
        SHA-256 of the module that a ``module:function`` names, so that shards that ran other versions of the module are
        not merged.
    head_dims : tuple of int, optional
        The head_dims that it declares; None where it declares none.
    limit : int, optional
        Of a slow kernel: the most cases of a family and trials of a property.
    pace : tuple of float
        Seconds of its calls (:func:`fa3verify.campaign.introduction.timed`), 0 where they are unknown.
    """

    name: str
    description: str = ""
    operation: str = field(default=FORWARD, metadata=OLDER)
    laws: tuple[str, ...] = field(default=(), metadata=PRIVATE)
    families: tuple[str, ...] = field(default=(), metadata=PRIVATE)
    claims: tuple[str, ...] = field(default=(), metadata=PRIVATE)
    not_claimed: tuple[str, ...] = field(default=(), metadata=PRIVATE)
    constraint: str | None = field(default=None, metadata=PRIVATE)
    failed: Failure | None = field(default=None, metadata=PRIVATE)
    dtype: Dtype | None = field(default=None, metadata=OLDER)
    states_order: bool = field(default=False, metadata=OLDER)
    accumulator: str | None = field(default=None, metadata=PRIVATE)
    sums: str | None = field(default=None, metadata=PRIVATE)
    policy: tuple[str, ...] = field(default=(), metadata=OLDER)
    identity: Identity = field(default_factory=Identity, metadata=OLDER)
    covers: bool = field(default=True, metadata=PRIVATE)
    narrowed: str | None = field(default=None, metadata=PRIVATE)
    source: str | None = field(default=None, metadata=PRIVATE)
    head_dims: tuple[int, ...] | None = field(default=None, metadata=PRIVATE)
    limit: int | None = field(default=None, metadata=PRIVATE)
    pace: tuple[float, float] = field(default=(0.0, 0.0), metadata=PRIVATE)


@dataclass(frozen=True, slots=True)
class Loss:
    """Accumulator loss of a forward at one number of keys (:mod:`fa3verify.campaign.accumulator_loss`).

    ``rel_rmse`` is against the exact output of the operands that the kernel saw; ``bias`` is the regression gain minus
    1. Both are None where ``missing`` says why nothing was measured, and ``missing`` is None otherwise.
    """

    seqlen_k: int
    rows: int
    rel_rmse: float | None
    bias: float | None
    missing: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRun:
    """Holds what a campaign found of one kernel; ratios are error / bound.

    Parameters
    ----------
    introduction : Introduction
        The kernel as it was before anything ran.
    families : tuple of FamilyRow
        The pooled figures of each family of inputs (:func:`fa3verify.judging.metrics.measures_of`).
    verdict : {"pass", "fail", "question", "inconclusive", "not run"}
        The verdict on this kernel alone; only an atlas has kernels that were not run.
    laws : tuple of LawOutcome
        The outcome of every property.
    cases, outputs : int
        Number of judged cases and law examples, and of the output values compared in them.
    worst_ratio, worst_ratio_lse : float, optional
        Largest error / bound of the main outputs over all families, and that of lse; None where nothing was compared.
    worst : WorstCase, optional
        The case of ``worst_ratio``.
    search_effort : int
        Number of cases behind ``worst_ratio``: a largest known error is a lower bound of the true one.
    assumed : Assumed, optional
        What the bound assumed of a kernel that states no order; None for one that states its order.
    orders : tuple of dict
        The :class:`fa3_reference.bounds.KernelModel`, of gradients the :class:`fa3_reference.bounds.BackwardModel`, of
        every bound, each once, as JSON values.
    tried : SizesTried, optional
        Sizes of the calls that returned and were compared.
    coverage : Coverage, optional
        The classes that it claims, and which of them were tried.
    inconclusive : str, optional
        Why there is no verdict: too little was tried, or the kernel could not run. None where there is one.
    worst_ratios : dict of str to float, optional
        Largest error / bound of every output beside the main ones, by its name.
    bits_lost : BitsLost, optional
        The number that ranks kernels; None for a quantiser, and where a family was not judged whole.
    sketch : Sketch, optional
        Where the errors of a forward lie, in units of the bound; None for other operations.
    loss : tuple of Loss, optional
        Its accumulator losses in an atlas, empty where none was measured; None in a run, which measures none.
    """

    introduction: Introduction = field(metadata=FLAT)
    families: tuple[FamilyRow, ...] = ()
    verdict: Literal[Verdict, "not run"]
    laws: tuple[LawOutcome, ...] = ()
    cases: int = 0
    outputs: int = 0
    worst_ratio: float | None = None
    worst_ratio_lse: float | None = None
    worst: WorstCase | None = None
    search_effort: int = 0
    assumed: Assumed | None = field(default=None, metadata=OMITTED)
    orders: tuple[dict[str, object], ...] = field(default=(), metadata=OLDER)
    tried: SizesTried | None = field(default=None, metadata=OLDER)
    coverage: Coverage | None = field(default=None, metadata=OLDER)
    inconclusive: str | None = field(default=None, metadata=OLDER)
    worst_ratios: dict[str, float | None] | None = field(default=None, metadata=OLDER)
    bits_lost: BitsLost | None = field(default=None, metadata=OLDER)
    sketch: Sketch | None = field(default=None, metadata=OLDER)
    loss: tuple[Loss, ...] | None = field(default=None, metadata=OMITTED)

    @property
    def name(self) -> str:
        """Return its name, as the command has it."""
        return self.introduction.name

    @property
    def operation(self) -> str:
        """Return the operation that it computes."""
        return self.introduction.operation

    @property
    def dtype(self) -> Dtype | None:
        """Return the format of its operands."""
        return self.introduction.dtype

    @property
    def figured(self) -> Figured:
        """Return its name, operation and figures, as the rules of the gate take them."""
        return Figured(self.name, self.families, self.operation)

    @property
    def side_ratios(self) -> dict[str, float | None]:
        """Largest error / bound of every output beside the main ones; older files have that of lse alone."""
        return {"lse": self.worst_ratio_lse} if self.worst_ratios is None else self.worst_ratios

    @property
    def assumption(self) -> str:
        """Return what its bound assumed, in words; empty for a kernel that states its order."""
        return self.assumed.words if self.assumed else ""

    @property
    def hypothesis(self) -> str:
        """Return the hypothesis that its figures assume; empty for a kernel that states its order."""
        return self.assumed.chosen if self.assumed else ""


@dataclass(frozen=True, slots=True)
class BaselineName:
    """The baseline that a run was compared with."""

    name: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Provenance:
    """Versions and platform of a run, and the hash of the twin's sources.

    :func:`fa3verify.campaign.summary.provenance` fills it: a new fact needs a field here, with a default and
    ``metadata=OLDER`` for files that lack it, and a value there. Shards of one campaign must agree on it, unless
    ``_NOT_COMPARED`` of :mod:`fa3verify.campaign.shards` names it.
    """

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
    """Everything that a campaign found: the verdict and what it rests on.

    Parameters
    ----------
    profile : {"quick", "release", "soak"}
        How much was tried.
    seed : int
        Seed of every draw.
    verdict : {"pass", "fail", "question", "inconclusive"}
        "fail" if any part fails or a task was lost, "question" if nothing fails under contracts that no kernel
        declared, "inconclusive" if nothing failed and too little was tried.
    exit_code : int
        Exit code of the command: 0, 1, 6 or 5; 128 + N where signal N interrupted it.
    layers : dict of str to str
        Status of each part of the verdict: bits (L0), bound (L1), baseline (L2) and properties (laws).
    kernels : tuple of KernelRun
        One record per kernel.
    gate : tuple of GateRow
        Every comparison of a figure with its limit.
    baseline : BaselineName, optional
        The stored baseline that figures were compared with; None where there is none.
    failures : tuple of Finding
        What failed; findings of one cause are neighbours.
    cases : tuple of CaseResult
        Every judged case.
    provenance : Provenance
        Versions, platform and the hash of the twin's sources.
    version, command, started : str
        Version of fa3verify, the command line, and when it began in UTC (ISO 8601).
    wall_s : float
        Seconds until the report was begun; for a merged campaign those of its longest shard.
    cpu_s : dict of str to dict of str to float
        CPU seconds by kernel (- for none) and by kind of task; results taken from a journal count 0.
    schema : str
        ``fa3verify.summary/1``.
    questions : tuple of ContractQuestion
        Contracts that explain what failed without them, and that no kernel declared.
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
    cases: tuple[CaseResult, ...]
    provenance: Provenance
    version: str
    command: str = ""
    started: str = ""
    wall_s: float = 0.0
    cpu_s: dict[str, dict[str, float]] = field(default_factory=dict, metadata=OLDER)
    schema: str = SCHEMA
    questions: tuple[ContractQuestion, ...] = field(default=(), metadata=OMITTED)

    @property
    def bits_lost(self) -> dict[str, float]:
        """Return the mean bits lost, by kernel; kernels without that number are left out."""
        return {kernel.name: kernel.bits_lost.mean for kernel in self.kernels if kernel.bits_lost}

    def to_json(self) -> dict[str, object]:
        """Return the JSON values of ``summary.json``.

        Returns
        -------
        dict of str to object
            Every key of ``docs/summary.md``; numbers that are not finite stay numbers.
        """
        return records.plain(self)


def verdict_of(kernels: Iterable[KernelRun], failures: Sequence[Finding]) -> Verdict:
    """Return "fail" if there is a finding, else "question" or "inconclusive" if any kernel is that, else "pass"."""
    if failures:
        return "fail"
    told = {kernel.verdict for kernel in kernels}
    return "question" if "question" in told else "inconclusive" if "inconclusive" in told else "pass"


def parse(body: Mapping[str, Any], name: str) -> Run:
    """Read what :meth:`Run.to_json` gives; ValueError, with ``name`` and the place, for what is damaged or foreign."""
    if body.get("schema") != SCHEMA:
        raise ValueError(f"{name} must have schema {SCHEMA!r}, got {body.get('schema')!r}")
    return records.read(Run, body, name)
