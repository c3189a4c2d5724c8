"""Hypothesis strategies of small trials, which take milliseconds, and :func:`law`, by which all laws are written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hypothesis import assume, strategies as st

from fa3_reference.problem import AttentionProblem, Dtype
from fa3verify import operations
from fa3verify.cases import space
from fa3verify.cases.case import Case
from fa3verify.cases.coverage import adapted
from fa3verify.files import Json
from fa3verify.inputs.strategies import TILE_EDGES, WINDOW_EDGES, recipes
from fa3verify.kernels.record import Kernel
from fa3verify.kernels.widths import head_dim_refusal, is_absorbed, widths
from fa3verify.operations.operation import Descales
from fa3verify.properties.compare import Found, first
from fa3verify.properties.law import Drawn, Kind, Law, Setup, Trial, Violation, set_up

CELLS = 130 * 130  # scores of one trial, about: batch * nheads * seqlen_q * seqlen_k
MAX_SEQLEN = 300
TILE = 128  # keys
LONG = (1024, 2048, 4096)  # keys in the few laws about accumulator loss
HEAD_DIMS = (64, 128, 80)  # 80 is padded to 96
Parameters = Callable[[st.DrawFn, Kernel, Case], Drawn]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Says which cases are drawn for a law.

    ``masks`` "some" means causal or windowed, "mostly" that in six of seven cases. ``several`` asks for at least two
    (sequence, kv head) pairs, ``single`` for one, ``permuted`` for at least three sequences and kv heads, which can be
    put in an order that is not its own inverse. ``grouped`` asks for shared kv heads. ``unseen`` asks, in three of four
    cases, for rows in front of the first key, from which a causal mask hides every key, beside a sequence with keys of
    two tiles; a chunk counts as a mask there, and always comes with such rows. ``empty`` allows sequences without
    queries or keys. ``descales`` of e4m3 are "any" kind, "uniform" over the keys of a head, or always "blocks" of rows.
    ``absorbed`` allows heads whose K holds V, for laws that change neither of them alone. ``seqlens_k`` are the only
    lengths of keys, any if it is empty, ``families`` the only inputs, all if it is None.
    """

    masks: Literal["any", "mostly", "none", "causal", "window", "some"] = "any"
    layout: Literal["any", "batched", "varlen"] = "any"
    descales: Descales = "any"
    softcap: bool = True
    grouped: bool = False
    several: bool = False
    single: bool = False
    permuted: bool = False
    unseen: bool = False
    empty: bool = True
    absorbed: bool = False
    longest_q: int = MAX_SEQLEN
    seqlens_k: tuple[int, ...] = ()
    families: tuple[str, ...] | None = None
    max_edits: int = 2


def _length(draw: st.DrawFn, most: int, least: int = 1) -> int:
    """Draw a length, every second time one at the edge of a tile.

    Hypothesis sees a single choice, so that an edge can shrink to any length.
    """
    most = max(least, most)
    edges = [n for n in TILE_EDGES if least <= n <= most] or [least]
    choices = most - least + 1
    n = draw(st.integers(0, 2 * choices - 1))
    return least + n if n < choices else edges[(n - choices) % len(edges)]


_SOME = ("causal", "window")
_SEVERAL = {"any": ("dense", *_SOME), "some": _SOME, "mostly": ("dense", *_SOME, *_SOME, *_SOME)}


def _mask(draw: st.DrawFn, kernel: Kernel, wanted: Wanted) -> Json:
    if wanted.masks == "none":
        return {}
    # A chunk is drawn as often as both others together.
    kinds = (*_SEVERAL.get(wanted.masks, (wanted.masks,)), *(2 * ("attention_chunk",) if wanted.unseen else ()))
    kind = draw(st.sampled_from([kind for kind in kinds if kind == "dense" or kind in kernel.features]))
    if kind in ("dense", "causal"):
        return {"causal": kind == "causal"}
    if kind == "attention_chunk":
        return {kind: draw(st.sampled_from((MAX_SEQLEN, MAX_SEQLEN, TILE // 2)))}
    return {"window": draw(st.tuples(st.sampled_from(WINDOW_EDGES), st.sampled_from(WINDOW_EDGES)))}


def _key_lengths(draw: st.DrawFn, wanted: Wanted, count: int) -> list[int]:
    """Draw the keys of ``count`` sequences; where blocks of descales are wanted, more than a tile."""
    if wanted.seqlens_k:
        return [draw(st.sampled_from(wanted.seqlens_k)) for _ in range(count)]
    least = 129 if wanted.descales == "blocks" else 1
    lengths = [_length(draw, MAX_SEQLEN, least) for _ in range(count)]
    if wanted.empty and draw(st.integers(0, 7)) == 7:
        lengths[draw(st.integers(0, count - 1))] = 0
    return lengths


def _dims(kernel: Kernel) -> tuple[int, ...]:
    """Return the head dims to try on a kernel that declares none: the usual ones that it takes, else any it takes."""
    return tuple(d for d in HEAD_DIMS if head_dim_refusal(kernel, d) is None) or space.head_dims(kernel) or HEAD_DIMS


@st.composite
def small_problems(draw: st.DrawFn, kernel: Kernel, wanted: Wanted) -> AttentionProblem:
    """Draw a problem of at most about CELLS scores that the kernel supports; others are rejected by ``assume``."""
    grouped = "gqa" in kernel.features
    fewest = 3 if wanted.permuted else 1
    nheads_kv = draw(st.integers(fewest, 1 if wanted.single else fewest + 1))
    group = draw(st.integers(2 if wanted.grouped else 1, 3)) if grouped else 1
    varlen = wanted.layout == "varlen"
    if wanted.layout == "any":
        varlen = "varlen" in kernel.features and draw(st.booleans())
    least = 2 if wanted.several and (nheads_kv == 1 or wanted.layout == "varlen") else 1
    batch = draw(st.integers(max(least, fewest), 1 if wanted.single else 3 if varlen else fewest + 1))
    dims = [d for d in kernel.head_dims or _dims(kernel) if wanted.absorbed or not is_absorbed(kernel, d)]
    assume(dims)
    head_dim = draw(st.sampled_from(dims))
    rest: Json = {
        "nheads": nheads_kv * group,
        "nheads_kv": nheads_kv,
        **widths(kernel, head_dim),
        "dtype": kernel.dtype,
        "softmax_scale": draw(st.sampled_from((None, 0.25, 0.05))),
        **_mask(draw, kernel, wanted),
    }
    if wanted.softcap and "softcap" in kernel.features:
        rest["softcap"] = draw(st.sampled_from((0.0, 0.0, 30.0, 2.0)))
    if "head_dim_v" in kernel.features and head_dim == 64:
        rest["head_dim_v"] = draw(st.sampled_from((64, 64, 32)))
    lengths_k = _key_lengths(draw, wanted, batch if varlen else 1)
    total_k = sum(lengths_k) if varlen else batch * lengths_k[0]
    most = min(wanted.longest_q, max(1, CELLS // (max(1, total_k) * rest["nheads"])))
    if varlen:
        lengths_q = [_length(draw, most) for _ in range(batch)]
        if wanted.empty and batch > 1 and draw(st.integers(0, 7)) == 7:
            lengths_q[-1] = 0
    else:
        lengths_q = [_length(draw, most)]
    if wanted.unseen and (draw(st.integers(0, 3)) or "attention_chunk" in rest):
        lengths_k[0] = max(lengths_k[0], TILE + 1)
        lengths_k[1:] = [min(n, 8) for n in lengths_k[1:]]  # the call is split by its longest sequence
        lengths_q[-1] = lengths_k[-1] + draw(st.integers(1, 8))
    if varlen:
        problem = AttentionProblem.varlen(tuple(lengths_q), tuple(lengths_k), **rest)
    else:
        problem = AttentionProblem(batch=batch, seqlen_q=lengths_q[0], seqlen_k=lengths_k[0], **rest)
    problem = adapted(kernel, problem)
    assume(kernel.supports(problem) and _is_wanted(problem, wanted))
    return problem


def _is_wanted(problem: AttentionProblem, wanted: Wanted) -> bool:
    """Tell whether a problem is still what a law wants in the sizes that its kernel declares."""
    pairs = min(problem.batch, problem.nheads_kv) if wanted.permuted else problem.batch * problem.nheads_kv
    return (
        not (wanted.masks in ("none", "window") and problem.causal)
        and wanted.layout in ("any", "varlen" if problem.is_varlen else "batched")
        and pairs >= (3 if wanted.permuted else 2 if wanted.several else 1)
        and problem.group >= (2 if wanted.grouped else 1)
    )


@st.composite
def small_cases(draw: st.DrawFn, kernel: Kernel, wanted: Wanted) -> Case:
    """Draw a case for a kernel."""
    problem = draw(small_problems(kernel, wanted))
    recipe = draw(recipes(wanted.families, problem=problem, max_edits=wanted.max_edits))
    operation = operations.find(kernel.operation)
    configure = kernel.code.configure
    scheme, changes = operation.draw_choices(draw, problem, kernel.features, configure, wanted.descales)
    return Case(kernel.name, problem, recipe, scheme, changes, operation.name)


def drawn(**parameters: st.SearchStrategy[Any]) -> Parameters:
    """Return a function that draws parameters whose strategies are the same in every case."""
    return lambda draw, kernel, case: {name: draw(strategy) for name, strategy in parameters.items()}


def needs(*features: str, dtypes: tuple[str, ...] = get_args(Dtype)) -> Callable[[Kernel], bool]:
    """Return a function that tells whether a kernel has all the features and one of the dtypes."""
    return lambda kernel: set(features) <= kernel.features and kernel.dtype in dtypes


NOTHING_DRAWN = drawn()
ANY_KERNEL = needs()


# Properties that hold of kernels with a score_mod or a mask_mod too. Left out are those that move queries, keys, heads
# or sequences to other indices, which the functions may read, and those that know the scores or which keys are visible.
WITH_MODS = frozenset(
    [
        "error_within_bound",
        "error_within_bound_on_long_rows",
        "numeric_switches_stay_within_bound",
        "value_scaling_by_powers_of_two",
        "score_scaling_by_powers_of_two",
        "sign_symmetry",
        "value_channels_are_independent",
        "repeated_run_is_identical",
        "schedule_switches_change_no_bit",
        "invisible_keys_never_matter",
        "empty_rows_are_zero",
        "grouped_heads_equal_repeated_heads",
        "neighbours_never_leak",
        "keys_that_a_term_hides_never_matter",
        "rows_that_a_term_empties_are_zero",
    ]
)


def law(
    name: str,
    statement: str,
    kind: Kind,
    compare: Callable[[Setup, Trial], Found],
    *,
    wanted: Wanted,
    parameters: Parameters = NOTHING_DRAWN,
    applies: Callable[[Kernel], bool] = ANY_KERNEL,
    of: tuple[str, ...] = (operations.FORWARD,),
) -> Law:
    """Return a law whose trials are cases of :func:`small_cases` with drawn ``parameters``.

    ``compare(setup, trial)`` gets the call that a trial's case describes, and yields a violation or None for each of
    its comparisons; the first violation ends it. ``wanted`` says which cases are drawn, ``applies`` which kernels have
    what the law needs, and ``of`` names the operations. A law that does not want absorbed heads does not apply to a
    kernel that has no others.
    """

    @st.composite
    def trials(draw: st.DrawFn, kernel: Kernel) -> Trial:
        case = draw(small_cases(kernel, wanted))
        return Trial(name, case, parameters(draw, kernel, case))

    def check(kernel: Kernel, trial: Trial) -> Violation | None:
        return first(compare(set_up(kernel, trial.case), trial))

    def fits(kernel: Kernel) -> bool:
        is_plain = not all(is_absorbed(kernel, d) for d in kernel.head_dims or (0,))
        return (is_plain or wanted.absorbed) and (kernel.mods is None or name in WITH_MODS) and applies(kernel)

    return Law(name=name, statement=statement, kind=kind, needs=fits, draw=trials, check=check, operations=of)
