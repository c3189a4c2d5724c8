"""Laws about how a call is handed over: views are read by their strides, and nothing is read that belongs to nobody.

The calls are those whose outputs name addresses, with their arguments arranged in other ways
(:mod:`fa3verify.properties.views`). A view that a kernel refuses, by any exception but an error of the GPU, is left
out.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from random import Random

from fa3_reference.problem import AttentionProblem
from fa3verify.cases.case import Case
from fa3verify.files import Json
from fa3verify.kernels.handed import arranged
from fa3verify.kernels.record import Kernel
from fa3verify.properties.addressed_calls import Stopwatch, call_of, calls, is_asked, is_refusal
from fa3verify.properties.law import KernelError, Law, Refused, Trial, Untaken, Violation, Walk
from fa3verify.properties.surroundings import restored
from fa3verify.properties.views import (
    EXPANDED,
    FAR,
    POOLS,
    PROJECTION,
    SLOW,
    VIEWS,
    WIDE,
    blank,
    copied,
    joined,
    viewed,
    views_of,
)

ALL = "all arguments"
# What may be expanded where operands are the same, by operation.
_ALIKE: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "forward": {"batch": ("k", "v"), "heads": ("k", "v"), "queries": ("q",)},
    "backward": {"dout": ("dout",)},
}
_OWN = ("out", "lse")  # what a backward gets of its own forward, and no caller lays otherwise
_SLACK = 5  # tokens behind the last sequence
SECONDS = 0.4  # of a walk for each example of a campaign
_MANY = 30  # examples of a campaign from which all views are asked
_MORE = 37  # by which max_seqlen is larger than any sequence
_PERTURB, _MMAP_THRESHOLD = -6, -3  # options of glibc's mallopt


def arguments_of(kernel: Kernel, problem: AttentionProblem) -> Json:
    """Return the arguments of a call by name; empty if the kernel is no function that gets them, or fails."""
    noted: Json = {}

    def note(arguments: Json) -> Json:
        noted.update(arguments)
        return arguments

    with arranged(note), contextlib.suppress(Exception):
        call_of(kernel, problem)[0].run()
    return noted


def _viewed(name: str, view: str) -> Callable[[Json], Json]:
    """Return how one argument, or all, or two that share memory, become views."""

    def give(arguments: Json) -> Json:
        if view in POOLS or view == PROJECTION:
            return arguments | joined(arguments, view)
        asked = (
            {each: x for each, x in arguments.items() if each not in _OWN} if name == ALL else {name: arguments[name]}
        )
        return arguments | {each: viewed(x, view) for each, x in asked.items() if view in (*views_of(x), EXPANDED)}

    return give


def _views(kernel: Kernel, examples: int) -> Walk:
    """Yield trials of each view of each argument, of all arguments, and of those that lie in one tensor, in any order:
    a slow kernel is asked some of each.
    """
    watch = Stopwatch()
    left_out = SLOW if examples < _MANY else frozenset()
    trials = []
    for problem in calls(kernel):
        arguments = arguments_of(kernel, problem)
        case = Case.plain(kernel, problem)
        own = {
            name: [view for view in views_of(x) if view not in left_out]
            for name, x in arguments.items()
            if name not in _OWN
        }
        shared = [view for view in (*POOLS, PROJECTION) if joined(arguments, view)]
        everywhere = dict.fromkeys(view for views in own.values() for view in views if view not in FAR)
        asked = [(name, view, "") for name, views in own.items() for view in views]
        asked += [(ALL, view, "") for view in (*shared, *everywhere)]
        asked += [
            (name, EXPANDED, way) for way, names in _ALIKE[kernel.operation].items() for name in names if name in own
        ]
        trials += [Trial(VIEWS_LAW, case, {"of": name, "as": view, "alike": way}) for name, view, way in asked]
    Random(0).shuffle(trials)
    trials.sort(key=lambda trial: trial.parameters["as"] not in (*POOLS, PROJECTION, EXPANDED))
    for trial in trials:
        if watch.seconds > SECONDS * examples or (yield trial):
            return


def _check_view(kernel: Kernel, trial: Trial) -> Violation | None:
    name, alike = str(trial.parameters["of"]), trial.choice("alike", ("", *_ALIKE[kernel.operation]))
    view = trial.choice("as", (*VIEWS, *FAR, *POOLS, PROJECTION, WIDE, EXPANDED))
    setup, due = call_of(kernel, trial.case.problem, alike=alike)
    try:
        with arranged(_viewed(name, view)):
            got = setup.run()
    except KernelError as error:
        if is_refusal(error):
            raise Untaken(f"{name}, {view}: {error}") from None
        raise
    return due.violation(f"{name}, {view}", got)


# What a call does not hand over, and how it is changed.


def _slack(problem: AttentionProblem, arguments: Json) -> Json:
    """Return packed arguments with tokens behind those of the last sequence, of garbage."""
    if not problem.is_varlen or problem.cache:
        return {}
    found = {}
    for name, x in arguments.items():
        if name not in ("q", "k", "v", "dout", "out", "lse"):
            continue
        tokens = problem.k_shape[0] if name in ("k", "v") else problem.q_shape[0]
        axis = list(x.shape).index(tokens) if name == "lse" else 0
        longer = blank(x, tuple(n + _SLACK * (a == axis) for a, n in enumerate(x.shape)))
        longer[(slice(None),) * axis + (slice(tokens),)] = x
        found[name] = longer
    return found


def _entries(entry: int | None, problem: AttentionProblem, arguments: Json) -> Json:
    """Return a page table with other entries behind those of each sequence; None stands for the first one's pages."""
    table = arguments.get("page_table")
    if table is None or problem.cache is None or problem.seqlens_k is None or problem.cache.indexed:
        return {}
    found = copied(table)
    for row, n, pad in zip(found, problem.seqlens_k, problem.cache.pads(problem), strict=True):
        row[-(-(n + pad) // problem.cache.page_size) :] = int(found[0, 0]) if entry is None else entry
    return {"page_table": found}


UNREAD: Mapping[str, Callable[[AttentionProblem, Json], Json]] = {
    "max_seqlen larger than any sequence": lambda problem, arguments: {
        name: x + _MORE for name, x in arguments.items() if name.startswith("max_seqlen")
    },
    "tokens behind the last sequence": _slack,
    **{
        f"table entries behind a sequence: {words}": lambda problem, arguments, entry=entry: _entries(
            entry, problem, arguments
        )
        for words, entry in (("-1", -1), ("2^30", 2**30), ("pages of another", None))
    },
}
_LOUD = "table entries behind a sequence: 2^30"  # which a kernel may refuse by an IndexError
FRESH = "fresh memory"
NAN_BEHIND, FULL = "NaN behind every sequence", "full to the last place"


@contextlib.contextmanager
def garbage_in_fresh_memory() -> Iterator[None]:
    """Fill memory that is allocated in a ``with`` block, on a CPU by glibc and on a GPU by torch, with NaN or very
    large numbers.

    Arrays below a kilobyte, which numpy takes from memory that it keeps, and other C libraries are left out.
    """
    perturb = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: 0)  # glibc alone has it
    torch = sys.modules.get("torch")
    is_on_gpu = torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
    perturb(_MMAP_THRESHOLD, 2**30)  # larger blocks would be fresh pages of zeros
    perturb(_PERTURB, 0xFF ^ 0x7F)
    try:
        if not is_on_gpu:
            yield
            return
        assert torch is not None
        with restored(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.use_deterministic_algorithms(True, warn_only=True)  # torch fills fresh memory in this mode alone
            yield
    finally:
        perturb(_PERTURB, 0)
        perturb(_MMAP_THRESHOLD, 128 * 1024)


def _unread(kernel: Kernel, examples: int) -> Walk:
    """Yield a trial for each thing that no kernel may read, in each of a few small calls that have it."""
    for problem in calls(kernel):
        arguments = arguments_of(kernel, problem)
        case = Case.plain(kernel, problem)
        names = [name for name, change in UNREAD.items() if change(problem, arguments)]
        if kernel.device.startswith("cuda"):  # torch's own indexing would end the process
            names = [name for name in names if name != _LOUD]
        cached: dict[str, Json] = {NAN_BEHIND: {"behind": "nan"}, FULL: {"spare": 0}}
        cases = dict.fromkeys((*names, FRESH), case)
        if problem.cache:
            caches = {name: replace(problem.cache, **changes) for name, changes in cached.items()}
            cases |= {name: Case.plain(kernel, replace(problem, cache=cache)) for name, cache in caches.items()}
        for name, each in cases.items():
            if (yield Trial(UNREAD_LAW, each, {"of": name})):
                return


def _check_unread(kernel: Kernel, trial: Trial) -> Violation | None:
    name = trial.choice("of", (*UNREAD, FRESH, NAN_BEHIND, FULL))
    problem = trial.case.problem
    setup, due = call_of(kernel, problem)
    change = UNREAD.get(name, lambda problem, arguments: {})
    given = arranged(lambda arguments: arguments | change(problem, arguments), slack=_SLACK * (change is _slack))
    fresh = garbage_in_fresh_memory() if name == FRESH else contextlib.nullcontext()
    try:
        with given, fresh:
            got = setup.run()
    except KernelError as error:
        if isinstance(error, Refused) or (name == _LOUD and isinstance(error.__cause__, IndexError)):
            raise Untaken(f"{name}: {error}") from None
        raise
    return due.violation(name, got)


def asked(what: str, trials: list[Trial]) -> Json:
    """Return in words what trials have asked, as a row of what was tried."""
    names = dict.fromkeys(str(trial.parameters["of"]) for trial in trials)
    return {"asked": ((what, ", ".join(names)),) if names else ()}


def is_handed(kernel: Kernel) -> bool:
    """Tell whether a kernel is a function of tensors, whose arguments can be arranged."""
    return is_asked(kernel) and kernel.is_handed


VIEWS_LAW, UNREAD_LAW = "views_are_read_by_their_strides", "nothing_else_is_read"
HANDING_LAWS = (
    Law(
        name=VIEWS_LAW,
        statement="each argument by itself, and all together, may be a view: strided, transposed, expanded, behind an "
        "offset, unaligned, part of a pool or of one projection, or with elements 2^31 apart; a kernel may refuse it",
        kind="bounded",
        needs=is_handed,
        draw=None,
        check=_check_view,
        asked=lambda trials: {
            "layouts": tuple(dict.fromkeys((str(t.parameters["of"]), str(t.parameters["as"])) for t in trials))
        },
        operations=("forward", "backward"),
        walk=_views,
    ),
    Law(
        name=UNREAD_LAW,
        statement="a larger max_seqlen, tokens behind the last sequence, entries of a page table and places of a cache "
        "that belong to none, and what fresh memory holds change no output",
        kind="bounded",
        needs=is_handed,
        draw=None,
        check=_check_unread,
        asked=lambda trials: asked("not to be read", trials),
        operations=("forward", "backward"),
        walk=_unread,
    ),
)
