"""Find what a bare function takes by calling it: the facts that would declare it to be a kernel.

Each function here loads somebody's module, so that :mod:`fa3verify.commands.declare` runs it in a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib.util import find_spec

from fa3_reference.problem import AttentionProblem
from fa3_reference.score_term import KINDS, ScoreTerm
from fa3verify.campaign.plan import judge_cases
from fa3verify.cases.case import Case
from fa3verify.files import Json
from fa3verify.inputs.recipe import Recipe
from fa3verify.judging.judgement import passes
from fa3verify.kernels import loading
from fa3verify.kernels.conventions import Convention, facts_of, features_of
from fa3verify.kernels.functions import declared_kernels
from fa3verify.kernels.names import declaring
from fa3verify.kernels.policy import VALUES
from fa3verify.kernels.sizes import SIZES

WHOLE: Json = {"batch": 2, "nheads": 3, "nheads_kv": 3, "seqlen_q": 128, "seqlen_k": 128, "head_dim": 64}
_LIBRARIES = (*(("torch",) if find_spec("torch") else ()), "numpy")  # whose arrays can be made here
# Calls of sizes of which a kernel that is made for some takes at least one.
PLAIN: tuple[Json, ...] = (
    WHOLE,
    WHOLE | {"batch": 1, "nheads": 1, "nheads_kv": 1},
    WHOLE | {"seqlen_q": 1},
    WHOLE | {"seqlen_q": 5, "seqlen_k": 7},
)
_TELLING: Mapping[Convention, frozenset[str]] = {  # names of arguments that only functions of a convention have
    "flash_attn_varlen": frozenset({"cu_seqlens_q"}),
    "flash_attn_kvcache": frozenset({"cache_seqlens", "page_table", "block_table"}),
    "flex": frozenset({"score_mod", "block_mask"}),
}
# What a call has that has a feature, beside those of terms.
_CALLS: Mapping[str, Json] = {
    "causal": {"causal": True},
    "gqa": {"nheads": 6, "nheads_kv": 2},
    "window": {"window": (17, 5)},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
}


def callings(reference: str) -> list[Json]:
    """Return the ways in which a function may be meant to be called, by the names of its arguments.

    Raises
    ------
    ValueError
        If there is no such function, or it was declared to be a kernel already.
    Unloadable
        If importing its module raises SystemExit.
    """
    function = loading.bare(reference)
    names = loading.parameters(function).keys()
    likes: Sequence[Convention] = ("sdpa", "flash_attn")
    for like, telling in _TELLING.items():
        likes = (like,) if telling & names else likes
    facts = facts_of(likes[0], function)
    scales: Sequence[Json] = ({}, {"softmax_scale": 1.0}) if "softmax_scale" in facts else ({},)
    always: Json = {"always": ("causal", *facts.get("always", ()))}
    return [
        {"like": like} | ({"library": library} if library != "torch" else {}) | scale | mask
        for mask in (({},) if "causal" in features_of(likes[0], function) else ({}, always))
        for scale in scales
        for library in _LIBRARIES
        for like in likes
    ]


def refusing(reference: str) -> Callable[..., object]:
    """Return a bare function that refuses calls by whatever it raises, as torch raises RuntimeError of lengths."""

    @wraps(function := loading.bare(reference))
    def called(*arguments: object, **options: object) -> object:
        try:
            return function(*arguments, **options)
        except Exception as error:
            raise NotImplementedError(repr(error)) from error

    return called


def features(reference: str, like: Convention) -> dict[str, tuple[Json, ...]]:
    """Return the features for which a function has an argument, and gqa, each with calls that have it."""
    known = (*features_of(like, loading.bare(reference)), "gqa")
    calls = {name: {"term": ScoreTerm(kind=name)} if name in KINDS else _CALLS[name] for name in known}  # type: ignore[arg-type]
    return {name: tuple(sizes | fields for sizes in PLAIN) for name, fields in calls.items()}


def tried(reference: str, facts: Json, calls: Sequence[Json]) -> tuple[int, int, str]:
    """Return how many calls were right, how many returned, and what the first that did not return raised.

    Parameters
    ----------
    reference : str
    facts : dict
        Keywords of ``fa3verify.kernel``.
    calls : sequence of dict
        Fields of problems, which are fitted to the sizes that are declared.
    """
    (kernel, *_) = declared_kernels(loading.bare(reference), facts)
    problems = dict.fromkeys(kernel.fitted(AttentionProblem(**fields, dtype=kernel.dtype)) for fields in calls)
    cases = [Case(kernel.name, problem, Recipe("normal"), None, (), kernel.operation) for problem in problems]
    records = judge_cases(kernel, "declare", cases)
    raised = [record.error for record in records if record.error]
    right = sum(not record.error and passes(kernel, record.measures) for record in records)
    return right, len(records) - len(raised), str(raised[0].message) if raised else ""


def answered(reference: str, facts: Json, said: Mapping[str, str]) -> Json:
    """Return the facts that a kernel's name declares beside others."""
    (kernel, *_) = declared_kernels(loading.bare(reference), facts)
    kernel = declaring(kernel, said)
    named: Json = {name: getattr(kernel.sizes, name) for name in SIZES if name in said}
    named |= {"features": tuple(sorted(kernel.features))} if "features" in said else {}
    return named | ({"policy": kernel.policy} if VALUES.keys() & said.keys() else {})
