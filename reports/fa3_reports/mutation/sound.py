"""Sound kernels in different orders under the suite: everything that it finds in one of them is a false alarm.

Each twin has an order of its own: tiles, the order of keys, of maxima and sums, formats of P, splits and their combine.
They are judged as kernels without a twin, by bound and properties, which is what a third party's kernel gets.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

from fa3verify import operations
from fa3verify.campaign.plan import judge_cases
from fa3verify.campaign.profiles import PROFILES, families, family_cases
from fa3verify.campaign.tasks import CallTask, run as run_tasks
from fa3verify.judging.family import Figured, family_row
from fa3verify.judging.gate import bound_rows
from fa3verify.kernels.record import Kernel
from fa3verify.kernels.sizes import Sizes
from fa3verify.known import registry
from fa3verify.properties import LAWS, find_law, run_law
from fa3verify.text import of_error

# One of each order; fa3-fwd's twins are left out, as findings/0003 says what is wrong with that build.
KERNELS = (
    *(f"twin.{x}" for x in ("fp16", "bf16", "e4m3", "quantize", "backward.fp16", "backward.bf16")),
    *(f"twin.flash3.dew.{x}" for x in ("fp16", "bf16", "backward.fp16", "backward.bf16")),
    *(f"twin.{family}.{x}" for family in ("cudnn", "flash2", "triton_unscaled") for x in ("fp16", "bf16")),
)
# Where a released kernel is known to be wrong it is not sound: findings/0003, lse of a call without keys is +inf.
_SOUND_WHERE: Mapping[str, dict[str, Any]] = {
    f"twin.flash3.dew.{dtype}": {"sizes": Sizes(min_seqlen=1)} for dtype in ("fp16", "bf16")
}
EXAMPLES = 60  # trials of a property with one seed


@dataclass(frozen=True, slots=True)
class Tally:
    """What one task of one kernel came to: ``trials``, the output values in them, and false alarms in words."""

    kernel: str
    task: str
    seed: int
    trials: int
    outputs: int
    alarms: tuple[str, ...]


def run(
    trials: int, seed: int, pool: Executor, progress: Callable[[str], None], *, seconds: float = 0.0
) -> list[Tally]:
    """Examine every kernel with one seed, then with as many as make so many trials; every seed is finished, but for
    what has not begun after ``seconds``, 0 for no end.
    """
    until = time.monotonic() + seconds if seconds else math.inf
    found: list[Tally] = []
    seeds = range(seed, seed + 1)
    while seeds and time.monotonic() < until:
        tasks = [
            CallTask(f"{kernel}: {task}", examined, {"kernel": kernel, "task": task, "seed": number})
            for number in seeds
            for kernel, task in _tasks()
        ]
        for outcome in run_tasks(tasks, pool, drops=lambda *_: time.monotonic() > until):
            if not outcome.skipped:
                found.append(outcome.result())
                progress(outcome.task.label)
        made = sum(tally.trials for tally in found)
        more = math.ceil(max(trials - made, 0) * (seeds.stop - seed) / max(made, 1))
        seeds = range(seeds.stop, seeds.stop + more)
    return sorted(found, key=lambda tally: (KERNELS.index(tally.kernel), tally.task, tally.seed))


def _tasks() -> Iterator[tuple[str, str]]:
    for kernel in KERNELS:
        asked = _sound(kernel)
        yield from ((kernel, law.name) for law in LAWS if law.applies(asked) and law.is_claimed(asked))
        yield from ((kernel, family) for family in families(asked, PROFILES["quick"]))


def _sound(kernel: str) -> Kernel:
    return replace(registry.find(kernel), twin=None, **_SOUND_WHERE.get(kernel, {}))


def examined(kernel: str, task: str, seed: int) -> Tally:
    """Run one property, or judge the cases of one family, with one seed."""
    asked = _sound(kernel)
    try:
        return _examined(asked, task, seed)
    except Exception as error:  # the suite's own failure on a sound kernel is an alarm as well
        return Tally(kernel, task, seed, 0, 0, (of_error(error),))


def _examined(asked: Kernel, task: str, seed: int) -> Tally:
    kernel = asked.name
    if task in {law.name for law in LAWS}:
        outcome = run_law(find_law(task), asked, max_examples=EXAMPLES, seed=seed, shrink_seconds=0)
        words = (outcome.violation.message,) if outcome.violation else ()
        return Tally(kernel, task, seed, outcome.examples, outcome.outputs, words)
    cases = family_cases(asked, task, PROFILES["quick"], seed)
    records = judge_cases(asked, task, cases)
    alarms = [f"{record.case.describe()}: {record.error}" for record in records if record.error]
    judged = [record for record in records if not record.error]
    outputs = sum(int(record.measures["outputs"]) for record in judged)
    if judged:
        operation = operations.find(asked.operation)
        rows = bound_rows(Figured(kernel, (family_row(judged, operation),), operation.name))
        alarms += [f"{row.rule}: {row.observed} beyond {row.limit}" for row in rows if row.status == "fail"]
    return Tally(kernel, task, seed, len(cases), outputs, tuple(alarms))


COLUMNS = ("kernel", "property or family", "seeds", "trials", "outputs", "false alarms", "first")


def rows(found: list[Tally]) -> list[list[object]]:
    """Rows of :data:`COLUMNS`, one for each task of each kernel."""
    groups: dict[tuple[str, str], list[Tally]] = {}
    for tally in found:
        groups.setdefault((tally.kernel, tally.task), []).append(tally)
    return [
        [*key, len(own), sum(x.trials for x in own), sum(x.outputs for x in own), len(alarms), (alarms or [""])[0]]
        for key, own in groups.items()
        for alarms in [[alarm for tally in own for alarm in tally.alarms]]
    ]
