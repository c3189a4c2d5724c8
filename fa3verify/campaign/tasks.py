"""Tasks, the units of work of any campaign, and :func:`run`, which runs them on an executor with a journal.

The tasks of a verification are in :mod:`fa3verify.campaign.plan`; ``learn`` and ``compare`` use :class:`CallTask`.
Where they run is the executor's business (:mod:`fa3verify.campaign.pool`, :mod:`fa3verify.campaign.executors`).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import json
import math
import signal
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, Future, as_completed
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from fa3verify.campaign.pool import TaskError, WorkerLost
from fa3verify.files import Json, write_text
from fa3verify.kernels.record import Kernel
from fa3verify.records import NOT_WRITTEN, plain
from fa3verify.text import of_error

LIBRARIES = ("numpy", "scipy", "numba", "ml_dtypes")  # the last bits of a truth or a bound may depend on these
NO_KERNEL = "-"
GIVE_UP = 3  # lost workers after which no more tasks of a kernel are run
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(ABC):
    """One unit of work; its fields hold everything that its result depends on.

    ``kernel`` is the name of the kernel that it is about, :data:`NO_KERNEL` for a task about none. The result of a
    ``durable`` task may be kept for resuming; those of kernels outside this package are not, as their code may change.
    """

    kind: ClassVar[str] = "task"  # the name under which its CPU seconds are added up

    kernel: str = NO_KERNEL
    durable: bool = True

    @property
    @abstractmethod
    def label(self) -> str:
        """Return the name that progress shows."""

    @abstractmethod
    def run(self) -> Any:
        """Do the work in whatever process this is, and return its value, which can be pickled and written as JSON."""

    def read(self, value: Any) -> Any:
        """Return the value that :meth:`run` returned from its JSON; ValueError for a damaged one."""
        return value

    def is_finding(self, value: Any) -> bool:
        """Tell whether its value holds a finding that needs no baseline."""
        return False

    @property
    def estimated_s(self) -> float:
        """Return about how many CPU seconds it takes, by which tasks are dealt to shards.

        Measured over the 353 tasks of a quick campaign of the built-in twins. Only the proportions matter; an error
        only makes shards uneven.
        """
        return 0.05

    def identity(self, stamp: str) -> str:
        """Return the name of its result in a journal or a shard: a hash of its fields and of the code's ``stamp``."""
        facts = {each.name: getattr(self, each.name) for each in fields(self)}
        text = json.dumps([stamp, type(self).__name__, facts], sort_keys=True, default=lambda x: x.__qualname__)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


@dataclass(frozen=True, slots=True)
class CallTask(Task):
    """A call of a top-level function with keyword arguments, which must be JSON values if its result is kept."""

    words: str
    function: Callable[..., Any]
    arguments: Json

    @property
    def label(self) -> str:
        return self.words

    def run(self) -> Any:
        return self.function(**self.arguments)


AnyTask = TypeVar("AnyTask", bound=Task)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a task: its ``value``, or an ``error`` of one line with the type of the exception in ``raised``.

    A task that lost its worker (``lost_worker``) or its GPU has in ``at`` the case that it was judging, if that is
    known, and the first in ``waited_s`` how long its call was waited for, 0 if its process died. A ``skipped`` task has
    neither value nor error: its kernel had lost too many workers, or the campaign was stopped. ``cpu_s`` is 0 where it
    is unknown, as for a result from a journal. Shard files hold no task: its identity is the key of the outcome.
    """

    task: Task = field(default=CallTask("", dict, {}), metadata=NOT_WRITTEN)
    value: Any = None
    cpu_s: float = 0.0
    error: str | None = None
    raised: str = ""
    at: Json | None = None
    lost_worker: bool = False
    skipped: bool = False
    waited_s: float = 0.0

    @property
    def arguments(self) -> Json:
        """Return the arguments of its task if that is a call, else an empty dict."""
        return self.task.arguments if isinstance(self.task, CallTask) else {}

    def result(self) -> Any:
        """Return the value.

        Raises
        ------
        TaskError
            If the task raised, lost its worker or was skipped.
        """
        if self.error or self.skipped:
            raise TaskError(self.error or f"{self.task.label} was skipped")
        return self.value


def journal_stamp(*kernels: Kernel) -> str:
    """Return a hash of this package's sources, of the versions of :data:`LIBRARIES` and of what identifies kernels.

    Results in a journal are only used again under the same stamp.
    """
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    identities = [dict(facts) for kernel in kernels if (facts := kernel.code.identity())]
    return hashlib.sha256(json.dumps([source_stamp(), versions, identities]).encode()).hexdigest()


def source_stamp(packages: Sequence[str] = ("fa3_reference", "fa3_kernels", "fa3verify")) -> str:
    """Return the hash of the modules and tables of the packages that make a result."""
    digest = hashlib.sha256()
    for package in packages:
        folder = Path(importlib.import_module(package).__path__[0])
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".json", ".toml"):
                content = path.read_bytes()
                digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


class Interrupted(KeyboardInterrupt, Generic[Found]):
    """Raised where work was interrupted: the number of the signal, what was found until then, and maybe a message."""

    def __init__(self, number: int, found: Found, *message: str) -> None:
        super().__init__(number, *message)
        self.number = number
        self.found = found


def run(
    tasks: Iterable[AnyTask],
    executor: Executor,
    *,
    journal: Path | None = None,
    stamp: str = "",
    until: float = math.inf,
    drops: Callable[[Outcome, AnyTask], bool] | None = None,
) -> Generator[Outcome, None, None]:
    """Run tasks on an executor and yield the outcome of each as it ends; results in the journal are not run again.

    A task that raises or loses its worker has an Outcome with an error. The remaining tasks of a kernel that has lost
    :data:`GIVE_UP` workers are skipped: a kernel that hangs everywhere would take hours. A caller that closes the
    generator ends the tasks that run, and no other begins.

    Parameters
    ----------
    journal : Path, optional
        Folder of kept results; None keeps and reads none.
    stamp : str
        Hash of the code (:func:`journal_stamp`), part of each result's name in the journal.
    until : float
        Time by :func:`time.monotonic` at which running tasks are ended; they and the rest have no outcome.
    drops : callable
        ``drops(outcome, task)`` is asked after each outcome whether a task that no worker has begun is skipped.
    """
    waiting: dict[Future, AnyTask] = {}
    lost: Counter[str] = Counter()
    try:
        for task in tasks:
            if kept := _recall(journal, task, stamp):
                yield kept
            else:
                waiting[executor.submit(task.run)] = task
        left_s = None if math.isinf(until) else max(0.0, until - time.monotonic())
        for future in as_completed(list(waiting), left_s):
            outcome = _outcome(waiting.pop(future), future, lost)
            kernel = outcome.task.kernel
            _keep(outcome, journal, stamp)
            if outcome.lost_worker and kernel != NO_KERNEL:
                lost[kernel] += 1
                if lost[kernel] == GIVE_UP:
                    _give_up(other for other, task in waiting.items() if task.kernel == kernel)
            yield outcome
            if drops:
                for other in [future for future, task in waiting.items() if drops(outcome, task)]:
                    other.cancel()
    except TimeoutError:
        return
    finally:
        _give_up(waiting)


def execute(
    tasks: Sequence[AnyTask],
    executor: Executor,
    *,
    journal: Path | None = None,
    stamp: str = "",
    progress: Callable[[Outcome], None] | None = None,
    stops: Callable[[Outcome], bool] = lambda outcome: False,
    until: float = math.inf,
) -> list[Outcome]:
    """Run tasks as :func:`run` does, and return their outcomes in the order of ``tasks``.

    After an outcome for which ``stops`` is true, and at ``until``, running tasks are ended and no other is begun; their
    outcomes are skipped ones. ``progress`` is called with each outcome.

    Raises
    ------
    Interrupted
        At a KeyboardInterrupt, with the outcomes of all tasks; those that had not ended are skipped.
    """
    by_task: dict[int, Outcome] = {}

    def outcomes() -> list[Outcome]:
        return [by_task.get(id(task)) or Outcome(task, skipped=True) for task in tasks]

    try:
        with contextlib.closing(run(tasks, executor, journal=journal, stamp=stamp, until=until)) as ended:
            for outcome in ended:
                by_task[id(outcome.task)] = outcome
                if progress:
                    progress(outcome)
                if stops(outcome):
                    break
    except KeyboardInterrupt as stop:
        raise Interrupted(stop.args[0] if stop.args else signal.SIGINT, outcomes()) from None
    return outcomes()


def _give_up(futures: Iterable[Future]) -> None:
    """Cancel tasks, and end running ones if their executor can; the last first, as a free worker takes the first."""
    for future in reversed(list(futures)):
        getattr(future, "give_up", future.cancel)()


def _keep(outcome: Outcome, journal: Path | None, stamp: str) -> None:
    """Write a result that may be kept into the journal."""
    if journal and outcome.task.durable and outcome.value is not None:
        with contextlib.suppress(OSError):  # a full disk costs what could be resumed, not the verdict
            write_text(
                journal / f"{outcome.task.identity(stamp)}.json", json.dumps([plain(outcome.value, private=True)])
            )


def is_finding(outcome: Outcome) -> bool:
    """Tell whether an outcome is a finding without comparing it with a baseline: the task was lost, a case failed or
    left its bound, or a property broke. A skipped task is none.
    """
    if outcome.error or outcome.skipped:
        return not outcome.skipped
    return outcome.task.is_finding(outcome.value)


def cpu_seconds(outcomes: list[Outcome]) -> dict[str, dict[str, float]]:
    """Return the CPU seconds of a campaign, by kernel and by kind of task: family, law, cover."""
    spent: dict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for outcome in outcomes:
        spent[outcome.task.kernel][outcome.task.kind] += outcome.cpu_s
    return {kernel: {kind: round(cpu_s, 2) for kind, cpu_s in kinds.items()} for kernel, kinds in spent.items()}


def _outcome(task: Task, future: Future, lost: Mapping[str, int]) -> Outcome:
    """Return the outcome of a task whose future is done; ``lost`` counts the workers that each kernel has lost.

    Tasks that a given-up kernel was still running are skipped, like those that it had not begun.
    """
    try:
        return Outcome(task, future.result(), getattr(future, "cpu_s", 0.0))
    except CancelledError:
        return Outcome(task, skipped=True)
    except WorkerLost as error:
        if lost.get(task.kernel, 0) >= GIVE_UP:
            return Outcome(task, skipped=True)
        return Outcome(task, error=str(error), at=error.at, lost_worker=True, waited_s=error.waited_s)
    except TaskError as error:
        return Outcome(task, error=str(error), raised=error.raised, at=error.at)
    except Exception as error:  # an executor of another kind lost the task
        return Outcome(task, error=of_error(error), raised=type(error).__name__)


def _recall(journal: Path | None, task: Task, stamp: str) -> Outcome | None:
    """Return a task's outcome from the journal; None where there is none or its entry is damaged."""
    if journal is None or not task.durable:
        return None
    try:
        (value,) = json.loads((journal / f"{task.identity(stamp)}.json").read_text(encoding="utf-8"))
        return Outcome(task, task.read(value))
    except (OSError, TypeError, ValueError):
        return None


def outcomes_of(outcomes: Iterable[Outcome], kernel: str, kind: type[AnyTask]) -> Iterator[tuple[AnyTask, Outcome]]:
    """Yield one kernel's tasks of a kind that were not skipped, and what became of them."""
    for outcome in outcomes:
        if isinstance(outcome.task, kind) and outcome.task.kernel == kernel and not outcome.skipped:
            yield outcome.task, outcome
