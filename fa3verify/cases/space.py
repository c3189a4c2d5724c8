"""The space of cases: dimensions with their classes, the classes of a case, and a case for any choice of classes.

A class is a range in which kernels take one path: one key, a whole tile, one key more. Lengths are those of the first
sequence, relative to the tile of the kernel's configuration, or to :data:`TILE` where it has none. :func:`point` goes
from a case to its classes and :func:`case_of` from classes to a case. :mod:`fa3verify.campaign.cover` chooses which
classes meet, and :mod:`fa3verify.cases.coverage` counts which were tried.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from fa3_kernels.plan.config import MAX_HEAD_DIM
from fa3_kernels.plan.quantizer import Scale, Scope
from fa3_reference.cache import Cache
from fa3_reference.hadamard import can_rotate
from fa3_reference.problem import AttentionProblem, Dtype
from fa3_reference.scales import ROUNDINGS, SHARING, QuantScheme, rounding_fields
from fa3_reference.score_term import BROADCAST, KINDS, VALUES, Kind, ScoreTerm
from fa3verify.cases.case import Case
from fa3verify.files import Json
from fa3verify.inputs.recipe import DISTRIBUTIONS, FAMILIES, UNCOMMON, Recipe
from fa3verify.kernels import calls
from fa3verify.kernels.arrays import ArrayFunction
from fa3verify.kernels.record import REFUSED, Kernel
from fa3verify.kernels.twins import Twin
from fa3verify.kernels.widths import BESIDE_V, head_dim_refusal, is_absorbed, widths
from fa3verify.operations.merge import PARTS, UNWRITTEN
from fa3verify.operations.operation import CACHES, needed_features

TILE = 128  # rows and keys of a tile in most kernels
LONG = 1024  # keys from which a row is of class "long"
HEAD_DIMS = (64, 32, 96, 128, 192, 256)  # asked of a kernel that declares none; others than 64, 128 and 256 are padded
TILES_OF_KEYS = ("a tile but one", "a tile", "a tile and one", "half a tile last", "several tiles")
Point = Mapping[str, str]  # a class by dimension
Classify = Callable[[Case, Any], str]


@dataclass(frozen=True, slots=True)
class Dimension:
    """One dimension: its classes, the plainest first, and ``of(case, config)``, which gives the class of a case.

    It concerns kernels of ``operation`` and ``dtype`` (None for all) that claim one of ``features`` (empty for all).
    Empty ``classes`` stand for those of the kernel, its head dims.
    """

    name: str
    classes: tuple[str, ...]
    of: Classify
    operation: str | None = None
    dtype: str | None = None
    features: frozenset[str] = frozenset()

    def concerns(self, kernel: Kernel) -> bool:
        """Tell whether kernels like this one have the dimension."""
        is_claimed = not self.features or bool(self.features & kernel.features)
        return is_claimed and self.operation in (None, kernel.operation) and self.dtype in (None, kernel.dtype)


def head_dims(kernel: Kernel) -> tuple[int, ...]:
    """Return the head_dims that a kernel declares, or if it declares none those of :data:`HEAD_DIMS` it may take."""
    return tuple(_head_dims(kernel))


def _head_dims(kernel: Kernel) -> Iterator[int]:
    if kernel.head_dims is not None:
        return iter(kernel.head_dims)
    return (d for d in HEAD_DIMS if head_dim_refusal(kernel, d) is None)


def every_head_dim(dtype: Dtype) -> range:
    """Return each head_dim that a kernel of a dtype may take."""
    step = 16 if dtype == "e4m3" else 8
    return range(step, MAX_HEAD_DIM + 1, step)


def probe(kernel: Kernel) -> None:
    """Call a user's function of arrays once at each head_dim, and note in ``REFUSED`` those that it refuses.

    It does nothing for kernels that declare their head dims, for other kinds of kernels, and the second time. A
    function has no other way to say what it takes. An error that is no refusal is not noted: judged calls will find it.
    """
    is_function = isinstance(kernel.code, ArrayFunction)
    if kernel.head_dims is not None or kernel.name in REFUSED or not is_function:
        return
    REFUSED[kernel.name] = frozenset(d for d in every_head_dim(kernel.dtype) if _refuses(kernel, d))


def _refuses(kernel: Kernel, head_dim: int) -> bool:
    """Tell whether a kernel refuses all small problems of a head_dim: a few rows, one, whole tiles."""
    return all(refuses(kernel, problem) for problem in _small(kernel, head_dim))


def _small(kernel: Kernel, head_dim: int) -> Iterator[AttentionProblem]:
    fields: Json = {"dtype": kernel.dtype, "causal": "causal" in kernel.features} | widths(kernel, head_dim)
    return (kernel.fitted(AttentionProblem(1, 1, 1, n, m, **fields)) for n, m in ((8, 8), (1, 8), (128, 128)))


def refuses(kernel: Kernel, problem: AttentionProblem) -> bool:
    """Tell whether a kernel refuses a problem of plain inputs, by running it."""
    error = raised(kernel, problem)
    return error is not None and (isinstance(error, calls.Refused) or not isinstance(error, calls.KernelError))


def small_call(kernel: Kernel, head_dim: int) -> ValueError | calls.KernelError | None:
    """Run small problems of a head_dim until one returns, and return what the kernel raised of the first, or None."""
    errors = (raised(kernel, problem) for problem in _small(kernel, head_dim))
    first = next(errors)
    return None if first is None or None in errors else first


def raised(kernel: Kernel, problem: AttentionProblem) -> ValueError | calls.KernelError | None:
    """Run a problem of plain inputs, and return what the kernel raised, or how it refused; None if it returned."""
    scheme = QuantScheme("head") if kernel.dtype == "e4m3" else None
    case = Case(kernel.name, problem, Recipe("normal"), scheme, (), kernel.operation)
    try:
        calls.run(kernel, problem, case.operands(), kernel.config_for(problem))
    except (calls.KernelError, ValueError) as error:
        return error
    return None


def tried_here(kernel: Kernel) -> Kernel:
    """Return a kernel that says why it cannot run here, where a small call of it does not return."""
    error = None if kernel.unavailable else small_call(kernel, (head_dims(kernel) or HEAD_DIMS)[0])
    return replace(kernel, unavailable=f"a call of a few queries and keys: {error}") if error else kernel


def _softcap(case: Case, config: Any) -> str:
    x = case.problem.softcap
    return "off" if not x else "above 1" if x > 1 else "at most 1"


def _first(case: Case) -> tuple[int, int]:
    """Return the number of queries and of keys of the first sequence."""
    seq = next(case.problem.sequences())
    return seq.seqlen_q, seq.seqlen_k


def _count(*steps: tuple[int, str]) -> Callable[[int], str]:
    """Return a function from a count to its class, which is that of the last step (least count, class) it reaches."""
    return lambda n: next(name for least, name in reversed(steps) if n >= least)


_BATCH = _count((1, "1"), (2, "2"), (3, "3 or more"))
_GROUP = _count((1, "1"), (2, "2 to 4"), (5, "5 or more"))
_KV_HEADS = _count((1, "1"), (2, "2 or 3"), (4, "4 or more"))
# The sizes of each class, which its cases take in turn: a kernel may hold heads by the four or eight. A turn that has
# large groups has few kv heads, so that no case is costly in both.
_SIZES: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "batch": {"1": (1,), "2": (2,), "3 or more": (3, 5)},
    "group": {"1": (1,), "2 to 4": (2, 4), "5 or more": (5, 8)},
    "kv_heads": {"1": (1,), "2 or 3": (2, 3), "4 or more": (9, 4)},
}
PAGE_SIZES = (16, 64, 1, 48, 256)  # keys of a page, in turn, for a kernel that declares none
ONE_ROTATED = "rotated, one token"
TURNS = 2  # the most sizes that a class has


def _queries(case: Case, config: Any) -> str:
    n = _first(case)[0]
    tile = getattr(config, "tile_m", TILE)
    if n <= 1:
        return ("none", "one")[n]
    return "part of a tile" if n < tile else "a tile" if n == tile else "several tiles"


def _keys(case: Case, config: Any) -> str:
    n = _first(case)[1]
    tile = getattr(config, "tile_n", TILE)
    named = {0: "none", 1: "one", tile - 1: "a tile but one", tile: "a tile", tile + 1: "a tile and one"}
    if n in named:
        return named[n]
    if n >= LONG:
        return "long"
    return "part of a tile" if n < tile else "half a tile last" if n % 128 == 64 else "several tiles"


def _mask(case: Case, config: Any) -> str:
    (left, right), causal = case.problem.window, case.problem.causal
    window = {(False, False): "", (True, False): "window left", (False, True): "window right"}
    words = window.get((left >= 0, right >= 0), "window both")
    return " ".join(filter(None, ("causal" * causal, words))) or "none"


def _scale(case: Case, config: Any) -> str:
    scale = case.problem.softmax_scale
    if math.isclose(scale * math.sqrt(case.problem.head_dim), 1.0):
        return "default"
    return "tiny" if scale < 0.01 else "above 1" if scale > 1 else "other"


def _layout(case: Case, config: Any) -> str:
    # Sequences of a cache differ in their keys; with equal queries the tensors are batched all the same.
    is_even = case.problem.cache is not None and case.problem.has_equal_queries
    if is_even or not case.problem.is_varlen:
        return "batched"
    others = list(case.problem.sequences())[1:]
    return "packed, some empty" if any(not s.seqlen_q or not s.seqlen_k for s in others) else "packed"


def _stored(case: Case, config: Any) -> str:
    """Return the class of a case's cache; where several would do, the first of these branches counts."""
    cache = case.problem.cache
    if cache is None:
        return "none"
    if cache.fp8:
        return "fp8 by key" if cache.fp8 == "row" else "fp8"
    if cache.rotary_dim:  # one position shows no kernel that rotates every query by the first one's
        return "rotated" if min(_first(case)) > 1 else ONE_ROTATED
    named = {"leftpad": cache.leftpad, "indexed": cache.indexed, "appended": cache.new}
    return next((name for name, is_on in named.items() if is_on), "pages" if cache.page_size else "rows")


def _of_term(case: Case, field: str, default: str) -> str:
    """Return a field of the term of a case's scores, ``default`` where it has none."""
    return str(getattr(case.problem.term, field, default))


def _promotion(case: Case, config: Any) -> str:
    interval = getattr(config, "promotion_interval", 0)
    return "chained" if not interval else "in parts" if interval < getattr(config, "tile_n", TILE) else "every tile"


def _descales(case: Case, config: Any) -> str:
    scheme = case.scheme
    if scheme is None or scheme.granularity != "block":
        return scheme.granularity if scheme else "none"
    rows = {scheme.rows_per_descale(operand) for operand in ("q", "k", "v")}
    return "blocks" if rows == {getattr(config, "tile_n", TILE)} else "other blocks"


def _of_scheme(field: str, default: object, words: Mapping[Any, str]) -> Classify:
    """Return a classifier by a field of the quantisation scheme, ``default`` where a case has none."""
    return lambda case, config: words[getattr(case.scheme, field, default)]


def _of_config(field: str, default: object, words: Mapping[Any, str]) -> Classify:
    """Return a classifier by a field of the configuration; a value that ``words`` lacks is its own class."""
    return lambda case, config: words.get(value := getattr(config, field, default), str(value))


_SPLITS = _of_config("num_splits", 1, {1: "one"})
_SCALINGS = {name: "exact" if name == "amax" else name.replace("_", " ") for name in ROUNDINGS}
_WHOLE = tuple(name for name, sharing in SHARING.items() if not sharing.rows)  # one descale for a whole sequence
_SCOPES = tuple(name for name in SHARING if name in get_args(Scope))
_ON = {False: "off", True: "on"}
_FP8: Json = {"operation": "forward", "dtype": "e4m3"}
_ROWS = {128: "of one size", (64, 32, 128): "of several"}
_KINDS = tuple(dict.fromkeys(d.kind for d in DISTRIBUTIONS.values()))
_TERMS = frozenset(KINDS)
_VALUES = tuple(dict.fromkeys(word for words in VALUES.values() for word in words))
# Axes along which a term has one value for all, by class; cases take those of a class in turn.
_SHARED: Mapping[str, tuple[str, ...]] = {
    "none": ("",),
    "batch": ("b",),
    "heads": ("h",),
    "queries": ("q",),
    "keys": ("k",),
    "several": ("bh", "bq", "bhq", "hq", "bk", "hk", "bhk", "qk", "bqk", "hqk", "bhqk"),
}
_SHARED_BY_AXES = {of[0]: name for name, of in _SHARED.items() if len(of) == 1}
DIMENSIONS: tuple[Dimension, ...] = (
    Dimension("inputs", _KINDS, lambda case, config: DISTRIBUTIONS[case.recipe.distribution].kind),
    Dimension("batch", ("1", "2", "3 or more"), lambda case, config: _BATCH(case.problem.batch)),
    Dimension("group", ("1", "2 to 4", "5 or more"), lambda case, config: _GROUP(case.problem.group)),
    Dimension("kv_heads", ("1", "2 or 3", "4 or more"), lambda case, config: _KV_HEADS(case.problem.nheads_kv)),
    Dimension("head_dim", (), lambda case, config: str(case.problem.head_dim)),
    Dimension(
        "value_dim",
        ("as keys", "other"),
        lambda case, config: "other" if "head_dim_v" in needed_features(case.problem) else "as keys",
    ),
    Dimension("queries", ("part of a tile", "one", "a tile", "several tiles"), _queries),
    Dimension(
        "keys",
        ("part of a tile", "none", "one", *TILES_OF_KEYS, "long"),
        _keys,
    ),
    Dimension("mask", ("none", "causal", "window both", "window left", "window right", "causal window left"), _mask),
    Dimension("softcap", ("off", "above 1", "at most 1"), _softcap),
    Dimension("scale", ("default", "tiny", "other", "above 1"), _scale),
    Dimension("layout", ("batched", "packed", "packed, some empty"), _layout),
    Dimension(
        "sinks",
        ("off", "on"),
        lambda case, config: _ON[case.problem.sinks],
        features=frozenset({"sinks"}),
    ),
    Dimension("term", ("none", *KINDS), lambda case, config: _of_term(case, "kind", "none"), features=_TERMS),
    Dimension("term_values", _VALUES, lambda case, config: _of_term(case, "values", "plain"), features=_TERMS),
    Dimension(
        "term_shared",
        tuple(_SHARED),
        lambda case, config: _SHARED_BY_AXES.get(_of_term(case, "shared", ""), "several"),
        features=frozenset({*BROADCAST, "alibi"}),
    ),
    Dimension(
        "chunk",
        ("off", "on"),
        lambda case, config: _ON[case.problem.attention_chunk > 0],
        features=frozenset({"attention_chunk"}),
    ),
    Dimension("qv", ("off", "on"), lambda case, config: _ON[case.problem.qv], features=frozenset({"qv"})),
    Dimension(
        "cache",
        ("none", "rows", "pages", "appended", "rotated", ONE_ROTATED, "leftpad", "indexed", "fp8", "fp8 by key"),
        _stored,
        features=CACHES,
    ),
    Dimension(
        "behind",
        ("random", "nan"),
        lambda case, config: case.problem.cache.behind if case.problem.cache else "random",
        features=CACHES,
    ),
    Dimension(
        "splits",
        ("one", "several"),
        lambda case, config: "one" if _SPLITS(case, config) == "one" else "several",
        operation="forward",
    ),
    Dimension("packing", ("off", "on"), _of_config("pack_gqa", False, _ON), operation="forward"),
    Dimension("output", ("bf16", "fp16"), _of_config("out_dtype", "bf16", {}), **_FP8),
    Dimension("promotion", ("every tile", "in parts", "chained"), _promotion, **_FP8),
    Dimension("descales", (*_WHOLE, "blocks", "other blocks"), _descales, **_FP8),
    Dimension(
        "rotation",
        ("off", "on"),
        lambda case, config: _ON[getattr(case.scheme, "hadamard_seed", None) is not None],
        **_FP8,
    ),
    Dimension("centring", ("off", "on"), _of_scheme("k_mean", False, _ON), **_FP8),
    Dimension("scaling", tuple(_SCALINGS.values()), _of_scheme("rounding", "amax", _SCALINGS), **_FP8),
    Dimension("scope", _SCOPES, _of_config("scope", "head", {}), operation="quantize"),
    Dimension("block_rows", ("of one size", "of several"), _of_config("block_rows", 128, _ROWS), operation="quantize"),
    Dimension("rounding", get_args(Scale), _of_config("scale", "amax", {}), operation="quantize"),
    Dimension("rotation", ("off", "on"), _of_config("rotate", False, _ON), operation="quantize"),
    Dimension("centring", ("off", "on"), _of_config("subtract_k_mean", False, _ON), operation="quantize"),
    Dimension("input", ("fp16", "bf16"), _of_config("input_dtype", "fp16", {}), operation="quantize"),
    Dimension("parts", tuple(map(str, PARTS)), _of_config("parts", 2, {}), operation="merge"),
    Dimension(
        "of_empty_parts",
        ("off", "on"),
        _of_config("unwritten", False, _ON),
        operation="merge",
        features=frozenset({UNWRITTEN}),
    ),
)


def dimensions(kernel: Kernel) -> dict[str, tuple[str, ...]]:
    """Return the dimensions that concern a kernel, each with all its classes, claimed or not, the plainest first."""
    own = {"head_dim": tuple(map(str, head_dims(kernel)))}
    return {d.name: own.get(d.name, d.classes) for d in DIMENSIONS if d.concerns(kernel)}


def point(kernel: Kernel, case: Case) -> dict[str, str]:
    """Return the class of a case in every dimension that concerns the kernel.

    Raises
    ------
    ValueError
        If the kernel has no configuration for the case.
    """
    config = kernel.config_for(case.problem, case.changes)
    return {d.name: d.of(case, config) for d in DIMENSIONS if d.concerns(kernel)}


def case_of(kernel: Kernel, chosen: Point, seed: int = 0) -> Case:
    """Return a case that has the chosen classes, and the plainest class of every other dimension.

    Successive seeds take the families of a kind of inputs in turn, and the sizes of a class.

    Raises
    ------
    ValueError
        If there is no such case, or if by its declarations the kernel does not take it. The kernel is not called, and
        may still refuse the case.
    """
    families = [
        f for f in (*FAMILIES, *UNCOMMON) if DISTRIBUTIONS[f.distribution].kind == chosen.get("inputs", _KINDS[0])
    ]
    drawn = [family for family in families if not DISTRIBUTIONS[family.distribution].check]
    recipe = drawn[seed % len(drawn)].recipe(seed=seed)
    # Lengths depend on the tile, which the kernel chooses for a problem: a first case tells the tile.
    case = _made(kernel, chosen, recipe, TILE, TILE)
    try:
        config = kernel.config_for(case.problem, case.changes)
    except ValueError:
        return case  # without a configuration there is no tile; whoever runs the case meets the kernel's refusal
    case = _made(kernel, chosen, recipe, getattr(config, "tile_m", TILE), getattr(config, "tile_n", TILE))
    own = point(kernel, case)
    if wrong := {name: c for name, c in chosen.items() if own.get(name, c) != c}:
        raise ValueError(f"{kernel.name} has no case of {wrong}")
    return case


def _made(kernel: Kernel, chosen: Point, recipe: Recipe, tile_m: int, tile_n: int) -> Case:
    """Return the case of the chosen classes for a tile of ``tile_m`` rows and ``tile_n`` keys.

    ValueError if by its declarations the kernel does not take it.
    """
    problem = _problem(kernel, chosen, tile_m, tile_n, recipe.seed)
    if chosen.get("rotation") == "on" and not can_rotate(problem.head_dim):
        raise ValueError(f"a head_dim of {problem.head_dim} is not rotated")
    changes = _changes(kernel, chosen, tile_n)
    scheme = _scheme(kernel, chosen, problem, tile_n)
    case = Case(kernel.name, problem, recipe, scheme, changes, kernel.operation)
    if lacking := (needed_features(problem) | case.needed_descales) - kernel.features:
        raise ValueError(f"{kernel.name} does not claim {', '.join(sorted(lacking))}")
    if words := kernel.misfit(problem):
        raise ValueError(words)
    return case


def _lengths(kernel: Kernel, chosen: Point, tile_m: int, tile_n: int) -> tuple[int, int]:
    """Return the number of queries and of keys of the first sequence, rounded up to lengths that the kernel takes."""
    plain = 1 if chosen.get("cache") == ONE_ROTATED else 5
    queries = {"one": 1, "a tile": tile_m, "several tiles": tile_m + 1, "part of a tile": 5}
    # More than a tile and one key, and a last tile of 128 that is half full.
    last_half = next(n for n in (192, 320, 448) if n % 128 == 64 and n > tile_n + 1)
    keys = {
        "none": 0,
        "one": 1,
        "a tile but one": tile_n - 1,
        "a tile": tile_n,
        "a tile and one": tile_n + 1,
        "half a tile last": last_half,
        "several tiles": 2 * tile_n + 5,
        "long": LONG + 6,
    }.get(chosen.get("keys", ""), 17)
    return kernel.sizes.queries(queries.get(chosen.get("queries", ""), plain)), kernel.sizes.keys(keys)


def _problem(kernel: Kernel, chosen: Point, tile_m: int, tile_n: int, turn: int) -> AttentionProblem:
    """Return the problem of the chosen classes; ``turn`` chooses among the sizes of a class."""
    # Packing a single head is a configuration of the twin, and no launch has it.
    plain_group = "2 to 4" if chosen.get("packing") == "on" and not isinstance(kernel.code, Twin) else "1"
    layout = chosen.get("layout", "batched")
    stored = chosen.get("cache", "none")
    is_ragged = "empty" in layout or (layout == "packed" and stored != "none")
    plain = {"batch": "2" if is_ragged else "1", "group": plain_group, "kv_heads": "1"}
    batch, group, nheads_kv = (
        (sizes := of[chosen.get(name, plain[name])])[turn % len(sizes)] for name, of in _SIZES.items()
    )
    head_dim = int(chosen.get("head_dim") or next(_head_dims(kernel), 0))
    n, m = _lengths(kernel, chosen, tile_m, tile_n)
    fields: Json = {
        "nheads": group * nheads_kv,
        "nheads_kv": nheads_kv,
        "head_dim": head_dim,
        "head_dim_v": 32 if head_dim != 32 else 64,
        "dtype": kernel.dtype,
        "softcap": {"above 1": 30.0, "at most 1": 0.1}.get(chosen.get("softcap", ""), 0.0),
        "softmax_scale": {"tiny": 1e-4, "other": 0.3, "above 1": 1.5}.get(chosen.get("scale", "")),
        "causal": "causal" in chosen.get("mask", ""),
    }
    if chosen.get("value_dim") != "other":
        del fields["head_dim_v"]
    if chosen.get("qv") == "on" or is_absorbed(kernel, head_dim):
        fields |= {"qv": True, "head_dim_v": head_dim - BESIDE_V}
    if chosen.get("sinks") == "on":
        fields["sinks"] = True
    if (term := _term(kernel, chosen, turn)) is not None:
        fields["term"] = term
    if chosen.get("chunk") == "on":
        fields["attention_chunk"] = max(1, m // 3)
    if "window" in (mask := chosen.get("mask", "")):
        fields["window"] = (-1 if "right" in mask else m // 3, -1 if "left" in mask else m // 5)
    if layout == "batched" and stored == "none":
        return kernel.fitted(AttentionProblem(batch=batch, seqlen_q=n, seqlen_k=m, **fields))
    # The lengths of the other sequences: queries and keys, in turn.
    others = [(2, 9), (3, 20)] if layout == "packed" else [(0, 9), (3, 0)]
    rest = [others[i % 2] for i in range(batch - 1)]
    lengths_q, lengths_k = zip((n, m), *((kernel.sizes.queries(a), kernel.sizes.keys(b)) for a, b in rest))
    if layout == "batched":
        lengths_q = (n,) * batch
    if stored != "none":
        fields["cache"] = _cache(kernel, chosen, lengths_q, lengths_k, turn)
    return kernel.fitted(AttentionProblem.varlen(lengths_q, lengths_k, **fields))


def _term(kernel: Kernel, chosen: Point, turn: int) -> ScoreTerm | None:
    """Return the term of the chosen classes; without a chosen kind the first that the kernel takes and that fits."""
    values = chosen.get("term_values", "plain")
    shared = chosen.get("term_shared", "none")
    is_plain = values == "plain" and shared == "none"
    fitting_kinds = [kind for kind in KINDS if kind in kernel.features and values in VALUES[kind]]
    kind = chosen.get("term") or ("none" if is_plain else next(iter(fitting_kinds), "none"))
    axes = _SHARED[shared]
    return None if kind == "none" else ScoreTerm(kind=kind, shared=axes[turn % len(axes)], values=values)  # type: ignore[arg-type]


def terms(kernel: Kernel) -> list[ScoreTerm]:
    """Return terms of every kind that a kernel takes, the kinds in turn, each with all its shapes and values."""
    kinds: list[Kind] = [kind for kind in KINDS if kind in kernel.features]
    axes: dict[str, list[str]] = {kind: [""] for kind in kinds}
    axes |= {kind: [x for of in _SHARED.values() for x in of] for kind in BROADCAST} | {"alibi": ["", "b"]}
    counts = {kind: max(len(axes[kind]), len(VALUES[kind]), 4) for kind in kinds}
    return [
        ScoreTerm(kind=kind, shared=axes[kind][i % len(axes[kind])], values=VALUES[kind][i % len(VALUES[kind])])
        for i in range(max(counts.values(), default=0))
        for kind in kinds
        if i < counts[kind]
    ]


def termed(kernel: Kernel, problem: AttentionProblem, turn: int) -> AttentionProblem:
    """Return a problem with one of the terms that a kernel takes, in turn; as it is where that does not fit it."""
    taken = terms(kernel)
    with contextlib.suppress(ValueError):
        return replace(problem, term=taken[turn % len(taken)]) if taken else problem
    return problem


def _cache(kernel: Kernel, chosen: Point, lengths_q: tuple[int, ...], lengths_k: tuple[int, ...], turn: int) -> Cache:
    """Return the cache of the chosen class, which is not "none".

    Keys lie by turns in pages and in rows if the kernel takes both, and in pages of each size.
    """
    stored = chosen["cache"]
    is_paged = stored == "pages" or (
        stored in ("appended", "rotated", ONE_ROTATED, "fp8", "fp8 by key")
        and "paged" in kernel.features
        and ("seqused_k" not in kernel.features or turn % 2 == 0)
    )
    sizes = kernel.page_sizes or PAGE_SIZES
    fields: Json = {"page_size": sizes[turn % len(sizes)] if is_paged else 0, "behind": chosen.get("behind", "random")}
    if stored in ("appended", "rotated", ONE_ROTATED):
        fields["new"] = tuple(min(pair) for pair in zip(lengths_q, lengths_k, strict=True))
    if stored in ("rotated", ONE_ROTATED):
        fields |= {"rotary_dim": 32, "interleaved": turn % 4 < 2}
    if "fp8" in stored:
        fields["fp8"] = "row" if stored == "fp8 by key" else ("head", "tensor")[turn // 2 % 2]
    if stored == "leftpad":
        fields["leftpad"] = tuple(1 + 7 * (i + turn) % 20 for i in range(len(lengths_k)))
    return Cache(indexed=stored == "indexed", seed=turn, **fields)


def _changes(kernel: Kernel, chosen: Point, tile_n: int) -> tuple[tuple[str, Any], ...]:
    """Return the fields of the configuration that give the chosen classes, sorted by name.

    For a forward fields without a chosen class keep the kernel's default; a quantiser gets all of its fields.
    """
    changes: Json = {}
    if kernel.operation == "forward":
        wanted = {
            "num_splits": {"one": 1, "several": 3}.get(chosen.get("splits", "")),
            "pack_gqa": {"off": False, "on": True}.get(chosen.get("packing", "")),
            "out_dtype": chosen.get("output"),
            "promotion_interval": {"every tile": tile_n, "in parts": tile_n // 2, "chained": 0}.get(
                chosen.get("promotion", "")
            ),
        }
        changes = {name: x for name, x in wanted.items() if x is not None and name in kernel.changeable}
    elif kernel.operation == "quantize":
        changes = {
            "scope": chosen.get("scope", "head"),
            "scale": chosen.get("rounding", "amax"),
            "block_rows": (64, 32, 128) if chosen.get("block_rows") == "of several" else 128,
            "rotate": chosen.get("rotation") == "on",
            "subtract_k_mean": chosen.get("centring") == "on",
            "input_dtype": chosen.get("input", "fp16"),
            "seed": 1,
        }
    elif kernel.operation == "merge":
        changes = {"parts": int(chosen.get("parts", PARTS[0])), "unwritten": chosen.get("of_empty_parts") == "on"}
    return tuple(sorted(changes.items()))


def _scheme(kernel: Kernel, chosen: Point, problem: AttentionProblem, tile_n: int) -> QuantScheme | None:
    """Return how the operands of an e4m3 forward are quantised; None for other kernels."""
    if kernel.operation != "forward" or kernel.dtype != "e4m3":
        return None
    if chosen.get("centring") == "on" and problem.softcap:
        raise ValueError("K is not centred under a softcap")
    descales = chosen.get("descales", "head")
    is_other = descales == "other blocks"
    return QuantScheme(
        "block" if "blocks" in descales else descales,  # type: ignore[arg-type]
        block_rows_q=32 if is_other else tile_n,
        block_rows_k=2 * tile_n if is_other else tile_n,
        block_rows_v=tile_n,
        hadamard_seed=0 if chosen.get("rotation") == "on" else None,
        k_mean=chosen.get("centring") == "on",
        **rounding_fields(next(name for name, word in _SCALINGS.items() if word == chosen.get("scaling", "exact"))),
    )


def claimed(kernel: Kernel) -> dict[str, tuple[str, ...]]:
    """Return the classes of each dimension that a kernel claims by the features and sizes it declares.

    Dimensions of which it claims no class are left out. The kernel is not called, and may refuse more.
    """
    possible = {
        name: tuple(c for c in classes if _is_claimed(kernel, {name: c}))
        for name, classes in dimensions(kernel).items()
    }
    return {name: classes for name, classes in possible.items() if classes}


def _is_claimed(kernel: Kernel, chosen: Point) -> bool:
    try:
        case_of(kernel, chosen)
    except ValueError:
        return False
    return True
