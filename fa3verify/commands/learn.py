"""The job of ``fa3verify learn``: find a kernel's order of operations, at each head_dim in a process of its own.

:mod:`fa3verify.learn` asks the kernel; this module runs it for several head dims, joins the answers and writes the
proposal, which ``fa3verify verify --order FILE`` takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

from fa3_kernels.plan.families.learned import LearnedOrder
from fa3_kernels.plan.order import Order
from fa3verify.campaign.introduction import found, introduce_all
from fa3verify.campaign.pool import AN_HOUR_S, processes
from fa3verify.campaign.run import Introduction
from fa3verify.campaign.tasks import CallTask, execute
from fa3verify.files import json_text, write_text
from fa3verify.learn import space
from fa3verify.learn.learner import OUTPUTS, Learned, learn

HEAD_DIMS = (64, 128)  # the head dims at which a kernel is asked by default, if it takes them


@dataclass(frozen=True, slots=True)
class Learning:
    """What was learned of a kernel: ``found`` at each head_dim, and ``failed``, a line for each head_dim without it."""

    kernel: str
    found: tuple[Learned, ...]
    failed: tuple[str, ...]

    @property
    def orders(self) -> tuple[Order, ...]:
        """Return the orders that no launch of any head_dim refuted; none if some head_dim was not learned whole."""
        if not self.found or not all(learned.is_whole for learned in self.found):
            return ()
        common = reduce(set.__and__, (set(learned.orders) for learned in self.found))
        return tuple(order for order in self.found[0].orders if order in common)

    @property
    def findings(self) -> tuple[str, ...]:
        """Return in words the steps of its order that are no sound choice, each once."""
        return tuple(dict.fromkeys(words for learned in self.found for words in learned.findings))

    @property
    def proposal(self) -> LearnedOrder | None:
        """Return what a file would hold, with the first order that is left; None where none is left."""
        if not self.orders:
            return None
        first = self.found[0]
        return LearnedOrder(
            self.kernel,
            first.dtype,
            {of.head_dim: (of.structure.tile_n, of.structure.tile_causal) for of in self.found},
            first.structure.promotion_interval,
            self.orders[0],
            frozenset.intersection(*(of.features for of in self.found)),
            space.free(self.orders),
            self.findings,
            sum(of.launches for of in self.found),
            sum(of.outputs for of in self.found),
        )

    def write(self, file: Path) -> bool:
        """Write the proposal, if there is one; tell whether there was."""
        if self.proposal is None:
            return False
        write_text(file, json_text(self.proposal.to_json()))
        return True


def learn_named(kernel: str, head_dim: int, outputs: int, seed: int) -> Learned:
    """Learn the order of a kernel, given by name, at one head_dim: the function of the tasks."""
    return learn(found(kernel), head_dim, outputs=outputs, seed=seed)


def _head_dims(introduced: Introduction) -> tuple[int, ...]:
    """Return those of :data:`HEAD_DIMS` that a kernel declares or may take, else the first one that it declares."""
    declared = introduced.head_dims
    return tuple(d for d in HEAD_DIMS if declared is None or d in declared) or (declared or HEAD_DIMS)[:1]


def learn_all(
    kernel: str,
    head_dims: Sequence[int] = (),
    *,
    outputs: int = OUTPUTS,
    seed: int = 0,
    workers: int = 0,
    progress: Callable[[str], None] = lambda label: None,
) -> Learning:
    """Learn the order of a kernel at each head_dim.

    Parameters
    ----------
    kernel : str
        Its name.
    head_dims : sequence of int
        By default those of :data:`HEAD_DIMS` that it declares to take.
    outputs : int
        Fresh output values at each head_dim that the answer is compared with.
    seed : int
        Seed of all launches.
    workers : int
        Processes; 0 is one per core.
    progress : callable
        Called with the label of each task that ended.

    Returns
    -------
    Learning
        Where the kernel raised, crashed or hung, ``failed`` says at which head_dim; if it did so while it was loaded,
        nothing is learned and ``failed`` says that.

    Raises
    ------
    ValueError
        If there is no such kernel.
    fa3verify.known.libraries.Unavailable
        If it cannot run here.
    """
    with processes(workers, AN_HOUR_S) as executor:
        (introduced,) = introduce_all((kernel,), "quick", executor)
        if introduced.failed:
            return Learning(kernel, (), (str(introduced.failed),))
        dims = tuple(head_dims) or _head_dims(introduced)
        arguments = [{"kernel": kernel, "head_dim": d, "outputs": outputs, "seed": seed} for d in dims]
        tasks = [
            CallTask(f"{kernel} at head_dim {each['head_dim']}", learn_named, each, kernel=kernel) for each in arguments
        ]
        outcomes = execute(tasks, executor, progress=lambda outcome: progress(outcome.task.label))
    failed = tuple(f"{outcome.task.label}: {outcome.error}" for outcome in outcomes if outcome.error)
    return Learning(kernel, tuple(outcome.value for outcome in outcomes if not outcome.error), failed)
