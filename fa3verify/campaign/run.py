"""A run: what a campaign found, of which ``summary.json`` is the JSON (its keys: ``docs/summary.md``).

:func:`parse` reads what :meth:`Run.to_json` gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fa3_reference.problem import Dtype
from fa3verify import records
from fa3verify.campaign.results import Assumed
from fa3verify.cases.coverage import Coverage
from fa3verify.cases.tried import SizesTried
from fa3verify.files import Json
from fa3verify.judging.bits_lost import BitsLost
from fa3verify.judging.family import CaseResult, FamilyRow, Figured
from fa3verify.judging.gate import GateRow
from fa3verify.judging.sketch import Sketch
from fa3verify.judging.verdict import Seen, What
from fa3verify.kernels.names import KernelName
from fa3verify.kernels.record import Identity
from fa3verify.operations import FORWARD
from fa3verify.properties import LawOutcome
from fa3verify.records import FLAT, NOT_WRITTEN, OLDER, OMITTED, PRIVATE
from fa3verify.text import Failure

SCHEMA = "fa3verify.summary/1"
Verdict = Literal["pass", "fail", "question", "inconclusive"]


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
class Question:
    """Whether a kernel means a contract that it has and did not declare: FlashAttention-3 has another one.

    Parameters
    ----------
    kernel : str
        The name under which it was judged by all that is asked, such as ``mine.py:attention[causal=top_left]``.
    meaning : str
        The contract in one line.
    public : str
        Which public kernels do it either way.
    seen : Finding
        What it explains: the smallest finding that the kernel has without the declaration, with its replay file.
    declaration : str
        What answers all questions of the kernel, in Python; one that does not mean it is to be mended.
    """

    kernel: str
    meaning: str
    public: str
    seen: Finding
    declaration: str = ""

    def of(self, kernel: str) -> Question:
        """Return the question of the kernel by the name under which it was judged at last."""
        return replace(self, kernel=kernel, declaration=KernelName.parse(kernel).declaration)


@dataclass(frozen=True, slots=True)
class WorstCase:
    """The case of a kernel's largest error / bound: its family, one line, and the file that replays it."""

    family: str
    case: str
    replay: str | None = None
    content: Json | None = field(default=None, metadata=NOT_WRITTEN)


@dataclass(frozen=True, slots=True)
class Introduction:
    """A kernel as its campaign knows it before anything is run; what is to run, no published file has.

    Parameters
    ----------
    name, description : str
        As the command names it, and one line about it.
    operation : {"forward", "quantize", "backward"}
        What it computes.
    laws, families : tuple of str
        What there is to run.
    claims, not_claimed : tuple of str
        Classes of :mod:`fa3verify.cases.coverage`; what kernels of its operation may claim and this one does not.
    constraint : str, optional
        What keeps it from some problem of the campaign.
    failed : Failure, optional
        How it failed while it was loaded or asked: a finding.
    dtype : {"fp16", "bf16", "e4m3"}, optional
        Format of its operands, of a quantiser that of its codes; None where it could not be asked.
    states_order : bool
        Whether it states its order of operations; the bound is that of any order otherwise.
    accumulator, sums : str, optional
        Of a kernel that states no order: how its products are added for the bound, and that in words, with who says so.
    policy : tuple of str
        What it declares other than the default policy and sizes, in words.
    identity : Identity
        Version and hash of what is judged, and the GPU it runs on; "CPU" for a twin.
    covers : bool
        Whether the cases that cover all pairs are run.
    narrowed : str, optional
        Why what is run gives no verdict, where less was asked for.
    source : str, optional
        SHA-256 of the module that a ``module:function`` names, so that shards of other versions of it are told apart.
    head_dims : tuple of int, optional
        The ones that it declares.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRun:
    """Holds what a campaign found of one kernel; ratios are error / bound.

    Parameters
    ----------
    introduction : Introduction
        What it said of itself.
    families : tuple of FamilyRow
        Per input family the pooled figures of :func:`fa3verify.judging.metrics.measures_of`.
    verdict : {"pass", "fail", "question", "inconclusive", "not run"}
        Of this kernel alone; what was not run stands in an atlas alone.
    laws : tuple of LawOutcome
        What became of every property.
    cases, outputs : int
        Judged cases and law examples, and the output values compared in them.
    worst_ratio, worst_ratio_lse : float, optional
        Largest error / bound of any output over the families, and that of lse; None where there is none.
    worst : WorstCase, optional
        The case of ``worst_ratio``.
    search_effort : int
        Cases behind ``worst_ratio``: a largest known error is a lower bound of the true one.
    assumed : Assumed, optional
        What the bound of a kernel that states no order assumed.
    orders : tuple of dict
        The :class:`fa3_reference.bounds.KernelModel`, of gradients the :class:`fa3_reference.bounds.BackwardModel`, of
        every bound, each once, as JSON values.
    tried : SizesTried, optional
        Sizes of the calls that returned and were compared.
    coverage : Coverage, optional
        Classes of problems that it claims, and which of them were tried.
    inconclusive : str, optional
        Why there is no verdict: too little was tried, or what kept it from running.
    worst_ratios : dict of str to float, optional
        Largest error / bound of every output beside the main ones, by its name.
    bits_lost : BitsLost, optional
        The number that ranks; None for a quantiser, and where a family was not judged whole.
    sketch : Sketch, optional
        Where the errors of a forward lie, in units of the bound.
    loss : tuple of Loss, optional
        In an atlas, empty where none was measured; a run has none.
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
        """Return what it computes."""
        return self.introduction.operation

    @property
    def dtype(self) -> Dtype | None:
        """Return the format of its operands."""
        return self.introduction.dtype

    @property
    def figured(self) -> Figured:
        """Return what the gate reads of it."""
        return Figured(self.name, self.families, self.operation)

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
    verdict : {"pass", "fail", "question", "inconclusive"}
        "fail" if any part fails or a task was lost, "question" if nothing fails under contracts that no kernel
        declared, "inconclusive" if nothing failed and too little was tried.
    exit_code : int
        Of the command: 0, 1, 6 or 5; 128 + N where signal N interrupted it.
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
    cases : tuple of CaseResult
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
    questions : tuple of Question
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
    questions: tuple[Question, ...] = field(default=(), metadata=OLDER)

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


def verdict_of(kernels: Iterable[KernelRun], failures: Sequence[Finding]) -> Verdict:
    """Return the verdict over kernels and findings."""
    if failures:
        return "fail"
    told = {kernel.verdict for kernel in kernels}
    return "question" if "question" in told else "inconclusive" if "inconclusive" in told else "pass"


def parse(body: Mapping[str, Any], name: str) -> Run:
    """Read what :meth:`Run.to_json` gives; ValueError, with ``name`` and the place, for what is damaged or foreign."""
    if body.get("schema") != SCHEMA:
        raise ValueError(f"{name} must have schema {SCHEMA!r}, got {body.get('schema')!r}")
    return records.read(Run, body, name)
