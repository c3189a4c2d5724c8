"""The law that no call leaves a trace in another: calls whose outputs name addresses, one after the other and at once.

A call is repeated after others of its shapes that differ in data, lengths, mask or scale; in the same memory and as a
replayed CUDA graph; after an exception and a pause; from another thread, and from two at once; with other global seeds
and settings; and after the first call of a new process, which had one query and one key. What it leaves outside of its
outputs is compared as well, and hundreds of small calls show a rare loss.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from itertools import count as count_of
from typing import Any

import numpy as np

from fa3_reference.problem import AttentionProblem, Operands
from fa3verify.cases.case import Case
from fa3verify.files import Json
from fa3verify.judging import hypotheses
from fa3verify.kernels import watch
from fa3verify.kernels.calls import KernelError, run
from fa3verify.kernels.handed import arranged
from fa3verify.kernels.loading import load
from fa3verify.kernels.names import KernelName
from fa3verify.kernels.record import Kernel
from fa3verify.operations import Outputs, WrongOutput
from fa3verify.properties.addressed_calls import Stopwatch, call_of, calls, is_asked
from fa3verify.properties.addresses import Addressed
from fa3verify.properties.compare import same_bits, summed, within
from fa3verify.properties.handing import asked
from fa3verify.properties.ladder import work
from fa3verify.properties.law import Law, Setup, Trial, Untaken, Violation, Walk
from fa3verify.properties.surroundings import keeping_environment, restored, settings
from fa3verify.properties.views import copied, filled, is_numpy, is_tensor

NAME = "calls_leave_no_trace"
_OFTEN = "again and again"
_NEW = "after a first call of one key"
_PAUSE_S = 0.3
_SECONDS = 0.2  # of repeated calls, for each example of a campaign
_FEW, _MANY = 3, 90  # keys
_AT_ONCE = 8  # calls of each of two threads
Call = tuple[Setup, Addressed]
Found = Iterator[Violation | None]


def _family(kernel: Kernel, problem: AttentionProblem) -> list[Call]:
    """Return the call, one of other data, and others: of its shapes with another scale, mask and lengths, and batched
    ones of fewer and more keys.
    """
    changes: list[Json] = [
        {"softmax_scale": problem.softmax_scale * 2},
        {"causal": not problem.causal, "window": (-1, -1)},
        {"causal": False, "window": (3, 2)},
    ]
    cache, queries, keys = problem.cache, problem.seqlens_q, problem.seqlens_k
    if queries and keys:
        changes.append({"seqlens_q": queries[::-1], "seqlens_k": keys[::-1]})
    if not keys:
        changes += [{"seqlen_k": _FEW}, {"seqlen_k": _MANY}]
    if cache and keys and not cache.new:
        fewer = tuple(max(1, n // 3) for n in keys)
        pages = [sum(-(-n // (cache.page_size or n)) for n in lengths) for lengths in (keys, fewer)]
        spare = cache.spare + pages[0] - pages[1] if cache.page_size else cache.spare + max(keys) - max(fewer)
        shorter = replace(cache, spare=spare, leftpad=(), shared=False)
        changes.append({"seqlens_k": fewer, "seqlen_k": max(fewer), "cache": shorter})
    problems = [problem, problem]
    for change in changes:
        with contextlib.suppress(ValueError):
            problems.append(replace(problem, **change))
    taken = [each for each in problems if kernel.supports(each)]
    return [call_of(kernel, each, seed=i % 3) for i, each in enumerate(taken)]


def _again(call: Call, words: str) -> Violation | None:
    setup, due = call
    return due.violation(words, setup.run())


def _in_turn(family: list[Call], trial: Trial) -> Found:
    """Make all calls, in either order: each is right, and repeats itself as the kernel claims or within its bound."""
    firsts = [setup.run() for setup, _ in family]
    turns = [*range(len(family)), *reversed(range(len(family)))]
    for number, i in enumerate(turns):
        words = f"call {len(family) + number + 1}, after others"
        setup, due = family[i]
        got = setup.run()
        yield due.violation(words, got)
        differs = same_bits(f"{words} against the first with its inputs", got, firsts[i])
        if differs and not setup.kernel.claims(NAME):
            sides = hypotheses.under(setup.kernel).values() or (setup.kernel,)
            bounds = [setup._replace(kernel=side).bound() for side in sides]
            widest = {name: np.max([bound[name] for bound in bounds], axis=0) for name in bounds[0]}
            differs = within(words, got, firsts[i], summed(widest, widest))
        yield differs


class _SameMemory:
    """Gives calls whose arguments lie where those of their name, shape and dtype lay before."""

    def __init__(self) -> None:
        self.held: Json = {}

    def __call__(self, arguments: Json) -> Json:
        return {name: self._placed(name, x) if is_tensor(x) else x for name, x in arguments.items()}

    def _placed(self, name: str, x: Any) -> Any:
        held = self.held.setdefault(f"{name} {tuple(x.shape)} {x.dtype}", copied(x))
        if is_numpy(x):
            held.flags.writeable = True
        return filled(held, x)


def _in_the_same_memory(family: list[Call], trial: Trial) -> Found:
    with arranged(_SameMemory()):
        yield from _in_turn(family, trial)


class _Graph:
    """Captures the first call as a CUDA graph in fixed memory, and replays it for later ones."""

    def __init__(self) -> None:
        self.give = _SameMemory()
        self.graph: Any = None
        self.returned: Any = None

    def __call__(self, kernel: Callable[[], Any]) -> Any:
        torch = sys.modules["torch"]
        if self.graph is None:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                kernel()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.returned = kernel()
            self.graph = graph
        self.graph.replay()
        torch.cuda.synchronize()
        return self.returned


def _as_a_graph(family: list[Call], trial: Trial) -> Found:
    """Replay a graph of the shortest call for those whose arguments differ from its own in their tensors alone."""
    graph = _Graph()
    short, *others = sorted(family, key=lambda call: call[0].problem.seqlen_k)
    bare: Json = {"seqlens_k": None, "seqlens_q": None, "seqlen_k": 1, "cache": None}
    said = [replace(setup.problem, **bare) for setup, _ in (short, *others)]
    with arranged(graph.give, call=graph):
        try:
            short[0].run()
        except KernelError as error:
            raise Untaken(f"it cannot be captured: {error}") from None
        shapes = len(graph.give.held)
        for call in (*(call for call, own in zip(others, said[1:], strict=True) if own == said[0]), short):
            with contextlib.suppress(KernelError):  # its arguments may have other shapes than those that were captured
                violation = _again(call, "a replayed CUDA graph")
                if len(graph.give.held) == shapes:
                    yield violation


def _after_an_exception(family: list[Call], trial: Trial) -> Found:
    def broken(arguments: Json) -> Json:
        return {name: x[..., :3] if name in ("k", "k_cache") else x for name, x in arguments.items()}

    yield _again(family[0], "the first call")
    with arranged(broken), contextlib.suppress(KernelError):
        family[0][0].run()
    for call in family:
        yield _again(call, "after a call that could not succeed")


def _after_a_pause(family: list[Call], trial: Trial) -> Found:
    yield _again(family[0], "before a pause")
    time.sleep(_PAUSE_S)
    yield _again(family[0], "after a pause")


def _with_other_seeds(family: list[Call], trial: Trial) -> Found:
    """Seed all generators otherwise, and tell whether a call has set them to a state of its own."""
    states = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 (the state that kernels share is what is changed)
        if torch := sys.modules.get("torch"):
            torch.manual_seed(seed)
        yield _again(family[0], "with other global seeds")
        states.append(_generators())
    if reset := [name for name, state in states[0].items() if state == states[1][name]]:
        yield Violation(f"it sets the state of {' and '.join(reset)}")


def _generators() -> dict[str, object]:
    states: dict[str, object] = {"random": random.getstate(), "numpy.random": np.random.get_state()[1].tobytes()}  # type: ignore[union-attr]  # noqa: NPY002
    torch = sys.modules.get("torch")
    return states | ({"torch's generator": torch.get_rng_state().numpy().tobytes()} if torch else {})


def _after_a_first_call_of_one_key(family: list[Call], trial: Trial) -> Found:
    """Make the calls in a process of their own, which begins with the smallest of each kind.

    Kernels that compile for shapes, or plan by them, may keep what the first one was: one key needs no softmax.
    """
    kernel = family[0][0].kernel
    of_one: Json = {"seqlens_q": None, "seqlens_k": None, "seqlen_q": 1, "seqlen_k": 1}
    small = dict.fromkeys(replace(setup.problem, **of_one) for setup, _ in family if not setup.problem.cache)
    every = [*(call_of(kernel, each) for each in small if kernel.supports(each)), *family]
    with watch.warming(f"{NAME} {kernel.name}"), ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as own:
        try:
            made = own.submit(_made_by, KernelName.parse(kernel.name).base, [setup[1:] for setup, _ in every]).result()
        except BrokenProcessPool:
            raise KernelError("the process whose first call had one query and one key has died") from None
    for number, ((_, due), got) in enumerate(zip(every, made, strict=True), start=1):
        yield due.violation(f"call {number} of a new process, the first of which had one query and one key", got)


def _made_by(reference: str, given: list[tuple[AttentionProblem, Operands, Any]]) -> list[Outputs]:
    kernel = load(reference)
    return [run(kernel, *each) for each in given]


def _unasked_gradients(family: list[Call], trial: Trial) -> Found:
    """Leave out gradients of some operands, and differentiate one graph twice."""
    setup, due = family[0]
    for frozen in (("q",), ("k",), ("v",), ("q", "k")):
        rest = {name: x for name, x in due.due.items() if name[1:] not in frozen}
        with arranged(frozen=frozen):
            partly = Addressed(due.problem, due.operands, rest, due.allowed)
            yield partly.violation(f"without gradients of {' and '.join(frozen)}", setup.run())
    with arranged(times=2):
        yield due.violation("a second backward of one graph", setup.run())


def _in_threads(family: list[Call], trial: Trial) -> Found:
    """Call from another thread, then from two at once."""
    found: list[Violation | BaseException | None] = []

    def repeat(call: Call, count: int) -> None:
        words = "from two threads at once" if count > 1 else "from another thread"
        try:
            found.extend(_again(call, words) for _ in range(count))
        except BaseException as error:  # it is raised in the thread that began this one
            found.append(error)

    for members, count in ((family[:1], 1), (family[:2], _AT_ONCE), (family[-2:], _AT_ONCE)):
        threads = [threading.Thread(target=repeat, args=(call, count), daemon=True) for call in members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for each in found:
        if isinstance(each, BaseException):
            raise each
        yield each


def _outside_stays(family: list[Call], trial: Trial) -> Found:
    """Call under other settings, which must stay, and compare what an earlier call returned."""
    changed: list[str] = []
    for name, read, write, values in settings():
        for value in values:

            def under(kernel: Callable[[], Any], *, read: Any = read, write: Any = write, value: Any = value) -> Any:
                before = read()
                write(value)
                try:
                    return kernel()
                finally:
                    changed.extend([name] * (read() != value))  # noqa: B023 (it is called before the next name)
                    write(before)

            with arranged(call=under):
                yield _again(family[0], f"with {name}: {value}")
    if changed:
        yield Violation(f"it changes {' and '.join(dict.fromkeys(changed))}")
    with arranged(call=keeping_environment):
        yield _again(family[0], "with its environment watched")
    with arranged() as arrangement:
        yield _again(family[0], "the first call")
        returned = _parts(arrangement.returned)
        tensors = {name: x for name, x in arrangement.given.items() if is_tensor(x)}
        if shared := [name for name, x in tensors.items() if any(_overlap(x, y) for y in returned)]:
            yield Violation(f"what it returns lies in the memory of {' and '.join(shared)}")
        copies = [copied(x) for x in returned]
        for call in family[1:]:
            yield _again(call, "the next call")
        if any(bool((x != copy).any() & (x == x).all()) for x, copy in zip(returned, copies, strict=True)):
            yield Violation("a later call changes what an earlier one returned")


def _parts(returned: Any) -> list[Any]:
    return [x for x in (returned if isinstance(returned, (tuple, list)) else (returned,)) if is_tensor(x)]


def _overlap(x: Any, y: Any) -> bool:
    """Tell whether two arrays, or two tensors, lie in the same memory."""
    if is_numpy(x) or is_numpy(y):
        return is_numpy(x) and is_numpy(y) and np.may_share_memory(x, y)
    return bool(x.numel()) and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def _often(family: list[Call], trial: Trial) -> Found:
    """Call as often as there is time, or as often as before: once with its arguments made anew, once with the same."""
    known = trial.integer("calls", 0, 10**9)
    stopwatch, limit_s = Stopwatch(), _SECONDS * trial.integer("examples", 1, 10**6)
    kernel = family[0][0].kernel
    setup, due = call_of(kernel, min(calls(kernel), key=work))

    def repeated(kernel: Callable[[], Any]) -> Any:
        first, count = kernel(), 1
        while count < known if known else stopwatch.seconds < limit_s:
            count += 1
            if not all(map(_alike, _parts(kernel()), _parts(first))):
                raise WrongOutput(f"returned something else in call {count:,} of the same arguments")
        trial.parameters["calls"] = count
        return first

    with arranged(call=repeated):
        yield due.violation("the first of many calls", setup.run())
    for count in count_of(1):
        if stopwatch.seconds > 2 * limit_s:
            return
        yield _again(family[count % len(family)], f"call {count:,}")


def _alike(x: Any, y: Any) -> bool:
    """Tell whether outputs of one call are the same, up to what may be added in another order."""
    if is_numpy(x):
        x, y = x.astype(np.float32), y.astype(np.float32)
    return bool((x == y).all()) or bool(((x == y) | (abs(x - y) <= abs(y) / 32 + 0.05)).all())


STEPS: Mapping[str, Callable[[list[Call], Trial], Found]] = {
    "after other calls of its shapes": _in_turn,
    "in the same memory": _in_the_same_memory,
    "as a CUDA graph": _as_a_graph,
    "after an exception": _after_an_exception,
    "after a pause": _after_a_pause,
    _NEW: _after_a_first_call_of_one_key,
    "with other global seeds": _with_other_seeds,
    "without some gradients, and twice": _unasked_gradients,
    "in threads": _in_threads,
    "what lies outside": _outside_stays,
    _OFTEN: _often,
}
_OF_TENSORS = ("in the same memory", "as a CUDA graph", "after an exception", "what lies outside")


def _trials(kernel: Kernel, examples: int) -> Walk:
    left_out: set[str] = set() if kernel.is_handed else set(_OF_TENSORS)
    if not kernel.device.startswith("cuda"):
        left_out.add("as a CUDA graph")
    if kernel.operation != "backward" or kernel.forward != "own":
        left_out.add("without some gradients, and twice")
    if not KernelName.parse(kernel.name).is_reference:  # another process could not find it
        left_out.add(_NEW)
    for problem in calls(kernel):
        for name in [each for each in STEPS if each not in left_out]:
            parameters: Json = {"of": name}
            if name == _OFTEN:
                parameters |= {"examples": examples if kernel.is_handed else 1, "calls": 0}
            if (yield Trial(NAME, Case.plain(kernel, problem), parameters)):
                return
        left_out |= {_OFTEN, _NEW, "after a pause"}  # once is enough


def _check(kernel: Kernel, trial: Trial) -> Violation | None:
    name = trial.choice("of", tuple(STEPS))
    family = _family(kernel, trial.case.problem)
    with restored():
        return next(filter(None, STEPS[name](family, trial)), None)


REUSE_LAWS = (
    Law(
        name=NAME,
        statement="a call gives the same after others of its shapes with other data, lengths, masks and scales, in the "
        "same memory, as a CUDA graph, after an exception, a pause and a first call of one key, in threads, and with "
        "other seeds and settings; it leaves nothing else changed, and is right each of hundreds of times",
        kind="agreement",
        needs=is_asked,
        draw=None,
        check=_check,
        asked=lambda trials: asked("calls", trials),
        operations=("forward", "backward"),
        walk=_trials,
    ),
)
