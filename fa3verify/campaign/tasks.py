"""Tasks: what any executor runs, any journal keeps, and what became of each."""

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

LIBRARIES = ("numpy", "scipy", "numba", "ml_dtypes")  # on whose last bits a truth or a bound may depend
NO_KERNEL = "-"
GIVE_UP = 3  # workers that one kernel may lose
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(ABC):
    """One unit of work, whose fields say all of it.

    ``kernel`` is the name of the kernel that it is about, :data:`NO_KERNEL` for a task about none. ``durable`` results
    may be kept for resuming; those of kernels outside this package may not, for their code may change.
    """

    kind: ClassVar[str] = "task"  # by which CPU seconds are told

    kernel: str = NO_KERNEL
    durable: bool = True

    @property
    @abstractmethod
    def label(self) -> str:
        """Return what progress shows."""

    @property
    def subject(self) -> str:
        """Return what its findings are about, such as the name of a family or a law."""
        return self.label

    @abstractmethod
    def run(self) -> Any:
        """Do it, wherever that is, and return what is kept of it."""

    def read(self, value: Any) -> Any:
        """Return its value from JSON; ValueError for a damaged one."""
        return value

    def is_finding(self, value: Any) -> bool:
        """Tell whether its value holds a finding that needs no baseline."""
        return False

    @property
    def estimated_s(self) -> float:
        """Return about how many CPU seconds it takes.

        Measured over the 353 tasks of a quick campaign of the built-in twins; only the proportions matter, and an error
        costs balance and nothing else.
        """
        return 0.05

    def identity(self, stamp: str) -> str:
        """Return the name under which the result is kept for resuming; ``stamp`` changes with the code."""
        facts = {each.name: getattr(self, each.name) for each in fields(self)}
        text = json.dumps([stamp, type(self).__name__, facts], sort_keys=True, default=lambda x: x.__qualname__)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


@dataclass(frozen=True, slots=True)
class CallTask(Task):
    """A top-level function and its arguments, which are JSON where results are kept."""

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
    """Holds what became of a task: ``value``, or ``error``, one line.

    A task that lost its worker has the case it was ``at`` where that is known. A ``skipped`` task has nothing: its
    kernel had lost too many workers before, or the campaign was stopped. ``cpu_s`` is 0 where nobody says, as of a
    result that was kept. Files have no task: they name it.
    """

    task: Task = field(default=CallTask("", dict, {}), metadata=NOT_WRITTEN)
    value: Any = None
    cpu_s: float = 0.0
    error: str | None = None
    at: Json | None = None
    lost_worker: bool = False
    skipped: bool = False

    @property
    def arguments(self) -> Json:
        """Return the arguments of the call that it is of; a task of another kind has none."""
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
    """Return what a journal knows its results by: the packages that made them, their libraries, and the kernels.

    Results of another version of a library, or of a kernel whose code is another, are not gone on with.
    """
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    identities = [dict(said) for kernel in kernels if (said := kernel.code.identity())]
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
    """Work that was interrupted by the signal of a number: what it had found, and a message where there is one."""

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
    """Run tasks on an executor and yield what becomes of each as it ends; results in the journal are not run again.

    A task that raises or loses its worker is one Outcome with an error. A kernel that has lost :data:`GIVE_UP` workers
    gets no more of them: hanging everywhere would take hours. Who stops listening ends what runs, and no other begins.

    Parameters
    ----------
    until : float
        Time, by the monotonic clock, at which the tasks that run are ended and no other begins.
    drops : callable
        ``drops(outcome, task)`` tells after an outcome whether a task that no worker has begun is skipped.
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
) -> list[Outcome]:
    """Run tasks as :func:`run` does, and return what became of them in the order of ``tasks``.

    After an outcome that ``stops``, running tasks are ended and nothing more is begun.

    Raises
    ------
    Interrupted
        At an interruption, with the outcomes of the tasks, those that had not ended as skipped.
    """
    found: dict[int, Outcome] = {}

    def outcomes() -> list[Outcome]:
        return [found.get(id(task)) or Outcome(task, skipped=True) for task in tasks]

    try:
        with contextlib.closing(run(tasks, executor, journal=journal, stamp=stamp)) as ended:
            for outcome in ended:
                found[id(outcome.task)] = outcome
                if progress:
                    progress(outcome)
                if stops(outcome):
                    break
    except KeyboardInterrupt as stop:
        number = stop.args[0] if stop.args else signal.SIGINT
        raise Interrupted(number, outcomes()) from None
    return outcomes()


def _give_up(futures: Iterable[Future]) -> None:
    """Cancel tasks, and end those that run, where their executor can; the last ones first, so that none begins."""
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
    """Tell whether a task found something that needs no baseline: it was lost, a case failed or left its bound, or a
    property broke.
    """
    if outcome.error or outcome.skipped:
        return not outcome.skipped
    return outcome.task.is_finding(outcome.value)


def cpu_seconds(outcomes: list[Outcome]) -> dict[str, dict[str, float]]:
    """CPU seconds of a campaign, by kernel and by what they were spent on: families, laws, the covering array."""
    found: dict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for outcome in outcomes:
        found[outcome.task.kernel][outcome.task.kind] += outcome.cpu_s
    return {kernel: {kind: round(cpu_s, 2) for kind, cpu_s in kinds.items()} for kernel, kinds in found.items()}


def _outcome(task: Task, future: Future, lost: Mapping[str, int]) -> Outcome:
    """Return what became of a task; what a kernel that is given up was still running is skipped like what it had not
    begun.
    """
    try:
        return Outcome(task, future.result(), getattr(future, "cpu_s", 0.0))
    except CancelledError:
        return Outcome(task, skipped=True)
    except WorkerLost as error:
        if lost.get(task.kernel, 0) >= GIVE_UP:
            return Outcome(task, skipped=True)
        return Outcome(task, error=str(error), at=error.at, lost_worker=True)
    except TaskError as error:
        return Outcome(task, error=str(error))
    except Exception as error:  # an executor of another kind lost the task
        return Outcome(task, error=of_error(error))


def _recall(journal: Path | None, task: Task, stamp: str) -> Outcome | None:
    """Return a result that was kept, None where there is none; a damaged entry counts as absent."""
    if journal is None or not task.durable:
        return None
    try:
        (kept,) = json.loads((journal / f"{task.identity(stamp)}.json").read_text(encoding="utf-8"))
        return Outcome(task, task.read(kept))
    except (OSError, TypeError, ValueError):
        return None


def outcomes_of(outcomes: Iterable[Outcome], kernel: str, kind: type[AnyTask]) -> Iterator[tuple[AnyTask, Outcome]]:
    """Yield one kernel's tasks of a kind that were not skipped, and what became of them."""
    for outcome in outcomes:
        if isinstance(outcome.task, kind) and outcome.task.kernel == kernel and not outcome.skipped:
            yield outcome.task, outcome
