"""Ask each kernel, before a campaign is planned, what it is, what it claims and what can be run on it.

:func:`introduce_all` is called by the verbs ``verify`` and ``learn``. A kernel that is no twin of ours is loaded in a
worker, as loading a stranger's module may end the process, hang or print. :class:`Only` narrows an introduction to the
families and properties that a user names; :mod:`fa3verify.campaign.plan` makes tasks of what is left.
"""

from __future__ import annotations

import hashlib
import sys
import time
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fa3_reference.problem import AttentionProblem
from fa3verify import operations
from fa3verify.campaign.pool import TaskError
from fa3verify.campaign.profiles import PROFILES, claimed_families, constraint, families
from fa3verify.campaign.run import Introduction
from fa3verify.cases import coverage, probing
from fa3verify.cases.coverage import COVER
from fa3verify.inputs.captures import Capture
from fa3verify.judging import hypotheses
from fa3verify.kernels import loading, twins, watch
from fa3verify.kernels.names import KernelName
from fa3verify.kernels.record import Identity, Kernel
from fa3verify.known import registry
from fa3verify.known.libraries import Unavailable
from fa3verify.properties import LAWS, check_claims
from fa3verify.text import Failure, of_error, of_traceback, one_line, plural

FIRST_WORD_S = 600.0  # in which the tasks of a quick campaign end of a slow kernel as well
# Few queries over many keys, as in cases of practice.
LONG = AttentionProblem(batch=1, nheads=8, nheads_kv=8, seqlen_q=2, seqlen_k=2048, head_dim=64)


@dataclass(frozen=True, slots=True)
class Only:
    """Which part of a campaign a user asked for; an empty one asks for all of it.

    Only families and properties that match a pattern are run, and of each at most ``limit`` cases or trials. Patterns
    are those of file names (``*``, ``?``, ``[abc]``). If only families are named no property is run, and the other way
    round. The covering array counts as the family ``cover``.
    """

    families: tuple[str, ...] = ()
    properties: tuple[str, ...] = ()
    limit: int | None = None

    @property
    def has_patterns(self) -> bool:
        """Tell whether families or properties are left out."""
        return bool(self.families or self.properties)

    def of(self, kernel: Introduction) -> Introduction:
        """Return a kernel with the families and properties that match, and in ``narrowed`` why that gives no verdict.

        A kernel on which nothing can be run comes back as it is.

        Raises
        ------
        ValueError
            If no family and no property matches.
        """
        if self == Only() or not kernel.families:
            return kernel
        known = (*kernel.families, COVER)
        families = _matching(known, self.families) if self.has_patterns else known
        laws = _matching(kernel.laws, self.properties) if self.has_patterns else kernel.laws
        if not (families or laws):
            names = ", ".join((*known, *kernel.laws))
            raise ValueError(f"no family and no property of {kernel.name} matches; there are {names}")
        covers = COVER in families
        families = tuple(name for name in families if name != COVER)
        return replace(kernel, families=families, laws=laws, covers=covers, narrowed=f"{self}: a part has no verdict")

    def __str__(self) -> str:
        """Return what was asked for, in words."""
        patterns_of = {"families": self.families, "properties": self.properties}
        parts = [f"{name} {', '.join(patterns)}" for name, patterns in patterns_of.items() if patterns]
        if self.limit is not None:
            parts.append(f"{self.limit} cases or trials of each")
        return f"only {' and '.join(parts)}"


def _matching(names: tuple[str, ...], patterns: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def found(kernel: str) -> Kernel:
    """Return a kernel by name, and tell whoever watches this process that loading may take its time.

    It raises what :func:`fa3verify.known.registry.find` raises. A function that declares no head dims is called once at
    each (:func:`fa3verify.cases.probing.probe`).
    """
    with watch.warming(f"import of {kernel}"):
        loaded = registry.find(kernel)
        if loaded.unavailable is None:
            probing.probe(loaded)
        return loaded


def introduce(kernel: str, profile: str, captures: tuple[Capture, ...] = ()) -> Introduction:
    """Load a kernel in this process and ask it what it takes.

    A kernel whose own code fails while it is loaded or configured is introduced with ``failed``, which is a finding.

    Raises
    ------
    ValueError
        If there is no such kernel.
    Unavailable
        If it cannot run here.
    """
    # Should loading end the process, this is what the parent says it was doing.
    watch.trying("loading", lambda: {"kernel": kernel})
    try:
        loaded = found(kernel)
    except loading.Unloadable as error:
        return Introduction(kernel, failed=Failure(str(error), traceback=of_traceback(error.__cause__ or error)))
    if loaded.unavailable:
        raise Unavailable(f"kernel {kernel} is unavailable: {loaded.unavailable}")
    if loaded.bitwise is not None:
        check_claims(loaded.bitwise)
    try:
        size = PROFILES[profile]
        fitting = [law for law in LAWS if law.applies(loaded)]
        laws = tuple(law.name for law in fitting if law.is_claimed(loaded))
        taken = families(loaded, size, captures)
        refused = constraint(loaded, size, captures)
        owed = [name for name in claimed_families(captures) if name in taken or not loaded.sizes.leaves_out]
        claims = coverage.claims(loaded, laws, owed)
        rest = operations.find(loaded.operation).features - loaded.features - operations.DESCALES
        not_claimed = (
            *(f"feature {name}" for name in sorted(rest)),
            *(f"property {law.name}" for law in fitting if not law.is_claimed(loaded)),
            *(one_line(f"policy {words}") for words in loaded.policy.exceptions),
            *((f"errors beyond: {loaded.mods.assumption}",) if loaded.mods and loaded.mods.score_mod else ()),
        )
        sums = hypotheses.sums_of(loaded) if hypotheses.under(loaded) else None
        return Introduction(
            kernel,
            one_line(loaded.description),
            loaded.operation,
            laws if taken else (),
            taken,
            claims,
            not_claimed,
            refused and one_line(refused),
            dtype=loaded.dtype,
            states_order=loaded.order is not None,
            accumulator=sums and sums.accumulator,
            sums=sums and str(sums),
            policy=tuple(map(one_line, loaded.declared)),
            identity=Identity(**loaded.code.identity()),
            source=_source(kernel),
            head_dims=loaded.head_dims,
            narrowed=loaded.lacking or None,
        )
    except Exception as error:  # configure is a third party's
        words = f"configuring it failed: {of_error(error)}"
        return Introduction(kernel, failed=Failure(words, traceback=of_traceback(error)))


def timed(kernel: str) -> tuple[float, float]:
    """Return how many seconds longer a new shape takes, and the seconds of a call of :data:`LONG`.

    The first call of a process is not counted. What the kernel refuses takes no time.
    """
    loaded = found(kernel)
    ends_s = [time.monotonic()]
    for shape in (PROFILES["quick"].shapes[0], LONG, LONG):
        problem = coverage.adapted(loaded, replace(shape, dtype=loaded.dtype))
        if loaded.supports(problem):
            probing.raised(loaded, problem)
        ends_s.append(time.monotonic())
    again_s = ends_s[3] - ends_s[2]
    return max(0.0, ends_s[2] - ends_s[1] - again_s), again_s


def paced(kernel: Introduction, executor: Executor, workers: float) -> Introduction:
    """Return a kernel with its pace; one that is too slow for a quick campaign has a limit, and says why.

    Parameters
    ----------
    kernel : Introduction
    executor : Executor
        Runs the calls that are timed; where it loses them the kernel comes back as it is.
    workers : float
        Infinite where nothing is to be left out.
    """
    try:
        shape_s, long_s = executor.submit(timed, kernel.name).result()
    except Exception:  # whatever a third party's kernel, or another executor, leads to: its tasks will tell
        return kernel
    kernel = replace(kernel, pace=(shape_s, long_s))
    # A case of each family and a trial of each property have about a hundred shapes, and as much work as fifty calls of
    # LONG. The longest case of practice has 36 times its keys and heads.
    affordable = FIRST_WORD_S * workers / (100 * shape_s + 50 * long_s + 1e-9)
    if workers == float("inf") or (
        affordable >= PROFILES["quick"].law_examples and 36 * long_s <= PROFILES["quick"].task_limit_s
    ):
        return kernel
    limit = max(1, int(affordable))
    return replace(
        kernel,
        limit=limit,
        narrowed=f"a new shape takes {shape_s:.2g} s to compile, and a call of 2,048 keys {long_s:.2g} s: at most "
        f"{plural(limit, 'case')} of a family and {plural(limit, 'trial')} of a property were run, and no sizes of "
        "practice; --limit N or --profile release runs more",
    )


def _source(kernel: str) -> str | None:
    """Return the SHA-256 of the file of ``module`` in ``module:function``; None for other names and without a file."""
    module = sys.modules.get(kernel.partition(":")[0]) if ":" in kernel else None
    try:
        return hashlib.sha256(Path(str(getattr(module, "__file__", None))).read_bytes()).hexdigest()
    except OSError:
        return None


def introduce_all(
    kernels: tuple[str, ...], profile: str, executor: Executor, captures: tuple[Capture, ...] = ()
) -> list[Introduction]:
    """Introduce kernels in the order of their names: our twins in this process, all others in workers.

    A reference to kernels of several dtypes introduces each of them.

    A kernel that ends or hangs its worker is introduced with ``failed``, as its worker's :class:`TaskError` says.

    Parameters
    ----------
    kernels : tuple of str
    profile : str
        A key of :data:`fa3verify.campaign.profiles.PROFILES`.
    executor : Executor
        Runs the calls. Those of this package raise no other error than TaskError for a call; what another executor
        raises for a call that it lost, such as BrokenProcessPool, is passed on.
    captures : tuple of Capture
        A user's own files of activations to judge the kernels on.

    Raises
    ------
    ValueError
        If there is no such kernel.
    Unavailable
        If one cannot run here.
    """
    pending: list[Future[Any] | str] = [
        kernel if twins.is_twin(kernel) else executor.submit(_answer, kernel, profile, captures) for kernel in kernels
    ]
    introduced: list[Introduction] = []
    for kernel, answer in zip(kernels, pending):
        try:
            told = introduce(kernel, profile, captures) if isinstance(answer, str) else _heard(kernel, answer)
            introduced.append(told)
        except loading.Several as several:
            names = tuple(str(replace(KernelName.parse(kernel), base=name)) for name in several.names)
            introduced += introduce_all(names, profile, executor, captures)
    return introduced


def _answer(kernel: str, profile: str, captures: tuple[Capture, ...]) -> Introduction | tuple[str, str]:
    """Introduce a kernel in a worker; a refusal is returned as its kind and words, which survive any executor."""
    try:
        return introduce(kernel, profile, captures)
    except loading.Several as error:
        return "several", "\n".join(error.names)
    except ValueError as error:
        return ("unavailable" if isinstance(error, Unavailable) else "unknown"), str(error)


def _heard(kernel: str, future: Future[Any]) -> Introduction:
    """Wait for what :func:`_answer` returned, and raise the refusal if it is one."""
    try:
        answer = future.result()
    except TaskError as error:  # the kernel ended or hung its worker, or raised what is no Exception (SystemExit)
        return Introduction(kernel, failed=Failure(f"loading it: {error}"))
    if isinstance(answer, Introduction):
        return answer
    kind, words = answer
    if kind == "several":
        raise loading.Several(words, tuple(words.splitlines()))
    raise (Unavailable if kind == "unavailable" else ValueError)(words)
